"""The fault lab: each slider is one `inject`, and leaves the other faults as they are."""

from types import SimpleNamespace

import pytest

from workbench.panels.live import FaultsPart, LivePart
from workbench.panels.model import Panel
from workbench.shared.faults import parse_fault


class Going:
    """A run that goes on and remembers what was injected."""

    def __init__(self, links=True):
        self.name, self.state, self.is_over, self.error = "base", "running", False, None
        self.engines, self.faults, self.number = (0, 1, 2), (), 1
        self.plan = SimpleNamespace(strategy="mirrored", entry=SimpleNamespace(links=links))

    def inject(self, *faults):
        for text in faults:
            parse_fault(text)
        self.faults = faults


@pytest.fixture
def lab(monkeypatch):
    run = Going()
    monkeypatch.setattr(LivePart, "run", lambda self: run)
    panel = Panel(SimpleNamespace(cluster=None), (LivePart, FaultsPart))
    return SimpleNamespace(run=run, panel=panel, do=panel.do)


def test_sliders_add_up_and_each_replaces_its_own(lab):
    lab.do("faults.slow", {"rank": 1, "ms": 50})
    lab.do("faults.slow", {"rank": 2, "factor": 3})
    lab.do("faults.everyone", {"jitter_ms": 20})
    lab.do("faults.everyone", {"bytes_per_s": 1e8})
    assert lab.run.faults == ("slow=1:50ms", "slow=2:3x", "jitter=20ms", "bandwidth=100MB/s")
    lab.do("faults.slow", {"rank": 1, "ms": 5})
    lab.do("faults.slow", {"rank": 2, "factor": 1})
    lab.do("faults.everyone", {"jitter_ms": 0})
    lab.do("faults.everyone", {"clear": "bandwidth", "latency_ms": 2.5})
    assert lab.run.faults == ("slow=1:5ms", "latency=2.5ms")
    lab.do("faults.clear", {})
    assert lab.run.faults == ()
    assert not lab.panel.notices


def test_the_sliders_show_what_is_injected_whoever_did_it(lab):
    lab.run.inject("slow=2:40ms", "jitter=7ms", "latency=3ms", "bandwidth=1MB/s")
    wire = lab.panel.wire()["faults"]
    assert [(w["rank"], w["ms"], w["factor"]) for w in wire["workers"]] == [
        (0, 0.0, 1.0), (1, 0.0, 1.0), (2, 40.0, 1.0),
    ]  # fmt: skip
    assert (wire["jitter_ms"], wire["latency_ms"]) == pytest.approx((7, 3))
    assert wire["bytes_per_s"] == 1e6
    assert wire["inject"].startswith("--inject slow=2:40ms --inject jitter=7ms")


def test_kill_keeps_the_other_faults(lab):
    lab.do("faults.slow", {"rank": 1, "ms": 50})
    lab.do("faults.kill", {"rank": 2})
    assert lab.run.faults == ("slow=1:50ms", "kill=2@0")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("slow", {"rank": 1, "ms": -1}),
        ("slow", {"rank": 1, "ms": 1e9}),
        ("slow", {"rank": 1, "ms": "soon"}),
        ("slow", {"rank": 1, "factor": 0.5}),
        ("slow", {"rank": 1, "ms": float("nan")}),
        ("everyone", {"jitter_ms": 10_000}),
        ("everyone", {"bytes_per_s": 0}),
    ],
)
def test_what_no_slider_can_say_is_refused(lab, name, fields):
    lab.do(f"faults.{name}", fields)
    assert lab.run.faults == ()
    assert "of range" in lab.panel.notices[-1].text


def test_without_a_run_there_is_nothing_to_break(lab):
    lab.run.is_over = True
    assert lab.panel.wire()["faults"]["live"] is False
    lab.do("faults.kill", {"rank": 0})
    assert "active run" in lab.panel.notices[-1].text
    assert lab.run.faults == ()
