"""Snapshots and columns, made from a history's reduced structures.

A snapshot is the data that a view draws. For columns, this module has their names and computes each
from the stored rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..shared import record
from ..shared.events import OVER
from ..shared.record import CURVES, PARTS, potential
from .snapshot import Snapshot, Worker

if TYPE_CHECKING:
    from .events import Story
    from .recent import Recent
    from .reducer import Reducer
    from .totals import Envelope, Throughput, Totals

_COMPUTE, _WAIT = PARTS.index("compute_s"), PARTS.index("sync_wait_s")


@dataclass(frozen=True)
class Label:
    """Data of a run that its history does not have."""

    name: str
    strategy: str
    framework: str
    state: str
    dropped: int
    plot_cpu: float


@dataclass(frozen=True)
class Sources:
    """A history's reduced structures, not copied; all have bounded size."""

    engines: tuple[int, ...]
    joined: bool
    data_parallel: bool
    totals: Totals
    recent: Recent
    curves: dict[str, Envelope]
    throughput: Envelope | Throughput
    logged: dict[str, Envelope]
    story: Story
    origin_s: NDArray[np.float64]
    last_step: int
    last_loss: float


def take(of: Sources, label: Label, whole: tuple[int | None, float, int] | None = None) -> Snapshot:
    """Return a run at this moment; arrays are copies.

    Args:
        whole: The worker that delayed the others over the whole run (as `Recent.straggler`), for
            the snapshot of an ended run.
    """
    totals, started = of.totals, of.story.started
    over = label.state in OVER
    slow_rank, slow_s, slow_steps = of.recent.straggler() if whole is None else whole
    origin = float(of.origin_s.min()) if len(of.origin_s) else 0.0
    # A pipeline's bubble has a separate picture, and a worker's memory has a column.
    shown = {"memory_bytes"} | ({"bubble_s"} if of.story.split is not None else set())
    extra = {
        name: of.curves[name].curve(origin)
        for name in CURVES
        if name not in shown and not of.curves[name].empty
    }
    total = int(started.get("total_steps") or 0)
    return Snapshot(
        name=label.name,
        strategy=label.strategy,
        framework=label.framework,
        state=label.state,
        workers=workers(of),
        step=totals.steps,
        total_steps=total or None,
        least_step=least_step(of),
        done=done(of, total, shared=label.framework == "tensorflow"),
        elapsed_s=totals.active_s,
        epoch=of.story.epoch,
        samples=totals.samples,
        samples_per_s=totals.samples_per_s if over else of.recent.samples_per_s(),
        loss=of.last_loss,
        compute_share=compute_share(totals),
        slow_rank=slow_rank,
        slow_ms=slow_s * 1e3,
        slow_steps=slow_steps,
        dropped=label.dropped,
        loss_curve=of.curves["loss"].curve(origin),
        throughput_curve=of.throughput.curve(origin),
        timeline=of.recent.timeline(of.origin_s, away=of.story.away),
        blame_s=totals.blame_s.copy(),
        plot_cpu=label.plot_cpu,
        extra=extra,
        logged={
            name: curve.curve(origin) for name, curve in of.logged.items() if name not in shown
        },
        evals=[dict(one) for one in of.story.evals],
        changes=tuple(dict(one) for one in of.story.changes),
        notes=tuple(of.story.notes),
        split=of.story.split,
        parallelism="data" if of.data_parallel else "model",
        unmeasured=unmeasured_parts(totals),
    )


def least_step(of: Sources) -> int:
    """Return the steps of the slowest worker that still takes part."""
    rows = np.delete(of.totals.rows, list(of.story.away))
    return of.totals.steps if of.joined or not len(rows) else int(rows.min())


def done(of: Sources, total: int, *, shared: bool) -> float | None:
    """Return the part of the run that is done, 0..1; None without a known end.

    A run in which no worker waits for another ends with the slowest worker.

    Args:
        shared: Asynchronous workers take their steps from one queue, so a fast one takes more. With
            steps of their own, they take over the steps of a worker that died.
    """
    if not total:
        return None
    rows = of.totals.rows
    if not of.joined and (shared or of.story.away):
        return min(1.0, int(rows.sum()) / (total * len(rows)))
    return min(1.0, least_step(of) / total)


def workers(of: Sources) -> tuple[Worker, ...]:
    """Return one row per worker, over the whole run (the median wait: over the latest steps)."""
    totals = of.totals
    wait_s, share, train_s = of.recent.median_wait_s(), totals.share, totals.train_s
    away = of.story.away
    # Waiting for data is neither work nor bubble: the schedule's ideal has only these two.
    piped_s = totals.parts_s[:, _COMPUTE] + totals.bubble_s
    bubble = totals.bubble_s / np.where(piped_s > 0, piped_s, np.nan)
    return tuple(
        Worker(
            rank=rank,
            engine=engine,
            device=of.story.devices.get(rank, ""),
            samples_per_s=float(totals.rank_samples[rank]) / train_s if train_s else float("nan"),
            potential_per_s=potential(
                totals.rank_samples[rank], totals.step_s[rank], totals.parts_s[rank, _WAIT]
            ),
            share=tuple(float(part) for part in share[rank]),
            wait_ms=float(wait_s[rank]) * 1e3,
            bubble=float(bubble[rank]),
            memory_bytes=of.story.memory_bytes.get(rank, float("nan")),
            host=of.story.hosts.get(rank, ""),
            away=rank in away,
        )
        for rank, engine in enumerate(of.engines)
    )


def compute_share(totals: Totals) -> float:
    """Return the share of the workers' step time spent in compute, 0..1; NaN before any step."""
    whole = float(totals.step_s.sum())
    return float(totals.parts_s[:, _COMPUTE].sum()) / whole if whole > 0 else float("nan")


def unmeasured_parts(totals: Totals) -> tuple[str, ...]:
    """Return the names of the parts that no row measured."""
    if not totals.rows.any():
        return ()
    return tuple(name for name, seen in zip(PARTS, totals.measured.sum(axis=0), strict=True)
                 if not seen)  # fmt: skip


_FIRST = ("rank", "step", "start_s", "step_s", *PARTS, "samples", "loss", "local_loss")
COLUMNS = (
    *_FIRST, *(name for name in record.COLUMNS if name not in _FIRST), "blamed_rank", "engine",
)  # fmt: skip
"""Columns of every history; `wb.log` adds more. Rare columns exist only if they were measured."""

_WHOLE = ("rank", "step", "samples", "blamed_rank", "engine")


def column(name: str, of: Reducer, engines: Sequence[int]) -> NDArray[Any]:
    """Return a column as a fresh array of shape (rows,), in the order of the stored rows.

    Args:
        engines: Engine ids by rank.
    """
    table = of.table
    if name in of.logged:
        step, rank = table.column("step"), table.column("rank")
        return of.logged[name].column(step.astype(np.int64), rank.astype(np.int64))
    if name == "engine":
        return np.take(np.asarray(engines, np.int64), table.column("rank"))
    if name == "other_s":
        named = sum(np.nan_to_num(column(part, of, engines)) for part in PARTS[:-1])
        return np.asarray(column("step_s", of, engines) - named)
    values = table.column(name)
    if name == "start_s":
        return np.asarray(values - of.origin_s()[table.column("rank")])
    return np.asarray(values.astype(np.int64 if name in _WHOLE else np.float64))


def empty(names: Iterable[str], of: Reducer, engines: Sequence[int]) -> list[str]:
    """Return the columns without a value in any row."""
    return [
        name
        for name in names
        if name not in _WHOLE and not np.isfinite(column(name, of, engines)).any()
    ]
