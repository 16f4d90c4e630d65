import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from workbench.cluster.forkserver.client import WarmParent
from workbench.cluster.processes import can_fork, start_keeper

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
WAIT_S = 60

RANK = """
    import datetime, os, sys
    import torch, torch.distributed as dist
    host, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=30))
    dist.init_process_group("gloo", store=dist.PrefixStore("t", store), rank=rank, world_size=2)
    x = torch.ones(2) * (rank + 1)
    dist.all_reduce(x)
    print(x.tolist())
    dist.destroy_process_group()
"""


@pytest.fixture(params=["forked", "own process"])
def store(request):
    """Yield pid, host and port of a keeper."""
    if request.param == "own process":
        process, host, port = start_keeper()
        yield process.pid, host, port
        process.stdin.close()
        assert process.wait(WAIT_S) == 0  # it ends by itself once nobody holds its stdin
        process.stdout.close()
        return
    possible, why_not = can_fork()
    if not possible:
        pytest.skip(why_not)
    warm = WarmParent().start()
    yield warm.fork_keeper()
    warm.stop()


def test_two_processes_meet_at_a_store_that_only_this_machine_reaches(store):
    pid, host, port = store
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", textwrap.dedent(RANK), host, str(port)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=env) for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=WAIT_S)[0].decode().strip() for rank in ranks]
    assert outputs == ["[3.0, 3.0]", "[3.0, 3.0]"]
    listening = [
        connection.laddr
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", port)]
