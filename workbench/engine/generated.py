"""Code that a framework generated from the user's: which line of theirs a line of it is.

TensorFlow's AutoGraph writes each function that it traces into a file, and keeps a map of its
lines. `tensorflow_temp` hands the maps in as they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

MARK = "__autograph_generated_file"


class Line(NamedTuple):
    """A line that the user wrote."""

    filename: str
    number: int
    function: str
    source: str


_lines: dict[str, dict[int, Line]] = {}


def is_generated(filename: str) -> bool:
    """Whether a framework wrote the file."""
    return MARK in filename


def note(filename: str, origins: Mapping[Any, Any]) -> None:
    """Take in AutoGraph's map of a file: `LineLocation` to `OriginInfo`."""
    found = _lines.setdefault(filename, {})
    for place, origin in origins.items():
        found[place.lineno] = Line(
            origin.loc.filename,
            origin.loc.lineno,
            origin.function_name or "",
            (origin.source_code_line or "").strip(),
        )


def written(frame: FrameType, line: int) -> Line | None:
    """Return the user's line that a generated one is; None where it is none of theirs."""
    return _lines.get(frame.f_code.co_filename, {}).get(line)
