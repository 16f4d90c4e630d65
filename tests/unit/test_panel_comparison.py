"""Runs side by side: which are compared, made anew only when they are others, exported."""

import base64
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.errors import RunError
from workbench.panels import comparison
from workbench.panels.comparison import ComparisonPart
from workbench.panels.model import Panel


def made(name, recipe="r", state="finished", steps=5):
    return SimpleNamespace(
        name=name, number=1, state=state, is_over=state != "running",
        folder=Path(name), engines=(0,),
        history=SimpleNamespace(rests=False, totals=SimpleNamespace(steps=steps)),
        plan=SimpleNamespace(strategy="mirrored", recipe=SimpleNamespace(digest=recipe)),
    )  # fmt: skip


class Compared:
    def __init__(self, runs):
        self.comparison = [run.name for run in runs]

    def to_wire(self):
        return {"names": self.comparison}


@pytest.fixture
def panel(monkeypatch):
    panel = Panel(SimpleNamespace(cluster=None), (ComparisonPart,))
    panel.runs, panel.made = {}, []

    def compare(*runs):
        panel.made.append([run.name for run in runs])
        if len(runs) == 3:
            raise RunError("Too many.", code="WB-RUN-000")
        return Compared(runs)

    monkeypatch.setattr(comparison, "runs", panel.runs)
    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(comparison, "as_bytes", lambda what, suffix: f"{what}{suffix}".encode())
    return panel


def add(panel, *runs):
    panel.runs.update({run.name: run for run in runs})


def shown(panel):
    panel.wire()
    assert panel.settled()
    return panel.wire()["comparison"]


def test_the_latest_recipes_runs_that_trained_and_are_over_are_compared(panel):
    assert shown(panel)["compared"] is None
    add(panel, made("old", "other"), made("a"), made("none", steps=0), made("b"))
    add(panel, made("going", state="running"))
    found = shown(panel)
    assert found["compared"] == {"names": ["a", "b"]}
    assert [(r["name"], r["picked"]) for r in found["runs"]] == [
        ("old", False), ("a", True), ("none", False), ("b", True),
    ]  # fmt: skip


def test_it_is_made_once_until_other_runs_are_picked(panel):
    add(panel, made("old", "other"), made("a"), made("b"))
    for _ in range(3):
        shown(panel)
    assert panel.made == [["a", "b"]]
    panel.do("comparison.pick", {"run": "b", "on": False})
    assert shown(panel)["compared"] == {"names": ["a"]}
    panel.do("comparison.pick", {"run": "old", "on": True})
    assert shown(panel)["compared"] == {"names": ["old", "a"]}
    panel.do("comparison.latest", {})
    assert shown(panel)["compared"] == {"names": ["a", "b"]}
    panel.do("comparison.pick", {"run": "never"})
    assert "WB-PLAN-070" in panel.notices[0].text


def test_what_cannot_be_compared_says_why_in_its_place(panel):
    add(panel, made("a"), made("b"), made("c"))
    found = shown(panel)
    assert (found["compared"], found["why"]) == (None, "Too many. [WB-RUN-000]")
    assert panel.notices == []


def test_an_export_is_a_file_and_needs_something_to_export(panel):
    files = []
    panel.do("comparison.export", {"kind": "csv"})
    assert panel.settled()
    assert "Nothing" in panel.notices[0].text
    add(panel, made("a"))
    shown(panel)
    panel.do("comparison.export", {"kind": "csv"}, files.append)
    panel.do("comparison.export", {"kind": "exe"})
    assert panel.settled()
    (file,) = files
    assert (file["name"], file["type"]) == ("comparison.csv", "text/csv")
    assert base64.b64decode(file["data"]) == b"['a'].csv"
    assert "exe" in panel.notices[-1].text
