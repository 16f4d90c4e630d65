"""Engines in jobs of Slurm over two hosts: options, the queue, the end of a job, no second job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from hosts.local_slurm import LocalSlurm
from hosts.on_hosts import (
    SHORT,
    WAIT_S,
    cluster_of,
    failed,
    going,
    hosts_of,
    kernel,
    kill,
    left,
    losses,
    met,
    pids,
    started,
)
from hosts.simulated_hosts import SimulatedHosts
from notebook_shell import Notebook, interrupt_main_thread, soon

import workbench as wb
from workbench.cluster.progress import Progress
from workbench.errors import ClusterError

LINE = (
    "4 --launcher slurm --nodes 2 --gpus-per-node 2 --time 5:00 --partition small "
    "--launcher-option nice=7 --setup '#SBATCH --comment=by-hand' "
    "--setup 'export WB_SEEN=$(hostname)'"
)


@pytest.fixture(scope="module")
def book(queues: LocalSlurm) -> Iterator[Notebook]:
    queues.cancel_all()
    with started(LINE) as book:
        yield book


@pytest.fixture
def full(queues: LocalSlurm) -> Iterator[int]:
    """Fill both nodes with another's job; return its number."""
    queues.cancel_all()
    job = queues.submit("#!/bin/sh\nsleep 600\n", "-N2", "--exclusive")
    assert soon(lambda: queues.state(job) == "RUNNING")
    yield job
    queues.cancel_all()


# -- a job -----------------------------------------------------------------------------------------


def test_options_and_lines_of_setup_reach_the_job(book: Notebook, queues: LocalSlurm) -> None:
    (job,) = queues.jobs()
    said = queues.call("scontrol", "show", "job", str(job))
    for fact in ("Partition=small", "TimeLimit=00:05:00", "NumNodes=2", "Comment=by-hand"):
        assert fact in said
    assert "gpu:2" in said
    assert "Nice=7" in said
    assert "JobName=workbench" in said
    cell = book.ok("%%distributed\nimport os\nprint(rank, os.environ['WB_SEEN'])").text
    for rank, host in enumerate(("xh1", "xh1", "xh2", "xh2")):
        assert f"{rank} {host}" in cell


def test_a_job_of_two_nodes_trains_as_one_device_does(book: Notebook) -> None:
    cluster = cluster_of(book)
    assert met(book)
    truth = cluster.run(SHORT, strategy="one_device").wait(WAIT_S)
    run = cluster.run(SHORT, strategy="mirrored").wait(WAIT_S)
    assert losses(run) == pytest.approx(losses(truth), abs=1e-6)
    assert list(hosts_of(cluster).values()) == ["xh1", "xh1", "xh2", "xh2"]


@pytest.mark.timing
def test_a_killed_rank_is_named_and_begins_anew_in_the_same_job(
    book: Notebook, queues: LocalSlurm
) -> None:
    cluster = cluster_of(book)
    run, before, jobs = going(cluster), pids(cluster), queues.jobs()
    kill(cluster, 2)
    text = failed(run, within_s=3)
    assert text.startswith(f"Rank 2 is gone: Engine 2 on xh2 (pid {before[2]}")
    book.ok("%cluster restart 2")
    assert hosts_of(cluster)[2] == "xh2"
    assert queues.jobs() == jobs
    assert met(book)


@pytest.mark.timing
def test_a_cancelled_job_ends_the_run_at_a_step_and_keeps_its_history(
    queues: LocalSlurm, reached: SimulatedHosts
) -> None:
    queues.cancel_all()
    with started("4 --launcher slurm --nodes 2") as book:
        cluster = cluster_of(book)
        run = going(cluster, steps=30)
        (job,) = queues.jobs()
        queues.call("scancel", str(job))
        text = failed(run, within_s=15)
        steps = run.history.totals.steps
        assert re.search(rf"\(SIGTERM\).* {steps} steps", text)
        assert steps >= 30
        assert soon(lambda: cluster.ids == [], 15)
        assert "killed by SIGTERM" in book.run("%%distributed\nprint(1)").text
        assert soon(lambda: not left(reached), 15), left(reached)


