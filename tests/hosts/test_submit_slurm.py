"""Job folders handed to a real Slurm: what its clients say is what `platforms` reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.clients import ONE, small_job
from hosts.local_slurm import LocalSlurm
from hosts.simulated_hosts import SimulatedHosts
from notebook_shell import soon

from workbench.errors import ClusterError
from workbench.jobs.submitted import Jobs

WAIT_S = 60.0


def job_folder(hosts: SimulatedHosts, name: str, script: str) -> Path:
    """Write a job folder that all nodes see."""
    folder = hosts.shared / name
    if not folder.exists():
        small_job(folder, name=name)
    (folder / "job.sbatch").write_text(f"#!/bin/sh\n#SBATCH --nodes=2\n{script}\n")
    return folder


def test_a_job_waits_runs_and_prints_then_one_is_refused_and_one_cancelled(
    queues: LocalSlurm, reached: SimulatedHosts, tmp_path: Path
) -> None:
    queues.cancel_all()
    jobs = Jobs(lambda: tmp_path)
    two = replace(ONE, nodes=2, gpus_per_node=2, time_s=60.0)
    folder = job_folder(reached, "prints", "srun sh -c 'echo hello from $(hostname)'")
    before = queues.submit("#!/bin/sh\nsleep 600\n", "-N2", "--exclusive")
    assert soon(lambda: queues.state(before) == "RUNNING")

    job = jobs.submit(folder, "slurm", two)
    assert soon(lambda: "(Resources)" in job.reason or "(Priority)" in job.reason, 10), job.reason
    assert job.state == "pending"
    queues.call("scancel", str(before))
    assert job.wait(WAIT_S).state == "finished"
    assert sorted(job.logs().splitlines()) == ["hello from xh1", "hello from xh2"]
    assert job.last.began_s is not None
    assert job.place == str(folder)

    for wrong, code in (
        (replace(two, partition="large"), "WB-CLUSTER-086"),
        (replace(two, nodes=3), "WB-CLUSTER-087"),
        (replace(two, gpus_per_node=3), "WB-CLUSTER-087"),
        (replace(two, partition="tiny", time_s=3600.0), "WB-CLUSTER-087"),
    ):
        with pytest.raises(ClusterError) as told:
            jobs.submit(folder, "slurm", wrong)
        assert told.value.code == code
    job_folder(reached, "prints", "#SBATCH --nodes=5\ntrue")
    with pytest.raises(ClusterError) as told:
        jobs.submit(folder, "slurm", two)
    assert told.value.code == "WB-CLUSTER-084"

    job_folder(reached, "prints", "sleep 600")
    job = jobs.submit(folder, "slurm", two)
    assert soon(lambda: job.state == "running", 20), job.reason
    job.cancel()
    assert soon(lambda: job.state == "cancelled", 20), job.reason
    assert list(jobs) == ["prints@1", "prints"]


def test_a_job_that_fails_is_told_with_its_code_and_last_lines(
    queues: LocalSlurm, reached: SimulatedHosts, tmp_path: Path
) -> None:
    queues.cancel_all()
    folder = job_folder(reached, "fails", "echo no such module >&2\nexit 3")
    jobs = Jobs(lambda: tmp_path)
    job = jobs.submit(folder, "slurm", replace(ONE, nodes=2))
    with pytest.raises(ClusterError) as told:
        job.wait(WAIT_S)
    for text in (str(told.value), repr(Jobs(lambda: tmp_path)["fails"])):
        assert "first step" in text
        assert "FAILED (NonZeroExitCode), exit code 3:0" in text
        assert "no such module" in text
    gone = replace(job.ticket, id="987654")
    assert jobs.add(gone, "gone").look().gone
    jobs["gone"].cancel()
