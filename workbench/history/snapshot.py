"""The data that a view draws: plain numbers and arrays, copied from a run's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A curve with fewer points, which keeps minima and maxima.

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
        start_s: (steps, ranks) seconds since the run began, without pauses (`recent.closed`).
        parts_s: (steps, ranks, 5) seconds in each of `record.PARTS`, in that order.
        cuts: Numbers of the steps before which time was cut out.
    """

    step: Floats
    start_s: Floats
    parts_s: Floats
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Worker:
    """One worker's row.

    Attributes:
        engine: Permanent id of the engine.
        device: `cpu`, `cuda:0 NVIDIA H200`.
        samples_per_s: Its own samples over wall time.
        potential_per_s: Its samples over the time it was not waiting.
        share: Fractions of its time in each of `record.PARTS`, which add up to 1.
        wait_ms: Median sync wait of a step, milliseconds.
        bubble: Idle share of its work and bubble, 0..1, without waits for data; NaN outside
            pipelines.
        memory_bytes: Its memory for model, gradients and optimizer state; NaN if not measured.
        host: Its host's name; empty on the notebook's machine.
        away: Whether it does not take part: it died or left and has not been replaced yet.
    """

    rank: int
    engine: int
    device: str
    samples_per_s: float
    potential_per_s: float
    share: tuple[float, ...]
    wait_ms: float
    bubble: float = float("nan")
    memory_bytes: float = float("nan")
    host: str = ""
    away: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        ranks: The workers with this stage: one worker of each pipeline.
        layers: The first and the last of its layers.
        parameters: Number of its parameters.
        microbatch_s: Forward and backward of a microbatch, as measured before the cut.
        handed_bytes: The bytes it sends on for a microbatch.
    """

    number: int
    ranks: tuple[int, ...]
    layers: str
    parameters: int
    microbatch_s: float
    handed_bytes: int


@dataclass(frozen=True)
class Split:
    """How a model was cut into the stages of a pipeline.

    Attributes:
        microbatch_samples: Samples of a microbatch.
        pipelines: Number of parallel pipelines.
        ideal_bubble: The schedule's share of idle time with equal stages, 0..1.
    """

    stages: tuple[Stage, ...]
    schedule: str
    microbatches: int
    microbatch_samples: int
    pipelines: int
    ideal_bubble: float

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Split:
        """Return the content of a `split` event; missing values are NaN, missing counts are 0."""
        rows, pipelines = fields["stages"], int(fields.get("pipelines", 1))
        workers = 1 + max(int(row["rank"]) for row in rows)
        stages = (
            Stage(
                int(row["stage"]),
                tuple(int(row["rank"]) + workers * other for other in range(pipelines)),
                str(row["layers"]),
                int(row["parameters"]),
                float("nan" if row["microbatch_s"] is None else row["microbatch_s"]),
                int(row["handed_bytes"] or 0),
            )
            for row in rows
        )
        return Split(
            tuple(stages), str(fields["schedule"]), int(fields["microbatches"]),
            int(fields.get("microbatch_samples", 0)), pipelines, float(fields["ideal_bubble"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Staffing:
    """The number of workers of a run whose strategy can change it.

    Attributes:
        target: The target number during a change.
        most: The largest possible number; None if unknown.
        why_not: Why the number cannot change at the moment, in words; empty if it can.
    """

    workers: int
    target: int | None = None
    most: int | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        state: One of `events.State`.
        step, total_steps: Steps complete on every rank; total is None while unknown. If workers do
            not take steps together: steps of the fastest worker.
        least_step: Steps of the slowest worker; `step` if workers take steps together.
        done: The part of the run that is done, 0..1; None while its end is unknown.
        elapsed_s: From the first step's start to the latest one's end, without pauses.
        samples_per_s: Global throughput over the latest seconds (over the run when it is over).
        compute_share: Share of the workers' time spent in compute, 0..1.
        color: Number of the run's colour (`views.theme.run_color`).
        slow_rank: The worker that the others wait for; None if no worker stands out.
        slow_ms: Median wait it causes, milliseconds.
        slow_steps: The number of latest steps with this wait; for an ended run, of all steps.
        dropped: Number of lost records.
        plot_cpu: Share of one core that drawing takes in the kernel.
        blame_s: (ranks, ranks) seconds that row waited for column.
        extra: Curves of the strategy (staleness, bubble): name -> Curve.
        evals: One mapping per evaluation: step, epoch, then the metrics.
        logged: Columns of `wb.log`: name -> Curve.
        changes: One mapping for each time that workers left or joined, as in `run.events`.
        notes: Notes for the user.
        split: How a pipeline's model was cut; None elsewhere.
        parallelism: `data` or `model`: whether workers take shares of the batch.
        banner: The current reason for a delay of the run; empty if there is none or the run is
            over. For a followed run that failed: the reason.
        staffing: The current and possible numbers of workers; None if fixed or if the run is over.
        place: Where a followed run trains: `job @ node-1`; empty for others.
        unmeasured: Names of `record.PARTS` that no row measured; they count 0 in shares and
            timelines and must be shown as not measured.
    """

    name: str
    strategy: str
    framework: str
    state: str
    workers: tuple[Worker, ...]
    step: int
    total_steps: int | None
    least_step: int
    done: float | None
    elapsed_s: float
    epoch: int
    samples: int
    samples_per_s: float
    loss: float
    compute_share: float
    slow_rank: int | None
    slow_ms: float
    dropped: int
    loss_curve: Curve
    throughput_curve: Curve
    timeline: Timeline
    blame_s: Floats
    slow_steps: int = 0
    plot_cpu: float = float("nan")
    extra: dict[str, Curve] = field(default_factory=dict)
    logged: dict[str, Curve] = field(default_factory=dict)
    evals: list[dict[str, Any]] = field(default_factory=list)
    changes: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    split: Split | None = None
    parallelism: str = "data"
    banner: str = ""
    unmeasured: tuple[str, ...] = ()
    color: int = 0
    place: str = ""
    staffing: Staffing | None = None

    @property
    def more(self) -> dict[str, Curve]:
        """All curves besides loss and throughput: of the strategy, of the user, of the metrics."""
        return {**self.extra, **self.logged, **self.evaluated}

    @property
    def evaluated(self) -> dict[str, Curve]:
        """Curves of the metrics, for example `eval accuracy`: name -> a point per evaluation.

        The loss of evaluations is on the loss curve. A metric with one value has no curve.
        """
        points: dict[str, list[tuple[float, float]]] = {}
        for one in self.evals:
            for name, value in one.items():
                known = isinstance(value, (int, float)) and "step" in one
                if known and name not in ("step", "epoch", "seconds", "loss"):
                    points.setdefault(f"eval {name}", []).append((float(one["step"]), value))
        return {name: _curve(found) for name, found in points.items() if len(found) > 1}


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return a curve through (step, value) points; their times are not known."""
    step, value = np.array(points, dtype=np.float64).T
    return Curve(step, np.full(len(step), np.nan), value, value, value)
