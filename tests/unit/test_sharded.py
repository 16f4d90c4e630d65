"""What `sharded` counts and times: on a CPU, and where collectives run beside the computation."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.strategies.torch import sharded
from workbench.strategies.torch.sharded import Traffic

pytestmark = pytest.mark.torch


class Timer:
    """Notes what is timed."""

    def __init__(self) -> None:
        self.blinded = False
        self.stretches = 0

    def blind(self) -> None:
        self.blinded = True

    @contextlib.contextmanager
    def blocked(self) -> Any:
        self.stretches += 1
        yield


def traffic(kind: str, root: Any) -> Traffic:
    trainer: Any = SimpleNamespace(timer=Timer(), device=torch.device(kind))
    return Traffic(trainer, root, FaultInjector(0))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_bytes_are_counted_on_every_device_and_waits_where_they_are_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    root = SimpleNamespace(set_custom_all_gather=None, modules=lambda: ())
    counted = traffic(kind, root)
    begun: list[Any] = []
    monkeypatch.setattr(sharded, "_all_gather", lambda *_, **given: begun.append(given) or "work")
    group: Any = SimpleNamespace(size=lambda: 4)
    whole = torch.zeros(100)
    assert sharded._AllGather(counted)(whole, whole[:25], group, async_op=True) == "work"
    assert counted.sent_bytes == 300
    on_cpu = kind == "cpu"
    timer: Any = counted.timer
    assert (timer.stretches, timer.blinded) == ((1, False) if on_cpu else (0, True))
    assert begun == [{"group": group, "async_op": not on_cpu}]  # it stays beside the computation
    columns = [] if on_cpu else ["sync_wait_s", "transfer_s"]
    assert list(counted.unmeasured) == columns


def test_a_torch_without_hooks_says_nothing_at_all() -> None:
    counted = traffic("cpu", SimpleNamespace())
    assert list(counted.unmeasured) == ["sync_wait_s", "transfer_s", "sent_bytes"]
    assert not counted.counted
