"""A loss that stops being a number is found where it begins."""

import numpy as np
import pytest

from workbench.history.totals import LossWatch


def looked(*losses: list[float]) -> LossWatch:
    watch, step = LossWatch(), 0
    for part in losses:
        watch.look(np.arange(step, step + len(part)), np.array(part, float))
        step += len(part)
    return watch


def test_a_loss_that_was_seen_and_never_was_a_number_is_named_as_such():
    nan = np.full(3, np.nan)
    watch = LossWatch()
    watch.look(np.arange(3), nan, np.zeros(3, bool))
    assert watch.step is None  # nobody saw it: not measured
    watch = LossWatch()
    watch.look(np.arange(3), nan, np.ones(3, bool))
    assert watch.step == 0
    assert "first step" in watch.note
    assert "data" in watch.note


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([[1.0, 2.0], [3.0]], None),
        ([[1.0, np.nan, 2.0]], 1),
        ([[1.0], [np.nan]], 1),
        ([[1.0, 2.0], [np.inf, np.nan]], 2),
        ([[np.inf]], 0),
        ([[np.nan, np.nan], [np.nan]], None),
        ([[np.nan, 1.0], [2.0, np.nan]], 3),
    ],
)
def test_the_first_step_without_a_number_is_named(losses, step):
    watch = looked(*losses)
    assert watch.step == step
    assert (f"since step {step}" in watch.note) if step is not None else watch.note == ""
    assert ("NaN" in watch.note) is (step is not None)
