"""A process with a time limit: it reports line by line, so a hang loses no earlier line.

The parent starts `python -m MODULE NAME LINES ASKED`; the child appends a JSON object per line to
the file LINES. After the time limit, the stacks of all its threads are written to its log. Then all
processes that it has started are killed by pid; a word in their environment identifies them.

Imports can take long on a busy machine. So a child can say that it has imported, and it gets more
time before that, as long as its processes compute.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .report import Line, Status

MARK = "WORKBENCH_DOCTOR_CHILD"
STACKS_S = 2.0
"""Time that a late process gets to write its stacks."""
LEAVE_S = 4.0
"""Time that its child processes get to end by themselves."""
IMPORTS_S = 5.0
"""Part of a time limit that is meant for imports."""
LOOK_S = 1.0
WORKS = 0.05
"""Share of a core that a child uses at least while it imports."""
_PACKAGES = str(Path(__file__).parents[2])


# -- the parent's side -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: Its exit status; negative: the signal that ended it.
        late: Whether it exceeded its time limit.
        imports: Whether it was late because it still imported, and computed.
        lines: The lines that it reported.
        garbage: Whether it wrote text that is not a report line.
        tail: The end of its output: errors, and the stacks of a late process.
    """

    status: int
    seconds: float
    late: bool
    lines: list[Line]
    garbage: bool
    tail: str
    imports: bool = False


def run(
    module: str,
    name: str,
    asked: Mapping[str, Any],
    limit_s: float,
    folder: Path,
    env: Mapping[str, str] | None = None,
    imports_s: float = 0.0,
) -> Ended:
    """Run `name` of a module in a separate process, for at most `limit_s` seconds.

    Args:
        asked: The arguments of the child, as JSON.
        folder: Folder for its log `NAME.log` and its lines `NAME.jsonl`.
        env: Variables to add to its environment.
        imports_s: Additional seconds for a child that computes, but has not called `imported`.
    """
    log, lines = folder / f"{name}.log", folder / f"{name}.jsonl"
    imported = _imported(lines)
    lines.unlink(missing_ok=True)
    imported.unlink(missing_ok=True)
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", module, name, str(lines), json.dumps(dict(asked))]
    path = os.pathsep.join(p for p in (_PACKAGES, os.environ.get("PYTHONPATH", "")) if p)
    around = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {}), MARK: mark}
    began = time.perf_counter()
    late: Late = ""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=around,
            start_new_session=True,
        )  # fmt: skip
        try:
            late = _wait(process, imported, mark, limit_s, imports_s)
            if late:
                _write_stacks(process)
        finally:
            _end(process, mark, 0 if late else LEAVE_S)
    said, garbage = read(lines)
    seconds = time.perf_counter() - began
    return Ended(
        process.returncode, seconds, bool(late), said, garbage, _tail(log), late == "imports"
    )


def _imported(lines: Path) -> Path:
    """Return the file with which a child says that it has imported."""
    return lines.with_suffix(".imported")


Late = Literal["", "hangs", "imports"]


def _wait(
    process: subprocess.Popen[bytes], imported: Path, mark: str, limit_s: float, imports_s: float
) -> Late:
    """Wait until it ends; return why it is late, "" if it ended in time."""
    began = time.monotonic()
    until, most = began + limit_s, began + limit_s + imports_s
    ready = imports_s <= 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return ""
        now = time.monotonic()
        if not ready and imported.exists():
            ready, until = True, max(until, now + limit_s - IMPORTS_S)
        if now < until:
            continue
        if ready:
            return "hangs"
        if now >= most:
            return "imports"
        idle = not _works(mark)
        if idle and process.poll() is None and not imported.exists():
            return "hangs"


def _works(mark: str) -> bool:
    """Whether the marked processes compute; takes `LOOK_S`."""
    before = _cpu_s(mark)
    if not before:  # this system does not show the processes
        return busy()
    time.sleep(LOOK_S)
    after = _cpu_s(mark)
    return sum(s - before.get(pid, 0.0) for pid, s in after.items()) > WORKS * LOOK_S


