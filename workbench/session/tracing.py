"""Writes a run's trace to a file, event by event: a long run's never stands in memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import RunError
from ..history import trace

if TYPE_CHECKING:
    from ..history.run_data import RunData

_TOGETHER = 512


def write(run: RunData, path: str | Path | None = None) -> Path:
    """Write a run's Chrome trace; return where it is.

    Args:
        path: By default `NAME-trace.json` in the present folder. One that ends in `.gz` is
            compressed. A file that is there is replaced when the new one is whole.

    Raises:
        RunError: The run has no step yet, or the file cannot be written.
    """
    if not len(run.history):
        raise RunError(
            f"Run {run.name} has no step to draw.",
            seen=run.state,
            allowed="a run with a complete step",
            code="WB-RUN-089",
        )
    goal = Path(path if path is not None else _name(run.name)).expanduser().absolute()
    fresh = goal.with_name(f".{goal.name}.{os.getpid()}")
    try:
        with _opened(fresh, compressed=goal.suffix == ".gz") as file:
            _write(file, run)
        fresh.replace(goal)
    except OSError as error:
        raise RunError(
            f"The trace cannot be written: {error.strerror}.",
            seen=str(goal),
            allowed="a file in a folder that is there",
            code="WB-RUN-090",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return goal


def _write(file: TextIO, run: RunData) -> None:
    plan = run.plan
    about = trace.About(
        run.name,
        plan.strategy,
        plan.framework,
        run.state,
        run.devices,
        [fault.text for fault in plan.faults],
    )
    head = json.dumps(trace.header(run.history, about), allow_nan=False)
    file.write(f'{head[:-1]}, "traceEvents": [\n')
    lines: list[str] = []
    separator = ""
    for event in trace.events(run.history, about):
        lines.append(json.dumps(event, allow_nan=False))
        if len(lines) >= _TOGETHER:
            file.write(separator + ",\n".join(lines))
            lines, separator = [], ",\n"
    if lines:
        file.write(separator + ",\n".join(lines))
    file.write("\n]}\n")


@contextlib.contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[TextIO]:
    opened: Any = gzip.open if compressed else open
    with opened(path, "wt", encoding="utf-8") as file:
        yield file


def _name(name: str) -> str:
    safe = re.sub(r"[^\w.@+-]+", "-", name).strip(".") or "run"
    return f"{safe}-trace.json"
