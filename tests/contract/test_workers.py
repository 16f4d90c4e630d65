"""The workers of these tests: one that hangs is ended, and later runs are answered by new ones."""

from __future__ import annotations

import pytest
import workers
from worker_reports import failures
from workers import Workers

pytestmark = pytest.mark.torch


def hangs():
    import threading

    threading.Event().wait()


def answers():
    return rank  # noqa: F821 - every cell has it


def test_a_run_that_hangs_says_where_and_takes_no_later_one_along(monkeypatch):
    pool = Workers(2)
    try:
        assert [report.value for report in pool.run("mirrored", answers, workers=2)] == [0, 1]
        monkeypatch.setattr(workers, "ANSWER_S", 1.0)
        with pytest.raises(TimeoutError, match="in hangs"):
            pool.run("mirrored", hangs, workers=2)
        monkeypatch.undo()
        reports = pool.run("mirrored", answers, workers=2)
        assert failures(reports) == []
        assert [report.value for report in reports] == [0, 1]
    finally:
        pool.close()
