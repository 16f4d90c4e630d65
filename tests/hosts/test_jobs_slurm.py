"""From the notebook to a job on two Slurm nodes, and back: submitted, shown, stopped, gone on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hosts.local_slurm import LocalSlurm
from hosts.simulated_hosts import SimulatedHosts
from job_folders import SLOW
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.errors import RunError
from workbench.history import disk
from workbench.shared import checkpoints

pytestmark = [pytest.mark.hosts, pytest.mark.torch]
need("torch")
WAIT_S = 120


@pytest.fixture
def shared(queues: LocalSlurm, reached: SimulatedHosts, tmp_path: Path) -> Path:
    """Hand out a folder that both nodes see, and a queue without jobs."""
    queues.cancel_all()
    return reached.shared / tmp_path.name / "job"


def submitted(folder: Path, cell: str, **asked: Any) -> Any:
    """Submit a cell to both nodes."""
    about = {"strategy": "mirrored", "workers": 2, "nodes": 2, **asked}
    return wb.submit(cell, on="slurm", folder=folder, follow=False, **about)


def test_a_cell_is_a_job_on_two_nodes_that_is_shown_and_stopped(shared: Path) -> None:
    handed = submitted(shared, SLOW)
    run = handed.follow()
    assert soon(lambda: run.snapshot().step >= 1, WAIT_S)
    assert handed.look().began_s is not None
    print(f"first step after {time.time() - handed.look().began_s:.1f} s")
    assert soon(lambda: set(run.history["rank"]) == {0, 1}, WAIT_S)
    assert handed.state == "running"
    asked_at = run.snapshot().step
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert soon(lambda: handed.state == "finished", WAIT_S)
    steps = np.bincount(run.history["rank"])
    assert len(set(steps)) == 1
    assert steps[0] > asked_at
    assert len(set(run.history.story.hosts) | {0}) == 2  # rank 1 named another host
    assert wb.jobs[handed.name].id == handed.id


def test_a_job_that_is_warned_goes_on_from_its_checkpoint(shared: Path, queues: LocalSlurm) -> None:
    cell = SLOW.replace("steps=2000", "steps=150")
    handed = submitted(shared, cell, checkpoint="kept", checkpoint_every=1000)
    run = handed.follow()
    assert soon(lambda: run.snapshot().step >= 3, WAIT_S)
    queues.call("scancel", "--batch", "--signal=USR1", handed.id)
    run.wait(WAIT_S)
    assert run.state == "stopped"
    stopped = run.history.totals.steps
    # Slurm has queued it again, and would let it wait for two minutes.
    assert soon(lambda: handed.look().state == "pending", WAIT_S)
    queues.call("scontrol", "update", f"JobId={handed.id}", "StartTime=now")
    second = shared / "runs" / "2"
    assert soon(lambda: (second / disk.META).exists(), WAIT_S)
    again = wb.follow(second)
    again.wait(WAIT_S)
    assert again.state == "finished"
    assert again.history["step"].min() == stopped
    assert disk.read_meta(second)["job"]["resumed_from"] == f"step-{stopped}"


@pytest.mark.parametrize("whom", [[], ["--batch"]], ids=["its processes", "its script"])
def test_a_job_that_is_told_to_end_writes_its_checkpoint_and_goes_on_when_it_is_queued_again(
    shared: Path, queues: LocalSlurm, whom: list[str]
) -> None:
    cell = SLOW.replace("steps=2000", "steps=150")
    handed = submitted(shared, cell, checkpoint="kept", checkpoint_every=1000)
    run = handed.follow()
    assert soon(lambda: run.snapshot().step >= 3, WAIT_S)
    queues.call("scancel", *whom, "--signal=TERM", handed.id)
    run.wait(WAIT_S)
    assert run.state == "stopped"
    stopped = run.history.totals.steps
    assert [one.step for one in checkpoints.found(shared / "checkpoints")] == [stopped]
    assert soon(lambda: handed.look().state not in ("pending", "running"), WAIT_S)
    queues.call("scontrol", "requeue", handed.id)
    queues.call("scontrol", "update", f"JobId={handed.id}", "StartTime=now")
    second = shared / "runs" / "2"
    assert soon(lambda: (second / disk.META).exists(), WAIT_S)
    again = wb.follow(second)
    again.wait(WAIT_S)
    assert again.state == "finished"
    assert again.history["step"].min() == stopped


def test_a_job_that_dies_is_named_with_what_it_printed(
    shared: Path, reached: SimulatedHosts
) -> None:
    handed = submitted(shared, "import torch\nraise ValueError('no data on this node')")
    with pytest.raises(RunError, match="no data on this node"):
        handed.follow().wait(WAIT_S)
    assert soon(lambda: handed.state == "failed", WAIT_S)
    assert "no data on this node" in handed.logs()


def test_a_rank_that_is_killed_on_the_other_node_ends_the_job(
    shared: Path, reached: SimulatedHosts
) -> None:
    handed = submitted(shared, SLOW)
    run = handed.follow()
    assert soon(lambda: run.snapshot().step >= 3, WAIT_S)
    ranks = [
        one
        for host in ("xh1", "xh2")
        for one in reached.processes(host)
        if one.cmdline()[-1:] == ["train.py"] and "torchrun" not in " ".join(one.cmdline())
    ]
    assert len(ranks) == 2
    other = max(ranks, key=psutil.Process.create_time)
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(RunError):
        run.wait(WAIT_S)
    assert run.state == "failed"
    assert soon(lambda: handed.state == "failed", WAIT_S)
    assert soon(lambda: not [p for h in ("xh1", "xh2") for p in reached.processes(h)
                             if "workbench.jobs.conductor" in p.cmdline()])  # fmt: skip
