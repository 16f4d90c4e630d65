"""Steps timed by an accelerator's events: under a fake of it, in simulated time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from fakes.accelerator import FakeAccelerator, HostClock

from workbench.engine.debugging import stacks
from workbench.engine.telemetry.recorder import Recorder
from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.shared.protocol import records_from
from workbench.shared.record import FLAG_DEVICE_CLOCK, FLAG_UNMEASURED, RECORD, derive
from workbench.strategies.torch.parts.timing import DeviceTimer

pytestmark = pytest.mark.torch
LOSS = torch.tensor(0.5)


def context(**more: Any) -> Any:
    return SimpleNamespace(**{"faults": FaultInjector(0), "fetch_s": 0.0, "step": 0, "closers": [],
                              **more})  # fmt: skip


@pytest.fixture(autouse=True)
def _no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_devices", [])


class Worker:
    """A worker under `mirrored`: 5 ms for a batch, 80 ms of own work, then the all-reduce.

    Args:
        ahead: The host enqueues a step and goes on at once, else it computes as the device does.
    """

    def __init__(self, ppm: float = 0.0, *, ahead: bool = False) -> None:
        self.host = HostClock()
        self.device = FakeAccelerator(self.host, ppm=ppm)
        self.context = context(fetch_s=0.005)
        self.timer = DeviceTimer(self.context, self.device, self.host)
        self.recorder = Recorder(0, 0, capacity=1 << 17)
        self.ahead = ahead

    def step(self, step: int, *, own_s: float = 0.080, exposed_s: float = 0.015) -> None:
        began_s = self.host.now_s
        self.host.go(0.005)
        self.context.step = step
        self.timer.begin()
        self.device.run(own_s)
        self.timer._marks.ready.append((self.device.event(), 0))
        self.device.run(exposed_s)
        self.timer.reduced()
        result = self.timer.finish(8, LOSS, 0.0)
        if not self.ahead:
            self.host.go_to(self.device.free_s)
        end_s = self.host.now_s
        self.recorder.add_step(step, result, began_s, end_s, data_wait_s=0.005)

    def rows(self) -> Any:
        return records_from(self.recorder.drain(1 << 17, final=True)).copy()


def trained(ppm: float, steps: int, *, drain_every: int = 1, **more: Any) -> Any:
    worker, parts = Worker(ppm), []
    for step in range(steps):
        worker.step(step, **more)
        if step % drain_every == 0:
            parts.append(records_from(worker.recorder.drain()).copy())
    return np.concatenate([*parts, worker.rows()])


# -- one step --------------------------------------------------------------------------------------


def test_the_parts_of_a_step_are_those_of_the_device() -> None:
    row = trained(0.0, 3)[1]
    assert row["compute_s"] == pytest.approx(0.080, abs=2e-4)
    assert row["exposed_s"] == pytest.approx(0.015, abs=1e-5)
    assert row["data_wait_s"] == pytest.approx(0.005, abs=2e-4)
    assert row["end_s"] - row["start_s"] == pytest.approx(0.100, abs=2e-4)
    assert row["flags"] & FLAG_DEVICE_CLOCK
    assert row["local_loss"] == 0.5


def test_fetching_that_the_device_hides_is_no_wait() -> None:
    worker = Worker(ahead=True)
    for step in range(5):
        worker.step(step)
    worker.host.go_to(worker.device.free_s)
    rows = worker.rows()
    assert rows["data_wait_s"][2:] == pytest.approx(0.0, abs=1e-5)
    assert np.diff(rows["end_s"])[1:] == pytest.approx(0.095, abs=1e-5)


def test_ready_is_read_from_the_clock_of_own_work() -> None:
    """A collective within backward (of SyncBatchNorm) is no work of this worker's."""
    worker = Worker()
    timer, device = worker.timer, worker.device
    timer.begin()
    device.run(0.010)
    with timer.blocked():
        device.run(0.007)
    timer._marks.ready.append((device.event(), len(timer._marks.blocked)))
    device.run(0.003)
    timer.reduced()
    values = timer.finish(8, LOSS, 0.0).deferred.values()  # type: ignore[union-attr]
    assert values["end_s"] - values["ready_s"] == pytest.approx(0.010, abs=2e-5)
    assert values["exposed_s"] == pytest.approx(0.010, abs=2e-5)


# -- many steps ------------------------------------------------------------------------------------


def test_ten_thousand_steps_that_nobody_drained_are_resolved() -> None:
    worker = Worker(ahead=True)
    deferred: Any = None
    for _ in range(10_000):
        worker.timer.begin()
        worker.device.run(1e-3)
        deferred = worker.timer.finish(1, LOSS, 0.0).deferred
    values = deferred.values()
    assert values["compute_s"] == pytest.approx(1e-3, abs=1e-6)
    assert not worker.timer.steps._open


