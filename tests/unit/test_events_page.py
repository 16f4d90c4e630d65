"""docs/recovery.md lists what `run.events` tells: each event, and its fields."""

from __future__ import annotations

import dataclasses
import re

import pytest
from doc_pages import DOCS

from workbench.shared.events import EVENTS, Healed

KINDS = {name: kind for name, kind in EVENTS.items() if issubclass(kind, Healed)}
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (`[`\w, ]+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """Return the fields that the page lists, by event."""
    page = (DOCS / "recovery.md").read_text(encoding="utf-8")
    part = page.partition("## What the run tells")[2].partition("\n## ")[0]
    return {name: re.findall(r"\w+", fields) for name, fields in ROW.findall(part)}


def test_every_event_is_listed(rows: dict[str, list[str]]) -> None:
    assert rows.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_its_fields_are_listed(rows: dict[str, list[str]], name: str) -> None:
    assert sorted(rows[name]) == sorted(one.name for one in dataclasses.fields(KINDS[name]))
