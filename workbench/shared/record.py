"""The measurements of a step: one row per replica and step, and the use of each field.

`MEASURED` lists all fields. The packed rows that engines send and that are kept on disk (`RECORD`),
the rows and columns of a history, and the curves in all views are built from it.

To add a column: an entry here, at the end (Workbench refuses to read runs that were saved without
it, WB-RUN-039), a field of `StepResult` (`engine/telemetry/recorder.py`), the place that measures
it, and its line in docs/metrics.md.

The other columns are derived here, by pure functions of measured rows. Definitions (one clock per
host, times in seconds):

- sync wait of rank r in a step: `max(0, G - R_r)`, where R_r is the time when r's last gradient
  was ready and G is the latest R_r of the step. At least one rank waits 0. The wall time of
  backward cannot show a straggler, because backward ends at the same time on all ranks.
- transfer: exposed communication beyond the wait, `exposed - wait`.
- across hosts, where clocks differ, and on accelerators, which have clocks of their own:
  `wait_r = exposed_r - min(exposed)` (the min rule).
- times of engines with another clock are converted to the kernel's clock when they arrive there
  (`cluster/router.py`), within a bound. They are exact enough for drawing, but not for waits.
- other: the residual `step - (data wait + compute + wait + transfer)`; the parts always add up.
  A part that could not be measured is NaN, and its time is in the residual.
- blame: the rank that the others waited for. Its gradient was ready last, or the strategy names it
  because it measured the wait itself.
- bubble of a pipeline's worker: the step without the worker's own computation. Part of it belongs
  to the schedule, and no rank is blamed for it. The rest arises because a stage computes longer.
  The busiest rank is blamed for it: `busy of the busiest - own busy`. The worker's bubble would be
  shorter by this time if both had equal work. If this is at most 1 ms or 5 % of the step, stages
  count as balanced and no rank is blamed.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLAG_SKEWED_CLOCK = 1
"""The run's workers read several clocks: waits use the min rule over `exposed_s`.

If their times can still be compared, `FLAG_KERNEL_CLOCK` is set.
"""

FLAG_LOSS_SEEN = 2
"""`local_loss` is the model's loss, so NaN means that the loss is not a number.

Without this flag NaN can mean that the loss was not seen.
"""

FLAG_DEVICE_CLOCK = 4
"""`ready_s` was read from an accelerator's own clock, which agrees with the host's clock
only to about a millisecond. So waits use the min rule over `exposed_s`."""

FLAG_UNMEASURED = 8
"""The device did not report when it had done the step: times are those of the host's calls."""

FLAG_KERNEL_CLOCK = 16
"""For a row with `FLAG_SKEWED_CLOCK`: its times are on the kernel's clock.

They were read there, or the kernel converted them with a known error bound.
"""

MIN_RULE_S = 2e-5
"""The min rule compares durations of different clocks; smaller differences mean nothing."""


@dataclass(frozen=True)
class Measured:
    """One field of a row.

    Attributes:
        name: Its name, which contains the unit.
        type: The NumPy type, with its size.
        column: Whether a history keeps the measured value under this name. Other fields are kept
            only as results of `record.derive`.
        curve: Whether views draw its curve if a run has it.
        rare: Whether a history has the column only if some row has a value.
        result: The field of `StepResult` with this value, if its name differs.
        moment: Whether it is a time on the engine's clock; other fields are durations or counts.
    """

    name: str
    type: str
    column: bool = False
    curve: bool = False
    rare: bool = False
    result: str = ""
    moment: bool = False


MEASURED = (
    Measured("run", "<u4"),  # sequence number of the run in this cluster
    Measured("step", "<u4", column=True),
    Measured("rank", "<u2", column=True),
    Measured("flags", "<u2"),
    Measured("samples", "<u4", column=True),
    Measured("start_s", "<f8", column=True, moment=True),  # perf_counter of the engine's host
    Measured("end_s", "<f8", moment=True),
    Measured(
        "ready_s", "<f8", moment=True
    ),  # when its last gradient was ready; NaN if nothing waits
    Measured("data_wait_s", "<f4"),
    Measured("compute_s", "<f4"),
    Measured("exposed_s", "<f4"),  # time blocked in communication after ready_s
    Measured("wait_s", "<f4"),  # a wait that the strategy measured; NaN: derive it from ready_s
    Measured("local_loss", "<f8", column=True, result="loss"),
    Measured("sent_bytes", "<f8", column=True),
    Measured("staleness", "<f4", column=True, curve=True),
    Measured("bubble_s", "<f4", column=True, curve=True, rare=True),
    Measured("waited_for", "<i8"),  # the rank that wait_s was for, if known; otherwise -1
)

