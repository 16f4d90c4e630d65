"""The panel's model without a browser: what controls do, what is shown, what a mistake costs."""

import threading
from types import SimpleNamespace

import pytest

from workbench.errors import PlanError
from workbench.panels.model import NOTICES, Panel, Part, action
from workbench.panels.show import Pump


class Counter(Part):
    """A section with a number."""

    name = "counter"

    def __init__(self, panel):
        super().__init__(panel)
        self.value, self.begun, self.go = 0, threading.Event(), threading.Event()
        self.closed = threading.Event()

    def wire(self):
        return {"value": self.value}

    @action()
    def add(self, by=1):
        self.value += int(by)
        return self.value

    @action(slow=True)
    def ponder(self):
        self.begun.set()
        assert self.go.wait(10)
        self.value = 100

    @action()
    def fail(self):
        raise PlanError("It cannot be done.", seen="3", allowed="2", code="WB-PLAN-000")

    @action()
    def crash(self):
        raise ZeroDivisionError("oh")

    def close(self):
        self.closed.set()


class Broken(Part):
    name = "broken"

    def wire(self):
        raise KeyError("gone")


@pytest.fixture
def panel():
    panel = Panel(SimpleNamespace(cluster=None), (Counter, Broken))
    yield panel
    panel.parts["counter"].go.set()


def test_a_control_calls_its_parts_method_and_answers(panel):
    told = []
    panel.do("counter.add", {"by": 2}, told.append)
    assert told == [2]
    assert panel.wire()["counter"] == {"value": 2}


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("nobody.add", {}, "WB-PLAN-073"),
        ("counter.wire", {}, "WB-PLAN-074"),
        ("counter.close", {}, "WB-PLAN-074"),
        ("counter.add", {"by": 1, "of": 2}, "WB-PLAN-075"),
    ],
)
def test_what_no_control_asks_for_is_refused_with_a_message(panel, name, fields, words):
    panel.do(name, fields)
    (notice,) = panel.wire()["panel"]["notices"]
    assert notice["level"] == "error"
    assert words in notice["text"]
    assert panel.parts["counter"].value == 0


def test_a_mistake_is_shown_and_the_panel_goes_on(panel):
    panel.do("counter.fail", {})
    panel.do("counter.crash", {})
    mine, other = panel.wire()["panel"]["notices"]
    assert "It cannot be done." in mine["text"]
    assert "allowed: 2" in mine["text"].lower()
    assert not mine["detail"]
    assert other["text"] == "ZeroDivisionError: oh"
    assert "Traceback" in other["detail"]
    panel.do("panel.dismiss", {"notice": mine["id"]})
    panel.do("counter.add", {})
    assert [one["text"] for one in panel.wire()["panel"]["notices"]] == ["ZeroDivisionError: oh"]
    assert panel.parts["counter"].value == 1


def test_the_same_message_stands_once_and_old_ones_make_room(panel):
    for _ in range(3):
        panel.say("counter", "again")
    assert len(panel.notices) == 1
    for number in range(9):
        panel.say("counter", f"number {number}")
    assert [one.text for one in panel.notices] == [f"number {n}" for n in range(9 - NOTICES, 9)]


def test_a_click_is_answered_while_something_slow_goes_on(panel):
    counter = panel.parts["counter"]
    panel.do("counter.ponder", {})
    assert counter.begun.wait(10)
    assert panel.wire()["panel"]["doing"] == ["counter.ponder"]
    told = []
    panel.do("counter.add", {}, told.append)
    assert told == [1]
    counter.go.set()
    assert panel.settled()
    assert counter.value == 100
    assert panel.wire()["panel"]["doing"] == []


def test_a_section_that_cannot_be_drawn_leaves_the_others_standing(panel):
    wire = panel.wire()
    assert wire["broken"] == {"broken": "KeyError: 'gone'"}
    assert wire["counter"] == {"value": 0}


class Widget:
    """What a widget is told."""

    def __init__(self):
        self.parts, self.told = [], threading.Event()

    def show(self, parts):
        self.parts.append(parts)
        self.told.set()


def test_all_widgets_show_the_same_and_the_last_one_ends_the_thread(panel):
    pump = Pump(panel, lambda: None)
    one, other = Widget(), Widget()
    pump.add(one)
    pump.add(other)
    panel.do("counter.add", {"by": 7})
    for widget in (one, other):
        widget.told.clear()
        panel.changed.set()
        assert widget.told.wait(10)
        while widget.parts[-1]["counter"] != {"value": 7}:
            widget.told.clear()
            assert widget.told.wait(10)
    pump.remove(one)
    assert not panel.parts["counter"].closed.is_set()
    pump.remove(other)
    assert panel.parts["counter"].closed.wait(10)


def test_a_widget_that_is_gone_does_not_keep_the_others_from_drawing(panel):
    class Gone(Widget):
        def show(self, parts):
            raise RuntimeError("comm is closed")

    other = Widget()
    Pump(panel, lambda: None).draw((Gone(), other))
    assert len(other.parts) == 1


def test_a_draw_that_fails_does_not_freeze_the_panel(panel):
    fail = [True]

    def on_show():
        if fail.pop() if fail else False:
            raise RuntimeError("its folder is gone")

    pump, widget = Pump(panel, on_show), Widget()
    pump.add(widget)
    panel.changed.set()
    assert widget.told.wait(10)  # by the tick after the one that failed
    pump.remove(widget)


def test_a_widget_that_says_hello_twice_is_drawn_once(panel):
    pump, widget = Pump(panel, lambda: None), Widget()
    pump.add(widget)
    pump.add(widget)
    assert pump.widgets == (widget,)
    pump.remove(widget)
    assert pump.widgets == ()


class Over:
    """A run that is over; counts how often it is asked how it is."""

    name, number, is_over, asked = "base", 1, True, 0

    def snapshot(self):
        self.asked += 1
        return object()


def test_a_run_that_is_over_is_read_once(panel):
    run, frames = Over(), []

    class Frames(Widget):
        def frame(self, key, snapshot):
            frames.append((key, snapshot))

    pump = Pump(panel, lambda: run)
    for _ in range(3):
        assert pump.draw((Frames(),)) is False
    assert run.asked == 1
    assert {key for key, _ in frames} == {"base#1"}
    assert len({id(snapshot) for _, snapshot in frames}) == 1
