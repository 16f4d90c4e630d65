"""`labs.beside`: a formula, what it predicts, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..views.table import Column, Table
from ..views.units import UNKNOWN, duration, number, size

_SHOWN: dict[str, Callable[[float], str]] = {
    "s": duration,
    "bytes": size,
    "share": lambda value: f"{value * 100:.1f} %",
    "x": lambda value: f"{value:.2f}x",
    "": number,
}


def beside(
    *rows: tuple[str, str, float, float] | tuple[str, str, float, float, str], title: str = ""
) -> Table:
    """Return a table of formulae beside the measured numbers that they predict.

    Args:
        rows: What it is; its formula; the predicted and the measured value; the unit: `s`, `bytes`,
            `share` (0..1), `x` (how many times as much), empty for a plain number, or any word.
    """
    shown = [_row(*row) for row in rows]
    columns = [
        Column("", "left"), Column("formula", "left"), Column("predicted"), Column("measured"),
        Column("measured / predicted"),
    ]  # fmt: skip
    return Table(columns, shown, title)


def _row(what: str, formula: str, predicted: float, measured: float, unit: str = "") -> list[str]:
    def in_unit(value: float) -> str:
        return f"{number(value)} {unit}"

    show = _SHOWN.get(unit, in_unit)
    ratio = measured / predicted if predicted else math.nan
    values = [show(v) if math.isfinite(v) else UNKNOWN for v in (predicted, measured)]
    return [what, formula, *values, f"{ratio:.2f}" if math.isfinite(ratio) else UNKNOWN]
