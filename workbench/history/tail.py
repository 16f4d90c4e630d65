"""Reads a run's folder while its engines write it: every row and event once, in their order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import RECORD

ROWS_AT_ONCE = 4096


class Tail:
    """What has been added to a run's folder since the last look.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes taken so far

    def rows(self) -> Iterator[NDArray[Any]]:
        """Yield fresh RECORD rows of shape (rows,), the ranks in turns, so that steps complete."""
        sources = sorted(self._folder.glob("records-rank*.bin"))
        while sources:
            still = []
            for path in sources:
                size = RECORD.itemsize
                packed = self._fresh(path, ROWS_AT_ONCE * size)
                whole = len(packed) // size * size
                if whole:
                    self._read[path] += whole
                    yield np.frombuffer(packed[:whole], RECORD)
                    still.append(path)
            sources = still

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return fresh events of all ranks in the order of time."""
        found = []
        for path in sorted(self._folder.glob("events-rank*.jsonl")):
            packed = self._fresh(path, -1)
            whole = packed.rfind(b"\n") + 1
            self._read[path] += whole
            for line in packed[:whole].splitlines():
                # A killed engine may have been writing the line.
                with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
                    fields = json.loads(line)
                    found.append((float(fields.get("t_s", 0.0)), str(fields.pop("name")), fields))
        return [(name, fields) for _, name, fields in sorted(found, key=lambda one: one[0])]

    def _fresh(self, path: Path, limit: int) -> bytes:
        at = self._read.setdefault(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                return file.read(limit)
        except OSError:
            return b""
