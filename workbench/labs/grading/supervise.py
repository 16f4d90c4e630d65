"""Starts a runner for each notebook, outlives whatever it meets, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

from . import processes
from .environment import kept
from .limits import Limits
from .outcome import Graded, from_wire

MARGIN_S = 150.0
"""For starting and ending kernels and for interrupts, beyond a notebook's time."""
MOST_ANSWER_BYTES = 20_000_000
_PREFIX = "wbg-"  # short: paths of sockets are


def grade(
    paths: Sequence[Path],
    *,
    notebooks: Path,
    canonical: Path | None = None,
    limits: Limits | None = None,
    jobs: int = 1,
    done: Callable[[Graded], None] = lambda graded: None,
) -> list[Graded]:
    """Grade notebooks, each in processes of its own; return what came out, in their order.

    Args:
        notebooks: Where the labs as handed out are, `lab_N.ipynb`.
        canonical: The lab as handed out, for all of them.
        jobs: Notebooks at once; labs measure times, so more than one needs cores for each.
        done: Told of each notebook when it is graded.
    """
    before = set(psutil.Process().children())
    ours = processes.adopt()
    runners = _Runners(notebooks, canonical, limits or Limits())
    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                waiting = [pool.submit(runners.grade, path, done) for path in paths]
                return [one.result() for one in waiting]
            except BaseException:
                runners.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        if ours:  # what has lost its runner is our child now
            me = psutil.Process()
            processes.end(lambda: set(me.children()) - before - _dead(me.children()))
            processes.adopt(False)


def _dead(found: list[psutil.Process]) -> set[psutil.Process]:
    return {process for process in found if not processes.lives(process)}


class _Runners:
    """The runners that live, so that all can be ended."""

    def __init__(self, notebooks: Path, canonical: Path | None, limits: Limits) -> None:
        self._given: dict[str, Any] = {
            "notebooks": str(notebooks.absolute()),
            "canonical": None if canonical is None else str(canonical.absolute()),
            "limits": asdict(limits),
        }
        self._limit_s = limits.total_s + MARGIN_S
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._lock, self._stopped = threading.Lock(), False

    def stop(self) -> None:
        """End all that live; start no other."""
        with self._lock:
            self._stopped = True
            for runner in self._living.values():
                runner.kill()

    def grade(self, path: Path, done: Callable[[Graded], None]) -> Graded:
        """Grade one notebook."""
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        try:
            graded = self._run(path, folder)
        finally:
            processes.end(lambda: processes.marked(folder.name))
            remove(folder)
        graded.file = str(path)
        graded.seconds = graded.seconds or time.monotonic() - began
        done(graded)
        return graded

    def _run(self, path: Path, folder: Path) -> Graded:
        given = {**self._given, "path": str(path.absolute()), "folder": str(folder)}
        with self._lock:
            if self._stopped:
                return Graded(str(path), problems=["It was not begun."])
            runner = subprocess.Popen(
                [sys.executable, "-m", "workbench.labs.grading.runner"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, cwd=folder, env=kept() | {"HOME": str(folder)},
            )  # fmt: skip
            self._living[runner.pid] = runner
        try:
            return self._wait(runner, path, {**given, "parent": os.getpid()})
        finally:
            family = processes.below(runner.pid)
            processes.end(lambda: [p for p in family if processes.lives(p)])
            runner.kill()
            runner.wait()
            with self._lock:
                del self._living[runner.pid]

    def _wait(self, runner: subprocess.Popen[bytes], path: Path, given: dict[str, Any]) -> Graded:
        assert runner.stdin is not None
        with contextlib.suppress(OSError), runner.stdin as stdin:
            stdin.write(json.dumps(given).encode() + b"\n")
        said: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=_read, args=(pipe, name, said), daemon=True)
            for name, pipe in (("out", runner.stdout), ("error", runner.stderr))
        ]
        for reader in readers:
            reader.start()
        try:
            runner.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            why = f"It was not over after {self._limit_s:g} s, and was ended."
            return Graded(str(path), problems=[why])
        for reader in readers:
            reader.join(5)
        try:
            return from_wire(json.loads(said.get("out", b"")))
        except (ValueError, KeyError, TypeError, AttributeError):
            last = said.get("error", b"").decode("utf-8", "replace").strip().splitlines()[-1:]
            words = f"The process that grades it was ended (status {runner.returncode})."
            return Graded(str(path), problems=[" ".join([words, *last])])


def _read(pipe: IO[bytes], name: str, into: dict[str, bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        into[name] = pipe.read(MOST_ANSWER_BYTES)


def remove(folder: Path) -> None:
    """Remove a folder, also parts that its owner may not write."""

    def again(function: Callable[[str], Any], path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
        with contextlib.suppress(OSError):
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
        with contextlib.suppress(OSError):
            function(path)

    shutil.rmtree(folder, onerror=again)
