"""What a calibration read, as a table: each quantity, what was measured, what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .table import Column, Table


@dataclass(frozen=True)
class Reading:
    """One line of a calibration.

    Attributes:
        passed: Whether it is as it should be; None where nothing is asked of it, or unknown.
    """

    quantity: str
    measured: str
    allowed: str
    passed: bool | None


def calibration_table(verdict: str, readings: Sequence[Reading], did: Sequence[str]) -> Table:
    """Return the readings as a table, under the verdict; what was done stands below."""
    marks = {True: "yes", False: "NO", None: ""}
    rows = [[r.quantity, r.measured, r.allowed, marks[r.passed]] for r in readings]
    columns = [
        Column("", "left", 44), Column("measured", "left"), Column("allowed", "left"),
        Column("as it should be", "left"),
    ]  # fmt: skip
    strong = frozenset(i for i, reading in enumerate(readings) if reading.passed is False)
    return Table(columns, rows, verdict, did, strong)