@pytest.mark.parametrize("drain_every", [1, 3])
def test_clocks_that_drift_apart_are_no_wait(drain_every: int) -> None:
    """Ten minutes of two equal workers, whose devices count 30 millionths apart."""
    steps = 6000
    both = np.stack([trained(ppm, steps, drain_every=drain_every) for ppm in (15.0, -15.0)], axis=1)
    assert both.shape == (steps, 2)
    columns = derive(both)
    assert np.nanmax(columns.sync_wait_s) < 2e-4
    assert (columns.blamed_rank == -1).all()
    assert columns.data_wait_s == pytest.approx(0.005, abs=2e-4)
    assert columns.other_s == pytest.approx(0.0, abs=2e-4)
    ends = both["end_s"]  # the tail of ten minutes is where it would show: 18 ms
    assert ends[-1, 0] - ends[-1, 1] == pytest.approx(0.0, abs=5e-4)


@pytest.mark.parametrize("ppm", [-1000.0, 1000.0])
def test_a_device_that_is_never_idle_stays_within_what_the_host_saw(ppm: float) -> None:
    """Its clock cannot be read then; the end of a step lies where the host saw that it lies."""
    worker = Worker(ppm=ppm, ahead=True)
    ends: list[float] = []
    parts: list[bytes] = []
    for step in range(3000):
        worker.step(step)
        ends.append(worker.device.free_s)
        if worker.device.free_s - worker.host.now_s > 0.1:  # so many launches fit the queue
            worker.host.go_to(worker.device.free_s - 0.1)
        parts.append(worker.recorder.drain())
    worker.host.go_to(worker.device.free_s)
    rows = records_from(b"".join([*parts, worker.recorder.drain(final=True)]))
    assert rows["end_s"] == pytest.approx(np.array(ends), abs=0.1)
    assert rows["exposed_s"] == pytest.approx(0.015, abs=5e-5)


def test_a_straggler_is_blamed_for_what_it_cost() -> None:
    slow = trained(+15.0, 300, own_s=0.130, exposed_s=0.015)
    fast = trained(-15.0, 300, own_s=0.080, exposed_s=0.065)
    columns = derive(np.stack([slow, fast], axis=1))
    assert columns.sync_wait_s[:, 1] == pytest.approx(0.050, abs=1e-4)
    assert (columns.sync_wait_s[:, 0] == 0).all()
    assert (columns.blamed_rank[:, 1] == 0).all()


# -- other threads, failures -----------------------------------------------------------------------


def test_whoever_asks_computes_on_the_device_meanwhile() -> None:
    """CUDA's current device belongs to a thread: the link's would be the first GPU."""
    worker = Worker()
    worker.step(0)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(worker.rows()), name="workbench-control")
    thread.start()
    thread.join()
    assert found[0]["compute_s"] == pytest.approx(0.080, abs=2e-4)
    assert "workbench-control" in worker.device.threads
    assert not worker.device.is_current()
    raw = worker.device.raw_event(timed=True)
    with pytest.raises(AssertionError, match="context on the first GPU"):
        raw.query()


def test_a_device_that_fails_costs_times_and_no_rows() -> None:
    worker = Worker()
    for step in range(3):
        worker.step(step)
    whole = records_from(worker.recorder.drain())
    for step in range(3, 6):
        worker.step(step)
    worker.device.fail()
    rows = records_from(worker.recorder.drain())
    assert whole["step"].tolist() == [0, 1, 2]
    assert rows["step"].tolist() == [3, 4, 5]
    assert (rows["flags"] & FLAG_UNMEASURED).all()
    assert np.isnan(rows["compute_s"]).all()
    assert np.isnan(rows["local_loss"]).all()
    assert worker.recorder.unmeasured == 3
    assert "device-side assert" in worker.recorder.trouble


def test_a_device_that_hangs_ends_no_drain() -> None:
    worker = Worker(ahead=True)
    worker.step(0)
    worker.host.go_to(worker.device.free_s)
    worker.device.hang()
    worker.step(1)
    assert records_from(worker.recorder.drain())["step"].tolist() == [0]
    assert worker.recorder.drain() == b""
    rows = records_from(worker.recorder.drain(final=True, within_s=0.02))
    assert rows["step"].tolist() == [1]
    assert (rows["flags"] & FLAG_UNMEASURED).all()
    assert worker.recorder.drain(final=True) == b""


# -- what the device is at -------------------------------------------------------------------------


