"""The numbers of one finished run, for tables and comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...shared.events import Topic
from ...shared.record import PARTS
from ..totals import Staleness
from .steady import Rate, Steady, rate_of, steady_of

if TYPE_CHECKING:
    from ..snapshot import Split, Worker
    from ..store import RunHistory

Floats = NDArray[np.float64]
_NAN = float("nan")
_COMPUTE = PARTS.index("compute_s")
_NO_RATE = Rate(_NAN, _NAN, _NAN, 0, 0, _NAN, (_NAN,) * len(PARTS))


@dataclass(frozen=True)
class LossCurve:
    """A run's loss along three axes; each array is (points,).

    Attributes:
        t_s: Seconds since the first step began, without pauses.
        samples: Samples seen by then (of all workers).
        low, high: Least and greatest loss within the point's steps.
    """

    step: Floats
    t_s: Floats
    samples: Floats
    loss: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class RunSummary:
    """One run's key figures. Times are in seconds; NaN means that a value was not measured.

    Attributes:
        state: `finished`, `stopped` or `failed`.
        recipe: Digest of the recipe; runs of one recipe can be compared.
        samples_per_s: Samples per second of all workers, over the steps after warm-up (`steady`).
        wall_s: From the first step's start to the last step's end, without pauses.
        low_per_s, high_per_s: Ends of the 95 % interval of that rate; NaN if steps are too few.
        warm_up: Steps left out at the beginning.
        all_per_s: Samples per second over all steps, the first ones included.
        step_s: Mean seconds of a worker's step after warm-up.
        parts_s: (5,) seconds of that step in each of `record.PARTS`.
        share: (5,) fractions of that step, which add up to 1.
        unmeasured: Names of the parts that were not measured; they count as 0 above.
        final_loss: Global loss of the last complete step.
        evals: Metrics of the last evaluation.
        sent_bytes: Bytes sent by all workers.
        batch_size: The global batch: as asked for, otherwise what a typical step had.
        first_step: Number of its first step, from 0. It is larger if an earlier run was continued.
        trained_before: Whether the model had been trained by an earlier run.
        diverged: Whether its loss became NaN or infinite.
        own_norms: Whether each worker's BatchNorm normalised over its own share of the batch.
        damaged: Data that were missing or changed in the folder it was loaded from.
        options: The strategy's options.
        faults: Faults that were injected, as typed.
        workers_table: One row per worker, over the whole run.
        split: The cut of a pipeline's model; None for other strategies.
        servers: For each server its bytes: parameters, optimizer, gradients.
        bubble: Share of that step in which a pipeline's workers were idle; NaN for others.
        staleness: Staleness of the pushes of asynchronous workers; None if there are none.
        steady: The typical step after warm-up; None if the run was too short.
        threads: CPU threads of a worker; None if not known.
        shares_batch: Whether workers take shares of the batch.
        joined: Whether workers take each step together.
        color: Number of the run's colour; None if it has no colour.
        epoch_samples: Samples of an epoch; None where not known.
        changes: One mapping for each time that workers left or joined, as in `run.events`.
    """

    name: str
    strategy: str
    framework: str
    workers: int
    state: str
    recipe: str
    steps: int
    samples: int
    samples_per_s: float
    wall_s: float
    step_s: float
    parts_s: tuple[float, ...]
    share: tuple[float, ...]
    compute_share: float
    final_loss: float
    sent_bytes: float
    curve: LossCurve
    low_per_s: float = float("nan")
    high_per_s: float = float("nan")
    warm_up: int = 0
    all_per_s: float = float("nan")
    batch_size: int | None = None
    first_step: int = 0
    seed: int | None = None
    total_steps: int | None = None
    evals: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    trained_before: bool = False
    diverged: bool = False
    own_norms: bool = False
    damaged: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    workers_table: tuple[Worker, ...] = ()
    split: Split | None = None
    servers: tuple[dict[str, Any], ...] = ()
    stride: int = 1
    bubble: float = float("nan")
    staleness: Staleness | None = None
    steady: Steady | None = None
    threads: int | None = None
    shares_batch: bool = True
    joined: bool = True
    color: int | None = None
    epoch_samples: int | None = None
    changes: tuple[dict[str, Any], ...] = ()

    @property
    def sent_step_bytes(self) -> float:
        """Bytes that all workers together send in a step; NaN where not measured."""
        return self.sent_bytes / self.steps if self.steps else float("nan")

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Bytes of model, gradients and optimizer state of each worker, if measured."""
        held = (worker.memory_bytes for worker in self.workers_table)
        return tuple(one for one in held if np.isfinite(one))

    @property
    def plan_name(self) -> str:
        """The name without the seed that `Plan.with_seed` adds: runs over seeds share this name."""
        return self.name.removesuffix(f"-seed{self.seed}") or self.strategy


