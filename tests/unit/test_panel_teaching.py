"""The Understand tab: pictures of the run on show, and calibration."""

from types import SimpleNamespace

import pytest

from workbench.errors import RunError
from workbench.panels import live
from workbench.panels.cluster import ClusterPart
from workbench.panels.live import LivePart, TeachingPart
from workbench.panels.model import Panel


class Picture:
    def __init__(self, text):
        self._text = text

    def canvas(self):
        return SimpleNamespace(svg=lambda: f"<svg>{self._text}</svg>")

    def text(self):
        return self._text

    def to_wire(self):
        return {"diagram": {"phases": []}}


class Made:
    """A run of two workers with pictures of steps 0 to 9."""

    name, number, state, is_over, engines = "base", 3, "paused", False, (0, 1)
    history = SimpleNamespace(totals=SimpleNamespace(steps=10))

    def step_picture(self, step=None):
        if step is not None and step > 9:
            raise RunError("There is no such step.", seen=step, allowed="0 to 9", code="WB-RUN-000")
        return Picture(f"step {9 if step is None else step}")

    def snapshot(self):
        return SimpleNamespace(step=10, slow_steps=4)

    def blame(self, first=None):
        return Picture(f"blame from {first}")

    def what_if(self, rank=None, first=None):
        return Picture(f"without {rank}")


@pytest.fixture
def panel(monkeypatch):
    panel = Panel(SimpleNamespace(cluster=None, lost=""), (ClusterPart, LivePart, TeachingPart))
    panel.run = Made()
    monkeypatch.setattr(LivePart, "run", lambda self: panel.run)
    return panel


def ask(panel, name, **fields):
    told = []
    panel.do(f"teaching.{name}", fields, lambda value, failed=False: told.append(value))
    assert panel.settled()
    return told[0]


def test_it_tells_which_run_it_is_about_and_how_far(panel):
    wire = panel.wire()["teaching"]
    assert (wire["run"], wire["number"], wire["workers"], wire["steps"]) == ("base", 3, 2, 10)
    panel.run = None
    assert panel.wire()["teaching"]["run"] is None


def test_pictures_are_drawn_of_the_latest_step_or_the_one_asked_for(panel):
    assert ask(panel, "step")["text"] == "step 9"
    found = ask(panel, "step", step=4)
    assert found == {"diagram": {"phases": []}, "svg": "<svg>step 4</svg>", "text": "step 4"}
    assert ask(panel, "blame")["svg"] == "<svg>blame from 6</svg>"  # as its headline
    panel.run.is_over = True
    assert ask(panel, "blame")["svg"] == "<svg>blame from None</svg>"
    assert ask(panel, "what_if", without=1)["text"] == "without 1"


def test_where_there_is_no_picture_why_stands_in_its_place(panel):
    found = ask(panel, "step", step=77)
    assert found["svg"] == ""
    assert "There is no such step." in found["text"]
    panel.run = None
    assert "no run" in ask(panel, "blame")["text"]
    assert panel.notices == []  # the browser asks by itself


def test_calibrate_starts_engines_where_there_are_none(panel, monkeypatch):
    started = []

    def start(count, **_):
        started.append(count)
        panel.session.cluster = object()

    panel.session.start, panel.session.need_cluster = start, lambda: panel.session.cluster
    found = SimpleNamespace(
        to_wire=lambda: {"error_ms": -0.2}, table=lambda: SimpleNamespace(html=lambda: "<table>")
    )
    monkeypatch.setattr(live, "calibrate", lambda cluster: found)
    assert ask(panel, "calibrate") == {"error_ms": -0.2, "html": "<table>"}
    assert started == [2]
