"""A pipeline in words and numbers, the same in all views: its stages, and each worker's bubble."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..history.snapshot import Split, Worker
from .units import UNKNOWN, milliseconds, percent, size

COLUMNS = ("stage", "worker", "layers", "parameters", "per microbatch", "hands on")
NUMERIC = frozenset({"parameters", "per microbatch", "hands on"})
"""Columns of `rows` that stand right."""

MOST_ROWS = 12
TITLE = "Pipeline bubble, of a step without its wait for data"
NAMES = ("schedule's ideal", "excess", "at work")
"""What the parts of a worker's bar are called: ideal bubble, excess, the rest."""


@dataclass(frozen=True)
class Bubble:
    """One worker's bubble as shares of its pipeline's time, 0..1: its work and its bubble.

    Attributes:
        ideal: The part that the schedule has with equal stages, at most `whole`: who has more to
            do than the others has less, and they stand idle for it.
        excess: What comes on top.
    """

    whole: float
    ideal: float
    excess: float

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return math.isfinite(self.whole)

    @property
    def words(self) -> tuple[str, str]:
        """How large it is, and how much of it is beyond the schedule's share."""
        if not self.known:
            return UNKNOWN, UNKNOWN
        points = round(self.excess * 100)
        return percent(self.whole), f"{'+' if points else '±'}{points} %"


def bubble(worker: Worker, split: Split) -> Bubble:
    """Return a worker's bubble, set against its schedule."""
    ideal = min(worker.bubble, split.ideal_bubble)
    return Bubble(worker.bubble, ideal, max(worker.bubble - split.ideal_bubble, 0.0))


def caption(split: Split) -> str:
    """Return the split in one line."""
    count = len(split.stages)
    parts = [f"{count} stage{'s' if count != 1 else ''}"]
    if split.pipelines > 1:
        parts.append(f"{split.pipelines} pipelines")
    batches = f"{split.microbatches} microbatches" if split.microbatches != 1 else "1 microbatch"
    if split.microbatch_samples:
        batches += f" of {split.microbatch_samples} samples"
    parts += [split.schedule, batches, ideal(split)]
    return " · ".join(parts)


def ideal(split: Split) -> str:
    """Return what the schedule itself leaves idle."""
    return f"ideal bubble {percent(split.ideal_bubble)}"


def rows(split: Split) -> list[tuple[str, ...]]:
    """Return one row of `COLUMNS` per stage; of many stages the first ones."""
    found: list[tuple[str, ...]] = [
        (
            str(stage.number),
            ", ".join(map(str, stage.ranks)),
            stage.layers,
            f"{stage.parameters:,}",
            milliseconds(stage.microbatch_s * 1e3),
            size(stage.handed_bytes) if stage.handed_bytes else "",
        )
        for stage in split.stages[:MOST_ROWS]
    ]
    more = len(split.stages) - len(found)
    return [*found, ("…", "", f"{more} more", "", "", "")] if more else found


def lines(split: Split) -> list[str]:
    """Return the stages as lines of aligned text."""
    table = [COLUMNS, *rows(split)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if name in NUMERIC else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def sentences(split: Split) -> list[str]:
    """Return the stages as sentences, for notes below a table."""
    found = []
    for stage in split.stages[:MOST_ROWS]:
        who = "worker" if len(stage.ranks) == 1 else "workers"
        text = (
            f"Stage {stage.number} on {who} {', '.join(map(str, stage.ranks))}: "
            f"{_layers(stage.layers)}, {stage.parameters:,} parameters"
        )
        if math.isfinite(stage.microbatch_s):
            text += f", {milliseconds(stage.microbatch_s * 1e3)} a microbatch"
        found.append(
            text + (f", hands on {size(stage.handed_bytes)}." if stage.handed_bytes else ".")
        )
    more = len(split.stages) - len(found)
    return [*found, f"And {more} more stages."] if more else found


def _layers(named: str) -> str:
    """Return what a stage holds, in words: `layers 0 to 1`, `layer 2`, but `dense` by its name."""
    if not named[:1].isdigit():
        return named
    several = " to " in named or "," in named
    return f"layer{'s' if several else ''} {named}"