def _cpu_s(mark: str) -> dict[int, float]:
    """Return the CPU seconds of each marked process, with those of its ended children."""
    found = {}
    for pid in marked(mark):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2]
            found[pid] = sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def busy() -> bool:
    """Whether more processes compute than this machine has cores."""
    return load() > (os.cpu_count() or 1)


def load() -> float:
    """Return the load average of the last minute; 0 if the system does not tell it."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def _write_stacks(process: subprocess.Popen[bytes]) -> None:
    """Let it write its threads' stacks; if it cannot, it is treated as dead."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGUSR1)
        process.wait(STACKS_S)


def _end(process: subprocess.Popen[bytes], mark: str, leave_s: float) -> None:
    """Kill it, and after `leave_s` its remaining child processes."""
    if process.poll() is None:
        process.kill()
    process.wait()
    until = time.monotonic() + leave_s
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has the mark; works only on Linux."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def read(lines: Path) -> tuple[list[Line], bool]:
    """Return the report lines of a file, and whether it has other content."""
    found: list[Line] = []
    garbage = False
    with contextlib.suppress(OSError):
        for text in lines.read_text("utf-8", "replace").splitlines():
            line = _parse(text)
            found += [] if line is None else [line]
            garbage = garbage or line is None
    return found, garbage


def _parse(text: str) -> Line | None:
    try:
        return Line.from_dict(json.loads(text))
    except (ValueError, TypeError):
        return None


def _tail(log: Path, most: int = 4000) -> str:
    try:
        return log.read_bytes()[-most:].decode("utf-8", "replace").strip()
    except OSError:
        return ""


# -- the child's side ------------------------------------------------------------------------------


class Child:
    """The arguments of a process with a time limit, and the output for its results.

    Attributes:
        asked: The arguments from the parent.
        on_late: Called by a thread shortly before the time limit; prints the results so far.
    """

    def __init__(self, name: str, lines: Path, asked: Mapping[str, Any]) -> None:
        self.name, self.asked = name, dict(asked)
        self._lines = lines
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._timer: threading.Timer | None = None
        self._late_at = 0.0
        self.on_late: Callable[[], object] = lambda: None

    def say(
        self, status: Status, id: str, what: str, found: str, next_step: str = "", **figures: Any
    ) -> None:
        """Report the result of a check; the time since the last report counts for this check."""
        now = time.perf_counter()
        line = Line(id, status, what, found, next_step, round(now - self._began, 3), figures)
        self._began = now
        with self._lock, self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line.to_dict(), default=str) + "\n")

    @contextlib.contextmanager
    def trying(self, id: str, what: str, next_step: str = "") -> Iterator[None]:
        """Report an exception as a failed check; the following checks continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.say("fail", id, what, f"{type(error).__name__}: {_first(str(error))}", next_step)

    def imported(self) -> None:
        """Say that all imports are done: from now on, a child that does not end hangs."""
        _imported(self._lines).touch()
        self.watch(float(self.asked.get("limit_s", 3600)) - IMPORTS_S)

    def watch(self, limit_s: float) -> None:
        """Call `on_late` shortly before the time limit, which only a later limit replaces."""
        self._late_at = max(self._late_at, time.monotonic() + max(0.5, limit_s - 3.0))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._late_at - time.monotonic(), lambda: self.on_late())
        self._timer.daemon = True
        self._timer.start()


def _first(text: str, most: int = 400) -> str:
    return " ".join(text.split())[:most]


def main(functions: Mapping[str, Callable[[Child], object]]) -> None:
    """Run as the child that the command line names; called by the modules with the functions."""
    name, lines, asked = sys.argv[1:4]
    faulthandler.enable()
    with contextlib.suppress(AttributeError, ValueError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    child = Child(name, Path(lines), json.loads(asked))
    child.watch(float(child.asked.get("limit_s", 3600)))
    functions[name](child)
    sys.stdout.flush()
