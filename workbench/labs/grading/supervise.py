"""Starts a runner for each notebook, survives whatever happens to it, and cleans up after it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import psutil

from . import processes
from .isolation import NOTHING, Isolation, find_out, kept, remove
from .processes import Limits
from .results import OVER, Graded, from_wire

MARGIN_S = 150.0
"""For starting and ending kernels and for interrupts, beyond a notebook's time."""
MOST_ANSWER_BYTES = 20_000_000
_PREFIX = "wbg-"  # short, because paths of sockets must be short


def grade(
    paths: Sequence[Path],
    *,
    notebooks: Path,
    canonical: Path | None = None,
    limits: Limits | None = None,
    jobs: int = 1,
    isolation: Isolation | None = None,
    done: Callable[[Graded], None] = lambda graded: None,
) -> list[Graded]:
    """Grade notebooks, each in its own processes; return the results in the same order.

    Args:
        notebooks: The folder of the original labs, `lab_N.ipynb`.
        canonical: The original lab, for all of them.
        isolation: How kernels are kept apart from the marks; by default the best that works.
        jobs: Notebooks at once; labs measure times, so more than one needs cores for each.
        done: Called with each graded notebook; its errors are dropped.
    """
    hidden = processes.hide()  # the environment that we were started with may hold secrets
    before = set(psutil.Process().children())
    ours = processes.adopt()
    kept_apart = replace(isolation or find_out(), hidden=_not_for_students(paths, canonical))
    runners = _Runners(notebooks, canonical, limits or Limits(), kept_apart)
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
            processes.end(lambda: [p for p in _new(me, before) if processes.lives(p)])
            processes.reap(_new(me, before))
            processes.adopt(False)
        if hidden:
            processes.hide(False)


def _not_for_students(paths: Sequence[Path], canonical: Path | None) -> list[str]:
    """Return the files of the notebooks that were handed in, and their folders."""
    files = {path.absolute() for path in (*paths, *filter(None, [canonical])) if path.exists()}
    return [str(one) for one in (*sorted({file.parent for file in files}), *sorted(files))]


def _new(me: psutil.Process, before: set[psutil.Process]) -> list[psutil.Process]:
    return [process for process in me.children() if process not in before]


class _Runners:
    """The living runners, so that all of them can be ended."""

    def __init__(
        self,
        notebooks: Path,
        canonical: Path | None,
        limits: Limits,
        isolation: Isolation = NOTHING,
    ) -> None:
        self._given: dict[str, Any] = {
            "notebooks": str(notebooks.absolute()),
            "canonical": None if canonical is None else str(canonical.absolute()),
            "limits": asdict(limits),
            "isolation": asdict(isolation),
        }
        self._limits = limits
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._lock, self._stopped = threading.Lock(), False

    def stop(self) -> None:
        """End all living runners; start no other."""
        with self._lock:
            self._stopped = True
            for runner in self._living.values():
                runner.kill()

    def grade(self, path: Path, done: Callable[[Graded], None]) -> Graded:
        """Grade one notebook; if something goes wrong, the result says what."""
        began = time.monotonic()
        try:
            graded = self._run(path)
        except Exception as error:  # one notebook must not lose the others
            graded = Graded(str(path), problems=[_said(error)])
        graded.file = str(path)
        graded.seconds = graded.seconds or time.monotonic() - began
        with contextlib.suppress(Exception):
            done(graded)
        return graded

    def _run(self, path: Path) -> Graded:
        given = {
            **self._given, "path": str(path.absolute()), "earlier": None,
            "until": time.monotonic() + self._limits.total_s, "parent": os.getpid(),
        }  # fmt: skip
        for _ in range(1 + self._limits.restarts):
            try:
                last, why = self._once(given)
            except Exception as error:  # no space, no process: what is known stays
                last, why = None, _said(error)
            if last is not None and last["running"] == OVER:
                return from_wire(last)
            if last is not None:
                given["earlier"] = last
            if given["earlier"] is None or self._stopped or time.monotonic() > given["until"]:
                break
            if last is not None:
                _leave_out(last, why)
        known = given["earlier"]
        graded = Graded(str(path)) if known is None else from_wire(known)
        graded.problems.append(why)
        for one in graded.outcomes:
            if one.state == "not graded":
                one.error = one.error or f"not reached: {why}"
        return graded

    def _once(self, given: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Let a runner grade in a new folder; return its last line, and how it ended."""
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        try:
            with self._lock:
                if self._stopped:
                    return None, "It was not started."
                runner = self._start(folder)
            return self._hear(runner, {**given, "folder": str(folder)})
        finally:
            with contextlib.suppress(Exception):
                remove(folder)

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        runner = subprocess.Popen(
            [sys.executable, "-m", "workbench.labs.grading.runner"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env=kept() | {"HOME": str(folder)},
            cwd="/",  # Python looks for modules there, and no cell may write there
        )  # fmt: skip
        self._living[runner.pid] = runner
        return runner

    def _hear(
        self, runner: subprocess.Popen[bytes], given: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, str]:
        """Return the last line of a runner, and in words how it ended."""
        try:
            return _talk(runner, given, given["until"] - time.monotonic() + MARGIN_S)
        except BaseException:  # nobody reads its output any more
            runner.kill()
            for pipe in filter(None, (runner.stdin, runner.stdout, runner.stderr)):
                with contextlib.suppress(OSError):
                    pipe.close()
            raise
        finally:
            family = processes.below(runner.pid)
            processes.end(lambda: [p for p in family if processes.lives(p)])
            runner.kill()
            runner.wait()
            processes.end(lambda: processes.marked(Path(given["folder"]).name))
            with self._lock:
                del self._living[runner.pid]


def _said(error: Exception) -> str:
    return f"The notebook could not be graded: {type(error).__name__}: {error}"


def _leave_out(last: dict[str, Any], why: str) -> None:
    """Settle the exercise whose cells ended a runner, if any: the next runner leaves them out."""
    for one in last["exercises"]:
        if one["exercise"] == last["running"]:
            one.update(state="stopped", error=f"in its cell: {why}")


def _talk(
    runner: subprocess.Popen[bytes], given: dict[str, Any], limit_s: float
) -> tuple[dict[str, Any] | None, str]:
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
        runner.wait(limit_s)
        why = f"the grading process ended too early (status {runner.returncode})"
    except subprocess.TimeoutExpired:
        why = f"the grading process took longer than {limit_s:.0f} s and was killed"
        runner.kill()
    for reader in readers:
        reader.join(5)
    last = said.get("error", b"").decode("utf-8", "replace").strip().splitlines()[-1:]
    return _last_line(said.get("out", b"")), ": ".join([why, *last])


def _last_line(said: bytes) -> dict[str, Any] | None:
    """Return the last complete line of a runner."""
    for line in reversed(said.splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found: dict[str, Any] = json.loads(line)
            from_wire(found)
            if isinstance(found["running"], str):
                return found
    return None


def _read(pipe: IO[bytes], name: str, into: dict[str, bytes]) -> None:
    with contextlib.suppress(OSError, ValueError), pipe:
        into[name] = pipe.read(MOST_ANSWER_BYTES)
