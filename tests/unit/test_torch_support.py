"""What an engine does with its device around a cell, whatever kind of device it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from fakes.accelerator import FakeAccelerator, HostClock
from torch.profiler import ProfilerActivity

from workbench.engine.debugging import stacks
from workbench.engine.torch import accelerator, support
from workbench.shared.protocol import RunSpec

pytestmark = pytest.mark.torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = FakeAccelerator(HostClock())
    real = accelerator.of
    monkeypatch.setattr(accelerator, "of", lambda d: device if "gpu" in str(d) else real(d))
    monkeypatch.setattr(stacks, "_devices", [])
    yield device
    support._asked.close()


def recorded(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Let NCCL's flight recorder say so."""
    asked: list[tuple[Any, ...]] = []

    def dump(*given: Any) -> bytes:
        asked.append(given)
        return json.dumps({"entries": entries}).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return asked


def test_a_worker_computes_on_its_device_and_takes_its_part_of_a_shared_one(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(device, "limit_memory", limits.append)
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    support._take_device(spec)
    assert device.is_current()
    assert limits == []
    spec = replace(spec, sharers=3)
    support._take_device(spec)
    assert limits == [pytest.approx(0.3)]
    assert len(stacks._devices) == 1


def test_a_device_is_shown_by_its_name(device: Any) -> None:
    assert support.device_label("cpu") == "cpu"
    assert support.device_label("fakegpu:0") == "cuda:0 Fake"


@pytest.mark.parametrize(("kind", "activity"), [("cuda", "CUDA"), ("xpu", "XPU")])
def test_the_profiler_sees_the_work_of_the_kind_of_device(
    device: Any, monkeypatch: pytest.MonkeyPatch, kind: str, activity: str
) -> None:
    device.kind = kind
    own = getattr(ProfilerActivity, activity)
    monkeypatch.setattr(support, "supported_activities", lambda: {ProfilerActivity.CPU, own})
    made: list[Any] = []
    monkeypatch.setattr(support, "profile", lambda **given: made.append(given))
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    profiler = support.TorchProfiler(spec)
    assert made[0]["activities"] == [ProfilerActivity.CPU, own]
    syncs = device.syncs
    profiler._synchronise()
    assert device.syncs == syncs + 1


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_a_collective_that_the_device_is_in_is_named(
    device: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    begun = {"profiling_name": "nccl:all_reduce", "state": state}
    done = {"profiling_name": "nccl:broadcast", "state": "completed"}
    asked = recorded(monkeypatch, done, begun)
    assert support.collective_under_way(device) == (True, "in all_reduce, on the device")
    assert asked == [(True, True)]
    recorded(monkeypatch, done)
    assert support.collective_under_way(device) is None


def test_a_main_thread_that_spins_for_the_device_waits_in_its_collective(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, {"profiling_name": "nccl:all_gather", "state": "started"})
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    support._take_device(spec)
    monkeypatch.setattr(stacks, "_main_thread", lambda: [stacks.Place(__file__, 3, "step")])
    found = stacks.where()
    assert (found.state, found.waits_in) == ("waits", "in all_gather, on the device")
    support._take_device(replace(spec, device="cpu"))
    assert stacks.where().state == "busy"


def test_without_a_recorder_nothing_is_said(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch._C._distributed_c10d
    monkeypatch.delattr(module, "_dump_nccl_trace_json", raising=False)
    assert support.collective_under_way(device) is None
