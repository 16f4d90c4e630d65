"""Helpers of chaos.py: a notebook whose cells are watched, and a disk that can be full."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from workbench.errors import WorkbenchError
from workbench.notebook.session import session

LIMIT_S = 30.0
"""What has not ended so long after its fault, or after its interrupt, hangs."""
COMMAND = re.compile(r"%cluster (?:restart|stop|start)(?: \d+)*")
NEXT = re.compile(r"^ *next: +(.*)$", re.MULTILINE)
GAVE_UP = 3
"""Exit code where a cell hangs whatever is done."""


@dataclass
class Cell:
    """The outcome of a cell.

    Attributes:
        text: All text below the cell, including the message of its error.
        ended_s: Time from the fault to the cell's end, or from its interrupt if that ended it.
        struck: Whether it was still running at the moment of the fault.
        by_itself: Whether it ended without an interrupt by the script.
        hung: Whether it was still running 30 s after that interrupt.
    """

    error: BaseException | None
    text: str
    ended_s: float
    struck: bool
    by_itself: bool
    hung: bool

    @property
    def step(self) -> str:
        """The command that its message names, preferably in its `next:` line; empty if none."""
        said = NEXT.findall(str(self.error or "")) or [str(self.error or ""), self.text]
        found = [command for text in said for command in COMMAND.findall(text)]
        return found[0] if found else ""

    @property
    def raw(self) -> bool:
        """Whether it ended in an error that is not Workbench's own, so not written for users."""
        return self.error is not None and not isinstance(
            self.error, WorkbenchError | KeyboardInterrupt
        )


class Attendant(threading.Thread):
    """Watches a cell: causes a fault, and interrupts the cell if it does not end."""

    def __init__(self, patience_s: float, strike: Strike | None) -> None:
        super().__init__(name="chaos-attendant", daemon=True)
        self.over = threading.Event()
        self.since = time.perf_counter()
        self.struck = strike is None
        self.by_itself, self.hung = True, False
        self.fault: Exception | None = None
        self._patience_s, self._strike = patience_s, strike

    def now(self) -> None:
        """Begin the measured time."""
        self.since = time.perf_counter()

    def run(self) -> None:
        if self._strike is not None:
            try:
                self.struck = bool(self._strike(self))
            except Exception as error:
                self.fault = error
        if self.over.wait(self._patience_s):
            return
        self.by_itself = False
        self.now()
        press_interrupt()
        if self.over.wait(LIMIT_S):
            return
        self.hung = True
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        press_interrupt()
        if self.over.wait(LIMIT_S):
            return
        for child in psutil.Process().children(recursive=True):  # so that the notebook goes on
            with contextlib.suppress(psutil.Error):
                child.kill()
        if not self.over.wait(LIMIT_S):
            os._exit(GAVE_UP)


Strike = Callable[[Attendant], object]
"""Does something to a cell, and says when; returns whether the cell was still going on."""


class Notebook:
    """Runs cells in an IPython shell, interrupted by signal as a notebook's kernel is."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.shell = InteractiveShell.instance()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for source in ("%load_ext workbench\nimport workbench as wb", self.start_line):
            done = self.run(source, 4 * LIMIT_S)
            if done.error is not None:
                raise done.error

    @property
    def start_line(self) -> str:
        """The line that starts the cluster."""
        return f"%cluster start {self.engines}"

    def run(self, source: str, patience_s: float, strike: Strike | None = None) -> Cell:
        """Run a cell that an attendant watches; its error is returned, not raised."""
        beside, result = Attendant(patience_s, strike), None
        captured: Any = None
        beside.start()
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with capture_output() as captured:
                result = self.shell.run_cell(source, store_history=True)
        except KeyboardInterrupt:  # it struck when the cell was over already
            pass
        finally:
            beside.over.set()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        ended_s = time.perf_counter() - beside.since
        beside.join()
        if beside.fault is not None:
            raise beside.fault
        error = None if result is None else result.error_before_exec or result.error_in_exec
        return Cell(
            error, _read(captured, error), ended_s, beside.struck, beside.by_itself, beside.hung
        )

    def follow(self, step: str) -> Cell:
        """Take the step that a message names."""
        done = self.run(step, 2 * LIMIT_S)
        if done.error is None and session.cluster is None:
            done = self.run(self.start_line, 2 * LIMIT_S)
        return done

    def close(self) -> None:
        session.stop()


def _read(captured: Any, error: BaseException | None) -> str:
    shown = [str(error or "")]
    if captured is not None:
        shown += [captured.stdout, captured.stderr]
        shown += [str(output.data.get("text/plain", "")) for output in captured.outputs]
    return "\n".join(filter(None, shown))


def press_interrupt() -> None:
    """Do what the notebook's interrupt button does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


class Disks:
    """Small disks, a fresh one for each round that needs one, which can be full.

    If root may mount them they are real: file systems of 6 MB in memory that only this process and
    its descendants see, filled by a file. Otherwise a limit on the size of files replaces them, for
    this process and its descendants: a write fails as on a full disk.

    Attributes:
        kind: Which of these two kinds, in words.
    """

    SIZE = "6m"

    def __init__(self, place: Path) -> None:
        self._place = place
        self._mounted: list[Path] = []
        self._count = 0
        self._private = _own_mounts()
        self.kind = f"tmpfs of {self.SIZE}" if self._private else "limit on the size of files"

    def fresh(self) -> Path:
        """Return a folder on a separate disk."""
        self._count += 1
        path = self._place / f"disk-{self._count}"
        path.mkdir()
        if self._private:
            _call("mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "chaos", str(path))
            self._mounted.append(path)
        return path

    @contextlib.contextmanager
    def full(self, disk: Path) -> Iterator[None]:
        """Keep the disk full for a while."""
        if self._private:
            fill = disk / "fill"
            try:
                _fill(fill)
                yield
            finally:
                fill.unlink(missing_ok=True)
        else:
            with _limited():
                yield

    def close(self) -> None:
        """Unmount them."""
        for path in self._mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)


def _own_mounts() -> bool:
    """Make separate mounts, which end with our last process; return whether this worked."""
    if not sys.platform.startswith("linux") or os.geteuid() or not shutil.which("mount"):
        return False
    clone_newns = 0x00020000
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(clone_newns):
            return False
        _call("mount", "--make-rprivate", "/")
    except (OSError, AttributeError, subprocess.SubprocessError):
        return False
    return True


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _fill(path: Path) -> None:
    """Write a file until there is no space for one more page."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (64 << 10, 4 << 10):
            with contextlib.suppress(OSError):
                while True:
                    if file.write(bytes(size)) < size:
                        break


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Prevent all files of this process and its descendants from growing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    mine = psutil.Process()
    pids = [mine.pid, *(child.pid for child in mine.children(recursive=True))]
    try:
        _limit(pids, (0, before[1]))
        yield
    finally:
        _limit(pids, before)


def _limit(pids: Sequence[int], limit: tuple[int, int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def await_(true: Callable[[], object], limit_s: float) -> bool:
    """Return whether something became true in time."""
    end_at = time.monotonic() + limit_s
    while time.monotonic() < end_at:
        if true():
            return True
        time.sleep(0.01)
    return bool(true())
