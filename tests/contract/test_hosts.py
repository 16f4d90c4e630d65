"""Workers on two hosts: network namespaces with a cable, whose names nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cells
import networks
import pytest
from strategy_cases import run
from worker_reports import assert_same, clean
from workers import Workers

from workbench import catalog

pytestmark = [pytest.mark.torch, pytest.mark.hosts]


class Spread(Workers):
    """Workers on two hosts in turn; their store is at the first host's address."""

    def __init__(self, names: tuple[str, str], count: int) -> None:
        self._names = names
        super().__init__(count)
        self._keeper, self._pipe, port = networks.start_store(names[0], networks.ADDRESSES[0])
        self.meet = networks.ADDRESSES[0], port

    def _network(self, place: int) -> str:
        return self._names[place % 2]

    def run(self, *args: Any, **keywords: Any) -> Any:
        """Run a cell; its hosts have names that sort the other way round."""
        count = 2 * keywords.get("workers", 1) + 1
        hosts = tuple("second" if place % 2 == 0 else "first" for place in range(count))
        return super().run(*args, **{"hosts": hosts, **keywords})

    def close(self) -> None:
        self._pipe.close()
        self._keeper.join(5)
        super().close()


@pytest.fixture(scope="module")
def spread(workers: Workers) -> Iterator[Spread]:
    with networks.two() as names:
        pool = Spread(names, 3)
        yield pool
        pool.close()


@pytest.mark.parametrize("name", ["mirrored", "parameter_server"])
def test_workers_of_two_hosts_train_as_one_device_does(
    spread: Spread, workers: Workers, name: str
) -> None:
    truth = workers.truth(cells.train)
    reports = clean(run(spread, catalog.lookup(name), cells.train, workers=2))
    assert_same(reports, truth, 1e-10)


def broken_out(address: str) -> Any:
    """Rank 0 waits in an all-reduce that rank 1 never joins, until its sockets are shut."""
    import os
    import socket
    import threading

    import torch
    import torch.distributed as dist

    from workbench.engine.torch import support

    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1))
    asked = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_SOCKET_IFNAME")
    found = [os.environ[name] for name in asked]
    if rank == 1:  # noqa: F821
        store.wait(["given up"])
        return found
    with socket.create_server((address, 0)) as database:
        client = socket.create_connection(database.getsockname())
        session, _ = database.accept()
    timer = threading.Timer(0.2, support.shutdown_group_sockets)
    timer.start()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        client.sendall(b"alive")
        return [*found, session.recv(5)]
    finally:
        timer.join()
        client.close()
        session.close()
        store.set("given up", "yes")


def test_breaking_out_leaves_the_users_connections(spread: Spread) -> None:
    first, second = clean(spread.run("mirrored", broken_out, "127.0.0.1", workers=2))
    assert first.value == ["0", "0", "1", "0", "eth0", b"alive"]
    assert second.value == ["1", "0", "1", "1", "eth0"]
