from __future__ import annotations

import pytest

from workbench import errors
from workbench.errors import PlanError, WorkbenchError, nearest, unknown

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, WorkbenchError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_was_seen_what_is_allowed_and_what_to_do(kind: type) -> None:
    text = str(kind("It broke.", seen=7, allowed="1 to 5", next_step="use 5"))
    assert text.splitlines() == [
        "It broke.",
        "  seen:    7",
        "  allowed: 1 to 5",
        "  next:    use 5",
    ]


def test_an_error_leaves_out_what_it_does_not_know() -> None:
    assert str(WorkbenchError("It broke.")) == "It broke."
    assert str(WorkbenchError("It broke.", seen=0)) == "It broke.\n  seen:    0"


def test_notebooks_show_the_message_without_our_stack() -> None:
    assert PlanError("No.")._render_traceback_() == ["PlanError: No."]


def test_a_failure_that_stands_above_is_not_told_twice() -> None:
    error = errors.RunError("Rank 1 failed: ValueError: mine.", next_step="this")
    error.brief = "Rank 1 failed with the ValueError above."
    assert error._render_traceback_() == [f"RunError: {error}"]
    error.shown = True
    assert error._render_traceback_() == ["RunError: Rank 1 failed with the ValueError above."]
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
