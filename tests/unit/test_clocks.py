"""The kernel's idea of other clocks: how right it is, and what it makes of rows and events."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from history_rows import make_rows

from workbench.cluster.router import (
    APART_S,
    AT_ONCE,
    DRIFT,
    EVERY_S,
    SLEW,
    Clock,
    Clocks,
    ControlRouter,
    EngineClock,
)
from workbench.engine.telemetry.control_link import ControlLink
from workbench.shared.events import Noted, RunStarted
from workbench.shared.messages import ClockAnswer, Happened, Hello, Records, Up
from workbench.shared.protocol import records_from
from workbench.shared.record import FLAG_KERNEL_CLOCK, FLAG_SKEWED_CLOCK, RECORD, clock_name

WAIT_S = 20.0
DAY_S = 777600.0


class Ahead:
    """An engine whose clock is `offset_s` ahead and runs `rate` times as fast, at a distance."""

    def __init__(self, offset_s: float = DAY_S, rate: float = 1.0) -> None:
        self.offset_s, self.rate, self.now_s = offset_s, rate, 100.0
        self.clocks = Clocks("kernel's", lambda: self.now_s)
        self.clocks.hello("n", Hello(engine=1, clock="another"), asked=True)

    def reads(self) -> float:
        return self.now_s * self.rate + self.offset_s

    def exchange(self, there_s: float, back_s: float) -> None:
        number = self.clocks.ask(1)
        self.now_s += there_s
        answer = ClockAnswer(engine=1, ask=number, at_s=self.reads())
        self.now_s += back_s
        self.clocks.heard("n", answer, self.now_s)

    @property
    def clock(self) -> Clock:
        return self.clocks.clock(1)

    @property
    def error_s(self) -> float:
        return abs(self.clock.offset_s - (self.reads() - self.now_s))

    def rows(self, run: int, *spans: tuple[float, float]) -> Records:
        packed = np.zeros(len(spans), RECORD)
        for at, (start_s, end_s) in enumerate(spans):
            packed[at]["start_s"], packed[at]["end_s"] = start_s, end_s
        packed["ready_s"], packed["run"] = np.nan, run
        return Records(run=run, dropped=0, rows=packed.tobytes())

    def arrived(self, message: Records) -> np.ndarray:
        found = self.clocks.arrived("n", message, self.now_s)
        assert isinstance(found, Records)
        return records_from(found.rows)


@pytest.mark.parametrize(("there_s", "back_s"), [(0.005, 0.005), (0.02, 0.0), (0.0, 0.02)])
def test_the_error_is_within_the_bound_whatever_each_way_takes(
    there_s: float, back_s: float
) -> None:
    engine = Ahead()
    engine.exchange(there_s, back_s)
    assert engine.error_s == pytest.approx(abs(there_s - back_s) / 2, abs=1e-6)
    assert engine.error_s <= engine.clock.bound_s + 1e-9
    assert engine.clock.bound_s == pytest.approx((there_s + back_s) / 2)


def test_the_answer_with_the_least_bound_counts_until_it_is_too_old() -> None:
    engine = Ahead(rate=1 + 0.8 * DRIFT)
    engine.exchange(0.0001, 0.0001)
    engine.exchange(0.03, 0.0)
    assert engine.clock.bound_s < 2e-4 + 1e-5  # a slow answer makes nothing worse
    for _ in range(100):  # a link that was fast once only
        engine.now_s += EVERY_S
        engine.exchange(0.004, 0.001)
        assert engine.error_s <= engine.clock.bound_s
    assert engine.clock.bound_s < 0.0025 + 1e-5


def test_a_clock_that_jumped_is_found_again_at_once() -> None:
    engine = Ahead()
    engine.exchange(0.0001, 0.0001)
    engine.offset_s += 3600.0  # the kernel's machine slept
    engine.exchange(0.01, 0.01)
    assert engine.error_s <= engine.clock.bound_s <= 0.011


def test_a_greeted_engine_is_asked_eight_times_within_a_second_and_then_now_and_then() -> None:
    engine, asked = Ahead(), []
    while engine.now_s < 150.0:
        wait_ms = engine.clocks.until_due_ms()
        assert wait_ms is not None
        engine.now_s += wait_ms / 1e3
        for one in engine.clocks.due():
            asked.append(engine.now_s)
            engine.clocks.ask(one)
    gaps = np.diff(asked)
    assert gaps[: AT_ONCE - 1] == pytest.approx([APART_S] * (AT_ONCE - 1), abs=2e-3)
    assert sum(gaps[: AT_ONCE - 1]) < 1.0
    assert gaps[AT_ONCE - 1 :] == pytest.approx([EVERY_S] * 5, abs=2e-3)
    engine.clocks.silence(1)
    assert engine.clocks.until_due_ms() is None


def test_engines_of_the_kernels_own_clock_are_not_asked_and_nothing_is_converted() -> None:
    clocks = Clocks("kernel's")
    clocks.hello("n", Hello(engine=0, clock="kernel's"), asked=True)
    clocks.hello("m", Hello(engine=1), asked=True)
    assert clocks.until_due_ms() is None
    assert clocks.due() == []
    assert clocks.clock(0) == clocks.clock(1) == Clock(0.0, 0.0)
    message = Records(run=1, dropped=0, rows=make_rows(2, 1).tobytes())
    assert clocks.arrived("n", message, 1.0) is message


def test_moments_of_rows_and_events_are_the_kernels_when_they_arrive() -> None:
    engine = Ahead()
    engine.exchange(0.001, 0.001)
    rows = make_rows(4, 1).reshape(-1)
    before = rows.copy()
    for name in ("start_s", "end_s", "ready_s"):
        rows[name] += engine.offset_s
    found = engine.arrived(Records(run=1, dropped=0, rows=rows.tobytes()))
    for name in ("start_s", "end_s", "ready_s"):
        assert found[name] == pytest.approx(before[name], abs=0.0011, nan_ok=True)
    for name in ("data_wait_s", "compute_s", "exposed_s", "step", "samples"):
        assert np.array_equal(found[name], before[name], equal_nan=True)
    assert (found["flags"] == FLAG_SKEWED_CLOCK | FLAG_KERNEL_CLOCK).all()
    started = Happened(run=1, event=RunStarted(t_s=engine.offset_s + 7.0))
    said = engine.clocks.arrived("n", started, engine.now_s)
    assert said.event.t_s == pytest.approx(7.0, abs=0.0011)  # type: ignore[union-attr]
    note = Happened(run=1, event=Noted(text="so"))
    assert engine.clocks.arrived("n", note, engine.now_s) is note


def test_within_a_run_moments_never_go_backwards_while_the_offset_gets_better() -> None:
    engine = Ahead()
    engine.exchange(0.04, 0.0)  # 20 ms too late: what comes later moves moments back
    step_s, edges, bounds = 0.01, [], []
    for batch in range(600):
        if batch == 20:
            engine.exchange(0.0001, 0.0001)
        first_s = engine.reads()
        spans = [(first_s + i * step_s, first_s + (i + 1) * step_s) for i in range(10)]
        engine.now_s += 10 * step_s
        found = engine.arrived(engine.rows(5, *spans))
        assert (np.abs(found["end_s"] - found["start_s"] - step_s) <= SLEW * step_s + 1e-9).all()
        bounds.append(engine.clocks.bound_s(1))
        assert abs(found["end_s"][-1] - engine.now_s) <= bounds[-1] + 1e-9
        edges += np.stack([found["start_s"], found["end_s"]], 1).reshape(-1).tolist()
    assert (np.diff(edges) >= -1e-9).all()
    assert bounds[25] > 0.015  # it says so while it is on its way
    assert edges[-1] == pytest.approx(engine.now_s, abs=2e-4)  # it has got there by now


def test_the_next_run_begins_with_the_best_offset() -> None:
    engine = Ahead()
    engine.exchange(0.04, 0.0)
    engine.arrived(engine.rows(1, (engine.reads(), engine.reads() + 0.01)))
    engine.exchange(0.0001, 0.0001)
    at_s, now_s = engine.reads(), engine.now_s
    assert engine.arrived(engine.rows(2, (at_s, at_s + 0.01)))["start_s"] == pytest.approx(
        now_s, abs=1.1e-4
    )


def test_rows_of_an_engine_that_cannot_be_asked_end_when_they_arrive_and_no_bound_is_told() -> None:
    engine = Ahead()
    engine.clocks.hello("n", Hello(engine=1, clock="another"), asked=False)
    assert engine.clocks.until_due_ms() is None
    spans = (engine.reads() - 0.02, engine.reads() - 0.01)
    engine.now_s += 0.1
    assert engine.arrived(engine.rows(1, spans))["end_s"] == pytest.approx(engine.now_s)
    assert engine.clock.bound_s == float("inf")


def test_senseless_moments_convert_nothing_and_harm_nothing() -> None:
    clock = EngineClock(0.0)
    clock.heard(clock.ask(1.0), float("nan"), 1.1)
    assert clock.at(1.2).bound_s == float("inf")
    rows = np.zeros(1, RECORD)
    rows["end_s"] = np.nan
    assert clock.converted(1, rows.tobytes(), 2.0) == rows.tobytes()


# -- real clocks ---------------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[ControlRouter]:
    heard: queue.Queue[Up] = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put(message))
    router.heard = heard  # type: ignore[attr-defined]
    yield router
    router.close()


def known(router: ControlRouter, engine: int) -> Clock:
    """Return an engine's clock once all of its first questions are answered."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = router._clocks._by_engine.get(engine)
        if found is not None and len(found[1]._answers) >= AT_ONCE:
            return router.clock(engine)
        time.sleep(0.01)
    raise AssertionError("the engine did not answer")


