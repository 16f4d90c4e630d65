"""The widget's kernel side, and the views around it, without a browser."""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import Any

import numpy as np
import pytest
from fake_run import fake_snapshot
from ipykernel.zmqshell import ZMQDisplayPublisher
from jupyter_client.session import Session

from workbench.errors import PlanError
from workbench.history.snapshot import Curve
from workbench.views import blocks
from workbench.views.live import frames, live
from workbench.views.live.frames import Dashboard, deliver_while_busy

WIDGET = "application/vnd.jupyter.widget-view+json"


class Wire:
    """Stands in for the channel to the browser."""

    def __init__(self, widget: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[dict[str, Any]] = []
        monkeypatch.setattr(widget, "send", lambda content, buffers: self.frames.append(content))


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

    found = Clock()
    monkeypatch.setattr(frames, "time", found)
    return found


@pytest.fixture
def commands():
    return []


@pytest.fixture
def widget(commands):
    made = Dashboard("base", lambda name, fields: commands.append((name, fields)))
    yield made
    made.close()


def test_the_first_frame_is_whole_and_the_next_builds_on_it(widget, monkeypatch, clock):
    wire = Wire(widget, monkeypatch)
    widget.update(fake_snapshot(step=50))
    widget.update(fake_snapshot(step=52))
    first, second = wire.frames
    assert first["full"]
    assert not second["full"]
    assert second["base"] == first["seq"]


def test_whole_frames_repeat_until_a_browser_has_spoken(widget, monkeypatch, clock):
    wire = Wire(widget, monkeypatch)
    for step in (50, 52, 54):
        widget.update(fake_snapshot(step=step))
        clock.now_s += 1.1
    assert [frame["full"] for frame in wire.frames] == [True, True, True]
    widget._receive(widget, {"type": "hello"}, [])
    clock.now_s += 5
    widget.update(fake_snapshot(step=56))
    assert [frame["full"] for frame in wire.frames[3:]] == [True, False]


def test_hello_brings_everything_up_to_the_latest_snapshot(widget, monkeypatch):
    wire = Wire(widget, monkeypatch)
    widget.update(fake_snapshot(step=50))
    widget.update(fake_snapshot(step=60))
    widget._receive(widget, {"type": "hello"}, [])
    answer = wire.frames[-1]
    assert answer["full"]
    assert answer["head"]["progress"] == "step 60 of 400"
    assert {t["key"]: t["rows"] for t in answer["arrays"]}["loss"] == 60


def test_hello_before_any_snapshot_sends_nothing(widget, monkeypatch):
    wire = Wire(widget, monkeypatch)
    widget._receive(widget, {"type": "hello"}, [])
    assert wire.frames == []


def test_finished_dashboards_that_a_browser_saw_still_answer_the_latest_few(monkeypatch):
    monkeypatch.setattr(frames, "_finished", type(frames._finished)())
    made = [Dashboard(str(i), lambda *_: None) for i in range(frames.KEPT + 1)]
    for widget in made:
        widget._receive(widget, {"type": "hello"}, [])
        widget.update(fake_snapshot(step=5))
        widget.finish()
    assert made[0].comm is None
    wire = Wire(made[-1], monkeypatch)
    made[-1]._receive(made[-1], {"type": "hello"}, [])
    assert wire.frames[0]["full"]


def test_a_dashboard_that_no_browser_saw_is_closed_and_leaves_no_code_behind():
    widget = Dashboard("x", lambda *_: None)
    widget.update(fake_snapshot(step=5))
    widget.finish()
    assert widget.comm is None
    assert len(widget._esm) < 50


def test_known_commands_reach_the_callback_and_nothing_else_does(widget, commands):
    for name in ("stop", "pause", "resume"):
        widget._receive(widget, {"type": "command", "name": name}, [])
    widget._receive(widget, {"type": "command", "name": "step", "fields": {"steps": 1}}, [])
    for bad in ({"type": "command", "name": "rm"}, {"type": "x"}, "stop", None, {}):
        widget._receive(widget, bad, [])
    assert commands == [("stop", {}), ("pause", {}), ("resume", {}), ("step", {"steps": 1})]


def test_curves_are_never_part_of_the_saved_state(widget):
    before = len(str(widget.get_state()))
    widget.update(fake_snapshot(step=1500))
    assert len(str(widget.get_state())) == before


def test_the_override_of_ipykernels_reply_shell_is_only_made_where_it_exists():
    class Comm:
        pass

    class Widget:
        comm = Comm()

    assert not deliver_while_busy(Widget())
    Comm._reply_subshell_for = lambda self, data, default: None
    assert deliver_while_busy(Widget())
    assert Widget.comm._reply_subshell_for({}, default="chosen") == "chosen"


NOTHING = Curve(*[np.empty(0)] * 5)


class Page:
    """Collects what a view publishes."""

    def __init__(self) -> None:
        self.shown: list[tuple[dict[str, Any], str, bool]] = []

    def __call__(self, bundle: dict[str, Any], display_id: str, update: bool) -> None:
        self.shown.append((bundle, display_id, update))


def test_the_widget_is_replaced_by_a_picture_and_text_without_it():
    page = Page()
    view = live.WidgetView("base", lambda name, fields: None, page)
    view.begin(fake_snapshot(step=1))
    view.update(fake_snapshot(step=20))
    view.end(fake_snapshot(step=30, state="finished"))
    (first, one, created), (last, other, updated) = page.shown
    assert WIDGET in first
    assert {"image/png", "text/plain"} < set(first)
    assert set(last) == {"image/png", "text/plain"}
    assert one == other
    assert (created, updated) == (False, True)
    assert "finished" in last["text/plain"]


@pytest.mark.parametrize("kind", [live.WidgetView, live.SvgView])
def test_a_run_that_failed_before_its_first_step_leaves_no_empty_axes(kind):
    page = Page()
    view = kind("base", lambda *_: None, page) if kind is live.WidgetView else kind(page)
    failed = dataclasses.replace(fake_snapshot(step=0, state="failed"), loss_curve=NOTHING)
    view.begin(failed)
    view.end(failed)
    assert page.shown[-1][0] == {"text/plain": ""}


def test_the_view_can_be_ended_from_another_thread_and_twice():
    page = Page()
    view = live.WidgetView("base", lambda name, fields: None, page)
    view.begin(fake_snapshot(step=1))
    ender = threading.Thread(target=view.end, args=(fake_snapshot(step=3, state="finished"),))
    ender.start()
    ender.join()
    view.end(fake_snapshot(step=3, state="finished"))
    view.update(fake_snapshot(step=3))
    assert len(page.shown) == 2


def test_svg_frames_share_one_display_and_end_in_the_picture():
    page = Page()
    view = live.SvgView(page)
    view.begin(fake_snapshot(step=1))
    view.update(fake_snapshot(step=2))
    view.end(fake_snapshot(step=3, state="finished"))
    assert [update for _, _, update in page.shown] == [False, True, True]
    assert len({display_id for _, display_id, _ in page.shown}) == 1
    kinds = [set(bundle) - {"text/plain"} for bundle, _, _ in page.shown]
    assert kinds == [{"image/svg+xml"}, {"image/svg+xml"}, {"image/png"}]


def test_outside_a_notebook_auto_is_text_and_a_widget_is_refused():
    assert isinstance(live.make_view("auto", lambda *_: None, "x"), live.TextView)
    assert isinstance(live.make_view("off", lambda *_: None, "x"), live.NoView)
    with pytest.raises(PlanError, match="WB-PLAN-150"):
        live.make_view("widget", lambda *_: None, "x")
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'widget'"):
        live.make_view("widgets", lambda *_: None, "x")


def test_the_text_view_writes_the_report_at_the_end():
    stream = io.StringIO()
    view = live.TextView(stream)
    view.begin(fake_snapshot(step=1))
    view.update(fake_snapshot(step=2))
    view.end(fake_snapshot(step=3, state="finished"))
    assert "median wait" in stream.getvalue()


class KernelStream(io.StringIO):
    """A kernel's stdout: what is written belongs to the cell that runs, or to the one asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.parent_header = {"msg_id": "cell 1"}
        self.written: dict[str, str] = {}

    def set_thread_parent(self, parent: dict[str, str]) -> dict[str, str]:
        before, self.parent_header = self.parent_header, parent
        return before

    def reset_thread_parent(self, token: dict[str, str]) -> None:
        self.parent_header = token

    def write(self, text: str) -> int:
        cell = self.parent_header["msg_id"]
        self.written[cell] = self.written.get(cell, "") + text
        return len(text)


def test_the_text_view_of_a_background_run_stays_below_its_own_cell(monkeypatch):
    stream = KernelStream()
    monkeypatch.setattr("sys.stdout", stream)
    view = live.TextView()
    view.begin(fake_snapshot(step=1))
    stream.parent_header = {"msg_id": "cell 2"}
    view.update(fake_snapshot(step=2))
    view.end(fake_snapshot(step=3, state="finished"))
    assert list(stream.written) == ["cell 1"]
    assert "median wait" in stream.written["cell 1"]
    assert stream.parent_header == {"msg_id": "cell 2"}


def test_output_from_a_timer_thread_belongs_to_the_cell_that_began_the_view(monkeypatch):
    sent: list[dict[str, Any]] = []

    class Silent(Session):
        def send(self, stream: Any, msg_or_type: Any, **rest: Any) -> None:
            sent.append(msg_or_type)

    publisher = ZMQDisplayPublisher(session=Silent())
    shell = type("Shell", (), {"display_pub": publisher, "kernel": object()})()
    monkeypatch.setattr(blocks, "_shell", lambda: shell)
    cell, button = ({"msg_id": name, "msg_type": "x"} for name in ("the cell", "a button"))
    publisher.set_parent(cell)
    publish = blocks.notebook_publisher()
    publisher.set_parent(button)
    timer = threading.Thread(target=publish, args=({"text/plain": "x"}, "id", True))
    timer.start()
    timer.join()
    publish({"text/plain": "x"}, "id", True)
    assert [message["parent_header"]["msg_id"] for message in sent] == ["the cell", "the cell"]
    assert publisher.parent_header == button