RECORD = np.dtype([(one.name, one.type) for one in MEASURED])
"""One row per replica and step as the engine measures it. Times in seconds, sizes in bytes; NaN
marks what could not be measured. Derived columns (sync wait, transfer, other, blame, the global
loss) need the rows of all ranks and are computed in the kernel by `record.derive`."""

COLUMNS = {one.name: one.type for one in MEASURED if one.column}
CURVES = tuple(one.name for one in MEASURED if one.curve)
RARE = frozenset(one.name for one in MEASURED if one.rare)
MOMENTS = tuple(one.name for one in MEASURED if one.moment)


Floats = NDArray[np.floating[Any]]
PARTS = ("data_wait_s", "compute_s", "sync_wait_s", "transfer_s", "other_s")
"""The parts of a step, in the order in which they are drawn; they add up to `step_s`."""

REAL_WAIT_S, REAL_WAIT_SHARE = 1e-3, 0.05
"""A worker that costs the others less time, or a smaller share of the step, is not reported."""


def clock_name() -> str:
    """Return a name that two processes share if `time.perf_counter` is one clock for both.

    This is so within one boot of a machine and one time namespace; containers can have their own.
    """
    boot = space = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/time")
    return f"{boot or platform.node()} {space}".strip()


@dataclass(frozen=True)
class Derived:
    """Columns that need the rows of all ranks; each is (steps, ranks), loss is (steps,).

    `blamed_s` is the time for which `blamed_rank` is to blame: the sync wait, or the excess of a
    bubble.
    """

    step_s: Floats
    data_wait_s: Floats
    compute_s: Floats
    sync_wait_s: Floats
    transfer_s: Floats
    other_s: Floats
    blamed_rank: NDArray[np.int32]
    blamed_s: Floats
    loss: Floats


def derive(rows: NDArray[Any], *, workers: int | None = None) -> Derived:
    """Compute the derived columns of complete steps.

    Args:
        rows: RECORD rows of shape (steps, ranks): every rank's row of each step, by rank.
        workers: Workers of the run, if `rows` holds them one by one (asynchronous strategies); by
            default the number of ranks in `rows`.
    """
    count = rows.shape[1] if workers is None else workers
    step_s = rows["end_s"] - rows["start_s"]
    data, compute, exposed = (_f8(rows[name]) for name in ("data_wait_s", "compute_s", "exposed_s"))
    wait, blamed = sync_wait(rows, workers=count)
    blamed, blamed_s = bubble_blame(rows, blamed, np.where(blamed >= 0, wait, 0.0))
    # A single worker sends no messages, so its transfer is known to be 0.
    unknown = 0.0 if count == 1 else np.nan
    transfer = np.where(np.isnan(exposed), unknown, np.maximum(exposed - np.nan_to_num(wait), 0.0))
    named = sum(np.nan_to_num(part) for part in (data, compute, wait, transfer))
    return Derived(
        step_s,
        data,
        compute,
        wait,
        transfer,
        np.asarray(step_s - named),
        blamed,
        blamed_s,
        global_loss(rows["local_loss"], rows["samples"], (rows["flags"] & FLAG_LOSS_SEEN) > 0),
    )


