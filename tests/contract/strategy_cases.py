"""PyTorch's strategies of the catalog, as the cases that tests are parametrised with."""

from __future__ import annotations

from typing import Any

import pytest
from worker_reports import Report
from workers import Workers

from workbench import catalog


def exact_options(entry: catalog.Strategy) -> dict[str, Any] | None:
    """Return the options under which several workers equal one device; None: under none."""
    if entry.exact_with is None:
        return None
    return {**dict(entry.exact_with), **({entry.sync_option: True} if entry.sync_option else {})}


ENTRIES = list(catalog.strategies("torch"))
CASES = [
    pytest.param(entry, count, id=f"{entry.name}-{count}")
    for entry in ENTRIES
    for count in (1, 2, 3)
    if entry.is_sync(exact_options(entry) or {}) and count <= (entry.max_workers or count)
]
EXACT = [case for case in CASES if case.values[1] == 1 or exact_options(case.values[0]) is not None]
PREPARE = [case for case in CASES if "prepare" in case.values[0].ways]
SEVERAL = [case for case in CASES if case.values[1] > 1]
SERVED = [entry for entry in ENTRIES if entry.servers or entry.servers_option]
FREE = [entry for entry in SERVED if not entry.sync]  # each worker at its own pace
NAME = {"ids": lambda value: getattr(value, "name", None)}
"""For `parametrize` over entries: an id is the entry's name."""
BOTH_WAYS = {"fit": False, "prepare": True}


def in_every_way(cases: list[Any]) -> list[Any]:
    """Return each case with each way the strategy can be used: (entry, count, own_loop)."""
    return [
        pytest.param(*case.values, own_loop, id=f"{case.id}-{way}")
        for case in cases
        for way, own_loop in BOTH_WAYS.items()
        if way in case.values[0].ways
    ]


def run(pool: Workers, entry: catalog.Strategy, cell: Any, *args: Any, **how: Any) -> list[Report]:
    """Run a cell under the options with which the strategy is exact, if there are any."""
    return pool.run(entry.name, cell, *args, options=exact_options(entry) or {}, **how)


def together(entry: catalog.Strategy) -> dict[str, Any]:
    """Return the options under which the workers take each step together."""
    return {entry.sync_option: True} if entry.sync_option else {}
