from __future__ import annotations

import numpy as np
import pytest

from workbench.history.totals import MOST, Staleness

NAN = float("nan")


def test_pushes_are_counted_by_how_late_they_are() -> None:
    late = Staleness.of(np.array([0, 1, 1, 3, NAN]))
    assert late is not None
    assert late.counts == (1, 2, 0, 1)
    assert late.mean == pytest.approx(1.25)
    assert late.worst == 3
    assert late.shares == pytest.approx((0.25, 0.5, 0, 0.25))


def test_runs_without_pushes_have_none() -> None:
    assert Staleness.of(np.array([NAN, NAN])) is None
    assert Staleness.of(np.array([])) is None
    assert Staleness.merged([None, None]) is None


def test_very_late_pushes_are_counted_together_but_not_in_the_mean() -> None:
    late = Staleness.of(np.array([10_000.0, 0.0]))
    assert late is not None
    assert len(late.counts) == MOST + 1
    assert late.counts[MOST] == 1
    assert (late.mean, late.worst) == (5000, 10_000)


def test_seeds_are_merged_by_pushes_not_by_runs() -> None:
    few, many = Staleness.of(np.array([4.0])), Staleness.of(np.zeros(3))
    late = Staleness.merged([few, None, many])
    assert late is not None
    assert late.counts == (3, 0, 0, 0, 1)
    assert late.mean == pytest.approx(1.0)
    assert late.worst == 4
