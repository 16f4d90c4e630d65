"""A cell's `init_process_group` finds the group that is there; what cannot be is refused."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import group_cells
import pytest
from needs import need
from worker_reports import failures
from workers import Workers

from workbench.errors import ClusterError
from workbench.shared.protocol import RunSpec

pytestmark = pytest.mark.torch
need("torch")
WAIT_S = 20


def joins_at(listener: socket.socket) -> RunSpec:
    """What a rank is told whose store is to be found there."""
    host, port = listener.getsockname()
    return RunSpec(mode="run", rank=0, world_size=2, ranks=(0, 1), store=(host, port), prefix="x/")


def test_a_store_that_is_gone_is_not_waited_for() -> None:
    from workbench.engine.torch import group

    with socket.create_server(("127.0.0.1", 0)) as listener:
        spec = joins_at(listener)
    began = time.monotonic()
    with pytest.raises(ClusterError, match="WB-CLUSTER-031") as told:
        group.ensure_group(spec)
    assert told.value.next_step
    assert time.monotonic() - began < group.CONNECT_S


def test_an_interrupt_ends_the_wait_for_a_store_that_is_halted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.engine.torch import group

    monkeypatch.setattr(group, "CONNECT_S", 0.2)
    # Whoever else talks in this process (pytest's plugins do) is to be left alone.
    others = {inode for _, inode in group._sockets()}
    monkeypatch.setattr(group, "_kept", others)
    failed: list[BaseException] = []

    def join() -> None:
        try:
            group.ensure_group(joins_at(listener))
        except ClusterError as error:
            failed.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        waits = threading.Thread(target=join)
        waits.start()
        waits.join(1.0)  # connected: the system takes connections of who is halted
        assert waits.is_alive()
        end_s = time.monotonic() + WAIT_S
        while waits.is_alive() and time.monotonic() < end_s:
            group.shutdown_group_sockets(store=True)
            waits.join(0.2)
    waits.join(WAIT_S)
    assert "WB-CLUSTER-031" in str(failed[0])


def test_before_there_is_a_group_no_connection_is_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.engine.torch import group

    monkeypatch.setattr(group, "_kept", None)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        assert group.shutdown_group_sockets(store=True) == 0
        accepted, _ = listener.accept()
        connection.sendall(b"heard")
        assert accepted.recv(5) == b"heard"
        accepted.close()


@pytest.mark.parametrize(
    "asked", [{}, {"backend": "gloo"}, {"backend": "cpu:gloo", "init_method": "env://"}]
)
def test_a_script_makes_leaves_and_makes_its_group(workers: Workers, asked: dict[str, Any]) -> None:
    reports = workers.run("mirrored", group_cells.joins, workers=2, keywords=asked)
    assert failures(reports) == []
    for rank, report in enumerate(reports):
        once = [(rank, 2, 2.0), [[1.5, 1.5]], False]
        assert report.value == (once * 3, [str(rank), "2"])
        assert report.left == []


def test_what_cannot_be_is_refused_by_name(workers: Workers) -> None:
    asked = [{"world_size": 4, "rank": 0}, {"backend": "nccl"}]
    reports = workers.run("mirrored", group_cells.refused, asked, workers=2)
    assert failures(reports) == []
    for rank, report in enumerate(reports):
        (world, backend), total = report.value
        assert total == 2.0
        assert "WB-CLUSTER-032" in world
        assert "-n 4" in world
        assert f"world_size=2, rank={rank}" in world
        assert "WB-CLUSTER-033" in backend
        assert "nccl on cpu" in backend


def test_a_collective_that_gloo_cannot_end_is_left_for_a_new_group(workers: Workers) -> None:
    from workbench.engine.torch import waits

    reports = workers.run("mirrored", group_cells.leaves_a_collective, workers=2)
    assert failures(reports) == []
    assert [report.value[0] for report in reports] == [(4.0, 8.0)] * 2
    assert reports[0].value[1].count(waits.LEFT) == 2
    assert reports[0].value[2] < 2.0  # it does not wait for gloo's thread
    assert all(report.value[3] for report in reports)
