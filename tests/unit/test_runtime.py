"""What an engine leaves behind, and in which order it lets go."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.engine import runtime
from workbench.engine.training import user_loops


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def parts(done: list[str]) -> tuple[Any, Any, Any]:
    """An engine in a process group, a run under way, a framework; each notes what is done to it."""
    engine = SimpleNamespace(
        group="run1/",
        link=SimpleNamespace(detach=lambda: done.append("link")),
        watch=SimpleNamespace(shielded=contextlib.nullcontext),
    )
    run = SimpleNamespace(
        spec=SimpleNamespace(group=""),
        failed=False,
        strategy=SimpleNamespace(close=lambda: done.append("strategy")),
        closers=[lambda: done.append("first closer"), lambda: done.append("second closer")],
        weights=None,
    )
    framework = SimpleNamespace(destroy_group=lambda: done.append("group"))
    return engine, run, framework


def test_wrappers_go_before_the_process_group(done: list[str], parts: tuple[Any, Any, Any]) -> None:
    runtime._tear_down(*parts)
    assert done == ["strategy", "second closer", "first closer", "link", "group"]
    assert parts[0].group == ""


def test_a_strategy_that_cannot_close_still_leaves_the_group(
    done: list[str], parts: tuple[Any, Any, Any]
) -> None:
    def fails() -> None:
        raise RuntimeError("stuck")

    parts[1].strategy.close = fails
    with pytest.raises(RuntimeError, match="stuck"):
        runtime._tear_down(*parts)
    assert done == ["link", "group"]


def test_the_way_around_a_wrapper_is_said_of_prepared_models_alone() -> None:
    class Model:
        pass

    def advised(model: Model) -> bool:
        with pytest.raises(AttributeError) as caught:
            model.module  # noqa: B018
        return runtime.outcome_of(caught.value).advice is not None

    ours, other = Model(), Model()
    user_loops.prepared.add(ours)
    assert advised(ours)
    assert not advised(other)


def test_a_runs_variables_are_there_for_its_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "before")
    with runtime._environment({"RANK": "1", "WORLD_SIZE": "2"}):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert "RANK" not in os.environ
    assert os.environ["WORLD_SIZE"] == "before"
