"""What `--log` takes, and what it says of what it does not take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.shared.log_targets import parse_target, parse_targets
from workbench.shared.plan import Plan, make_plan
from workbench.shared.run_request import parse_cell_line


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tensorboard:runs", "{here}/runs"),
        ("tensorboard:/var/runs", "/var/runs"),
        ("tensorboard:my runs", "{here}/my runs"),
        ("mlflow:sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("mlflow:sqlite:////var/mlflow.db", "sqlite:////var/mlflow.db"),
        ("mlflow:http://localhost:5000", "http://localhost:5000"),
        ("mlflow:postgresql://me@db/runs", "postgresql://me@db/runs"),
        ("mlflow:file:mlruns", "file://{here}/mlruns"),
        ("mlflow:file:///var/mlruns", "file:///var/mlruns"),
        ("mlflow:", ""),
        ("mlflow", ""),
        ("mlflow:databricks", "databricks"),
    ],
)
def test_places_are_whole(text, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = parse_target(text)
    assert target.where == where.format(here=tmp_path)
    assert parse_target(target.text) == target


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("neptune:project", "WB-PLAN-140"),
        ("", "WB-PLAN-140"),
        ("tensorboard", "WB-PLAN-142"),
        ("tensorboard:", "WB-PLAN-142"),
        ("tensorboard:gs://bucket/runs", "WB-PLAN-142"),
        ("tensorboard:a\nb", "WB-PLAN-141"),
        ("mlflow:mlruns", "WB-PLAN-143"),
        ("mlflow:ftp://host/", "WB-PLAN-143"),
        ("mlflow:sqlite:mlflow.db", "WB-PLAN-145"),
        ("mlflow:sqlite:///", "WB-PLAN-145"),
        ("mlflow:http://", "WB-PLAN-146"),
        ("mlflow:http://[::1", "WB-PLAN-146"),
        ("mlflow:http://host:port", "WB-PLAN-146"),
        ("mlflow:file:", "WB-PLAN-144"),
    ],
)
def test_what_is_no_place_is_refused(text, words):
    with pytest.raises(PlanError, match=words) as refused:
        parse_target(text)
    assert refused.value.allowed


def test_a_malformed_uri_is_shown_without_its_password():
    with pytest.raises(PlanError, match="WB-PLAN-146") as refused:
        parse_target("mlflow:mysql://me:secret@host:port/runs")
    assert "secret" not in str(refused.value)
    assert "host:port" in str(refused.value)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(PlanError, match="WB-PLAN-147") as refused:
        parse_target("mlflow:https://me:s3cret@host/mlflow")
    assert "s3cret" not in str(refused.value)
    assert "MLFLOW_TRACKING_URI" in refused.value.next_step


@given(st.text())
def test_any_text_is_a_target_or_a_plan_error(text):
    for prefix in ("", "tensorboard:", "mlflow:", "mlflow:http://", "mlflow:sqlite:///"):
        try:
            target = parse_target(prefix + text)
        except PlanError:
            continue
        assert parse_target(target.text) == target


def test_the_flag_can_be_given_again():
    line = parse_cell_line("mirrored --log tensorboard:/a --log mlflow:sqlite:////b.db")
    assert line.log == ("tensorboard:/a", "mlflow:sqlite:////b.db")
    assert parse_cell_line("mirrored").log == ()


def test_the_same_place_counts_once():
    assert parse_targets(["tensorboard:/a", "tensorboard:/a"]) == ("tensorboard:/a",)
    assert parse_targets("tensorboard:/a") == ("tensorboard:/a",)


def test_plans_keep_it_on_their_way_to_disk():
    plan = make_plan(Recipe("x = 1"), "mirrored", workers=2, log=["tensorboard:/a"])
    assert plan.log == ("tensorboard:/a",)
    wire = plan.to_wire()
    assert Plan.from_wire(wire).log == plan.log
    del wire["log"]  # of a run from before there was such a thing
    assert Plan.from_wire(wire).log == ()
