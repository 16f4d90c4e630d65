"""Published scaling curves with their sources, to compare with the user's curves.

The curves are in `published.json`. Each curve has the published numbers (`from`), the efficiencies
computed from them, the hardware and the source. They describe other machines and other models: they
show what is usual, not what is right for this run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PlanError, unknown
from ..table import Column, Table

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """A published curve.

    Attributes:
        points: Numbers of workers (GPUs) with their efficiency, 0..1.
        made_from: The numbers as they were published.
        relative_to: The number of workers whose efficiency is 1 by definition.
    """

    key: str
    name: str
    year: int
    what: str
    hardware: str
    kind: str
    points: tuple[tuple[int, float], ...]
    made_from: str
    relative_to: int
    source: str
    url: str


@functools.cache
def curves() -> tuple[Published, ...]:
    """Return all published curves."""
    return tuple(_read(one) for one in json.loads(_FILE.read_text(encoding="utf-8")))


def _read(data: dict[str, Any]) -> Published:
    points = tuple((int(workers), float(value)) for workers, value in data["points"])
    rest = {key: value for key, value in data.items() if key not in ("points", "from")}
    return Published(points=points, made_from=data["from"], **rest)


def chosen(asked: bool | str | Sequence[str]) -> tuple[Published, ...]:
    """Return the requested curves: all (True), none (False), or by their keys.

    Raises:
        PlanError: No curve has this key.
    """
    if isinstance(asked, bool):
        return curves() if asked else ()
    known = {one.key: one for one in curves()}
    wanted = [asked] if isinstance(asked, str) else list(asked)
    for key in wanted:
        if not isinstance(key, str):
            raise PlanError(
                "This is not the key of a published curve.",
                seen=key,
                allowed=", ".join(known),
                code="WB-PLAN-280",
            )
        if key not in known:
            raise unknown("published curve", key, list(known))
    return tuple(known[key] for key in wanted)


def published_table(shown: Sequence[Published]) -> Table:
    """Return the curves with their numbers as published, hardware and source."""
    columns = [
        Column("key", "left"), Column("curve", "left", 28), Column("published", "left", 48),
        Column("source", "left", 44),
    ]  # fmt: skip
    rows = [
        [
            one.key,
            f"{one.name} ({one.year})",
            f"{one.made_from}; {one.hardware}",
            f"{one.source}: {one.url}",
        ]
        for one in shown
    ]
    return Table(columns, rows, "Published scaling", [
        "These curves are not from your runs, but from other models on other machines. "
        "They show typical values."
    ])  # fmt: skip
