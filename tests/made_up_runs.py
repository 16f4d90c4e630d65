"""Made-up runs of many kinds, for tests of comparisons and of their picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from history_rows import NAN, make_history, make_rows

from workbench.history.analysis.comparison import Comparison, compare
from workbench.history.analysis.summary import RunSummary, summarise

MIB = float(1 << 20)


def make_run(
    name: str,
    ranks: int = 1,
    *,
    strategy: str | None = None,
    steps: int = 60,
    seed: int = 0,
    state: str = "finished",
    held_bytes: float = 0.0,
    evals: dict[str, float] | None = None,
    late: float | None = None,
    bubble_s: float | None = None,
    **timing: float,
) -> RunSummary:
    """Return a run's summary: `late` makes it asynchronous, `bubble_s` a pipeline."""
    rng = np.random.default_rng(seed)
    rows = make_rows(steps, ranks, **{"samples": 64 // ranks, **timing})  # type: ignore[arg-type]
    fade = np.exp(-np.arange(steps) / 30)[:, None]
    rows["local_loss"] = 2.3 * fade + 0.1 + 0.02 * rng.random((steps, ranks))
    if late is not None:
        rows["staleness"], rows["ready_s"] = rng.poisson(late, (steps, ranks)), NAN
        rows["wait_s"] = 0
    if bubble_s is not None:
        rows["bubble_s"] = bubble_s
        rows["exposed_s"] = bubble_s
        rows["wait_s"] = 0
    history = make_history(rows, joined=late is None, data_parallel=bubble_s is None)
    for rank in range(ranks):
        history.hear("run_started", {"rank": rank, "device": "cpu", "threads": 1})
        if held_bytes:
            values = {"memory_bytes": held_bytes * (1 + rank / 10)}
            history.hear("log", {"rank": rank, "step": 0, "values": values})
    if evals and steps:
        history.hear("eval", {"step": steps, "epoch": 0, "values": evals})
    meta = {"name": name, "strategy": strategy or name, "state": state, "recipe": "abc",
            "seed": seed, "batch_size": 64}  # fmt: skip
    return summarise(history, meta)


def eight(steps: int = 60, seeds: int = 1, stem: str = "") -> list[RunSummary]:
    """Eight plans, some asynchronous, one a pipeline, each under so many seeds."""
    kinds: dict[str, dict[str, Any]] = {
        "one_device": {"compute_s": 0.02, "transfer_s": 0.0},
        "mirrored": {"ranks": 4, "transfer_s": 0.003},
        "central_storage": {"ranks": 4, "transfer_s": 0.006},
        "parameter_server": {"ranks": 4, "late": 3.0},
        "sharded": {"ranks": 4, "slow_rank": 1, "slow_s": 0.01},
        "model_split": {"ranks": 4, "bubble_s": 0.004, "transfer_s": 0.004, "compute_s": 0.006},
        "local_sgd": {"ranks": 4, "transfer_s": 0.0005},
        "gossip": {"ranks": 4, "transfer_s": 0.001},
    }
    return [
        make_run(
            f"{stem}{kind}-seed{seed}" if seeds > 1 else f"{stem}{kind}", strategy=kind,
            steps=steps, seed=seed, held_bytes=3 * MIB,
            evals={"accuracy": 0.9 + 0.001 * seed, "loss": 0.31, "top5": 0.97}, **given,
        )
        for kind, given in kinds.items()
        for seed in range(seeds)
    ]  # fmt: skip


def partial() -> list[RunSummary]:
    """A complete run, and runs that were stopped, failed, or never made a step."""
    return [
        make_run("one_device", compute_s=0.02, transfer_s=0.0, evals={"accuracy": 0.9}),
        make_run("halted", 2, strategy="mirrored", steps=7, state="stopped"),
        make_run("single", 2, strategy="mirrored", steps=1, state="failed", seed=1),
        make_run("nothing", 2, strategy="mirrored", steps=0, state="failed", seed=2),
        make_run("late", 2, strategy="parameter_server", steps=3, state="failed", late=2.0),
        make_run("piped", 2, strategy="model_split", steps=2, state="stopped", bubble_s=0.003),
    ]


CASES: dict[str, Any] = {
    "two": lambda: eight()[:2],
    "one": lambda: eight()[1:2],
    "eight": eight,
    "seeds": lambda: eight(seeds=3)[:9],
    "long names": lambda: [
        *eight(stem="a_rather_long_name_for_a_run_of_")[:3],
        make_run("costs $5 or $6 <b>&amp;</b> | `x` *y*", 2, strategy="mirrored", seed=4),
    ],
    "partial": partial,
    "nothing at all": lambda: partial()[3:4],
    "without a baseline": lambda: eight(stem="some_long_name_of_")[1:4],
}
"""What a picture must be readable for, by name."""


def compared(case: str) -> Comparison:
    """Return the comparison of one of `CASES`."""
    return compare(CASES[case]())
