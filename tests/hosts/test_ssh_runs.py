"""Cells and runs on two hosts that ssh reaches: numbers, records and controls as on one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hosts.on_hosts import (
    BOTH,
    SHORT,
    SUM,
    WAIT_S,
    cluster_of,
    failed,
    going,
    hosts_of,
    kill,
    losses,
    met,
    pids,
    settled,
    started,
)
from hosts.simulated_hosts import SimulatedHosts
from notebook_shell import Notebook, interrupt_main_thread, soon

from workbench import catalog
from workbench.execution.run import Run
from workbench.session.cluster import Cluster

SLOW_S = 0.05


@pytest.fixture(scope="module")
def book(reached: SimulatedHosts) -> Iterator[Notebook]:
    with started(f"4 --launcher ssh --on {BOTH}") as book:
        yield book


@pytest.fixture
def cluster(book: Notebook) -> Iterator[Cluster]:
    cluster = cluster_of(book)
    yield cluster
    settled(cluster)


@pytest.fixture(scope="module")
def one_device(book: Notebook) -> Run:
    return cluster_of(book).run(SHORT, strategy="one_device").wait(WAIT_S)


@pytest.fixture(scope="module")
def truth(one_device: Run) -> np.ndarray:
    return losses(one_device)


# -- cells and strategies --------------------------------------------------------------------------


def test_ranks_go_host_by_host_and_meet(book: Notebook) -> None:
    cell = book.ok(
        "%%distributed\nimport os, torch\nx = torch.tensor([float(rank)]); dist.all_reduce(x)\n"
        "own = ' '.join(os.environ[n] for n in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK'))\n"
        "print(f'rank {rank} of {world_size} on {os.uname().nodename}: {own}: {int(x)}')"
    )
    found = sorted(line[line.rindex("rank ") :] for line in cell.lines() if " on xh" in line)
    assert found == [
        "rank 0 of 4 on xh1: 0 2 0: 6",
        "rank 1 of 4 on xh1: 1 2 0: 6",
        "rank 2 of 4 on xh2: 0 2 1: 6",
        "rank 3 of 4 on xh2: 1 2 1: 6",
    ]
    said = book.ok("%cluster").text
    assert "xh1" in said
    assert "xh2" in said


@pytest.mark.parametrize(
    "name", [e.name for e in catalog.strategies("torch") if e.exact_with is not None]
)
def test_a_strategy_trains_as_one_device_does(
    cluster: Cluster, one_device: Run, truth: np.ndarray, name: str
) -> None:
    entry = catalog.lookup(name)
    options = {
        **dict(entry.exact_with or ()),
        **({entry.sync_option: True} if entry.sync_option else {}),
    }
    run = cluster.run(SHORT, strategy=name, options=options).wait(WAIT_S)
    assert run.state == "finished"
    assert len(run.engines) == min(4, entry.max_workers or 4)
    assert losses(run) == pytest.approx(truth, abs=1e-6)
    mine, theirs = run.weights(), one_device.weights()
    assert mine.keys() == theirs.keys()
    for parameter, value in theirs.items():
        assert np.abs(mine[parameter] - value).max() < 1e-6, parameter
    assert set(hosts_of(cluster).values()) == {"xh1", "xh2"}


@pytest.mark.parametrize("name", ["gossip", "parameter_server"])
def test_a_strategy_at_its_own_pace_learns(cluster: Cluster, name: str) -> None:
    source = SHORT.replace("steps=20", "steps=120").replace("0.2", "0.02")
    run = cluster.run(source, strategy=name).wait(WAIT_S)
    loss = run.history["local_loss"]
    assert run.state == "finished"
    assert np.nanmean(loss[-40:]) < np.nanmean(loss[:40])


def test_servers_are_engines_of_the_same_hosts(cluster: Cluster) -> None:
    before = hosts_of(cluster)
    run = cluster.run(SHORT, strategy="parameter_server", options={"servers": 2, "sync": True})
    run.wait(WAIT_S)
    after = hosts_of(cluster)
    assert len(after) == 6
    assert {engine: after[engine] for engine in before} == before
    assert set(after.values()) == {"xh1", "xh2"}
    assert list(run.engines) == [0, 1, 2, 3]


# -- records ---------------------------------------------------------------------------------------


def test_rows_of_all_ranks_come_live_in_order_and_begin_at_0(cluster: Cluster) -> None:
    run = going(cluster, steps=30)
    live = [int((run.history["rank"] == rank).sum()) for rank in range(4)]
    assert min(live) > 0
    run.stop()
    run.wait(WAIT_S)
    history = run.history
    last = {int(history["step"][history["rank"] == rank].max()) for rank in range(4)}
    assert len(last) == 1
    for rank in range(4):
        own = history["rank"] == rank
        assert history["step"][own].tolist() == list(range(last.copy().pop() + 1))
        starts = history["start_s"][own]
        assert (np.diff(starts) >= 0).all()
        assert -0.1 < starts[0] < 5
    again = run.folder / "run.json"
    assert again.exists()
    assert [n for n in run.history.story.notes if "dropped" in n] == []


@pytest.mark.timing
def test_a_slow_worker_on_the_other_host_is_blamed_for_its_milliseconds(cluster: Cluster) -> None:
    run = going(cluster, inject=[f"slow=2:{SLOW_S * 1e3:g}ms"], steps=60)
    run.stop()
    run.wait(WAIT_S)
    blame = run.blame(first=10)
    assert blame.worst == 2
    assert [blame.mean_s[rank, 2] / SLOW_S for rank in (0, 1, 3)] == pytest.approx([1] * 3, abs=0.2)
    assert blame.mean_s[2].sum() < 0.2 * SLOW_S


# -- controls --------------------------------------------------------------------------------------


@pytest.mark.timing
def test_pause_resume_and_stop_reach_both_hosts(cluster: Cluster) -> None:
    run = going(cluster)
    run.pause()
    assert soon(lambda: run.state == "paused", 5)
    steps = run.history.totals.steps
    assert not soon(lambda: run.history.totals.steps > steps + 1, 0.5)
    run.resume()
    assert soon(lambda: run.history.totals.steps > steps + 5, 5)
    began = time.monotonic()
    run.stop()
    run.wait(WAIT_S)
    assert time.monotonic() - began < 2
    assert run.state == "stopped"


@pytest.mark.timing
def test_an_interrupt_of_a_blocked_collective_leaves_engines_and_variables(
    book: Notebook, cluster: Cluster
) -> None:
    before = pids(cluster)
    book.ok("%%distributed\nkept = 10 * rank")
    later = threading.Timer(2.0, interrupt_main_thread)
    later.start()
    cell = book.run("%%distributed\nimport time, torch\nif rank == 0:\n    time.sleep(300)" + SUM)
    later.join()
    assert cell.error is not None
    assert cell.seconds < 2 + 3
    assert pids(cluster) == before
    kept = book.ok("%%distributed\nprint('kept', kept)" + SUM).text
    for rank in range(4):
        assert f"[rank {rank}] kept {10 * rank}\n[rank {rank}] sum 4" in kept


def test_an_error_of_one_rank_names_it_and_the_next_cell_works(book: Notebook) -> None:
    cell = book.run("%%distributed\nimport torch\nif rank == 2:\n    1 / 0" + SUM)
    assert "Rank 2" in str(cell.error)
    assert "ZeroDivisionError" in str(cell.error)
    assert met(book)


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_killed_rank_is_named_at_once_and_its_successor_is_on_its_host(
    book: Notebook, cluster: Cluster
) -> None:
    run, before = going(cluster), pids(cluster)
    kill(cluster, 3)
    text = failed(run, within_s=3)
    assert text.startswith(f"Rank 3 is gone: Engine 3 on xh2 (pid {before[3]}")
    assert "killed by SIGKILL" in text
    assert "%cluster restart 3" in text
    book.ok("%cluster restart 3")
    assert hosts_of(cluster)[3] == "xh2"
    after = pids(cluster)
    assert [engine for engine in range(4) if after[engine] != before[engine]] == [3]
    assert met(book)


def test_the_others_go_on_without_a_killed_rank(cluster: Cluster, truth: np.ndarray) -> None:
    run = cluster.run(SHORT, strategy="mirrored", on_failure="continue", inject=["kill=3@8"])
    run.wait(WAIT_S)
    assert run.state == "finished"
    assert [done.workers for done in run.recoveries] == [3]
    mine = losses(run)
    known = ~np.isnan(mine)
    assert known[-1]
    assert mine[known] == pytest.approx(truth[known], abs=1e-6)
    assert len(set(run.history["step"])) == 20


def test_a_killed_rank_is_replaced_on_its_host_from_a_checkpoint(
    cluster: Cluster, truth: np.ndarray, reached: SimulatedHosts
) -> None:
    before = pids(cluster)
    folder = reached.shared / f"checkpoints-{time.time_ns()}"
    run = cluster.run(
        SHORT, strategy="mirrored", on_failure="replace", checkpoint=str(folder),
        checkpoint_every=5, inject=["kill=2@12"],
    )  # fmt: skip
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert (done.engines, done.workers) == ((2,), 4)
    mine = losses(run)
    known = ~np.isnan(mine)
    assert known[-1]
    assert mine[known] == pytest.approx(truth[known], abs=1e-6)
    assert hosts_of(cluster)[2] == "xh2"
    assert [engine for engine in range(4) if pids(cluster)[engine] != before[engine]] == [2]
    assert os.listdir(folder)


def test_engines_of_the_other_host_join_a_run_that_trains(cluster: Cluster) -> None:
    run = going(cluster, workers=2, on_failure="heal")
    first = {hosts_of(cluster)[engine] for engine in run.engines}
    assert len(first) == 1
    run.scale(4)
    assert len({hosts_of(cluster)[engine] for engine in run.engines}) == 2
    joined = [rank for one in run.events if one["event"] == "joined" for rank in one["ranks"]]
    assert (sorted(joined), run.events[-1]["workers"]) == ([2, 3], 4)
    steps = run.history.totals.steps
    assert soon(lambda: run.history.totals.steps > steps + 5, WAIT_S)
    run.scale(2)
    assert run.events[-1]["workers"] == 2
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
