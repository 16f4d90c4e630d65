"""`wb.compare(...).best(metric)` is the run with the best last evaluation."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from history_rows import make_summary

from workbench.errors import PlanError
from workbench.history.analysis.comparison import compare
from workbench.notebook.compare import Compared


class Run(SimpleNamespace):
    """A run as far as `best` looks at it."""

    __hash__ = object.__hash__


def compared(*runs: Any) -> Compared:
    summaries = [make_summary(run.name) for run in runs]
    return Compared(compare(summaries), summaries, runs)


def run(name: str, *evals: dict[str, float]) -> Any:
    return Run(name=name, evals=list(evals))


EARLY = run("early", {"step": 1, "loss": 0.1, "accuracy": 0.9}, {"step": 2, "loss": 0.8,
                                                                 "accuracy": 0.5})  # fmt: skip
LATE = run("late", {"step": 2, "loss": 0.4, "accuracy": 0.7})
NEVER = run("never")
BROKEN = run("broken", {"step": 2, "loss": math.nan, "accuracy": math.nan})


@pytest.mark.parametrize(
    ("metric", "largest", "name"),
    [("accuracy", None, "late"), ("loss", None, "late"), ("loss", True, "early"),
     ("accuracy", False, "early")],
)  # fmt: skip
def test_the_last_evaluation_decides(metric: str, largest: bool | None, name: str) -> None:
    found = compared(EARLY, NEVER, BROKEN, LATE).best(metric, largest=largest)
    assert found.name == name


@pytest.mark.parametrize(
    ("metric", "least"),
    [("val_loss", True), ("Loss", True), ("mean_squared_error", True), ("err", True),
     ("top1-err", True), ("mae", True), ("eval/MSE", True), ("val_rmse", True), ("mape", True),
     ("test perplexity", True), ("ppl", True), ("nll", True), ("WER", True), ("cer", True),
     ("val_binary_crossentropy", True), ("cross_entropy", True), ("kl_divergence", True),
     ("categorical_hinge", True), ("entropy", False),
     ("accuracy", False), ("f1", False), ("rmse_skill", False), ("answer", False),
     ("officer", False), ("loss_kept", False)],
)  # fmt: skip
def test_the_name_says_whether_the_least_value_is_the_best(metric: str, least: bool) -> None:
    small, large = run("small", {"step": 1, metric: 0.1}), run("large", {"step": 1, metric: 0.9})
    assert compared(small, large).best(metric).name == ("small" if least else "large")
    assert compared(small, large).best(metric, largest=True).name == "large"


def test_a_metric_that_no_run_has_is_refused_with_those_that_exist() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-333") as caught:
        compared(EARLY, LATE).best("f1")
    assert caught.value.seen == "f1"
    assert "accuracy" in str(caught.value.allowed)


def test_runs_without_an_evaluation_are_refused() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-333"):
        compared(NEVER).best("loss")
