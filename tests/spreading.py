"""Which tests one process of `pytest -n N --dist loadgroup --no-loadscope-reorder` runs, and when.

A file's tests share a cluster, so they stay together. Where each test starts a kernel of its own
they need not, and a file that takes minutes would be the last to end. What takes longest begins
first, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

APART = ("labs/test_checks.py", "notebooks/test_quickstart.py", "cluster/test_leftovers.py")
"""Files whose tests share nothing."""
LONGEST = (
    "labs/test_grading.py",
    "labs/test_checks.py",
    "notebooks/test_quickstart.py",
    "docs/test_code_blocks.py",
    "cluster/test_tensorflow_",
    "cluster/recovery/",
    "cluster/test_mistakes.py",
    "cluster/test_recipes.py",
    "cluster/test_magics.py",
    "cluster/test_deaths.py",
    "cluster/test_keep",
    "cluster/test_listening",
)
"""Beginnings of paths, the longest first; what is not named comes after these."""


def spread(items: list[pytest.Item]) -> None:
    """Group tests by their files, but for those that stand alone, and sort the groups."""
    for item in items:
        file = _file(item)
        if not file.endswith(APART):
            item.add_marker(pytest.mark.xdist_group(file))
    items.sort(key=lambda item: _place(_file(item), LONGEST))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _place(file: str, longest: Sequence[str]) -> int:
    """Return how early a file comes."""
    inside = file.removeprefix("tests/")
    return next((i for i, start in enumerate(longest) if inside.startswith(start)), len(longest))
