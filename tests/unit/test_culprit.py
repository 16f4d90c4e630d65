"""Who is slow is named, and nobody else: on rows of real runs (`benchmarks/record_waits.py`)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.history.analysis.blame import blame
from workbench.history.recent import BLOCKS, Recent, culprit_of
from workbench.history.store import RunHistory
from workbench.history.totals import Blame, parts_of
from workbench.shared.record import RECORD, Derived, derive
from workbench.views import text

MEASURED = Path(__file__).parents[2] / "docs/measured/waits.npz"
TRIES = 1000
STRETCH = 10
"""Neighbouring steps are alike: whole stretches of so many are drawn."""


@cache
def recorded() -> dict[str, np.ndarray]:
    """The rows of the recorded runs, as RECORD of shape (steps, ranks)."""
    found = {}
    with np.load(MEASURED) as file:
        for name, kept in file.items():
            rows = np.zeros(kept.shape, RECORD)
            rows["staleness"] = rows["sent_bytes"] = np.nan
            for field in set(kept.dtype.names) - {"at"}:
                rows[field] = kept[field]
            for field in ("start_s", "end_s", "ready_s"):
                rows[field] += kept["at"]
            found[name] = rows
    return found


CALM = [name for name in recorded() if "slow" not in name]
SLOW = [name for name in recorded() if "slow" in name]


def drawn(columns: Derived, steps: int, rng: np.random.Generator) -> int | None:
    """Who is named in a run of so many steps that is put together from stretches of another."""
    begins = rng.integers(0, len(columns.blamed_rank) - STRETCH, -(-steps // STRETCH))
    at = (begins[:, None] + np.arange(STRETCH)).ravel()[:steps]
    return culprit_of(columns.blamed_rank[at], columns.blamed_s[at], columns.step_s[at])


def late(rows: np.ndarray, rank: int, delay_s: np.ndarray) -> np.ndarray:
    """The same steps with one worker ready so much later, and the others waiting for it."""
    found = rows.copy()
    shift = delay_s.cumsum() - delay_s
    for name in ("start_s", "end_s", "ready_s"):
        found[name] += shift[:, None]
    before = rows["ready_s"].max(axis=1)
    found["ready_s"][:, rank] += delay_s
    longer = found["ready_s"].max(axis=1) - shift - before
    found["end_s"] += longer[:, None]
    found["exposed_s"] += longer[:, None]
    found["exposed_s"][:, rank] -= delay_s
    found["wait_s"] = np.nan
    return found


@pytest.mark.parametrize("steps", [60, 300])
@pytest.mark.parametrize("name", CALM)
def test_without_a_fault_hardly_anybody_is_accused(name: str, steps: int) -> None:
    columns, rng = derive(recorded()[name]), np.random.default_rng(1)
    named = [drawn(columns, steps, rng) for _ in range(TRIES)]
    assert sum(one is not None for one in named) <= 0.01 * TRIES


@pytest.mark.parametrize("name", CALM)
def test_while_a_run_goes_on_hardly_anybody_is_accused(name: str) -> None:
    """The headline looks at the latest steps, again and again."""
    columns, steps = derive(recorded()[name]), len(recorded()[name])
    for width in (3, 4, 9, 10, 20, 30, 60):
        named = [
            culprit_of(columns.blamed_rank[at], columns.blamed_s[at], columns.step_s[at])
            for at in (slice(first, first + width) for first in range(20, steps - width))
        ]
        assert np.mean([one is not None for one in named]) <= 0.01, width


@pytest.mark.parametrize("steps", [20, 60, 300])
@pytest.mark.parametrize("name", SLOW)
def test_ten_milliseconds_are_put_down_to_the_right_worker(name: str, steps: int) -> None:
    columns, rng = derive(recorded()[name]), np.random.default_rng(2)
    named = [drawn(columns, steps, rng) for _ in range(TRIES)]
    assert sum(one == 1 for one in named) >= 0.95 * TRIES


@pytest.mark.parametrize("kind", ["each step", "0 to 20 ms", "half of the steps"])
@pytest.mark.parametrize("name", ["linear-3", "mlp-2", "wide-2", "convolution-3"])
def test_delays_of_other_kinds_are_found_too(name: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    for rank in range(2):
        rows = recorded()[name]
        delay_s = {
            "each step": np.full(len(rows), 0.010),
            "0 to 20 ms": 0.020 * rng.random(len(rows)),
            "half of the steps": 0.020 * (rng.random(len(rows)) < 0.5),
        }[kind]
        columns = derive(late(rows, rank, delay_s))
        named = [drawn(columns, 60, rng) for _ in range(200)]
        least = 0.85 if kind.startswith("half") else 0.95
        assert sum(one == rank for one in named) >= least * len(named)


def test_one_long_pause_is_nobodys_habit() -> None:
    rows = make_rows(60, 2)
    rows["ready_s"][30, 1] += 2.0
    rows["exposed_s"][30, 0] += 2.0
    rows["end_s"][30] += 2.0
    found = blame(make_history(rows))
    assert found.total_s[0, 1] == pytest.approx(2.0, rel=1e-3)
    assert (found.most, found.worst) == (1, None)


@pytest.mark.parametrize("steps", [2, 5, BLOCKS - 1])
def test_of_a_few_steps_only_what_is_beyond_doubt_is_named(steps: int) -> None:
    for slow_s, named in ((0.005, None), (0.5, 1 if steps >= 3 else None)):
        rows = make_rows(steps, 3, slow_rank=1, slow_s=slow_s)
        assert blame(make_history(rows)).worst == named


def test_a_delay_that_begins_in_mid_run_is_named_within_three_seconds() -> None:
    """Steps of 0.5 ms for a while; then worker 1 takes 500 ms more."""
    fast = {"compute_s": 0.0003, "data_s": 0.0, "transfer_s": 0.0001, "other_s": 0.0001}
    recent, now = Recent(2), 0.0

    def take(rows: np.ndarray) -> None:
        nonlocal now
        rows = rows.copy()
        step_s = rows["end_s"] - rows["start_s"]
        moved = now + np.concatenate([[0.0], step_s[:, 0].cumsum()[:-1]]) - rows["start_s"][:, 0]
        for name in ("start_s", "end_s", "ready_s"):
            rows[name] += moved[:, None]
        now = float(rows["end_s"].max())
        columns = derive(rows)
        parts, whom = parts_of(columns), Blame.of(columns)
        for rank in range(2):
            recent.add(rank, rows[:, rank], parts[:, rank], whom[:, rank])

    take(make_rows(8000, 2, **fast))
    assert recent.straggler()[0] is None
    began = now
    while recent.straggler()[0] is None:
        take(make_rows(1, 2, slow_rank=1, slow_s=0.5, **fast))
        assert now - began < 2.1  # what comes on top: 0.1 s to the kernel, 0.2 s to the screen
    rank, caused_s, steps = recent.straggler()
    assert (rank, caused_s) == (1, pytest.approx(0.5, rel=1e-3))
    assert steps < 10
    take(make_rows(8000, 2, **fast))  # and it is forgiven as fast
    assert recent.straggler()[0] is None


def test_the_headline_the_bars_and_the_matrix_name_the_same_worker_and_the_same_steps() -> None:
    rows = np.concatenate([
        make_rows(200, 2, slow_rank=0, slow_s=0.0002),
        make_rows(60, 2, first=200, slow_rank=1, slow_s=0.05),
    ])  # fmt: skip
    history = make_history(rows)
    shot = history.snapshot(state="running")
    assert (shot.slow_rank, shot.slow_steps) == (1, 23)  # those of 1.5 s
    assert blame(history, shot.step - shot.slow_steps).worst == 1
    assert re.fullmatch(r"rank 1 .* 50 ms a step \(latest 23 steps\)", text.slow(shot))
    over = history.snapshot(state="finished")  # slow for a part of the run: named for it
    assert (over.slow_rank, blame(history).worst) == (1, 1)
    late_half = np.concatenate([
        make_rows(20, 2, slow_rank=0, slow_s=0.0002),
        make_rows(180, 2, first=20, slow_rank=1, slow_s=0.05),
    ])  # fmt: skip
    over = make_history(late_half).snapshot(state="finished")
    assert over.slow_rank == blame(make_history(late_half)).worst == 1
    assert text.slow(over).endswith("(all steps)")


def test_nobody_is_named_before_there_are_steps() -> None:
    assert RunHistory(range(2)).snapshot().slow_rank is None
    assert blame(RunHistory(range(2))).worst is None