ENGINE = """
import sys, time
from workbench.engine.context import RunContext
from workbench.engine.telemetry.control_link import ControlLink
from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.engine.telemetry.step_gate import FaultInjector, Gate
from workbench.shared.events import RunStarted
from workbench.shared.protocol import RunSpec
url, key = sys.argv[1:]
link = ControlLink(3, url, bytes.fromhex(key), {})
sys.stdin.readline()
spec = RunSpec(mode="run", rank=0, world_size=1, ranks=(3,), run=1)
run = RunContext(spec, Recorder(1, 0), Gate(), FaultInjector(0), link.emit)
link.attach(run, None)
link.emit(RunStarted(t_s=time.perf_counter()))
for step in range(5):
    began = time.perf_counter()
    time.sleep(0.01)
    run.recorder.add_step(step, StepResult(8, 1.0, 0.01), began, time.perf_counter(),
                          data_wait_s=0.0)
link.detach(10)
print(link.kernels_clock, flush=True)
sys.stdin.readline()
"""


def test_an_engine_with_another_clock_is_read_within_the_bound(router: ControlRouter) -> None:
    apart = ["unshare", "--time", "--monotonic", str(int(DAY_S)), "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this user may not make a time namespace")
    child = subprocess.Popen(
        [*apart, sys.executable, "-c", ENGINE, router.url, router.key.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ},
    )  # fmt: skip
    try:
        clock = known(router, 3)
        # The namespace's offset is exact: what is left is our error.
        assert abs(clock.offset_s - DAY_S) <= clock.bound_s < 0.05
        assert child.stdin is not None
        assert child.stdout is not None
        before_s = time.perf_counter()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "False\n"
        after_s, bound_s = time.perf_counter(), router.clock(3).bound_s
        moments: list[float] = []
        while len(moments) < 6:
            message = router.heard.get(timeout=WAIT_S)  # type: ignore[attr-defined]
            if isinstance(message, Happened) and isinstance(message.event, RunStarted):
                moments.append(message.event.t_s)
            elif isinstance(message, Records):
                moments += [float(at_s) for at_s in records_from(message.rows)["start_s"]]
        assert all(before_s - bound_s <= at_s <= after_s + bound_s for at_s in moments)
    finally:
        child.kill()
        child.wait()