def summarise(history: RunHistory, meta: Mapping[str, Any]) -> RunSummary:
    """Return the summary of a run.

    Args:
        history: Its history, complete.
        meta: Facts that are not in the history, as in `run.json`: `name`, `strategy`, `framework`,
            `state`, `recipe`, `seed`, `batch_size`, `options`, `faults`, `trained_before`; all
            may be missing.
    """
    snapshot = history.snapshot(state=str(meta.get("state", "finished")))
    totals, started = history.totals, history.story.started
    counted = snapshot.throughput_curve
    rate = rate_of(history) or _NO_RATE
    parts, whole = rate.parts_s, sum(rate.parts_s)
    waits_s = median_wait_s(history)
    sent = totals.sent_bytes[np.isfinite(totals.sent_bytes)]
    batch_size = meta.get("batch_size") or started.get("batch_size")
    evals = history.evals
    return RunSummary(
        name=str(meta.get("name", "")),
        strategy=str(meta.get("strategy", "")),
        framework=str(meta.get("framework", "torch")),
        workers=len(history.engines),
        state=snapshot.state,
        recipe=str(meta.get("recipe", "")),
        steps=totals.steps,
        samples=totals.samples,
        samples_per_s=rate.mean,
        wall_s=totals.active_s if totals.rows.any() else float("nan"),
        step_s=rate.step_s,
        parts_s=parts,
        share=tuple(part / whole if whole > 0 else float("nan") for part in parts),
        compute_share=parts[_COMPUTE] / whole if whole > 0 else float("nan"),
        final_loss=snapshot.loss,
        sent_bytes=float(sent.sum()) if len(sent) else float("nan"),
        curve=_loss_curve(history),
        low_per_s=rate.low,
        high_per_s=rate.high,
        warm_up=rate.warm_up,
        all_per_s=totals.samples_per_s,
        batch_size=_batch(int(batch_size) if batch_size else None, _recorded_batch(history)),
        first_step=int(counted.step[0]) if len(counted) else 0,
        seed=meta.get("seed"),
        total_steps=snapshot.total_steps,
        evals=dict(evals[-1]) if evals else {},
        options=dict(meta.get("options") or {}),
        faults=tuple(meta.get("faults") or ()),
        trained_before=bool(meta.get("trained_before", False)),
        diverged=Topic.LOSS_LOST in history.story.facts,
        own_norms=Topic.OWN_NORMS in history.story.facts,
        damaged=tuple(history.story.facts.get(Topic.DAMAGED, ())),
        unmeasured=snapshot.unmeasured if totals.rows.any() else PARTS,
        notes=snapshot.notes,
        workers_table=tuple(
            _with_wait(worker, wait_s)
            for worker, wait_s in zip(snapshot.workers, waits_s, strict=True)
        ),
        split=snapshot.split,
        servers=tuple(dict(held) for _, held in sorted(history.story.servers.items())),
        stride=history.stride,
        bubble=rate.bubble,
        staleness=Staleness.of(history["staleness"]),
        steady=steady_of(history),
        threads=int(started["threads"]) if started.get("threads") else None,
        shares_batch=history.data_parallel,
        joined=history.joined,
        epoch_samples=int(started["epoch_samples"]) if started.get("epoch_samples") else None,
        changes=snapshot.changes,
    )


def _batch(told: int | None, recorded: int | None) -> int | None:
    """Return the samples of an update: several batches of the loader if a loop accumulates them."""
    if told is None or (recorded is not None and recorded > told and recorded % told == 0):
        return recorded
    return told


def _recorded_batch(history: RunHistory) -> int | None:
    """Return the samples of all workers in a typical step; None if none were recorded."""
    columns = history.together("rank", "samples")
    rank, samples = columns["rank"], columns["samples"]
    each = [float(np.median(samples[rank == r])) for r in np.unique(rank)]
    if not each:
        return None
    whole = sum(each) if history.data_parallel else max(each)
    return round(whole) or None


def median_wait_s(history: RunHistory) -> list[float]:
    """Return each worker's median sync wait over the stored rows, seconds; NaN: not measured."""
    rank, wait = history["rank"], history["sync_wait_s"]
    known = np.isfinite(wait)
    found = []
    for r in range(len(history.engines)):
        own = wait[known & (rank == r)]
        found.append(float(np.median(own)) if len(own) else float("nan"))
    return found


def _loss_curve(history: RunHistory) -> LossCurve:
    curve, totals = history.snapshot().loss_curve, history.totals
    # All steps have the same batch, except an epoch's last, so samples grow evenly with steps.
    per_step = totals.samples / totals.steps if totals.steps else 0.0
    first = curve.step[0] if len(curve) else 0.0
    return LossCurve(
        curve.step,
        totals.without_pauses(curve.t_s + history.origin_s) - history.origin_s,
        (curve.step - first + 1) * per_step,
        curve.mean,
        curve.low,
        curve.high,
    )


def _with_wait(worker: Worker, wait_s: float) -> Worker:
    return replace(worker, wait_ms=wait_s * 1e3)