def sync_wait(
    rows: NDArray[Any], *, workers: int | None = None
) -> tuple[Floats, NDArray[np.int32]]:
    """Return the wait of each rank in each step, and the rank it waited for (-1: none).

    Args:
        rows: RECORD rows of shape (steps, ranks).
        workers: As in `derive`.

    Returns:
        Two arrays of shape (steps, ranks): seconds waited (NaN if the strategy did not measure it
        and some `ready_s` is not known), blamed rank.
    """
    own, exposed, ready = _f8(rows["wait_s"]), _f8(rows["exposed_s"]), rows["ready_s"]
    steps, ranks = ready.shape
    alone = (ranks if workers is None else workers) == 1
    derived = np.full((steps, ranks), 0.0 if alone else np.nan)
    last = np.full((steps, 1), -1, np.int32)
    comparable = ~np.isnan(ready).any(axis=1) & (ranks > 1)
    own_clocks = FLAG_SKEWED_CLOCK | FLAG_DEVICE_CLOCK
    skewed = comparable & (rows["flags"] & own_clocks).any(axis=1)
    plain = comparable & ~skewed
    if plain.any():
        derived[plain] = ready[plain].max(axis=1, keepdims=True) - ready[plain]
        last[plain, 0] = ready[plain].argmax(axis=1)
    if skewed.any():
        least = exposed[skewed].min(axis=1, keepdims=True)
        more = exposed[skewed] - least
        derived[skewed] = np.where(more < MIN_RULE_S, 0.0, more)
        last[skewed, 0] = exposed[skewed].argmin(axis=1)
    # A rank cannot have waited longer than it was blocked, even if the clocks say so.
    derived = np.minimum(derived, np.where(np.isnan(exposed), derived, np.maximum(exposed, 0.0)))
    wait = np.where(np.isnan(own), derived, own)
    named = np.where(np.isnan(own) | (rows["waited_for"] < 0), last, rows["waited_for"])
    blamed = np.where((wait > 0) & (named >= 0), named, -1).astype(np.int32)
    return wait, blamed


def bubble_blame(
    rows: NDArray[Any], blamed: NDArray[np.int32], blamed_s: Floats
) -> tuple[NDArray[np.int32], Floats]:
    """Return the rank to blame and for how long; in pipelines for the excess of the bubble.

    Args:
        rows: RECORD rows of shape (steps, ranks); steps in which all ranks have a bubble are those
            of pipelines.
        blamed, blamed_s: (steps, ranks), the values for all other steps.
    """
    step_s, bubble_s = rows["end_s"] - rows["start_s"], _f8(rows["bubble_s"])
    if rows.shape[1] < 2 or np.isnan(bubble_s).all():
        return blamed, blamed_s
    piped = ~np.isnan(bubble_s).any(axis=1, keepdims=True)
    busy_s = np.where(piped, step_s - bubble_s, 0.0)
    worst = busy_s.argmax(axis=1)[:, None].astype(np.int32)
    excess_s = np.minimum(busy_s.max(axis=1, keepdims=True) - busy_s, np.nan_to_num(bubble_s))
    real = excess_s > np.maximum(REAL_WAIT_S, REAL_WAIT_SHARE * step_s)
    return (
        np.where(piped, np.where(real, worst, -1), blamed).astype(np.int32),
        np.where(piped, np.where(real, excess_s, 0.0), blamed_s),
    )


def global_loss(
    local_loss: Floats, samples: NDArray[Any], seen: NDArray[np.bool_] | None = None
) -> Floats:
    """Return each step's loss over all samples: local means weighted by their samples.

    Args:
        local_loss: (steps, ranks), NaN if a rank computes no loss (a stage that is not the last).
        samples: (steps, ranks).
        seen: (steps, ranks), whether the model returned the loss. A NaN that it returned makes
            the loss of the step NaN, as on one device.
    """
    unknown = np.isnan(local_loss) if seen is None else np.isnan(local_loss) & ~seen
    weight = np.where(unknown, 0, samples).astype(float)
    total = weight.sum(axis=1)
    summed = np.where(weight > 0, local_loss, 0.0) * weight
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(total > 0, summed.sum(axis=1) / total, np.nan))


def what_if(rows: NDArray[Any]) -> Floats:
    """Return each step's wall time if its straggler had been as fast as the next slowest rank.

    Args:
        rows: RECORD rows of shape (steps, ranks).
    """
    step_s = (rows["end_s"] - rows["start_s"]).max(axis=1)
    if rows.shape[1] < 2:
        return np.asarray(step_s)
    ready = np.sort(rows["ready_s"], axis=1)
    return np.asarray(step_s - (ready[:, -1] - ready[:, -2]))


def potential(samples: Floats, step_s: Floats, wait_s: Floats) -> float:
    """Return samples per second of a worker that never had to wait.

    In synchronous training all actual rates are equal; this rate shows differences between workers.
    """
    busy = float(np.sum(step_s) - np.sum(wait_s))
    return float(np.sum(samples)) / busy if busy > 0 else float("nan")


def residual(step_s: Floats, wall_s: float, paused_s: float = 0.0) -> float:
    """Return the share of a run's wall time that belongs to no step (0.01 is 1 %)."""
    if wall_s <= 0:
        return float("nan")
    return (wall_s - paused_s - float(np.sum(step_s))) / wall_s


def _f8(column: NDArray[Any]) -> Floats:
    return column.astype(np.float64)