def test_an_engine_of_this_machine_answers_no_question_and_its_rows_are_left_alone(
    router: ControlRouter,
) -> None:
    link = ControlLink(3, router.url, router.key, {})
    try:
        hello = router.heard.get(timeout=WAIT_S)  # type: ignore[attr-defined]
        assert isinstance(hello, Hello)
        assert hello.clock == clock_name()
        assert router.clock(3) == Clock(0.0, 0.0)
        assert router._clocks.until_due_ms() is None
        assert link.kernels_clock
    finally:
        link.close()


def relay(to: tuple[str, int], there_s: float, back_s: float) -> socket.socket:
    """Listen for one connection and carry it on, each way with a delay of its own."""
    listening = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, goal: socket.socket, delay_s: float) -> None:
        late: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def release() -> None:
            while True:
                at_s, data = late.get()
                time.sleep(max(0.0, at_s - time.perf_counter()))
                if not data:
                    return
                goal.sendall(data)

        threading.Thread(target=release, daemon=True).start()
        while data := source.recv(65536):
            late.put((time.perf_counter() + delay_s, data))
        late.put((0.0, b""))

    def main() -> None:
        engine, _ = listening.accept()
        kernel = socket.create_connection(to)
        threading.Thread(target=carry, args=(engine, kernel, back_s), daemon=True).start()
        carry(kernel, engine, there_s)

    threading.Thread(target=main, daemon=True).start()
    return listening


def test_over_a_link_that_is_slow_one_way_the_error_is_within_the_bound(
    router: ControlRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.engine.telemetry.control_link.clock_name", lambda: "another")
    port = int(router.url.rpartition(":")[2])
    listening = relay(("127.0.0.1", port), there_s=0.03, back_s=0.002)
    own = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    link = ControlLink(4, own, router.key, {})
    try:
        clock = known(router, 4)  # the same clock in truth, so the offset is the error
        assert 0.005 < abs(clock.offset_s) <= clock.bound_s
        assert clock.bound_s == pytest.approx(0.016, abs=0.01)
    finally:
        link.close()
        listening.close()
