"""Runs envelopes as their platforms do: in an empty folder and environment, with pip's packages.

The packages for pip are downloaded once, before. The job then has no network except its own
loopback.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lending import lent

import workbench as wb
from workbench.history import disk
from workbench.jobs.followed import follow

CELL = """
import sys, torch, torch.nn as nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), batch_size=64, steps=30)
print("Workbench is in", wb.__file__, "and Python in", sys.prefix)
"""
NAME, STEPS = "mirrored", 30
RUN_S = 1200
"""Most of it is pip's, which unpacks more than a gigabyte."""
SYSTEM = f"{sys.base_prefix}/bin:/usr/bin:/bin"
PACKAGE = "workbench", "distributed_workbench"


def written(folder: Path, on: str, **resources: Any) -> Path:
    """Write a job and its envelope, as a notebook does."""
    assert not folder.exists()
    return wb.job(CELL, folder, on=on, strategy=NAME, workers=2, **resources)


def fetched(job: Path, into: Path, *more: str) -> Path:
    """Download the packages of a job's requirements, and more; skip the test if this fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(into), "-r", "requirements.txt",
         *more],
        cwd=job, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    if done.returncode:
        what = " ".join(more) or "the requirements"
        pytest.skip(f"pip cannot fetch {what}: {done.stderr[-300:]}")
    for ours in into.glob("distributed_workbench*"):
        ours.unlink()  # it must come from the job's folder
    return into


def installed(venv: Path, wheels: Path, *what: str) -> Path:
    """Install something with pip from the downloaded packages."""
    done = subprocess.run(
        [f"{venv}/bin/python", "-m", "pip", "install", "-q", *what],
        env=bare(venv.with_name("home"), wheels), capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return venv


def bare(home: Path, wheels: Path, **more: str) -> dict[str, str]:
    """Return an environment with nothing in it, but the site's mirror of packages."""
    home.mkdir(exist_ok=True)
    own = {"PATH": SYSTEM, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
    return {**own, **site(wheels), **more}


def site(wheels: Path) -> dict[str, str]:
    """Return pip's options for the site's mirror; packages are not compiled before their import."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_COMPILE": "1"}


def fresh(at: Path, *options: str) -> Path:
    """Make an empty environment."""
    subprocess.run([f"{sys.base_prefix}/bin/python3", "-m", "venv", *options, at], check=True)
    return at


def layered(at: Path, base: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Make an environment that has another one's packages, but for some; it may get more.

    Each package is linked separately, so pip sees the packages there and does not change them.
    """
    fresh(at, "--without-pip")
    (theirs,) = (base / "lib").glob("python3*/site-packages")
    (ours,) = (at / "lib").glob("python3*/site-packages")
    for one in theirs.iterdir():
        if not one.name.startswith(without):
            (ours / one.name).symlink_to(one)
    torchrun = (base / "bin" / "torchrun").read_text()
    (at / "bin" / "torchrun").write_text(torchrun.replace(str(base), str(at)))
    (at / "bin" / "torchrun").chmod(0o755)
    return at


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder with a short name, for names of sockets; it is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="wb-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@dataclass(frozen=True)
class Node:
    """The commands of one machine, and the file with their output."""

    words: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path


class Apart:
    """A place whose only network is its own loopback; processes started in it end with it."""

    def __init__(self) -> None:
        self._outer = subprocess.Popen(
            ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c",
             "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "up\n":
            self.close()
            pytest.skip("this user may make no namespaces, or has no `ip`")

    def command(self, words: Sequence[str], cwd: Path = Path("/")) -> list[str]:
        """Return a command as it is started in there."""
        there = ["nsenter", "--net", "--pid", "--mount", f"--target={self._inner}"]
        return [*there, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *words]

    def start(self, words: Sequence[str], cwd: Path, **about: Any) -> subprocess.Popen[str]:
        """Start a command in there."""
        command = self.command(words, cwd)
        return subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, **about)

    def run(self, words: Sequence[str], cwd: Path, **about: Any) -> str:
        """Run a command in there and return its output after it has ended without an error."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.start(words, cwd, **streams, **about) as process:
            said, _ = process.communicate(timeout=RUN_S)
        assert process.returncode == 0, f"{shlex.join(words)}\n{said[-6000:]}"
        return said

    @contextlib.contextmanager
    def nodes(self, nodes: Sequence[Node]) -> Iterator[list[subprocess.Popen[str]]]:
        """Start commands at the same time; at the end of the block all must end well."""
        with contextlib.ExitStack() as stack:
            started = []
            for node in nodes:
                log = stack.enter_context(node.log.open("w"))
                one = self.start(node.words, node.cwd, env=node.env, stdout=log, stderr=log)
                stack.callback(one.wait)
                stack.callback(one.kill)
                started.append(one)
            yield started
            codes = [one.wait(RUN_S) for one in started]
            assert codes == [0] * len(codes), "\n".join(n.log.read_text()[-3000:] for n in nodes)

    @property
    def _inner(self) -> int:
        listed = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        return int(listed.split()[0])

    def close(self) -> None:
        """End everything in there."""
        assert self._outer.stdin is not None
        assert self._outer.stdout is not None
        self._outer.stdin.close()
        self._outer.wait()
        self._outer.stdout.close()


def in_notebook() -> Mapping[str, np.ndarray]:
    """Return the weights of the same run in a notebook, each worker with as many threads."""
    with lent(2) as cluster:
        return cluster.run(CELL, strategy=NAME, workers=2).wait(RUN_S).weights()


def followed(log: Path, process: subprocess.Popen[str]) -> Any:
    """Follow the output of a process, by a command that ends with it, as `kubectl logs -f` does."""
    return follow(["tail", "-n", "+1", "-f", f"--pid={process.pid}", str(log)], wait_s=RUN_S)


def has_ended_as(run: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Assert that a run is complete, and that its weights equal the given ones to the last bit."""
    assert (run.state, run.error) == ("finished", None)
    assert run.history.totals.steps == STEPS
    assert set(run.history["rank"]) == {0, 1}
    theirs = run.weights()
    assert theirs.keys() == weights.keys()
    assert [name for name in weights if not np.array_equal(weights[name], theirs[name])] == []


def made_by(said: str, where: Path) -> None:
    """Assert that Workbench was that of an environment, and no other."""
    found = re.findall(r"Workbench is in (\S+) and Python in (\S+)", said)
    assert found
    assert [one for one in found if not all(f"{at}/".startswith(f"{where}/") for at in one)] == []


def runs(folder: Path) -> Path:
    """Return the only run of a job."""
    (only,) = (folder / "runs").iterdir()
    assert disk.read_meta(only)["state"] == "finished"
    return only
