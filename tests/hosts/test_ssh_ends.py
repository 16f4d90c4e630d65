"""Hosts that ssh reaches die, fall silent or lose their kernel: it is said, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from hosts.on_hosts import (
    BOTH,
    WAIT_S,
    cluster_of,
    failed,
    family,
    going,
    hosts_of,
    kernel,
    left,
    met,
    pids,
    settled,
    started,
)
from hosts.simulated_hosts import ADDRESSES, SimulatedHosts
from notebook_shell import Notebook, soon

from workbench.history import disk


@pytest.fixture
def book(reached: SimulatedHosts) -> Iterator[Notebook]:
    if not reached.is_plain():
        reached.again()
    with started(f"4 --launcher ssh --on {BOTH}") as book:
        yield book


@pytest.mark.timing
def test_a_dead_host_is_named_and_its_engines_begin_anew_on_the_other(
    book: Notebook, reached: SimulatedHosts
) -> None:
    cluster = cluster_of(book)
    run = going(cluster)
    reached.kill("xh2")
    text = failed(run, within_s=10)
    assert "xh2" in text
    assert "died: host gone (" in text
    assert soon(lambda: cluster.ids == [0, 1], 5)
    book.ok("%cluster restart 2 3")
    assert set(hosts_of(cluster).values()) == {"xh1"}
    assert met(book)
    settled(cluster)


@pytest.mark.timing
def test_the_first_host_dies_with_the_store_and_the_other_takes_its_place(
    book: Notebook, reached: SimulatedHosts
) -> None:
    cluster = cluster_of(book)
    run = going(cluster)
    reached.kill("xh1")
    assert "xh1" in failed(run, within_s=10)
    assert soon(lambda: cluster.ids == [2, 3], 5)
    book.ok("%cluster restart 0 1")
    assert set(hosts_of(cluster).values()) == {"xh2"}
    assert met(book)


@pytest.mark.timing
def test_a_silent_host_is_named_and_ends_what_it_has_when_it_is_back(
    book: Notebook, reached: SimulatedHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "IDLE_S", 0.2)  # rows that come late are written, for so long
    cluster = cluster_of(book)
    run = going(cluster)
    reached.link("xh2", up=False)
    text = failed(run, within_s=10)
    assert "xh2" in text
    assert soon(lambda: cluster.ids == [0, 1], 5)
    reached.link("xh2", up=True)
    assert soon(lambda: not left(reached, "xh2"), 15), left(reached, "xh2")
    book.ok("%cluster restart 2 3")
    assert met(book)


@pytest.mark.timing
def test_the_others_go_on_without_a_dead_host(book: Notebook, reached: SimulatedHosts) -> None:
    cluster = cluster_of(book)
    run = going(cluster, on_failure="continue")
    reached.kill("xh2")
    assert soon(lambda: bool(run.recoveries) or run.is_over, 15), run
    assert not run.is_over, run.error
    assert run.recoveries[-1].workers == 2
    steps = run.history.totals.steps
    assert soon(lambda: run.history.totals.steps > steps + 5, WAIT_S)
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


@pytest.mark.timing
def test_a_stopped_cluster_leaves_nothing_on_the_hosts(
    book: Notebook, reached: SimulatedHosts
) -> None:
    assert met(book)
    for host in ADDRESSES:
        assert left(reached, host)
    assert book.ok("%cluster stop").seconds < 5
    assert soon(lambda: not left(reached), 5), left(reached)


@pytest.mark.timing
def test_a_killed_kernel_leaves_nothing_anywhere(reached: SimulatedHosts) -> None:
    if not reached.is_plain():
        reached.again()
    start = f"cluster = wb.Cluster(4, launcher='ssh', on={BOTH!r})\n"
    start += "task = cluster.execute('import torch; kept = 1'); task.over.wait(60)"
    with kernel(start) as process:
        started_here = family(process.pid)
        assert left(reached)
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert soon(lambda: not left(reached), 15), left(reached)
        _, alive = psutil.wait_procs(started_here, timeout=15)
        assert not alive
        assert time.monotonic() - began < 15


@pytest.mark.timing
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_is_done_without_and_the_other_takes_its_engines(
    book: Notebook, reached: SimulatedHosts, how: str
) -> None:
    cluster = cluster_of(book)
    run = going(cluster, on_failure="heal")
    began = time.perf_counter()
    if how == "killed":
        reached.kill("xh2")
    else:
        reached.link("xh2", up=False)
    assert soon(lambda: run.is_over or bool(run.events), 20), run.history.story.notes
    print(f"{how}: healed after {time.perf_counter() - began:.1f} s")
    assert soon(lambda: run.is_over or run.events[-1]["workers"] == 4, WAIT_S), (
        run.history.story.notes
    )
    assert not run.is_over, run.error
    print(f"{how}: whole after {time.perf_counter() - began:.1f} s", run.events)
    assert set(hosts_of(cluster).values()) == {"xh1"}
    assert not any(done.again or done.lost_steps for done in run.recoveries)
    steps = run.history.totals.steps
    assert soon(lambda: run.history.totals.steps > steps + 5, WAIT_S)
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


@pytest.mark.timing
def test_a_halted_worker_of_a_host_is_done_without(book: Notebook, reached: SimulatedHosts) -> None:
    cluster = cluster_of(book)
    run = going(cluster, on_failure="heal")
    before = pids(cluster)
    began = time.perf_counter()
    os.kill(before[2], signal.SIGSTOP)
    assert soon(lambda: run.is_over or bool(run.events), 20), run.history.story.notes
    print(f"halted: healed after {time.perf_counter() - began:.1f} s")
    assert soon(lambda: run.is_over or run.events[-1]["workers"] == 4, WAIT_S), run.history.story
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {2}
    assert "SIGSTOP" in run.recoveries[0].how
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
