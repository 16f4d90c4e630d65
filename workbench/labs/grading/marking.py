"""The marks: a check runs here, in the grader's own process, and asks the kernel by messages."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import WorkbenchError
from ..asking import check as look
from ..exercise import exercises
from ..limit import Late, at_most
from ..side import Wire

_MOST_FINDINGS, _MOST_CHARACTERS = 50, 2000
_OWN_S = 30.0
"""For what a check reckons itself, beyond the time that answers may take and are waited for."""

_STUB = '''"""In place of the checks of lab {lab}, which another process makes."""

from ..exercise import exercise


def _away(c):
    c.wrong("This check is made when all cells have run, and not in the notebook.")


for _number, _title, _where in {known!r}:
    exercise(_number, _title, where=_where)(_away)
'''

_LOOK_AT = {
    "workbench.labs": r"workbench\.labs|labs\.(?:exercise|asking|answers|checks)",
    "the grader's names": r"_inside\b|_labs_|\bGuard\b|\bgrading\b",
    "frames": r"_getframe|f_locals|f_back|tb_frame|currentframe",
    "solutions": r"solutions|lab_\d+\.md",
    "the memory": r"gc\.get_|\bctypes\b|\.contents\b",
    "/proc": r"/proc\b",
    "a case's hidden numbers": r"\.(?:whole_s|latency_s|bytes_per_s|faults|link)\b|labs\.cases",
    "imports": r"\bimportlib\b|__import__|sys\.modules|meta_path",
    "code of others": r"__code__|__globals__|__closure__|setattr\s*\(|__dict__",
    "other processes": r"os\.(?:kill|fork|exec|_exit)|subprocess|\bsignal\b|getppid",
    "the history of a run": r"\.(?:summarise|history|weights|plan|_runs)\s*=[^=]",
    "how runs are kept": r"session\.(?:registry|results|run)\b|RunHistory|run\.json|copy\.copy",
    "the post office": r"class\s+Mail\b|Mail\.\w+\s*=|sent_bytes\s*=[^=]|sent_to\s*=[^=]",
}


def look_at(source: str) -> list[str]:
    """Return what a teacher should look at in a cell: what no answer of the labs needs."""
    return [name for name, pattern in _LOOK_AT.items() if re.search(pattern, source)]


def write_stubs(folder: Path, lab: int) -> Path:
    """Write what stands in for the checks in a kernel: numbers and titles, and no check."""
    folder.mkdir(mode=0o755)
    known: list[tuple[str, str, str]] = []
    with contextlib.suppress(WorkbenchError):  # the kernel's start says so
        known = [(one.number, one.title, one.where) for one in exercises(lab)]
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / f"lab_{lab}.py").write_text(_STUB.format(lab=lab, known=known), encoding="utf-8")
    return folder


class OutOfTime(BaseException):
    """The time for a check is over; no `except Exception` of a check holds it."""


class Away(BaseException):
    """The kernel is no more; the cause says why."""


class Told:
    """The other side of a check: a kernel, which is not believed.

    Args:
        send: Sends what is to be done with its time limit; gives the answer, None when it was
            interrupted.
        known: Facts of runs as they were when the lab's own cell had made them.
        workers: How many engines must answer; 0 where that is not known.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any], float], Wire | None],
        known: dict[str, Wire],
        limit_s: float,
        workers: int = 0,
    ) -> None:
        self._send, self._known, self._workers = send, known, workers
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the answers must have come."""
        return self._until - time.monotonic()

    def _told(self, do: str, **what: Any) -> Wire:
        left_s = self.left_s
        found = None if left_s <= 0 else self._send({"do": do, **what}, left_s)
        if found is None:
            raise OutOfTime
        if "failed" in found:
            raise ValueError(str(found["failed"])[:_MOST_CHARACTERS])
        return found

    def value(self, name: str) -> Wire:
        """See `Side`."""
        return self._told("value", name=name)

    def call(self, name: str, args: list[Any], limit_s: float) -> Wire:
        """See `Side`."""
        return self._told("call", name=name, args=args, limit_s=limit_s)

    def ask(self, source: str, limit_s: float, framework: str | None) -> Wire:
        """See `Side`."""
        found = self._told("run_on_engines", source=source, limit_s=limit_s, framework=framework)
        values = found.get("values")
        if values is not None and (not isinstance(values, list) or not values):
            raise ValueError("no engine answered")
        if values is not None and self._workers > 0 and len(values) != self._workers:
            words = f"{len(values)} of {self._workers} engines answered."
            return {"wrong": words, "hint": "the lab's engines are needed, all of them"}
        return found

    def run(self, name: str) -> Wire:
        """See `Side`."""
        return self._known[name] if name in self._known else self._told("run", name=name)

    def play(self, name: str) -> Wire:
        """See `Side`."""
        return self._told("play", name=name)


def mark(number: str, told: Told) -> tuple[dict[str, Any], bool]:
    """Return what a check says of an answer, and whether its time was over."""
    late = False
    try:
        with at_most(max(told.left_s, 0) + _OWN_S):
            report = look(number, told).to_wire()
    except (OutOfTime, Late):
        late = True
        words = "The check was stopped at the time limit: code of the answer did not end."
        finding = {"right": False, "words": words, "hint": "does every loop and every receive end?"}
        report = {"exercise": number, "passed": False, "findings": [finding]}
    report["findings"] = [_cut(one) for one in report["findings"][:_MOST_FINDINGS]]
    return report, late


def _cut(finding: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(finding[key])[:_MOST_CHARACTERS] for key in ("words", "hint")}
    return {"right": finding["right"] is True, **texts}
