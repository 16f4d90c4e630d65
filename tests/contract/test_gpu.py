"""Collectives on a device: both kinds of tensors, an abort as the way out, no stale group."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import gpu_cells
import pytest
from fakes import gpu
from needs import need
from worker_reports import clean
from workers import Workers

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
