"""Made-up runs with several numbers of workers, for tests of scaling and its picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from history_rows import make_history, make_rows

from workbench.history.analysis.summary import RunSummary, summarise


def run_of(
    workers: int,
    step_s: float,
    *,
    strategy: str = "mirrored",
    batch: int = 64,
    name: str = "",
    steps: int = 60,
    state: str = "finished",
    seed: int = 0,
    noise: float = 0.0,
    **more: Any,
) -> RunSummary:
    """Return a run with this step time; with several workers, 10 ms of it are communication."""
    sent_s = 0.01 if workers > 1 else 0.0
    rows = make_rows(
        steps, workers, compute_s=step_s - sent_s, transfer_s=sent_s, data_s=0.0, other_s=0.0,
        samples=batch // workers,
    )  # fmt: skip
    if noise and steps:
        rng = np.random.default_rng([seed, workers])
        longer = np.cumsum(step_s * noise * rng.standard_normal(steps))[:, None]
        for column in ("end_s", "ready_s"):
            rows[column] += longer
        rows["start_s"][1:] += longer[:-1]
    history = make_history(rows)
    for rank in range(workers):
        history.hear("run_started", {"rank": rank, "device": "cpu", "threads": 1, **more})
    meta = {"name": name or f"{strategy}-n{workers}", "strategy": strategy, "state": state,
            "recipe": "abc", "seed": seed, "batch_size": batch}  # fmt: skip
    return summarise(history, meta)


def amdahl(workers: int, serial: float = 0.2, whole_s: float = 0.1) -> float:
    return whole_s * (serial + (1 - serial) / workers)


def strong(counts: tuple[int, ...] = (2, 4, 8), **given: Any) -> list[RunSummary]:
    """One device, and mirrored that follows Amdahl's law with a serial share of 20 %."""
    return [
        run_of(1, 0.1, strategy="one_device"),
        *(run_of(count, amdahl(count), **given) for count in counts),
    ]
