"""Made-up runs of known workers and links, for tests of predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from history_rows import NAN, make_history

from workbench.cookbook.recipe import Recipe
from workbench.history.analysis.summary import RunSummary, summarise
from workbench.shared.faults import parse_fault
from workbench.shared.plan import make_plan
from workbench.shared.record import RECORD

GRADIENTS_BYTES = 1e6


def made_run(
    own_s: np.ndarray,
    step_s: np.ndarray,
    strategy: str = "mirrored",
    *,
    sent_bytes: float = GRADIENTS_BYTES,
    samples: int = 8,
    faults: tuple[str, ...] = (),
    joined: bool = True,
    bubble: bool = False,
    name: str = "made",
    **options: Any,
) -> Any:
    """Return the data of a run that a prediction reads.

    Args:
        own_s: (steps, workers) seconds of computation.
        step_s: (steps,) or (steps, workers) seconds of the whole step.
        bubble: Whether all time except the computation was a pipeline's bubble.
    """
    steps, ranks = own_s.shape
    length = np.broadcast_to(step_s.T, (ranks, steps)).T
    rows = np.zeros((steps, ranks), RECORD)
    for key in ("wait_s", "staleness", "bubble_s", "ready_s"):
        rows[key] = NAN
    rows["waited_for"], rows["local_loss"] = -1, 1.0
    rows["step"], rows["rank"] = np.arange(steps)[:, None], np.arange(ranks)
    rows["samples"], rows["sent_bytes"] = samples, sent_bytes
    rows["end_s"] = 100.0 + np.cumsum(length, axis=0)
    rows["start_s"] = rows["end_s"] - length
    rows["compute_s"], rows["exposed_s"] = own_s, length - own_s
    rows["wait_s"] = own_s.max(axis=1, keepdims=True) - own_s if joined else 0.0
    if bubble:
        rows["bubble_s"] = length - own_s
    plan = make_plan(
        Recipe("x = 1"), strategy, workers=ranks, options=options,
        faults=tuple(parse_fault(text) for text in faults),
    )  # fmt: skip
    history = make_history(rows, joined=joined, data_parallel=plan.entry.data_parallel)
    return SimpleNamespace(name=name, plan=plan, history=history)


def ring_run(
    rng: np.random.Generator, message_s: float, byte_s: float, *, steps: int = 120,
    workers: int = 2, size_bytes: float = GRADIENTS_BYTES, **given: Any,
) -> Any:  # fmt: skip
    """Return a run of a ring all-reduce over a link with the given cost of a message."""
    own = draw_own(rng, steps, workers)
    each = 2 * (workers - 1) * (message_s + byte_s * size_bytes / workers)
    sent = 2 * (workers - 1) / workers * size_bytes
    return made_run(
        own, own.max(axis=1) + each, sent_bytes=sent, **{"allreduce": "ring", **given}
    )  # fmt: skip


def draw_own(rng: np.random.Generator, steps: int, workers: int) -> np.ndarray:
    """Return computation times with a long tail: 0.1 s and more."""
    return 0.1 + 0.02 * rng.gamma(1.0, 1.0, (steps, workers))


MESSAGE_S, BYTE_S = 0.001, 1e-9
"""Seconds of a message, and of a byte, of the links below."""
LINK = ("bandwidth=1GB/s", "latency=1ms")
BATCH = 64


def own_of(samples: float) -> float:
    """Return the factor of `draw_own` for this number of samples; a tenth is constant."""
    return 0.1 + 0.9 * samples / BATCH


def true_step_s(rng: np.random.Generator, workers: int, samples: float) -> float:
    """Return the mean step of a ring of so many workers over that link."""
    own = draw_own(rng, 4000, workers) * own_of(samples)
    sent_s = 2 * (workers - 1) * (MESSAGE_S + BYTE_S * GRADIENTS_BYTES / workers)
    return float(own.max(axis=1).mean() + sent_s)


def scaled_runs(
    counts: tuple[int, ...] = (2, 4), *, steps: int = 120, weak: bool = False, seed: int = 11,
    strategy: str = "mirrored", name: str = "", **options: Any,
) -> list[Any]:  # fmt: skip
    """Return one device and the given rings; all their values are known."""
    rng = np.random.default_rng(seed)
    found, ring = [], {"allreduce": "ring"} if strategy == "mirrored" else {}
    for workers in (1, *counts):
        samples = BATCH if weak else BATCH // workers
        own = draw_own(rng, steps, workers) * own_of(samples)
        sent_s = 2 * (workers - 1) * (MESSAGE_S + BYTE_S * GRADIENTS_BYTES / workers)
        alone = workers == 1
        found.append(
            made_run(
                own, own.max(axis=1) + sent_s, "one_device" if alone else strategy,
                sent_bytes=0.0 if alone else 2 * (workers - 1) / workers * GRADIENTS_BYTES,
                samples=samples, faults=() if alone else LINK,
                name="one_device" if alone else f"{name or strategy}-n{workers}",
                **({**ring, **options} if not alone else {}),
            )
        )  # fmt: skip
    return found


def summary_of(run: Any) -> RunSummary:
    """Return a made run in numbers, as a finished one."""
    workers = len(run.history.engines)
    for rank in range(workers):
        run.history.hear("run_started", {"rank": rank, "device": "cpu", "threads": 1})
    samples = int(run.history.together("samples")["samples"][0])
    return summarise(run.history, {
        "name": run.name, "strategy": run.plan.strategy, "state": "finished", "recipe": "abc",
        "batch_size": samples * workers, "options": run.plan.options, "seed": 0,
    })  # fmt: skip
