"""Snapshots of runs that never happened, for tests of the views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from workbench.history.snapshot import Curve, Snapshot, Split, Timeline, Worker


def curve(step: np.ndarray, values: np.ndarray, step_s: float, spread: float = 0.0) -> Curve:
    noise = spread * np.abs(values) * (0.6 + 0.4 * np.sin(step * 1.7))
    return Curve(step.astype(float), step * step_s, values, values - noise, values + noise)


def fake_snapshot(
    workers: int = 4,
    step: int = 120,
    *,
    total: int | None = 400,
    state: str = "running",
    slow: int | None = 1,
    strategy: str = "mirrored",
    name: str = "base",
    extra: bool = False,
    logged: bool = False,
    notes: tuple[str, ...] = (),
    dropped: int = 0,
    device: str = "cpu",
) -> Snapshot:
    """Return a run of `workers` in which rank `slow` computes 48 ms longer than the others."""
    rng = np.random.default_rng(7)
    many, longest = max(step, 1), 2000
    base = rng.uniform(0.034, 0.040, (longest, workers))
    if slow is not None and workers > 1:
        base[:, slow % workers] += 0.048
    wait = base.max(axis=1, keepdims=True) - base
    parts = np.empty((longest, workers, 5))
    parts[:, :, 0] = rng.uniform(0.003, 0.006, (longest, 1))
    parts[:, :, 1], parts[:, :, 2] = base, wait
    parts[:, :, 3] = 0.006 if workers > 1 else 0.0
    parts[:, :, 4] = 0.0015
    parts, wait = parts[:many], wait[:many]  # a longer run has the same beginning
    length = parts.sum(axis=2)
    start = np.cumsum(length, axis=0) - length
    step_s = 0.1
    at = np.arange(0, many)
    loss = 2.3 * np.exp(-at / 90.0) + 0.15 + 0.05 * np.sin(at * 0.9) * np.exp(-at / 150)
    rate = 256 / length[:, 0] * (1 + 0.03 * np.sin(at / 7.0))
    share = parts[:, :, :].sum(axis=0) / length.sum(axis=0)[:, None]
    rows = tuple(
        Worker(
            rank=r,
            engine=r,
            device=device if device == "cpu" else f"{device}:{r}",
            samples_per_s=256 / workers / step_s,
            potential_per_s=256 / workers / float((length - wait)[:, r].mean()),
            share=tuple(float(x) for x in share[r]),
            wait_ms=float(np.median(wait[:, r]) * 1e3),
        )
        for r in range(workers)
    )
    last = slice(max(0, many - 40), many)
    evals = [
        {"step": s, "epoch": i + 1, "accuracy": 0.95 - 0.5 * np.exp(-s / 60), "loss": 0.2 + 1 / s}
        for i, s in enumerate(range(50, many, 50))
    ]
    more = {"staleness": curve(at, 2 + np.sin(at / 9.0), step_s, 0.4)} if extra else {}
    columns = {
        "lr": curve(at, 1e-3 * 0.99**at, step_s),
        "grad norm": curve(at, 3 / (1 + at / 30), step_s),
    }
    blame = np.zeros((workers, workers))
    if slow is not None and workers > 1:
        blame[:, slow % workers] = wait.sum(axis=0)
    return Snapshot(
        name=name,
        strategy=strategy,
        framework="torch",
        state=state,
        workers=rows,
        step=step,
        total_steps=total,
        least_step=step,
        done=None if total is None else min(1.0, step / total),
        elapsed_s=float(length[:, 0].sum()),
        epoch=step // 50,
        samples=256 * step,
        samples_per_s=float(rate[-1]),
        loss=float(loss[-1]),
        compute_share=float(share[:, 1].mean()),
        slow_rank=(slow % workers) if slow is not None and workers > 1 else None,
        slow_ms=48.0,
        dropped=dropped,
        loss_curve=curve(at, loss, step_s, 0.12),
        throughput_curve=curve(at, rate, step_s, 0.03),
        timeline=Timeline(at[last].astype(float), start[last], parts[last]),
        blame_s=blame,
        plot_cpu=0.004,
        extra=more,
        logged=columns if logged else {},
        evals=evals,
        notes=notes,
    )


def fake_pipeline(
    workers: int = 3, step: int = 120, *, slow: int | None = 1, **more: Any
) -> Snapshot:
    """Return a run of a pipeline of `workers` stages of one layer each; 8 microbatches."""
    shot = fake_snapshot(workers, step, slow=slow, strategy="model_split", **more)
    ideal = (workers - 1) / (8 + workers - 1)
    rows = [
        {
            "stage": rank, "rank": rank, "layers": f"layers.{2 * rank} to layers.{2 * rank + 1}",
            "parameters": 262_656 * (rank + 1), "microbatch_s": 0.0042,
            "handed_bytes": 65_536 if rank < workers - 1 else 0,
        }
        for rank in range(workers)
    ]  # fmt: skip
    split = Split.of(
        {
            "stages": rows, "schedule": "1f1b", "microbatches": 8, "microbatch_samples": 32,
            "pipelines": 1, "ideal_bubble": ideal,
        }
    )  # fmt: skip
    staged = tuple(
        replace(
            w, bubble=ideal - 0.05 if w.rank == slow else ideal + 0.04 + 0.1 * (slow is not None)
        )
        for w in shot.workers
    )
    return replace(shot, split=split, workers=staged)


def empty_snapshot(workers: int = 2, state: str = "starting") -> Snapshot:
    """Return a run that has no step yet."""
    none = np.zeros(0)
    nothing = Curve(none, none, none, none, none)
    nan = float("nan")
    return Snapshot(
        name="base",
        strategy="mirrored",
        framework="torch",
        state=state,
        workers=tuple(Worker(r, r, "cpu", nan, nan, (nan,) * 5, nan) for r in range(workers)),
        step=0,
        total_steps=None,
        least_step=0,
        done=None,
        elapsed_s=0.0,
        epoch=0,
        samples=0,
        samples_per_s=nan,
        loss=nan,
        compute_share=nan,
        slow_rank=None,
        slow_ms=nan,
        dropped=0,
        loss_curve=nothing,
        throughput_curve=nothing,
        timeline=Timeline(none, np.zeros((0, workers)), np.zeros((0, workers, 5))),
        blame_s=np.zeros((workers, workers)),
    )
