"""Looks from time to time for a notice that this host goes away soon (`wb.leave_when`).

Clouds tell a spot machine two minutes or half a minute before they take it back. Each cloud tells
it in a different way. The user knows how their cloud tells it: a file appears, or a function asks
the cloud. By default, Workbench looks for no notice.

    every few seconds   the file exists, or the function reports it ──> `Departure.hear`
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ...errors import PlanError, RunError
from .departure import Departure, Notice

Source = str | os.PathLike[str] | Callable[[], object]
VARIABLE = "WORKBENCH_LEAVE_WHEN"
"""Names a file whose appearance is a notice, for all engines that have this variable set."""
EVERY_S = 5.0

_departure: Departure | None = None
_watch: Watch | None = None


def serve(departure: Departure) -> None:
    """Register the object that receives the notices of this process from now on."""
    global _departure
    _departure = departure
    if path := os.environ.get(VARIABLE):
        leave_when(path)


def leave_when(source: Source, every_s: float = EVERY_S) -> None:
    """Watch for a notice that this host ends soon. Call this function on every worker.

    Call it before training. When there is a notice, the workers of this host leave the run before
    the host ends. They leave in the same way after a SIGTERM. In a job, the whole job stops. A
    second call replaces the first call.

    Args:
        source: A file or a function. If the file exists, this is the notice, and a number in the
            file is the remaining time in seconds. A function must return None as long as there is
            no notice. When there is a notice, the function must return the remaining time in
            seconds, or True if this time is not known. The function is called on a separate thread.
        every_s: Number of seconds between two checks of the file or function.

    Raises:
        PlanError: The source or the time is not valid.
        RunError: This process is neither an engine nor a process of a job.
    """
    global _watch
    if not (callable(source) or isinstance(source, (str, os.PathLike))):
        raise PlanError(
            "`source` must be a path or a function.",
            seen=type(source).__name__,
            allowed="the path of a file, or a function. The function returns None as long as no "
            "shutdown of this host is announced. When a shutdown is announced, the function "
            "returns the number of seconds until the shutdown, or True",
            code="WB-PLAN-328",
        )
    if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not every_s > 0:
        raise PlanError(
            "every_s must be a number of seconds.",
            seen=every_s,
            allowed="a number of seconds greater than 0",
            code="WB-PLAN-329",
        )
    if _departure is None:
        raise RunError(
            "wb.leave_when must be called on a worker.",
            allowed="a cell under %%distributed, or a job's script",
            next_step="put wb.leave_when into the cell that trains, above wb.fit",
            code="WB-RUN-150",
        )
    if _watch is not None:
        _watch.close()
    _watch = Watch(source, float(every_s), _departure.hear)


class Watch:
    """Looks for a notice on its own thread until there is one; it looks first at its start."""

    def __init__(self, source: Source, every_s: float, hear: Callable[[Notice], object]) -> None:
        self._look = source if callable(source) else _file(Path(source))
        self._hear, self._every_s = hear, every_s
        function = "reported by the function given to wb.leave_when"
        self._reason = function if callable(source) else f"{source} exists"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="workbench-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _main(self) -> None:
        told = ""
        while not self._closed.is_set():
            try:
                found = self._look()
            except Exception as error:  # a request to a network may fail; the next look repeats it
                found, text = None, f"{type(error).__name__}: {error}"
                if text != told:
                    told = text
                    said = (
                        "wb.leave_when: Workbench could not find out whether this host will be "
                        f"shut down soon ({text}). Workbench tries again.\n"
                    )
                    os.write(2, said.encode())
            if found is not None and found is not False:
                self._hear(Notice(f"notice: {self._reason}", _seconds(found), host=True))
                return
            self._closed.wait(self._every_s)


def _seconds(found: object) -> float | None:
    """Return how many seconds remain, if the notice says so."""
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        return None
    return max(0.0, float(found))


def _file(path: Path) -> Callable[[], object]:
    """Return a function that looks for a file, and reads the seconds that the file contains."""

    def look() -> object:
        if not path.exists():
            return None
        try:
            return float(path.read_text(errors="replace").strip())
        except (OSError, ValueError):  # the file is empty, or it does not contain a number
            return True

    return look
