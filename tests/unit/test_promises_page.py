"""docs/recovery.md says what docs/promises.py promises, and a test is there for each promise."""

from __future__ import annotations

import subprocess
import sys

import pytest
from doc_pages import REPOSITORY, generator

from workbench import catalog

maker = generator("make_promises")
PROMISES, WAYS = maker.PROMISES, maker.WAYS


def test_the_page_is_up_to_date() -> None:
    written = maker.PAGE.read_text(encoding="utf-8")
    assert written == maker.written(), "run python docs/make_promises.py"


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="no place"):
        maker.filled("# When an engine dies\n")


def missing(proofs: set[str]) -> set[str]:
    """Return those that pytest does not collect."""
    files = sorted({proof.partition("::")[0] for proof in proofs})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *files]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return proofs - set(found.stdout.splitlines())


def test_every_promise_has_a_test_that_is_collected() -> None:
    gone = "tests/cluster/recovery/test_healing.py::test_that_is_not_there"
    assert missing({one.proof for one in PROMISES} | {gone}) == {gone}


def test_every_way_to_go_on_is_one_there_is() -> None:
    assert {way for one in PROMISES for way in one.on_failure} <= set(WAYS)
    keys = [
        (one.framework, one.strategy, one.case, one.dies, way)
        for one in PROMISES
        for way in one.on_failure
    ]
    assert len(set(keys)) == len(keys), "two lines promise the same"


def test_what_heals_promises_so_and_nothing_else_does() -> None:
    said = {(o.framework, o.strategy) for o in PROMISES if o.ways == "heal" and o.dies == "worker"}
    assert said == {(entry.framework, entry.name) for entry in catalog.CATALOG if entry.heals}


def test_who_holds_everything_loses_nothing_when_fewer_go_on() -> None:
    for one in PROMISES:
        if one.dies == "worker" and "continue" in one.on_failure and one.framework == "torch":
            entry = catalog.lookup(one.strategy)
            assert (one.at_most(entry) == "nothing") == entry.replicated, one
