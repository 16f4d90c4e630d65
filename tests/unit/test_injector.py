"""The injector spends each fault in its phase, on its worker."""

from __future__ import annotations

import signal

import pytest

from workbench.engine.telemetry import step_gate
from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.errors import PlanError


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    naps: list[float] = []
    monkeypatch.setattr(step_gate.time, "sleep", naps.append)
    return naps


def test_without_faults_nothing_is_spent(slept: list[float]) -> None:
    faults = FaultInjector(0)
    assert not faults.active
    assert faults.spend("forward") == 0
    assert slept == []


def test_another_workers_fault_is_not_ours(slept: list[float]) -> None:
    assert not FaultInjector(0, ["slow=1:50ms"]).active
    assert FaultInjector(1, ["slow=1:50ms"]).spend("forward") == pytest.approx(0.05)
    assert slept == [pytest.approx(0.05)]


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_delay_is_spent_in_the_phase_it_names(slept: list[float], phase: str) -> None:
    faults = FaultInjector(0, [f"slow=0:10ms/{phase}"])
    spent = {name: faults.spend(name) for name in ("data", "forward", "backward")}
    assert spent.pop(phase) == pytest.approx(0.01)
    assert set(spent.values()) == {0.0}


def test_a_factor_multiplies_the_steps_own_compute(slept: list[float]) -> None:
    faults = FaultInjector(0, ["slow=0:3x"])
    faults.compute_s = 0.2
    assert faults.spend("forward") == pytest.approx(0.4)


def test_jitter_stays_below_its_bound_and_varies(slept: list[float]) -> None:
    faults = FaultInjector(2, ["jitter=20ms"])
    spent = [faults.spend("forward") for _ in range(50)]
    assert all(0 <= delay <= 0.02 for delay in spent)
    assert len(set(spent)) > 40


def test_delays_of_one_phase_add_up(slept: list[float]) -> None:
    faults = FaultInjector(0, ["slow=0:10ms", "slow=0:5ms/forward"])
    assert faults.spend("forward") == pytest.approx(0.015)


def test_a_kill_is_due_from_its_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(step_gate.os, "kill", lambda pid, number: sent.append(number))
    faults = FaultInjector(0, ["kill=0@3"])
    for step in range(3):
        faults.before_step(step)
    assert sent == []
    faults.before_step(3)
    assert sent == [signal.SIGKILL]


def test_faults_can_be_replaced_and_cleared_in_mid_run(slept: list[float]) -> None:
    faults = FaultInjector(0, ["slow=0:10ms"])
    faults.set(["slow=0:20ms"])
    assert faults.spend("forward") == pytest.approx(0.02)
    faults.set(["clear"])
    assert not faults.active


def test_what_is_no_fault_is_refused() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-040"):
        FaultInjector(0, ["slow"])
