"""A run that goes on from an earlier step: what came after that step is forgotten, then done again.

The rows on disk are whole and not decimated, so the history is built anew from them, and every
total stays exact: each step counts once, the way it was done last. Events of those steps
(evaluations, logged values) go with them. Where rows are out of reach (engines of another host
keep them there), the history keeps what it has, and rows of repeated steps are left out instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import scratch
from ..record import RECORD

_CHUNK_ROWS = 4096
_OF_STEPS = frozenset({"eval", "log", "epoch"})
Phase = tuple[int, tuple[int, ...]]
"""From this step on, these ranks: a run that went on with fewer workers."""


def cut(folder: Path, ranks: Iterable[int], step: int) -> bool:
    """Drop the rows and events of `step` and later from a run's folder.

    Args:
        ranks: Those whose engines wrote files.

    Returns:
        Whether the rows of every rank are here; nothing is changed where they are not.

    Raises:
        OSError: Not all files could be written anew; each is as it was or as it should be.
    """
    records = [folder / f"records-rank{rank}.bin" for rank in ranks]
    if not all(path.exists() for path in records):
        return False
    for path in records:
        packed = path.read_bytes()
        rows = np.frombuffer(packed, RECORD, count=len(packed) // RECORD.itemsize)
        scratch.replace(path, rows[rows["step"] < step].tobytes())
    for path in folder.glob("events-rank*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        scratch.replace(path, b"".join(line for line in lines if _stays(line, step)))
    return True


def _stays(line: bytes, step: int) -> bool:
    """Whether a line's event is still true of a run that goes on from `step`."""
    try:
        fields = json.loads(line)
        return stays(fields["name"], fields, step)
    except (ValueError, KeyError, TypeError):
        return False  # the line a killed engine was writing


def stays(name: str, fields: Mapping[str, Any], step: int) -> bool:
    """Whether an event is still true of a run that goes on from `step`."""
    return name != "run_finished" and (name not in _OF_STEPS or int(fields["step"]) < step)


def replay(folder: Path, ranks: Sequence[int], first: int, end: int | None) -> Iterator[Any]:
    """Yield the rows of steps from `first` to before `end`, of all ranks in turns.

    Steps so complete as they did in the run, and little waits for other ranks meanwhile.
    """
    sources = [_rows(folder / f"records-rank{rank}.bin", first, end) for rank in ranks]
    while sources:
        still = []
        for source in sources:
            rows = next(source, None)
            if rows is not None:
                yield rows
                still.append(source)
        sources = still


def _rows(path: Path, first: int, end: int | None) -> Iterator[NDArray[Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while packed := file.read(_CHUNK_ROWS * RECORD.itemsize):
            rows = np.frombuffer(packed, RECORD, count=len(packed) // RECORD.itemsize)
            wanted = rows["step"] >= first
            if end is not None:
                wanted &= rows["step"] < end
            yield rows[wanted]


def phases_before(phases: Sequence[Phase], step: int) -> list[Phase]:
    """Return the phases that are still true of a run that goes on from `step`."""
    return [phase for phase in phases if phase[0] < step]


def spans(phases: Sequence[Phase]) -> list[tuple[int, int | None, tuple[int, ...] | None]]:
    """Return (first step, step after the last, ranks) of each phase; None: all ranks, no end."""
    starts: list[tuple[int, tuple[int, ...] | None]] = [(0, None), *phases]
    ends: list[int | None] = [first for first, _ in starts[1:]]
    return [(first, end, ranks) for (first, ranks), end in zip(starts, [*ends, None], strict=True)]
