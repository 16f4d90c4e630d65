"""A history's columns: which there are, and how each is made of the stored rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import record
from ..metrics import PARTS
from .reducer import Reducer

_FIRST = ("rank", "step", "start_s", "step_s", *PARTS, "samples", "loss", "local_loss")
COLUMNS = (
    *_FIRST, *(name for name in record.COLUMNS if name not in _FIRST), "blamed_rank", "engine",
)  # fmt: skip
"""Columns of every history; `wb.log` adds more. Rare ones are there where they were measured."""

_WHOLE = ("rank", "step", "samples", "blamed_rank", "engine")


def column(name: str, of: Reducer, engines: Sequence[int]) -> NDArray[Any]:
    """Return a column as a fresh array of shape (rows,), in the order of the stored rows.

    Args:
        engines: Engine ids by rank.
    """
    table = of.table
    if name in of.logged:
        step, rank = table.column("step"), table.column("rank")
        return of.logged[name].column(step.astype(np.int64), rank.astype(np.int64))
    if name == "engine":
        return np.take(np.asarray(engines, np.int64), table.column("rank"))
    if name == "other_s":
        named = sum(np.nan_to_num(column(part, of, engines)) for part in PARTS[:-1])
        return np.asarray(column("step_s", of, engines) - named)
    values = table.column(name)
    if name == "start_s":
        return np.asarray(values - of.origin_s()[table.column("rank")])
    return np.asarray(values.astype(np.int64 if name in _WHOLE else np.float64))


def empty(names: Iterable[str], of: Reducer, engines: Sequence[int]) -> list[str]:
    """Return those of the columns that hold no value in any row."""
    return [
        name
        for name in names
        if name not in _WHOLE and not np.isfinite(column(name, of, engines)).any()
    ]
