"""Fails each test after which this process has additional resources, and names the test.

For a test, the guard compares the resources with those after its wider fixtures were made. For a
file, it compares with those before its first test, so the resources of fixtures must end with them.
For all tests of the process, it compares with the beginning. `lending` says what it keeps for the
next file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import leaks
import pytest
from leaks import Held, Kept, Thing

NEXT_STEP = (
    "Close, stop or join it in the test or in the fixture that made it (a with-block, "
    "monkeypatch, stop()); what more tests share belongs to a fixture of wider scope."
)


class LeakGuard:
    """The plugin of one process of pytest."""

    def __init__(self) -> None:
        self._at_first: Held | None = None  # before all tests
        self._file: Path | None = None
        self._before_file: Held = Counter()
        self._of_session: Held = Counter()  # made by fixtures that outlive the file
        self._of_wider: Held = Counter()  # made by fixtures that outlive the test under way
        self._failed_in_file = self._failed = False
        self._test, self._before_test = "", Counter[Thing]()
        self._clusters: list[Any] = []  # that were there before the test under way
        self._told: Held = Counter()  # what tests were failed for, which no file is failed for too
        self._told_of_files: Held = Counter()

    # -- a test ------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Look before the test's own fixtures are made and after they have ended."""
        shares = request.node.get_closest_marker("leaks")
        if shares is not None and not (shares.args and str(shares.args[0]).strip()):
            pytest.fail('Say what the tests share: @pytest.mark.leaks("why").', pytrace=False)
        if self._test != request.node.nodeid:  # a test that is repeated is not forgiven
            self._test, self._before_test = request.node.nodeid, leaks.look()
            self._of_wider, self._clusters = Counter(), _running()
        yield
        if shares is None and not request.node.stash.get(_failed, False):
            self._check(self._test, self._before_test, self._of_wider, self._told)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Note the resources that fixtures with a wider scope make."""
        if fixturedef.scope == "function":
            return (yield)
        before = leaks.look()
        try:
            return (yield)
        finally:
            made = leaks.look() - before
            self._of_wider |= made
            self._clusters = _running()
            if fixturedef.scope in ("session", "package"):
                self._of_session |= made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note that a test failed: resources that it could not end are then a consequence."""
        report = yield
        if report.failed and report.when != "teardown":
            item.stash[_failed] = self._failed_in_file = self._failed = True
        return report

    # -- a file, and all ---------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Look before the first fixture of a file."""
        item.stash[_failed] = False
        if self._at_first is None:
            self._at_first = leaks.look()
        if self._file != item.path:  # a test that is repeated does not excuse its file
            self._file, self._before_file = item.path, leaks.look()
            self._failed_in_file = False

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, None, None]:
        """Look after the last fixture of a file, and of all; output is still captured then."""
        yield
        if self._failed_in_file:
            return
        if nextitem is None or nextitem.path != item.path:
            name, self._clusters = item.nodeid.partition("::")[0], []
            made = self._of_session | self._told
            who = f"{name}, all its tests together,"
            self._check(who, self._before_file, made, self._told_of_files)
        if nextitem is None and self._at_first is not None and not self._failed:
            if (lending := sys.modules.get("lending")) is not None:
                lending.end()
            told = self._told | self._told_of_files
            self._check("All tests of this process together", self._at_first, told, Counter())

    # -- what is allowed ---------------------------------------------------------------------------

    def _check(self, who: str, before: Held, made: Held, told: Held) -> None:
        clusters = self._clusters

        def allowed(thing: Thing) -> bool:
            if thing in made:
                return True
            kept = _kept([one for one in clusters if one in _running()])
            stay = {pid for kind, pid in (*before, *made) if kind == "child"}
            stay |= {pid for pid in leaks.children() if leaks.excuse(("child", pid), kept, False)}
            linked = any(map(leaks.is_talked_to, stay))
            return bool(leaks.excuse(thing, kept, linked))

        if found := leaks.left(before, allowed):
            told.update(found)
            lines = "\n".join(f"  {line}" for line in leaks.described(found, before))
            pytest.fail(f"{who} left behind:\n{lines}\n{NEXT_STEP}", pytrace=False)


_failed = pytest.StashKey[bool]()


def _running() -> list[Any]:
    """Return the clusters of this process."""
    registry = sys.modules.get("workbench.execution.registry")
    return registry.running_clusters() if registry is not None else []


def _kept(clusters: list[Any]) -> Kept:
    """Return the resources that `lending` keeps, and those of clusters of wider fixtures."""
    lending = sys.modules.get("lending")
    kept = lending.kept_resources() if lending is not None else Kept()
    for cluster in clusters:
        folder = os.path.join(tempfile.gettempdir(), f"workbench-{cluster.keeping.id}")
        kept.add(cluster.keeping.about(), folder)
    return kept
