"""The bubble of a pipeline's worker: where the host waits for messages, and where a device does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from fakes.accelerator import FakeAccelerator, HostClock

from workbench.engine.debugging import stacks
from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.strategies.torch.parts.timing import DeviceTimer
from workbench.strategies.torch.pipeline import stage
from workbench.strategies.torch.pipeline.stage import DeviceTimeline, Timeline

pytestmark = pytest.mark.torch
MICROBATCHES, ARRIVES_S, WORK_S = 4, 0.010, 0.005
BUBBLE = 25 / 45
"""The last stage of two: a microbatch arrives each 10 ms, and takes 5 ms of work."""


@pytest.fixture(autouse=True)
def _no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_devices", [])


def on_device(host: HostClock, device: FakeAccelerator, *faults: str, **more: Any) -> Any:
    context: Any = SimpleNamespace(
        faults=FaultInjector(0, faults), fetch_s=0.0, step=0, closers=[], settle=None
    )
    timer = DeviceTimer(context, device, host)
    return DeviceTimeline(context.faults, timer, device, **{"stamped": False, **more})


def step(timeline: Any, host: HostClock, device: FakeAccelerator, *, stops_host: bool) -> Any:
    began_s = host.now_s
    timeline.open()
    timeline.begin()
    for k in range(MICROBATCHES):
        arrives_s = began_s + ARRIVES_S * (k + 1)
        if stops_host:  # gloo
            host.go_to(arrives_s)
        else:  # NCCL
            device.wait_for(arrives_s)
        timeline.work("forward", arrives_s - 0.002)
        device.run(WORK_S)
        if isinstance(timeline, DeviceTimeline):
            timeline.rest()
        else:
            host.go_to(device.free_s)
            timeline.rest()
    timeline.end()
    return timeline.finish(8, torch.tensor(0.25), 0.0)


def share(values: Any) -> float:
    return float(values["bubble_s"] / (values["bubble_s"] + values["compute_s"]))


@pytest.mark.parametrize("stops_host", [True, False])
def test_the_bubble_is_the_same_whoever_waits_for_messages(stops_host: bool) -> None:
    host = HostClock()
    device = FakeAccelerator(host)
    timeline = on_device(host, device)
    syncs = device.syncs
    result = step(timeline, host, device, stops_host=stops_host)
    assert device.syncs == syncs  # nothing stood still for it
    values = result.deferred.values()
    assert share(values) == pytest.approx(BUBBLE, abs=0.05)
    assert values["local_loss"] == 0.25
    assert values["exposed_s"] == values["bubble_s"]
    assert values["wait_s"] != values["wait_s"]  # clocks cannot be compared: not said


def test_a_device_has_the_bubble_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostClock()
    monkeypatch.setattr(stage, "clock", host)
    cpu = step(Timeline(FaultInjector(0), stamped=True), host, FakeAccelerator(host),
               stops_host=True)  # fmt: skip
    host = HostClock()
    device = FakeAccelerator(host)
    result = step(on_device(host, device, stamped=True), host, device, stops_host=True)
    values = result.deferred.values()
    for name in ("compute_s", "bubble_s", "exposed_s", "wait_s"):
        assert values[name] == pytest.approx(getattr(cpu, name), abs=2e-4)
    assert cpu.wait_s == pytest.approx(0.017, abs=1e-6)  # 8 + 3 x 3 ms until they were sent


def test_an_injected_delay_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostClock()
    device = FakeAccelerator(host)
    timeline = on_device(host, device, "slow=0:50ms/forward")
    monkeypatch.setattr("workbench.engine.telemetry.step_gate.time.sleep", host.go)
    values = step(timeline, host, device, stops_host=False).deferred.values()
    assert values["compute_s"] == pytest.approx(0.020 + 0.050, abs=2e-4)


def test_where_all_meet_the_end_of_own_work_is_said() -> None:
    host = HostClock()
    device = FakeAccelerator(host)
    timeline = on_device(host, device, ends_together=True)
    values = step(timeline, host, device, stops_host=False).deferred.values()
    assert values["end_s"] - values["ready_s"] == pytest.approx(values["bubble_s"])
