"""TensorFlow's strategies whose replicas are all in one engine, as cases to parametrise with."""

from __future__ import annotations

from typing import Any

import pytest
from tf_cells import WAYS

from workbench import catalog

ENTRIES = [
    entry
    for entry in catalog.strategies("tensorflow")
    if entry.one_engine and entry.sync and entry.data_parallel and entry.anywhere
]
CASES = [
    pytest.param(entry, count, id=f"{entry.name}-{count}")
    for entry in ENTRIES
    for count in (1, 2, 3)
    if count <= (entry.max_workers or count)
]
SEVERAL = [case for case in CASES if case.values[1] > 1]
WIDEST = [case for case in CASES if case.values[1] == 3]


def in_every_way(cases: list[Any]) -> list[Any]:
    """Return each case with each way the strategy can be used: (entry, count, way)."""
    return [
        pytest.param(*case.values, way, id=f"{case.id}-{way}")
        for case in cases
        for way in WAYS
        if way in case.values[0].ways
    ]