@pytest.mark.timing
def test_the_end_of_the_allocation_ends_the_run_at_a_step_and_keeps_its_history(
    queues: LocalSlurm,
) -> None:
    queues.cancel_all()
    with started("4 --launcher slurm --nodes 2 --partition tiny") as book:
        run = going(cluster_of(book), steps=30)
        assert run.over.wait(150), run
        steps = run.history.totals.steps
        assert run.error.code == "WB-RUN-149"
        assert all(named in run.error.what for named in ("SIGTERM", f"{steps} steps"))
        assert steps >= 30
        assert {int(rank) for rank in run.history["rank"]} == {0, 1, 2, 3}


# -- the queue -------------------------------------------------------------------------------------


@pytest.mark.timing
def test_a_full_queue_is_shown_and_an_interrupt_leaves_no_job(
    full: int, queues: LocalSlurm
) -> None:
    before = queues.submit("#!/bin/sh\nsleep 600\n", "-N2", "--exclusive")
    assert soon(lambda: "PENDING" in queues.state(before))
    said: list[str] = []

    def report(progress: Progress) -> None:
        said.append(str(progress))
        if "number 2 " in said[-1]:
            interrupt_main_thread()

    with pytest.raises(KeyboardInterrupt):
        wb.Cluster(4, launcher="slurm", nodes=2, start_timeout="30s", progress=report)
    assert re.search(r": pending \(\w+\), number 2 ", "\n".join(said))
    assert soon(lambda: sorted(queues.jobs()) == [full, before], 5)


@pytest.mark.timing
def test_who_does_not_want_to_wait_longer_has_the_job_cancelled(
    full: int, queues: LocalSlurm
) -> None:
    began = time.monotonic()
    text = refused(start_timeout="4s")
    assert time.monotonic() - began < 12
    for word in ("PENDING (", "cancelled", "--start-timeout"):
        assert word in text
    assert soon(lambda: queues.jobs() == [full], 5)


@pytest.mark.timing
def test_what_slurm_refuses_is_told_in_its_words(queues: LocalSlurm) -> None:
    queues.cancel_all()
    began = time.monotonic()
    text = refused(partition="gold")
    assert time.monotonic() - began < 5
    for word in ("invalid partition", "sinfo"):
        assert word in text
    assert queues.jobs() == []


def refused(**settings: str) -> str:
    """Return what a start of four engines on two nodes fails with."""
    with pytest.raises(ClusterError) as error:
        wb.Cluster(4, launcher="slurm", nodes=2, **settings)
    assert error.value.code
    return str(error.value)


# -- no job is left, and no second one asked for ---------------------------------------------------


@pytest.mark.timing
def test_a_killed_kernel_leaves_no_job_and_nothing_on_the_hosts(
    queues: LocalSlurm, reached: SimulatedHosts
) -> None:
    queues.cancel_all()
    start = "cluster = wb.Cluster(4, launcher='slurm', nodes=2)\n"
    start += "task = cluster.execute('import torch; kept = 1'); task.over.wait(60)"
    with kernel(start) as process:
        assert len(queues.jobs()) == 1
        process.send_signal(signal.SIGKILL)
        assert soon(lambda: not queues.jobs() and not left(reached), 15), left(reached)


@pytest.mark.timing
def test_inside_of_an_allocation_there_is_no_second_job(
    queues: LocalSlurm, monkeypatch: pytest.MonkeyPatch, reached: SimulatedHosts
) -> None:
    queues.cancel_all()
    done = subprocess.run(
        ["salloc", "--no-shell", "--nodes=2", "--ntasks=4"], capture_output=True, text=True,
        env=queues.environment, cwd=reached.shared, check=True, timeout=60,
    )  # fmt: skip
    (job,) = queues.jobs()
    assert str(job) in done.stderr
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with started("4 --launcher slurm") as book:
        assert list(hosts_of(cluster_of(book)).values()) == ["xh1", "xh1", "xh2", "xh2"]
        assert queues.jobs() == [job]
        assert met(book)
    assert soon(lambda: not left(reached), 15), left(reached)
    assert queues.state(job) == "RUNNING"
    assert os.environ["SLURM_JOB_ID"] == str(job)
