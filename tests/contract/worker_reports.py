"""What workers bring back from a run, and how it is read: the rows together, what must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench import catalog
from workbench.shared import record


@dataclass
class Report:
    """What one worker brings back from a run."""

    value: Any = None
    error: str | None = None
    rows: Any = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # the strategy's, of each worker
    saved: dict[str, np.ndarray] = field(default_factory=dict)  # beside the run's records
    wrapped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    train_s: float = 0.0
    eval_s: float = 0.0
    trained: int = 0
    copy: dict[str, int] = field(default_factory=dict)  # as it was at the end of the cell
    strategy: str = ""
    replace: bool = False  # whether the engine asks for another in its place

    def emitted(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def joined(reports: list[Report]) -> Any:
    """Return the rows as (steps, ranks)."""
    return np.stack([report.rows for report in reports], axis=1)


def failures(reports: list[Report]) -> list[str]:
    return [report.error for report in reports if report.error]


def more_ms(column_s: Any, share: float = 0.2) -> Any:
    """Return by how many ms a column's quantile grows, per rank, with faults `by_turns`.

    What else goes on at the machine is in both kinds of steps, as they take turns. It only ever
    adds, and more where all workers compute: so the lower quintile says whether the whole delay is
    in the steps, and the median that not more is.

    Args:
        column_s: Seconds, (steps, ranks).
    """
    inside = [step for step in range(len(column_s)) if step % 5]  # the first may be part of both
    slowed, plain = (
        np.quantile([column_s[step] for step in inside if step // 5 % 2 == turn], share, axis=0)
        for turn in (1, 0)
    )
    return (slowed - plain) * 1e3


def clean(reports: list[Report]) -> list[Report]:
    """Check what holds after every run, then hand the reports on."""
    assert failures(reports) == []
    assert [report.left for report in reports] == [[] for _ in reports]
    assert [report.wrapped for report in reports] == [[] for _ in reports]
    for report in reports:  # what the run keeps is what its strategy ended with
        assert report.saved.keys() in ({}.keys(), report.weights.keys())
        for name, value in report.saved.items():
            assert np.array_equal(value, report.weights[name], equal_nan=True), name
    assert reports[0].saved or not (reports[0].weights and reports[0].trained)
    return reports


def assert_same(reports: list[Report], truth: Report, tolerance: float) -> None:
    """Check parameters of every worker, and the losses of every step, against one device."""
    shares = [report.weights for report in reports]
    if not catalog.lookup(reports[0].strategy).whole:
        shares = [dict(pair for share in shares for pair in share.items())]
        assert sum(len(report.weights) for report in reports) == len(truth.weights)
    for weights in shares:
        assert weights.keys() == truth.weights.keys()
        for name, value in truth.weights.items():
            assert abs(weights[name] - value).max() <= tolerance, name
    losses = record.derive(joined(reports)).loss
    assert np.allclose(
        losses, record.derive(joined([truth])).loss, rtol=0, atol=tolerance, equal_nan=True
    )
