"""Collectives on a device: both kinds of tensors, an abort as the way out, no stale group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import cells
import gpu_cells
import pytest
from fakes import gpu
from needs import need
from worker_reports import assert_same, clean
from workers import Workers

from workbench.errors import EngineSpentError
from workbench.shared.protocol import RunSpec

pytestmark = pytest.mark.torch
need("torch")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Workers]:
    if lacking := gpu.missing():
        pytest.skip(f"a GPU for tests cannot be built: {lacking} is missing")
    pool = Workers(2, "fakegpu")
    yield pool
    pool.close()


def pids(pool: Workers) -> list[int]:
    return [process.pid for process in pool.processes]


def check_all_is_well(pool: Workers, before: list[int]) -> None:
    """The same processes still compute the right sums."""
    reports = clean(pool.run("mirrored", gpu_cells.sums, [1, 2], workers=2))
    both = [[3.0, 5.0], 16.0]
    assert [report.value for report in reports] == [[*both, *both, [{"rank": 0}, {"rank": 1}]]] * 2
    assert pids(pool) == before


def test_tensors_of_the_cpu_and_of_the_device_are_summed_in_one_group(gpus: Workers) -> None:
    check_all_is_well(gpus, pids(gpus))


@pytest.mark.parametrize("how", ["raises", "runs out of memory"])
def test_a_rank_that_fails_costs_no_engine_and_nothing_half_summed_is_used(
    gpus: Workers, how: str
) -> None:
    before = pids(gpus)
    first, second = gpus.run("mirrored", gpu_cells.fails_in_step, 3, how, workers=2)
    assert ("ValueError" if how == "raises" else "OutOfMemoryError") in (second.error or "")
    left = first.value
    assert left["caught"] in ("KeyboardInterrupt", "ClusterError")
    assert left["left"] == left["after"][2]  # three whole steps, and nothing of the fourth
    check_all_is_well(gpus, before)


def test_an_interrupt_ends_what_waits_on_the_device(gpus: Workers) -> None:
    before = pids(gpus)

    def interrupt() -> None:
        time.sleep(3)
        for pid in before:
            os.kill(pid, signal.SIGINT)

    pressing = threading.Thread(target=interrupt)
    pressing.start()
    began = time.monotonic()
    first, second = gpus.run("mirrored", gpu_cells.fails_in_step, 3, "sleeps", workers=2)
    pressing.join()
    assert time.monotonic() - began < 15
    assert first.value["caught"] == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in (second.error or "")
    assert first.value["left"] == first.value["after"][2]
    check_all_is_well(gpus, before)


def test_two_ranks_on_one_gpu_are_told_so(gpus: Workers) -> None:
    before = pids(gpus)
    one = {"device": "fakegpu:0", "backend": "cpu:gloo,fakegpu:fakenccl"}
    reports = gpus.run("mirrored", gpu_cells.sums, [1], workers=2, **one)
    assert all("Duplicate GPU detected" in (report.error or "") for report in reports)
    check_all_is_well(gpus, before)


def test_a_device_that_failed_asks_for_another_engine() -> None:
    if lacking := gpu.missing():
        pytest.skip(f"a GPU for tests cannot be built: {lacking} is missing")
    pool = Workers(1, "fakegpu")
    try:
        (report,) = pool.run("one_device", gpu_cells.breaks_the_device, workers=1)
    finally:
        pool.close()
    assert "device-side assert" in (report.error or "")
    assert report.replace


FORMS = ["ring", "recursive_doubling", "hierarchical", "reduce_to_one", "backend"]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_all_reduce_ends_where_messages_begin_in_order(
    gpus: Workers, form: str
) -> None:
    truth = gpus.truth(cells.train)
    reports = gpus.run("mirrored", cells.train, workers=3, options={"allreduce": form})
    assert_same(clean(reports), truth, 1e-10)


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("workers", [2, 4])
def test_neighbours_that_send_and_receive_at_once_do_not_wait_for_each_other(
    gpus: Workers, graph: str, workers: int
) -> None:
    reports = gpus.run("gossip", cells.train, workers=workers, options={"graph": graph})
    assert all(report.trained for report in clean(reports))


def spec(**told: Any) -> RunSpec:
    about = {"mode": "spmd", "rank": 0, "world_size": 1, "ranks": (0,), "prefix": "one/", **told}
    return RunSpec(**about)


def test_what_would_end_a_waiting_process_is_off_unless_the_user_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.engine.torch.group import environ

    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    found = environ(spec(device="cuda:0", backend="cpu:gloo,cuda:nccl"))
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["NCCL_SOCKET_IFNAME"] == "lo"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in found
    two_hosts = spec(world_size=2, ranks=(0, 1), hosts=("a", "b"), backend="cpu:gloo,cuda:nccl")
    assert "NCCL_SOCKET_IFNAME" not in environ(two_hosts)
    assert not [name for name in environ(spec()) if "NCCL" in name]


@pytest.fixture
def store() -> Iterator[tuple[str, int]]:
    import torch.distributed as dist

    from workbench.engine.torch import group

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", server.port
    group.destroy_group()


def test_a_group_of_another_run_is_not_taken_for_this_ones(store: tuple[str, int]) -> None:
    import torch.distributed as dist

    from workbench.engine.torch import group

    group.ensure_group(spec(store=store))
    first = dist.group.WORLD
    group.ensure_group(spec(store=store))
    assert dist.group.WORLD is first
    group.ensure_group(spec(store=store, prefix="two/"))
    assert dist.group.WORLD is not first


def test_a_group_that_does_not_go_spends_its_engine(
    store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.engine.torch import group

    group.ensure_group(spec(store=store))
    with monkeypatch.context() as patch:
        patch.setattr(group, "_torch_destroy", lambda *_: None)
        with pytest.raises(EngineSpentError, match="WB-CLUSTER-055"):
            group.ensure_group(spec(store=store, prefix="two/"))
