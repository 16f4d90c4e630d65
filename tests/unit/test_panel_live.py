"""The run on show: what goes on comes first, else the one picked; its buttons."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import RunError
from workbench.execution.registry import Runs
from workbench.execution.run import Run
from workbench.panels import live
from workbench.panels.live import MOST_CHARACTERS, LivePart
from workbench.panels.model import Panel
from workbench.shared.plan import make_plan


class Made(Run):
    """A run of which only the outside is used."""

    is_over = property(lambda self: self.state in ("finished", "stopped", "failed"))
    state = error = task = color = None

    def __init__(self, name, state="finished"):
        self.name, self.state, self.folder = name, state, Path("/nowhere") / name
        self.plan = make_plan(Recipe("wb.fit()"), "mirrored", workers=2)
        self.done = []

    def stop(self):
        self.done.append("stop")

    def pause(self):
        self.done.append("pause")

    def resume(self):
        self.done.append("resume")

    def step(self, steps=1):
        self.done.append(f"step {steps}")


@pytest.fixture
def panel(monkeypatch):
    runs = Runs()
    monkeypatch.setattr(live, "runs", runs)
    panel = Panel(SimpleNamespace(cluster=SimpleNamespace(busy=None)), (LivePart,))
    panel.runs = runs
    return panel


def shown(panel):
    return panel.wire()["live"]["run"]


def test_the_latest_is_shown_or_the_picked_one_and_one_that_goes_on_before_both(panel):
    assert panel.wire()["live"] == {
        "run": None, "state": None, "error": None, "printed": "", "runs": [],
    }  # fmt: skip
    panel.runs.add(Made("one"))
    panel.runs.add(Made("two"))
    assert shown(panel) == "two"
    panel.do("live.pick", {"run": "one"})
    assert shown(panel) == "one"
    going = Made("three", "running")
    panel.session.cluster.busy = going
    panel.runs.add(going)
    assert shown(panel) == "three"
    going.state = "finished"
    assert shown(panel) == "one"
    panel.do("live.pick", {"run": "never"})
    assert shown(panel) == "three"


def test_the_buttons_reach_the_run_that_goes_on_and_no_other(panel):
    run = Made("base", "running")
    panel.session.cluster.busy = run
    for name, fields in (("pause", {}), ("step", {"steps": 2}), ("resume", {}), ("stop", {})):
        panel.do(f"live.{name}", fields)
    assert run.done == ["pause", "step 2", "resume", "stop"]
    run.state = "stopped"
    panel.do("live.stop", {})
    assert len(run.done) == 4
    assert "No run" in panel.notices[0].text


def test_a_failed_run_shows_what_its_ranks_printed_read_once(panel):
    read = []

    def text():
        read.append(1)
        return "x" * MOST_CHARACTERS + "the end"

    run = Made("base", "failed")
    run.error, run.task = (
        RunError("Rank 1 failed.", code="WB-RUN-000"),
        SimpleNamespace(board=SimpleNamespace(text=text)),
    )
    panel.runs.add(run)
    for _ in range(3):
        wire = panel.wire()["live"]
    assert wire["error"] == "Rank 1 failed. [WB-RUN-000]"
    assert wire["printed"].endswith("the end")
    assert len(wire["printed"]) == MOST_CHARACTERS
    assert len(read) == 1
