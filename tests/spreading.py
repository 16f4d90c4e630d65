"""Which tests one process of `pytest -n N --dist loadgroup --no-loadscope-reorder` runs, and when.

A file's tests share a cluster, so they stay together. If each test starts its own kernel, they are
spread, because a file that takes minutes would be the last to end. The longest tests begin first
for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

APART = (
    "labs/test_checks.py",
    "notebooks/test_quickstart.py",
    "cluster/test_leftovers.py",
    "benchmarks/test_short.py",
)
"""Files whose tests share nothing."""
LONGEST = (
    "binder/test_image.py",
    "labs/test_grading.py",
    "labs/test_checks.py",
    "cluster/test_leftovers.py",
    "notebooks/test_quickstart.py",
    "docs/test_code_blocks.py",
    "benchmarks/test_short.py",
    "browser/",
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


class Together(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
    """Sends the tests of a file to one process, except tests that are independent.

    Marks of `xdist_group` would say the same, but pytest-xdist 3.8 writes them into ids that
    pytest 9 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file.endswith(APART) else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Give a crashed process's tests to the others, but not the test that ended it.

        pytest-xdist 3.8 would run this test again with the others of its file, until it has ended
        every process; then it waits for ever.
        """
        work = self.assigned_work.pop(node)
        waiting = [name for unit in work.values() for name, done in unit.items() if not done]
        if not waiting:
            return None
        work[self._split_scope(waiting[0])][waiting[0]] = True
        self._give_out({scope: unit for scope, unit in work.items() if not all(unit.values())})
        return waiting[0]

    def mark_test_pending(self, item: str) -> None:
        """Let a test that ended its process run again (pytest-rerunfailures asks for this)."""
        self._give_out({self._split_scope(item): {item: False}})

    def _give_out(self, units: dict[str, dict[str, bool]]) -> None:
        for scope, unit in units.items():
            self.workqueue.setdefault(scope, {}).update(unit)
        for node in self.nodes:
            self._reschedule(node)

    def _reschedule(self, node: WorkerController) -> None:
        if node in self.registered_collections:  # else it is new, and asks when it has collected
            super()._reschedule(node)


def spread(items: list[pytest.Item]) -> None:
    """Sort tests by their files: what takes longest first."""
    items.sort(key=lambda item: _place(item.nodeid.partition("::")[0], LONGEST))


def _place(file: str, longest: Sequence[str]) -> int:
    """Return how early a file comes."""
    inside = file.removeprefix("tests/")
    return next((i for i, start in enumerate(longest) if inside.startswith(start)), len(longest))
