"""Envelopes for several machines, done to the letter over two hosts, from empty folders."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from envelope_jobs import (
    RUN_S,
    SYSTEM,
    bare,
    fetched,
    has_ended_as,
    in_notebook,
    made_by,
    runs,
    site,
    written,
)
from hosts.local_slurm import LocalSlurm
from hosts.simulated_hosts import ADDRESSES, SimulatedHosts
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.jobs.followed import follow

pytestmark = [
    pytest.mark.hosts, pytest.mark.torch, pytest.mark.timeout(2 * RUN_S),
    pytest.mark.leaks("the environments of a file are made by its first test"),
]  # fmt: skip
need("torch")


@pytest.fixture(scope="module")
def weights() -> Mapping[str, np.ndarray]:
    """Train the job in a notebook."""
    return in_notebook()


@pytest.fixture(scope="module")
def place(reached: SimulatedHosts) -> Iterator[Path]:
    """Hand out a folder that all hosts see, of gigabytes, of which nothing is left."""
    made = reached.shared / "envelopes"
    made.mkdir()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def job(place: Path) -> Path:
    """Write a job of two nodes."""
    return written(place / "slurm", "slurm", nodes=2)


@pytest.fixture(scope="module")
def wheels(job: Path, place: Path) -> Path:
    """Fetch what the job needs: the hosts reach nobody but each other."""
    return fetched(job, place / "wheels")


@pytest.fixture(scope="module")
def venv(job: Path, wheels: Path, queues: LocalSlurm, place: Path) -> Path:
    """Hand the job to Slurm, on whose nodes it makes its environment, and wait for its end."""
    environment = bare(place / "home", wheels, SLURM_CONF=queues.environment["SLURM_CONF"])
    handed = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"],
        cwd=job, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    number = int(handed.stdout)
    over = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"}
    assert soon(lambda: queues.state(number) in over, RUN_S)
    said = (job / f"slurm-{number}.out").read_text()
    assert queues.state(number) == "COMPLETED", said[-6000:]
    return job / ".venv"


def test_sbatch_trains_the_job_on_two_nodes_in_an_environment_of_its_own(job, venv, weights):
    run = wb.load(runs(job))
    has_ended_as(run, weights)
    assert len(set(run.history.story.hosts) | {0}) == 2  # rank 1 named another host
    made_by((runs(job) / "log-rank1.txt").read_text(), venv)


@pytest.fixture
def logins(reached: SimulatedHosts, wheels: Path) -> Iterator[None]:
    """Give the hosts' user a shell that knows no checkout, and where packages come from."""
    told = "".join(f"export {name}={value}\n" for name, value in site(wheels).items())
    files = [reached.path(host, str(Path("~/.bashrc").expanduser())) for host in ADDRESSES]
    before = [file.read_text() if file.exists() else None for file in files]
    for file in files:
        file.write_text(f"unset PYTHONPATH\nexport PATH={SYSTEM}\n{told}")
    yield
    for file, text in zip(files, before, strict=True):
        file.unlink() if text is None else file.write_text(text)


def test_start_ssh_copies_the_job_and_trains_it_on_both_hosts(
    place, venv, logins, reached, weights
):
    folder = written(place / "ssh", "ssh", nodes=2, hosts=tuple(ADDRESSES))
    assert (folder / "requirements.txt").read_text() == (venv / "made-from.txt").read_text()
    home = Path.home()
    there = [reached.path(host, f"{home}/workbench-jobs/mirrored") for host in ADDRESSES]
    for one in there:  # the environment that they would make is there already
        one.mkdir(parents=True)
        (one / ".venv").symlink_to(venv)
    environment = {"PATH": f"{reached.bin}:/usr/bin:/bin", "HOME": str(place / "home")}
    done = subprocess.run(
        ["bash", "start-ssh.sh"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = follow(f"ssh://xh1{home}/workbench-jobs/mirrored").wait(RUN_S)
    has_ended_as(run, weights)
    made_by(done.stdout, venv)
    for one in there:
        shutil.rmtree(one)
