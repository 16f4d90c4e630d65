"""What a view is given to draw: plain numbers and arrays, copied out of a run's history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A decimated curve that keeps minima and maxima.

    Attributes:
        step: (points,) first step of each bucket.
        t_s: (points,) seconds since the run began.
        mean, low, high: (points,) mean, least and greatest value in the bucket.
    """

    step: Floats
    t_s: Floats
    mean: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Timeline:
    """The latest steps of every worker.

    Attributes:
        step: (steps,) step numbers.
        start_s: (steps, ranks) seconds since the run began.
        parts_s: (steps, ranks, 5) seconds in each of `metrics.PARTS`, in that order.
    """

    step: Floats
    start_s: Floats
    parts_s: Floats


@dataclass(frozen=True)
class Worker:
    """One worker's row.

    Attributes:
        engine: Permanent id of the engine.
        device: `cpu`, `cuda:0 NVIDIA H200`.
        samples_per_s: Its own samples over wall time.
        potential_per_s: Its samples over the time it was not waiting.
        share: Fractions of its time in each of `metrics.PARTS`, which add up to 1.
        wait_ms: Median sync wait of a step, milliseconds.
        memory_bytes: What it holds of model, gradients and optimizer; NaN where not measured.
    """

    rank: int
    engine: int
    device: str
    samples_per_s: float
    potential_per_s: float
    share: tuple[float, ...]
    wait_ms: float
    memory_bytes: float = float("nan")


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        state: One of `lifecycle.State`.
        step, total_steps: Steps complete on every rank; total is None while unknown.
        samples_per_s: Global throughput over the latest seconds (over the run when it is over).
        efficiency: Share of the workers' time spent in compute, 0..1.
        slow_rank: The worker that the others wait for, None when nobody stands out.
        slow_ms: Median wait it causes, milliseconds.
        dropped: Records lost on the way.
        plot_cpu: Share of one core that drawing takes in the kernel.
        blame_s: (ranks, ranks) seconds that row waited for column.
        extra: What the strategy adds (staleness, bubble): name -> Curve.
        evals: One mapping per evaluation: step, epoch, then the metrics.
        logged: Columns of `wb.log`: name -> Curve.
        notes: Things the user should know.
        parallelism: `data` or `model`: whether workers take shares of the batch.
        unmeasured: Names of `metrics.PARTS` that no row measured; they count 0 in shares and
            timelines and are to be shown as not measured.
    """

    name: str
    strategy: str
    framework: str
    state: str
    workers: tuple[Worker, ...]
    step: int
    total_steps: int | None
    elapsed_s: float
    epoch: int
    samples: int
    samples_per_s: float
    loss: float
    efficiency: float
    slow_rank: int | None
    slow_ms: float
    dropped: int
    loss_curve: Curve
    throughput_curve: Curve
    timeline: Timeline
    blame_s: Floats
    plot_cpu: float = float("nan")
    extra: dict[str, Curve] = field(default_factory=dict)
    logged: dict[str, Curve] = field(default_factory=dict)
    evals: list[dict[str, Any]] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    parallelism: str = "data"
    unmeasured: tuple[str, ...] = ()
