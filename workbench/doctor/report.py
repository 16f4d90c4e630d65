"""Results of checks: ok, warnings, failures, or not checkable here.

The JSON form is for programs and for issues: `schema` changes when a field changes its meaning.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from ..views.table import Table

Status = Literal["ok", "warn", "fail", "unknown"]
STATUSES: tuple[Status, ...] = get_args(Status)
SCHEMA = 1
MARKS: Mapping[Status, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL", "unknown": "not known"}


@dataclass(frozen=True)
class Line:
    """The result of one check.

    Attributes:
        id: Stable name for programs: `gpu.matmul`.
        status: `unknown`: the check is not possible here, and `found` says why.
        what: The checked property, in a few words.
        found: The observation, with its values.
        next_step: What the user can do now; empty if there is nothing to do.
        seconds: Duration of the check.
        figures: Measured values, by name with the unit: `{"bandwidth_gb_s": 12.5}`.
        stacks: Where the threads of a check that hangs were.
    """

    id: str
    status: Status
    what: str
    found: str
    next_step: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    stacks: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Line:
        """Read a line that another process wrote.

        Raises:
            ValueError: The text is not a line of a report.
        """
        known = {name: said[name] for name in cls.__dataclass_fields__ if name in said}
        if known.get("status") not in STATUSES or not {"id", "what", "found"} <= set(known):
            raise ValueError(f"not a line of a report: {str(said)[:200]}")
        return cls(**known)


@dataclass
class Report:
    """All lines of a doctor or of a GPU test.

    Attributes:
        kind: `doctor` or `gpu-test`.
        about: Data about the machine: system, Python, time.
        seconds: Total duration.
        files: Names of the files next to the report.
    """

    kind: str
    lines: list[Line] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=lambda: about_here())
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)

    def add(self, lines: Iterable[Line]) -> None:
        """Add results of checks."""
        self.lines += lines

    def counts(self) -> dict[str, int]:
        """Return the number of lines of each status."""
        return {s: sum(line.status == s for line in self.lines) for s in STATUSES}

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(line.status == "fail" for line in self.lines)

    @property
    def exit_status(self) -> int:
        """Exit status for a shell: 0 all ok or warnings, 1 something failed."""
        return int(self.failed)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "about": self.about,
            "seconds": round(self.seconds, 2),
            "counts": self.counts(),
            "failed": self.failed,
            "lines": [line.to_dict() for line in self.lines],
            "files": self.files,
        }

    def json(self) -> str:
        """Return it as one JSON document."""
        return json.dumps(self.to_dict(), indent=1, default=str)

    def verdict(self) -> str:
        """Return one sentence about all lines."""
        words = {
            "ok": "ok",
            "warn": "with a warning",
            "fail": "failed",
            "unknown": "cannot be checked here",
        }
        counts = self.counts()
        said = ", ".join(f"{counts[s]} {words[s]}" for s in STATUSES if counts[s])
        many = f"{len(self.lines)} check{'' if len(self.lines) == 1 else 's'}"
        return f"{many} in {self.seconds:.0f} s: {said or 'none'}"

    def text(self) -> str:
        """Return it for a terminal, a line for each check and one for each next step."""
        out, group = [], ""
        for line in together(self.lines):
            first = line.id.partition(".")[0]
            if first != group and group:
                out.append("")
            group = first
            out.append(line_text(line))
        where = ", ".join(f"{key} {value}" for key, value in self.about.items() if key != "when")
        return "\n".join([*out, "", self.verdict(), f"({where})"])

    def table(self) -> Table:
        """Return it as a table for a notebook."""
        from ..views.table import Column, Table

        columns = [Column("", "left"), Column("checked", "left", 28), Column("found", "left", 60)]
        lines = together(self.lines)
        rows = [[MARKS[one.status], one.what, one.found] for one in lines]
        if any(one.next_step for one in lines):
            columns.append(Column("next step", "left", 40))
            rows = [[*row, one.next_step] for row, one in zip(rows, lines, strict=True)]
        strong = frozenset(i for i, one in enumerate(lines) if one.status == "fail")
        return Table(columns, rows, f"Doctor: {self.verdict()}", (), strong)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.table().html(), "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()

    def write(self, folder: Path) -> None:
        """Write `report.json` and `report.txt` there."""
        (folder / "report.json").write_text(self.json() + "\n", "utf-8")
        (folder / "report.txt").write_text(self.text() + "\n", "utf-8")


def together(lines: Sequence[Line]) -> list[Line]:
    """Return the lines for a reader; impossible checks with the same reason share a line."""
    same: dict[str, list[Line]] = {}
    for line in lines:
        if line.status == "unknown":
            same.setdefault(line.found, []).append(line)
    shown = []
    for line in lines:
        alike = same.get(line.found, []) if line.status == "unknown" else []
        if len(alike) < 2:
            shown.append(line)
        elif line is alike[0]:
            what = ", ".join(one.what for one in alike)
            found = f"{line.found}. So these checks were not made: {what}"
            shown.append(Line(line.id, "unknown", f"{len(alike)} checks", found, line.next_step))
    return shown


def line_text(line: Line) -> str:
    """Return a line for a terminal."""
    text = f"{MARKS[line.status]:<9} {line.what}: {line.found}"
    return text + (f"\n{'':<9}   next: {line.next_step}" if line.next_step else "")


def about_here() -> dict[str, Any]:
    """Return a report's data about the machine, without its name or its user's name."""
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "workbench": getattr(package, "__version__", ""),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "when": time.strftime("%Y-%m-%d %H:%M"),
    }


@dataclass(frozen=True)
class Check:
    """A check that runs in this process and takes very little time.

    Attributes:
        look: Returns status, result, and optionally the next step and figures.
    """

    id: str
    what: str
    look: Callable[[], tuple[Any, ...]]

    def run(self) -> Line:
        """Return its result; if the check raises an error, its status is unknown."""
        began = time.perf_counter()
        try:
            status, found, *rest = self.look()
        except Exception as error:
            status, found, rest = (
                "unknown",
                f"the check could not run: {type(error).__name__}: {error}",
                [],
            )
        step = rest[0] if rest else ""
        figures = rest[1] if len(rest) > 1 else {}
        seconds = round(time.perf_counter() - began, 3)
        return Line(self.id, status, self.what, found, step, seconds, figures)
