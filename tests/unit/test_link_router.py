"""The two ends of the control path, in one process."""

import queue
import threading
import time

import numpy as np
import pytest

from workbench.cluster.router import ControlRouter
from workbench.engine.context import RunContext
from workbench.engine.telemetry.control_link import ControlLink
from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.engine.telemetry.step_gate import FaultInjector, Gate
from workbench.shared.events import Evaluated, Noted, Warned
from workbench.shared.messages import (
    AskWhere,
    Halt,
    HaltAt,
    Happened,
    Hello,
    Inject,
    Position,
    Records,
)
from workbench.shared.protocol import RunSpec, records_from
from workbench.shared.record import FLAG_UNMEASURED

WAIT_S = 20


@pytest.fixture
def router():
    heard = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put((engine, message)))
    router.heard = heard
    yield router
    router.close()


@pytest.fixture
def link(router):
    link = ControlLink(3, router.url, router.key, {"pid": 1})
    assert next_of(router, Hello).engine == 3
    yield link
    link.close()


def next_of(router, wanted):
    """The next message of a class."""
    while True:
        _, message = router.heard.get(timeout=WAIT_S)
        if isinstance(message, wanted):
            return message


def event(router, wanted):
    while True:
        message = next_of(router, Happened)
        if isinstance(message.event, wanted):
            return message


def context(link, run=1, rank=0):
    spec = RunSpec(mode="run", rank=rank, world_size=2, ranks=(3, 4), run=run)
    return RunContext(spec, Recorder(run, rank), Gate(), FaultInjector(rank), link.emit)


def row(run, step, loss=1.0):
    run.recorder.add_step(step, StepResult(8, loss, 0.2), step, step + 0.5, data_wait_s=0.1)


def test_rows_and_events_of_a_run_arrive_whole_and_in_order(router, link):
    run = context(link)
    link.attach(run, None)
    for step in range(5000):
        row(run, step)
    link.emit(Noted(rank=0, text="seen"))
    assert link.detach(WAIT_S)
    steps = []
    while len(steps) < 5000:
        message = next_of(router, Records)
        assert message.dropped == 0
        steps += records_from(message.rows)["step"].tolist()
    assert steps == list(range(5000))


def test_events_carry_the_run_and_their_fields(router, link):
    link.attach(context(link, run=9), None)
    link.emit(Evaluated(step=3, values={"loss": 0.5}))
    found = event(router, Evaluated)
    assert found == Happened(run=9, event=Evaluated(step=3, values={"loss": 0.5}))


def test_dropped_rows_are_counted(router, link):
    run = context(link)
    run.recorder.dropped = 7
    row(run, 0)
    link.attach(run, None)
    assert next_of(router, Records).dropped == 7


class Device:
    """What a step's events say on a device that fails, or never comes to an end."""

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble

    def ready(self):
        if self.trouble == "fails":
            raise RuntimeError("CUDA error: device-side assert triggered")
        return False

    def values(self):
        raise AssertionError("it is not ready")


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_a_device_that_fails_or_hangs_costs_neither_rows_nor_the_link(router, link, trouble):
    run = context(link)
    link.attach(run, None)
    for step in range(3):
        result = StepResult(8, 1.0, float("nan"), deferred=Device(trouble))
        run.recorder.add_step(step, result, step, step + 0.5, data_wait_s=0.1)
    assert router.questions.ask(AskWhere, [3], WAIT_S)
    came_s = time.monotonic()
    ended = threading.Thread(target=lambda: flushed.append(link.flush(2.0)))
    flushed = []
    ended.start()
    assert router.questions.ask(AskWhere, [3], 0.5)  # also while the run's end waits for it
    ended.join()
    assert flushed == [True]
    assert time.monotonic() - came_s < 1.8
    rows = []
    while len(rows) < 3:
        rows += list(records_from(next_of(router, Records).rows))
    assert all(row["flags"] & FLAG_UNMEASURED for row in rows)
    said = event(router, Warned).event.text
    assert "3 steps were not measured: the device " in said
    assert link.faults == 0
    assert link._thread.is_alive()


def test_a_halt_is_answered_with_the_step_and_a_named_step_ends_the_run(router, link):
    run = context(link)
    link.attach(run, None)
    run.gate.enter(4)
    router.send(3, Halt(run=1, purpose="stop"))
    assert next_of(router, Position).step == 4
    router.send(3, HaltAt(run=1, purpose="stop", step=5))
    assert run.gate.enter(5)
    assert not run.gate.enter(6)


def test_what_comes_before_the_run_has_begun_here_is_not_lost(router, link):
    router.send(3, Halt(run=2, purpose="stop"))
    assert router.questions.ask(AskWhere, [3], WAIT_S)  # so the halt was handled before any run
    link.attach(context(link, run=2), None)
    assert next_of(router, Position).step == -1


def test_messages_for_another_run_are_not_obeyed(router, link):
    run = context(link, run=5)
    link.attach(run, None)
    router.send(3, HaltAt(run=4, purpose="stop", step=0))
    router.send(3, Inject(run=5, faults=("slow=0:1ms",)))
    assert router.questions.ask(AskWhere, [3], WAIT_S)
    assert not run.gate.stopping
    assert run.faults.active


def test_a_message_for_an_engine_that_is_yet_to_come_waits_for_it(router):
    router.send(8, Halt(run=1, purpose="stop"))
    link = ControlLink(8, router.url, router.key, {})
    link.attach(context(link), None)
    assert next_of(router, Position).step == -1
    assert router.connected == {8}
    router.forget(8)
    assert router.connected == frozenset()
    link.close()


def test_a_link_with_a_wrong_key_is_not_heard_and_hears_nothing(router):
    stranger = ControlLink(1, router.url, b"x" * 32, {})
    friend = ControlLink(2, router.url, router.key, {})
    assert next_of(router, Hello).engine == 2
    stranger.close()
    friend.close()
    assert router.rejected >= 1
    assert 1 not in router.connected


def test_where_the_socket_is_out_of_reach_everything_goes_the_other_way(router):
    link = ControlLink(1, "tcp://127.0.0.1:9", router.key, {}, fallback=router.feed)
    run = context(link)
    link.attach(run, None)
    row(run, 0, loss=2.5)
    link.emit(Noted(rank=0, text="over there"))
    assert link.detach(WAIT_S)
    assert link.using_fallback
    rows = records_from(next_of(router, Records).rows)
    np.testing.assert_array_equal(rows["local_loss"], [2.5])
    link.close()


def test_closing_ends_both_threads(router):
    link = ControlLink(1, router.url, router.key, {})
    next_of(router, Hello)
    link.close()
    router.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {"workbench-control", "workbench-router"} & names
