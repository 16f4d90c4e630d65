"""One engine that holds several replicas, as the parts that need no engine see it."""

from __future__ import annotations

import pytest

from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.devices.leases import Lease, Leases
from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.errors import PlanError
from workbench.execution.requests import make_specs, members_of
from workbench.shared.plan import Plan, make_plan
from workbench.shared.protocol import RunSpec, records_from
from workbench.shared.run_request import parse_cell_line

GPUS = Leases(tuple(Lease(f"cuda:{i}", f"cuda:{i} GPU") for i in range(3)), "cpu:gloo,cuda:nccl")


def test_one_engine_is_told_of_all_its_replicas() -> None:
    specs = make_specs(
        {7: "here"}, 3, GPUS, store=None, framework="tensorflow", prefix="p", one_engine=True
    )
    assert list(specs) == [7]
    spec = specs[7]
    assert (spec.rank, spec.world_size, spec.replicas) == (0, 3, 3)
    assert spec.ranks == (7, 7, 7)
    assert spec.hosts == ("here", "here", "here")
    assert spec.devices == ("cuda:0", "cuda:1", "cuda:2")
    assert list(spec.held) == [0, 1, 2]
    assert RunSpec.from_wire(spec.to_wire()) == spec
    assert members_of(specs)[7].heading == "replicas 0-2 · cuda:0"


def test_an_engine_per_worker_is_told_of_one() -> None:
    hosts = {0: "a", 1: "b", 2: "b"}
    specs = make_specs(
        hosts, 2, GPUS, store=("h", 1), framework="torch", prefix="p", helpers=("server",)
    )
    assert [spec.rank for spec in specs.values()] == [0, 1, 2]
    assert [spec.role for spec in specs.values()] == ["worker", "worker", "server"]
    assert specs[1].devices == ("cuda:1",)
    assert list(specs[1].held) == [1]
    assert specs[0].ranks == (0, 1, 2)


def test_a_plan_knows_how_many_engines_run_its_cell() -> None:
    cell = Recipe("1")
    plan = make_plan(cell, "mirrored", framework="tensorflow", workers=4, init_from="base")
    assert (plan.workers, plan.engines) == (4, 1)
    assert Plan.from_wire(plan.to_wire()) == plan
    assert make_plan(cell, "mirrored", workers=4).engines == 4


def test_each_replica_spends_its_own_delays() -> None:
    faults = FaultInjector(2, ["slow=3:20ms", "slow=1:1s", "jitter=1us"], held=2)
    first, second = faults.replicas
    assert first.spend("forward") < 0.001
    assert 0.02 <= second.spend("forward") < 0.021
    faults.set(["slow=2:10ms"])
    assert 0.01 <= first.spend("forward") < 0.011
    assert second.spend("forward") == 0.0
    assert FaultInjector(0, ["slow=0:1ms"]).replicas[0].spend("forward") == 0.001


def test_rows_of_several_ranks_come_from_one_recorder() -> None:
    recorder = Recorder(1, 4)
    for rank in (None, 5):
        recorder.add_step(0, StepResult(8, 0.5, 1.0), 1.0, 2.0, data_wait_s=0.0, rank=rank)
    assert records_from(recorder.drain())["rank"].tolist() == [4, 5]


def test_a_name_is_found_in_whichever_framework_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only = catalog.Strategy("lonely", "tensorflow", "t", "s", "m:C", "su", "so", aliases=("alone",))
    monkeypatch.setattr(catalog, "CATALOG", (*catalog.CATALOG, only))
    assert catalog.canonical("alone") == "lonely"
    assert catalog.canonical("ddp") == "mirrored"
    with pytest.raises(PlanError, match=r"WB-PLAN-001[\s\S]*tensorflow"):
        catalog.canonical("lonely", "torch")
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'mirrored'"):
        catalog.canonical("mirrord")


def test_the_line_names_the_run_to_start_from() -> None:
    assert parse_cell_line("mirrored --init-from base").init_from == "base"
    assert parse_cell_line("mirrored").init_from == ""