def test_a_device_that_waits_in_communication_says_so() -> None:
    worker = Worker(ahead=True)
    worker.context.step = 7
    worker.timer.begin()
    worker.device.run(0.010)
    worker.timer._marks.ready.append((worker.device.event(), 0))
    worker.device.hang()
    worker.timer.reduced()
    worker.timer.finish(8, LOSS, 0.0)
    waits, where = worker.timer.steps.under_way()
    assert not waits
    assert "step 7" in where
    worker.host.go(1.0)
    waits, where = worker.timer.steps.under_way()
    assert waits
    assert "step 7" in where


def test_where_a_spinning_thread_waits_is_asked_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "_main_thread", lambda: [stacks.Place(__file__, 3, "step")])
    worker = Worker(ahead=True)
    try:
        assert stacks.where().state == "busy"
        worker.timer.begin()
        with worker.timer.blocked():
            worker.device.hang()
            worker.host.go(1.0)
            found = stacks.where()
        assert found.state == "waits"
        assert "step 0" in found.waits_in
        worker.device.fail()
        assert stacks.where().state == "busy"
    finally:
        for close in worker.context.closers:
            close()
    assert not stacks._devices


def test_a_device_that_computes_is_no_wait_whatever_is_queued_behind_it() -> None:
    worker = Worker(ahead=True)
    undo = stacks.ask_device(lambda: stacks.DeviceWork(True, "in all_reduce on the GPU"))
    stacks._devices.reverse()  # it was there before the timer, as a device's setup is
    worker.timer.begin()
    worker.device.run(60.0)
    worker.timer._marks.ready.append((worker.device.event(), 0))
    worker.device.run(1.0)
    worker.host.go(5.0)
    waits, where = stacks._device_work()
    assert not waits
    assert "step 0" in where
    worker.host.go(55.5)
    waits, where = stacks._device_work()
    assert waits
    assert "step 0" in where
    undo()


def test_rows_have_the_layout_of_every_other() -> None:
    assert trained(0.0, 1).dtype == RECORD


# -- phases, delays --------------------------------------------------------------------------------


def test_a_simulated_link_holds_a_message_back_after_what_comes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sleep of the host alone is hidden by what the device still has to do."""
    worker = Worker(ahead=True)
    monkeypatch.setattr("workbench.engine.telemetry.step_gate.time.sleep", worker.host.go)
    worker.context.faults.set(["latency=50ms"])
    timer, device = worker.timer, worker.device
    timer.begin()
    device.run(0.080)
    timer.ready()
    with timer.blocked():
        worker.context.faults.travel(1000)
        device.run(0.002)
    values = timer.finish(8, LOSS, 0.0).deferred.values()  # type: ignore[union-attr]
    assert values["exposed_s"] == pytest.approx(0.052, abs=1e-4)
    assert values["compute_s"] == pytest.approx(0.080, abs=1e-4)


def test_without_faults_nothing_waits_for_the_device() -> None:
    worker = Worker(ahead=True)
    syncs = worker.device.syncs
    for step in range(10):
        worker.timer.spend("forward")
        worker.context.faults.travel(1000)
        worker.step(step)
    assert worker.device.syncs == syncs
    assert worker.context.settle == worker.device.synchronize


# -- SyncBatchNorm ---------------------------------------------------------------------------------


def test_collectives_of_synchronised_batchnorm_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.strategies.torch import mirrored

    worker = Worker(ahead=True)
    batchnorm, dist = mirrored._batchnorm, torch.distributed
    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: worker.device.run(0.006))
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    synced = mirrored.SyncedBatchNorm(model, {"sync_batchnorm": True}, torch.device("xpu"))
    assert isinstance(model[0], torch.nn.SyncBatchNorm)
    synced.time(worker.timer)
    worker.timer.begin()
    worker.device.run(0.010)
    batchnorm.dist.all_gather([], LOSS)  # as its forward does, and its backward:
    batchnorm.torch.distributed.all_reduce(LOSS)
    assert batchnorm.torch.zeros(2).sum() == 0
    values = worker.timer.finish(8, LOSS, 0.0).deferred.values()  # type: ignore[union-attr]
    assert values["exposed_s"] == pytest.approx(0.012, abs=1e-4)
    assert values["compute_s"] == pytest.approx(0.010, abs=1e-4)
    synced.undo()
    assert batchnorm.dist is dist
    assert batchnorm.torch is torch
    assert type(model[0]) is torch.nn.BatchNorm1d


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_batchnorm_is_synchronised_where_torch_can(kind: str) -> None:
    from workbench.errors import FitError
    from workbench.strategies.torch.mirrored import SyncedBatchNorm

    with pytest.raises(FitError, match="WB-FIT-119"):
        SyncedBatchNorm(torch.nn.Linear(2, 2), {"sync_batchnorm": True}, torch.device(kind))
