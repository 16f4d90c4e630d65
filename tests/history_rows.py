"""Rows of made-up runs, with known causes, for tests of metrics and history."""

from __future__ import annotations

import numpy as np

from workbench.history.analysis.summary import RunSummary, summarise
from workbench.history.store import RunHistory
from workbench.shared.record import RECORD

NAN = float("nan")


def make_rows(
    steps: int,
    ranks: int,
    *,
    first: int = 0,
    compute_s: float = 0.010,
    slow_rank: int | None = None,
    slow_s: float = 0.0,
    data_s: float = 0.002,
    transfer_s: float = 0.003,
    other_s: float = 0.001,
    samples: int = 8,
) -> np.ndarray:
    """Return RECORD rows of shape (steps, ranks): lockstep training with one slow rank."""
    rows = np.zeros((steps, ranks), RECORD)
    for name in ("wait_s", "staleness", "bubble_s"):
        rows[name] = NAN
    rows["waited_for"] = -1
    own = np.full(ranks, compute_s)
    if slow_rank is not None:
        own[slow_rank] += slow_s
    step_s = data_s + own.max() + transfer_s + other_s
    index = first + np.arange(steps)[:, None]
    rows["step"], rows["rank"], rows["samples"] = index, np.arange(ranks), samples
    rows["start_s"] = 100.0 + index * step_s
    rows["end_s"] = rows["start_s"] + step_s
    rows["ready_s"] = rows["start_s"] + data_s + own
    rows["data_wait_s"], rows["compute_s"] = data_s, own
    rows["exposed_s"] = own.max() - own + transfer_s
    rows["local_loss"] = 2.0 / (1.0 + index) + 0.1 * np.arange(ranks)
    rows["sent_bytes"] = 1000.0 if ranks > 1 else 0.0
    return rows


def make_history(rows: np.ndarray, **options: object) -> RunHistory:
    """Return a history of rows of shape (steps, ranks), appended rank by rank."""
    history = RunHistory(range(rows.shape[1]), **options)  # type: ignore[arg-type]
    for rank in range(rows.shape[1]):
        history.append(rows[:, rank])
    return history


def make_summary(name: str, *, ranks: int = 1, steps: int = 20, **given: object) -> RunSummary:
    """Return the summary of a made-up run; `meta_*` goes to its description, the rest to rows."""
    meta = {key[5:]: given.pop(key) for key in list(given) if key.startswith("meta_")}
    rows = make_rows(steps, ranks, **{"samples": 32 // ranks, **given})  # type: ignore[arg-type]
    history = make_history(rows)
    accuracy = meta.pop("accuracy", None)
    if accuracy is not None:
        history.hear("eval", {"step": steps, "epoch": 0, "values": {"accuracy": accuracy}})
    base = {"name": name, "strategy": name, "framework": "torch", "state": "finished",
            "recipe": "abc", "seed": 0, "batch_size": 32}  # fmt: skip
    return summarise(history, {**base, **meta})
