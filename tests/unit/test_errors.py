from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable

import pytest

from workbench import errors
from workbench.cluster.processes import Ending, EngineDiedError
from workbench.errors import PlanError, WorkbenchError, nearest, unknown
from workbench.execution.registry import MissingRunError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, WorkbenchError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_was_seen_what_is_allowed_and_what_to_do(kind: type) -> None:
    error = kind("It broke.", code="WB-GEN-000", seen=7, allowed="1 to 5", next_step="use 5")
    assert str(error).splitlines() == [
        "It broke. [WB-GEN-000]",
        "  seen:    7",
        "  allowed: 1 to 5",
        "  next:    use 5",
    ]
    assert (error.code, error.what) == ("WB-GEN-000", "It broke.")


def test_an_error_leaves_out_what_it_does_not_know() -> None:
    assert str(WorkbenchError("It broke.", code="WB-GEN-000")) == "It broke. [WB-GEN-000]"
    text = str(WorkbenchError("It broke.", code="WB-GEN-000", seen=0))
    assert text == "It broke. [WB-GEN-000]\n  seen:    0"


def test_code_of_others_may_raise_our_errors_without_a_code() -> None:
    error = errors.FitError("No.", next_step="this")
    assert (str(error), error.code) == ("No.\n  next:    this", "")


def test_the_code_ends_the_first_line_of_several() -> None:
    error = PlanError("No.\n  Also failed: rank 1", code="WB-PLAN-000", next_step="this")
    assert str(error) == "No. [WB-PLAN-000]\n  Also failed: rank 1\n  next:    this"


def test_an_error_that_tells_of_anothers_has_that_ones_code() -> None:
    inner = errors.FitError("It is no model.", code="WB-FIT-000", seen=3)
    error = errors.RunError(f"Rank 1 failed: FitError: {inner}", code="WB-RUN-000")
    assert error.code == "WB-FIT-000"
    assert str(error) == "Rank 1 failed: FitError: It is no model. [WB-FIT-000]\n  seen:    3"


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    "error",
    [
        errors.RunError("No.\n  at all", code="WB-RUN-000", seen=1),
        errors.RunDamagedWarning("Half of it is there.", code="WB-WARN-000"),
        EngineDiedError(1, 55, Ending("SIGKILL"), "log"),
        MissingRunError("x", ["xy"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(
    error: Exception, again: Callable[[Exception], Exception]
) -> None:
    other = again(error)
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_a_warning_ends_in_its_code() -> None:
    with pytest.warns(errors.RunDamagedWarning) as caught:
        warnings.warn(errors.RunDamagedWarning("Half.", code="WB-WARN-000"), stacklevel=1)
    assert str(caught[0].message) == "Half. [WB-WARN-000]"
    assert caught[0].message.code == "WB-WARN-000"  # type: ignore[union-attr]


def test_notebooks_show_the_message_without_our_stack() -> None:
    error = PlanError("No.", code="WB-PLAN-000")
    assert error._render_traceback_() == ["PlanError: No. [WB-PLAN-000]"]


def test_a_failure_that_stands_above_is_not_told_twice() -> None:
    error = errors.RunError("Rank 1 failed: ValueError: mine.", next_step="this", code="WB-RUN-000")
    error.brief = "Rank 1 failed with the ValueError above."
    assert error._render_traceback_() == [f"RunError: {error}"]
    error.shown = True
    (line,) = error._render_traceback_()
    assert re.match("RunError: Rank 1 .*ValueError", line)
    assert "mine" in str(error)


def test_mistakes_in_values_are_value_errors() -> None:
    assert issubclass(PlanError, ValueError)
    assert issubclass(errors.FitError, ValueError)
    assert issubclass(errors.RunError, RuntimeError)


def test_a_stop_in_the_users_loop_is_no_workbench_error() -> None:
    assert not issubclass(errors.RunStopped, WorkbenchError)


def test_the_nearest_name_is_offered_only_when_it_is_near() -> None:
    assert nearest("mirored", ["mirrored", "one_device"]) == "mirrored"
    assert nearest("xyz", ["mirrored"]) is None
    assert unknown("strategy", "xyz", ["b", "a"], "look there").next_step == "look there"
    assert unknown("strategy", "xyz", ["b", "a"]).allowed == "a, b"
