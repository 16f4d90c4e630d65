"""The step loop where the device is behind the host: what waits for it, and what does not."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from fakes.accelerator import FakeAccelerator, HostClock

from workbench.engine.context import RunContext
from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.engine.telemetry.step_gate import FaultInjector, Gate
from workbench.engine.training import fit_arguments, loop
from workbench.engine.training.loop import Logs, Training
from workbench.shared.protocol import RunSpec

pytestmark = pytest.mark.torch


class Late:
    """A loss on a device, which counts how often it is fetched."""

    def __init__(self, loss: float = 0.25, device: FakeAccelerator | None = None) -> None:
        self.loss, self.device, self.fetched = loss, device, 0

    def ready(self) -> bool:
        return True

    def values(self) -> dict[str, float]:
        self.fetched += 1
        if self.device is not None:
            self.device.synchronize()
        return {"local_loss": self.loss}


def held(late: Late) -> Logs:
    logs = Logs()
    logs["eval_loss"] = 1.5
    logs.take(StepResult(8, float("nan"), float("nan"), deferred=late))
    return logs


@pytest.mark.parametrize(
    "read",
    [
        lambda logs: logs["loss"],
        lambda logs: logs.get("loss"),
        lambda logs: dict(logs)["loss"],
        lambda logs: {**logs}["loss"],
        lambda logs: dict(**logs)["loss"],
        lambda logs: dict(logs.items())["loss"],
        lambda logs: next(value for value in logs.values() if value != 1.5),
        lambda logs: logs.copy()["loss"],
        lambda logs: copy.copy(logs)["loss"],
        lambda logs: copy.deepcopy(logs)["loss"],
        lambda logs: pickle.loads(pickle.dumps(logs))["loss"],
        lambda logs: json.loads(json.dumps(logs))["loss"],
        lambda logs: (logs | {"more": 1})["loss"],
        lambda logs: ({"more": 1} | logs)["loss"],
        lambda logs: {"more": 1, **logs}["loss"],
        lambda logs: logs.pop("loss"),
        lambda logs: 0.25 if "'loss': 0.25" in repr(logs) else None,
        lambda logs: 0.25 if logs == {"eval_loss": 1.5, "loss": 0.25} else None,
        lambda logs: float(f"{logs['loss']:.2f}"),
    ],
)
def test_whoever_reads_the_loss_has_the_number(read: Any) -> None:
    late = Late()
    assert read(held(late)) == 0.25
    assert late.fetched == 1


def test_whoever_reads_something_else_waits_for_nothing() -> None:
    late = Late()
    logs = held(late)
    assert logs["eval_loss"] == logs.get("eval_loss") == 1.5
    assert "loss" in logs
    assert list(logs) == ["eval_loss", "loss"]
    assert len(logs) == 2
    logs["mine"] = 3
    assert late.fetched == 0
    logs["loss"] = 7.0  # a callback's own
    assert (logs["loss"], late.fetched) == (7.0, 0)


class Strategy:
    """Steps of 80 ms on a device, of which the host sees nothing; an evaluation of 20 ms."""

    owns_loop = injects_data_delay = False
    shard = eval_shard = (0, 1)
    seed = 0

    def __init__(self, device: FakeAccelerator) -> None:
        self.device, self.results = device, []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: given[0] if given else {}

    def step(self, share: Any) -> StepResult:
        self.device.run(0.080)
        late = Late(device=self.device)
        self.results.append(late)
        return StepResult(8, float("nan"), float("nan"), deferred=late)

    def evaluate(self, shares: Any) -> dict[str, float]:
        self.device.run(0.020)
        return {"loss": 0.5}

    def memory_bytes(self) -> float:
        return 0.0

    def shares(self, first: int) -> list[tuple[tuple[int, int], int | None]]:
        return [(self.shard, None)]


class Source:
    """Four shares a pass."""

    steps_per_epoch = 4

    def shares(self, rank: int, workers: int, first: int) -> Any:
        return iter(range(1000))

    def epoch(self, *unused: Any) -> Any:
        return ()


def trained(monkeypatch: pytest.MonkeyPatch, callbacks: Any = (), *, evaluate: bool = True) -> Any:
    host = HostClock()
    device = FakeAccelerator(host)
    strategy = Strategy(device)
    spec = RunSpec(mode="run", rank=0, world_size=1, ranks=(0,), strategy="one_device")
    context = RunContext(
        spec, Recorder(0, 0), Gate(), FaultInjector(0), lambda event: None,
        settle=device.synchronize,
    )  # fmt: skip
    monkeypatch.setattr(loop, "clock", host)
    monkeypatch.setattr(loop, "announce", lambda *_, **__: None)
    monkeypatch.setattr(RunContext, "log_memory", lambda *_: None)
    none = SimpleNamespace(every=0, enter=lambda *_: None, save=lambda: None)
    monkeypatch.setattr(loop, "checkpoints_of", lambda context: none)
    monkeypatch.setattr(fit_arguments, "load_strategy", lambda context: strategy)
    monkeypatch.setattr(
        fit_arguments, "support", lambda name: SimpleNamespace(parameter_count=lambda model: 0)
    )
    job: Any = SimpleNamespace(model=None, seed=0, batch_size=8, total_steps=8, steps_per_epoch=4)
    hooks = fit_arguments.Callbacks.of(callbacks)
    source: Any = Source()
    training = Training(context, job, (source, source if evaluate else None), hooks, None)
    training.run(2)
    return context, strategy


def test_training_ends_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = trained(monkeypatch, evaluate=False)
    assert context.train_s == pytest.approx(8 * 0.080)
    assert context.eval_s == 0.0


def test_an_evaluation_is_given_its_own_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first wait for the device takes in the steps that are still to be done."""
    context, _ = trained(monkeypatch)
    assert context.eval_s == pytest.approx(2 * 0.020)
    assert context.train_s == pytest.approx(8 * 0.080)


def test_a_callback_that_does_not_read_the_loss_waits_for_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    _, strategy = trained(monkeypatch, [lambda step, logs: seen.append(step)], evaluate=False)
    assert seen == list(range(8))
    assert [late.fetched for late in strategy.results] == [0] * 7 + [1]  # the result's


def test_a_callback_that_reads_it_has_each_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    _, strategy = trained(monkeypatch, [lambda step, logs: seen.append(logs["loss"])],
                          evaluate=False)  # fmt: skip
    assert seen == [0.25] * 8
    assert [late.fetched for late in strategy.results] == [1] * 7 + [2]
