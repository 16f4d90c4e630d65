"""A flag is one field: what knows flags is made from it."""

import dataclasses
import inspect
import json

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.session.cluster import Cluster
from workbench.shared.faults import parse_fault
from workbench.shared.flags.settings import SETTINGS
from workbench.shared.plan import Plan, plan_of
from workbench.shared.protocol import RunSpec
from workbench.shared.run_request import (
    FLAGS,
    RunRequest,
    from_arguments,
    parse_cell_line,
)

CELL = Recipe("wb.fit()")
LINE = (
    "mirrored -n 2 --inject slow=1:50ms --init-from base --checkpoint /tmp --checkpoint-every 5 "
    "--on-failure heal --on-straggler shed --spares 1 --profile 1:3 --traceback full --set lr=0.1 "
    "--log tensorboard:/tmp/a --name x"
)


def plan(request: RunRequest) -> Plan:
    return plan_of(request, CELL, framework="torch", workers=2)


def test_every_field_has_a_flag_and_every_setting_is_in_the_plan_and_on_the_engines() -> None:
    fields = {field.name for field in dataclasses.fields(RunRequest)}
    assert set(FLAGS) == fields - {"several"}  # what flags with several values give
    for kind in (Plan, RunSpec):
        assert set(SETTINGS) <= {field.name for field in dataclasses.fields(kind)}


def test_the_line_above_sets_every_setting() -> None:
    asked, nothing = parse_cell_line(LINE), RunRequest()
    assert [name for name in SETTINGS if getattr(asked, name) == getattr(nothing, name)] == []


def test_settings_reach_the_plan_and_the_engines_as_they_are() -> None:
    asked = parse_cell_line(LINE)
    made = plan(asked)
    assert made.settings == asked.settings
    assert Plan.from_wire(json.loads(json.dumps(made.to_wire()))) == made
    spec = RunSpec("run", 0, 2, (0, 1), **made.settings)
    assert RunSpec.from_wire(json.loads(json.dumps(spec.to_wire()))).settings == asked.settings


def test_plans_of_older_versions_load_without_the_settings_they_lack() -> None:
    wire = plan(RunRequest(strategies=("mirrored",))).to_wire()
    for name in ("traceback", "log", "profile"):
        del wire[name]
    assert Plan.from_wire(wire).traceback == "short"


def test_python_gives_the_same_plan_as_the_line() -> None:
    asked = from_arguments("mirrored", {
        "workers": 2, "inject": ["slow=1:50ms"], "init_from": "base", "checkpoint": "/tmp",
        "checkpoint_every": 5, "on_failure": "heal",
        "on_straggler": "shed", "spares": 1, "profile": "1:3", "traceback": "full",
        "values": {"lr": 0.1}, "log": "tensorboard:/tmp/a", "name": "x", "seed": None,
    })  # fmt: skip
    assert plan(asked) == plan(parse_cell_line(LINE))
    assert asked.faults == (parse_fault("slow=1:50ms"),)


def test_what_python_gives_wrong_is_named() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-095"):
        from_arguments("mirrored", {"epoch": 1})
    with pytest.raises(PlanError, match=r"WB-PLAN-093[\s\S]*short, full"):
        from_arguments("mirrored", {"traceback": "long"})
    with pytest.raises(PlanError, match="WB-PLAN-152"):
        from_arguments("mirrored", {"profile": "ten"})


def test_cluster_run_shows_every_argument() -> None:
    shown = inspect.signature(Cluster.run).parameters
    arguments = {flag.argument for flag in FLAGS.values() if flag.argument}
    assert arguments <= set(shown)
    assert {"source", "args", "strategy"} <= set(shown)
    assert "asked" not in shown
    for argument in arguments:
        assert f"{argument}: As `" in (Cluster.run.__doc__ or "")


def test_a_plain_cell_knows_which_flags_belong_to_training() -> None:
    asked = parse_cell_line("--seeds 2 -o bucket_mb=1 --inject jitter=5ms --name x --local")
    assert asked.training_flags == ["--option", "--seeds", "--inject"]
    assert parse_cell_line("--ranks 0 --traceback full").training_flags == []
