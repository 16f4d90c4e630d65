import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from workbench.cluster.forkserver.client import WarmParent
from workbench.cluster.processes import can_fork, start_keeper
from workbench.errors import ClusterError
from workbench.shared import cluster_env

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
def start(request):
    """Yield a function that starts a keeper at (host, ports) and gives its pid, host and port."""
    if request.param == "own process":
        started = []

        def start_one(host, ports):
            process, host, port = start_keeper(host=host, ports=ports)
            started.append(process)
            return process.pid, host, port

        yield start_one
        for process in started:
            process.stdin.close()
            assert process.wait(WAIT_S) == 0  # it ends by itself once nobody holds its stdin
            process.stdout.close()
        return
    possible, why_not = can_fork()
    if not possible:
        pytest.skip(why_not)
    warm = WarmParent().start()
    yield lambda host, ports: warm.fork_keeper(host=host, ports=ports)
    warm.stop()


def test_two_processes_meet_at_a_store_that_listens_where_it_is_told_to_and_nowhere_else(start):
    with cluster_env.listening("127.0.0.2") as taken:
        first = taken.getsockname()[1]
        pid, host, port = start("127.0.0.2", (first, first + 9))
        assert (host, port) == ("127.0.0.2", port)
        assert first < port < first + 10
        with pytest.raises(ClusterError, match=r"(?s)127\.0\.0\.2\..*WB-CLUSTER-046.*--ports"):
            start("127.0.0.2", (first, first))
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
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.2", port)]
