"""A run's numbers as series by step, for other tools: the numbers that are new since the last call.

Like the history, a series keeps only steps that are multiples of a stride. The stride doubles as a
run grows, so a run of any length gives a bounded number of points.

A history is also written as a Chrome trace for Perfetto (https://ui.perfetto.dev), event by event:
the whole trace of a long run is never in memory. Format: "Trace Event Format", Google, 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
The trace uses complete events (`X`) for steps and phases, counters (`C`), instant events (`i`) and
metadata (`M`).

The trace draws a step's phases one after the other, in the order of `PARTS` (`shared/record.py`).
The history knows how long the phases took; it does not know how they alternated.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ...errors import RunError
from ...shared.record import PARTS
from ..reducer import STORED, Rows

if TYPE_CHECKING:
    from ..events import Moment
    from ..run_data import RunData
    from ..store import RunHistory

OCTAVE_POINTS = 20_000
"""Points after which the stride doubles; this many points may wait for a later call."""
TURN_POINTS = 1_000
"""Points of one call while a run trains: MLflow needs a fifth of a second for this many points."""
LEAST_STEPS = 64
LEAST_TURN_STEPS = 8
LOGGED_OCTAVE = 20_000
PENDING_STEPS = 4096


@dataclass(frozen=True)
class Scalar:
    """One value of one series.

    Attributes:
        t_s: Seconds since the run's first step began.
    """

    tag: str
    step: int
    value: float
    t_s: float


@dataclass(frozen=True)
class Batch:
    """The new values of one call.

    Attributes:
        scalars: Finite values; the values of one series are in the order of steps.
        rewound: The run went back to this step: values of it and of later steps will come again.
    """

    scalars: list[Scalar]
    rewound: int | None = None


class Feed:
    """Follows a history; returns every value once.

    Series: `loss` and `samples_per_s` of the run; per worker `step_s`, `sync_wait_s`, the share of
    each part of the step, `staleness`, `bubble_share` (as `sync_wait_s/rank_1`); `eval/<metric>`;
    `log/<name>` for values that rank 0 gave to `wb.log`, `log/<name>/rank_1` for other ranks.
    """

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._ranks = len(history.engines)
        self._last = np.full(self._ranks, -1)  # latest step seen, by rank
        self._given = np.full(self._ranks, -1)  # latest step returned, by rank
        self._last_logged: dict[str, NDArray[np.int64]] = {}
        self._evals: set[tuple[int, object]] = set()
        self._rewinds = 0
        per_step = 2 + 8 * self._ranks
        self._octave = max(LEAST_STEPS, OCTAVE_POINTS // per_step)
        self._turn = max(LEAST_TURN_STEPS, TURN_POINTS // per_step)
        self._stride, self._in_octave = 1, 0
        self._at_s: dict[int, float] = {}  # ends of steps, for values without a time
        self._backlog: Rows = np.empty(0, STORED)  # chosen, for later turns
        self._tail: Rows = np.empty(0, STORED)  # the latest step, where it was left out
        self._logged_count: Counter[str] = Counter()
        self._pending: dict[int, list[Rows]] = {}  # asynchronous: not done by all workers

    def fresh(self, *, over: bool = False) -> Batch:
        """Return what is new since the last call.

        Args:
            over: The run has ended: return everything now.
        """
        rewound = self._rewind()
        rows = self._history.since(self._last)
        if len(rows):
            np.maximum.at(self._last, rows["rank"], rows["step"].astype(np.int64))
            last = rows[rows["step"] == rows["step"].max()]
            self._backlog = np.concatenate([self._backlog, self._choose(rows)])
            self._tail = last[:0] if last["step"][0] in self._backlog["step"] else last
        chosen = self._take(over)
        np.maximum.at(self._given, chosen["rank"], chosen["step"].astype(np.int64))
        scalars = [s for row in chosen for s in self._of_worker(row)]
        scalars += [s for step in self._steps(chosen, over) for s in self._of_step(step)]
        scalars += [*self._logged(), *self._evaluations()]
        return Batch([s for s in scalars if math.isfinite(s.value)], rewound)

    def _rewind(self) -> int | None:
        fresh = self._history.story.rewinds[self._rewinds :]
        if not fresh:
            return None
        self._rewinds += len(fresh)
        step = min(fresh)
        self._last = np.minimum(self._last, step - 1)
        self._given = np.minimum(self._given, step - 1)
        self._last_logged = {k: np.minimum(v, step - 1) for k, v in self._last_logged.items()}
        self._evals = {one for one in self._evals if one[0] < step}
        self._pending = {k: v for k, v in self._pending.items() if k < step}
        self._backlog = self._backlog[self._backlog["step"] < step]
        self._tail = self._tail[self._tail["step"] < step]
        return step

    def _choose(self, rows: Rows) -> Rows:
        """Return the rows of the steps to return, now or in a later call."""
        steps, chosen = np.unique(rows["step"]), []
        self._stride = max(self._stride, self._history.stride)
        at = 0
        while at < len(steps):
            rest = steps[at:]
            kept = rest[rest % self._stride == 0]
            room = self._octave - self._in_octave
            chosen.append(kept[:room])
            if len(kept) < room:
                self._in_octave += len(kept)
                break
            at += int(np.searchsorted(rest, kept[room - 1], side="right"))
            self._stride, self._in_octave = self._stride * 2, 0
        return rows[np.isin(rows["step"], np.concatenate(chosen))]

    def _take(self, over: bool) -> Rows:
        """Return the rows of this call; if the run is too fast, thin out the waiting rows."""
        if over:  # the run's end is always included
            taken = np.concatenate([self._backlog, self._tail])
            self._backlog, self._tail = taken[:0], taken[:0]
            return taken
        while len(np.unique(self._backlog["step"])) > self._octave:
            self._stride *= 2
            self._backlog = self._backlog[self._backlog["step"] % self._stride == 0]
        now = np.isin(self._backlog["step"], np.unique(self._backlog["step"])[: self._turn])
        taken, self._backlog = self._backlog[now], self._backlog[~now]
        return taken

    def _steps(self, rows: Rows, over: bool) -> Iterator[Rows]:
        """Yield the rows of each step that every worker has done."""
        for one in np.split(rows, np.flatnonzero(np.diff(rows["step"].astype(np.int64))) + 1):
            if len(one):
                self._pending.setdefault(int(one["step"][0]), []).append(one)
        reached = math.inf if over or self._history.joined else int(self._given.min())
        ready = sorted(step for step in self._pending if step <= reached)
        # Without this, a worker that has died would hold back all steps.
        if len(self._pending) - len(ready) > PENDING_STEPS:
            ready = sorted(self._pending)[: len(self._pending) - PENDING_STEPS // 2]
        for step in ready:
            yield np.concatenate(self._pending.pop(step))

    def _of_step(self, rows: Rows) -> Iterator[Scalar]:
        step = int(rows["step"][0])
        spent = np.maximum(rows["step_s"].astype(float), 1e-9)
        end_s = float((rows["start_s"] + spent).max())
        if self._history.joined:
            samples = (
                rows["samples"].sum() if self._history.data_parallel else rows["samples"].max()
            )
            loss, rate = float(rows["loss"][0]), float(samples / spent.max())
        else:
            trained = rows[rows["samples"] > 0]  # a NaN of one worker is the loss of the step
            summed = float((trained["local_loss"] * trained["samples"]).sum())
            loss = summed / float(trained["samples"].sum()) if len(trained) else math.nan
            rate = float((rows["samples"] / spent).sum())
        yield Scalar("loss", step, loss, end_s)
        yield Scalar("samples_per_s", step, rate, end_s)

    def _of_worker(self, row: np.void) -> Iterator[Scalar]:
        step, spent = int(row["step"]), float(row["step_s"])
        end_s, worker = float(row["start_s"]) + spent, f"rank_{row['rank']}"
        self._at_s[step] = end_s
        while len(self._at_s) > PENDING_STEPS:
            self._at_s.pop(next(iter(self._at_s)))
        parts = {name: float(row[name]) for name in PARTS[:-1]}
        parts["other_s"] = spent - sum(v for v in parts.values() if math.isfinite(v))
        values = {"step_s": spent, "sync_wait_s": parts["sync_wait_s"]}
        values["staleness"] = float(row["staleness"])
        if spent > 0:
            shares = {**parts, "bubble_s": float(row["bubble_s"])}
            values |= {f"{name[:-2]}_share": v / spent for name, v in shares.items()}
        for name, value in values.items():
            yield Scalar(f"{name}/{worker}", step, value, end_s)

    def _logged(self) -> Iterator[Scalar]:
        for name, values in self._history.logged_since(self._last_logged).items():
            last = self._last_logged.setdefault(name, np.full(self._ranks, -1))
            for step, rank, value in values:
                last[rank] = max(step, last[rank])
                stride = 1 << (self._logged_count[name] // LOGGED_OCTAVE).bit_length()
                self._logged_count[name] += 1
                if self._logged_count[name] % stride == 0:
                    tag = f"log/{name}" if rank == 0 else f"log/{name}/rank_{rank}"
                    yield Scalar(tag, step, value, self._when(step))

    def _evaluations(self) -> Iterator[Scalar]:
        for one in self._history.evals:
            key = (int(one["step"]), one.get("epoch"))
            if key not in self._evals:
                self._evals.add(key)
                for name, value in metrics_of(one):
                    yield Scalar(f"eval/{name}", key[0], value, self._when(key[0]))

    def _when(self, step: int) -> float:
        """Return when a step ended; for a step that was left out, when the latest step ended."""
        near = (self._at_s[s] for s in (step, step - 1) if s in self._at_s)
        return next(near, next(reversed(self._at_s.values()), 0.0))


def metrics_of(evaluation: dict[str, object]) -> Iterable[tuple[str, float]]:
    """Return an evaluation's metrics that are numbers, by name."""
    for name, value in evaluation.items():
        if name not in ("step", "epoch") and isinstance(value, (int, float)):
            yield name, float(value)


Event = dict[str, Any]
PID = 1
"""All workers have one process in the trace, so that their tracks are below each other."""
COLORS = {
    "data wait": "thread_state_iowait",
    "compute": "thread_state_running",
    "sync wait": "terrible",
    "transfer": "rail_response",
    "bubble": "grey",
    "other": "generic_work",
}
"""Phases, and their colours in viewers that use `cname`."""
_CHUNK_STEPS = 2048
_ROUNDING = 1e-6  # share of a step: rounding of 4-byte numbers
_COLUMNS = ("rank", "step", "step_s", *PARTS[:-1], "samples", "loss", "local_loss", "sent_bytes",
            "staleness", "bubble_s", "blamed_rank")  # fmt: skip


@dataclass(frozen=True)
class About:
    """Facts about a run that are not in its history.

    Attributes:
        devices: The device of each rank.
        faults: The faults at the run's start, as typed.
    """

    name: str
    strategy: str
    framework: str
    state: str
    devices: Sequence[str] = ()
    faults: Sequence[str] = ()


def header(history: RunHistory, about: About) -> Event:
    """Return the fields of the trace other than `traceEvents`."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": about.name,
            "strategy": about.strategy,
            "framework": about.framework,
            "state": about.state,
            "workers": len(history.engines),
            "every_nth_step": history.stride,
        },
    }


def events(history: RunHistory, about: About) -> Iterator[Event]:
    """Yield a run's events; times in microseconds since its first step began.

    Every slice of a phase lies inside the slice of its step, and steps of a worker do not overlap.
    A value that was not measured has no slice, and is null in the arguments.
    """
    yield from _names(history, about)
    rows = history.since(np.full(len(history.engines), -1))
    until = _ends_ns(rows)
    cuts = np.flatnonzero(np.diff(rows["step"].astype(np.int64))) + 1
    cuts = np.concatenate([[0], cuts, [len(rows)]]) if len(rows) else np.zeros(1, int)
    for at in range(0, len(cuts) - 1, _CHUNK_STEPS):
        bounds = cuts[at : at + _CHUNK_STEPS + 1]
        part = rows[bounds[0] : bounds[-1]]
        logged = history.logged_at([(int(row["step"]), int(row["rank"])) for row in part])
        for index, row in enumerate(part):
            more = {name: values[index] for name, values in logged.items()}
            yield from _step(history, row, int(until[bounds[0] + index]), more)
        if history.joined:
            for first, end in pairwise(bounds):
                yield from _counters(history, rows[first:end])
    yield from _moments(history, about, rows, until)


def _names(history: RunHistory, about: About) -> Iterator[Event]:
    title = f"{about.name}: {about.strategy}" if about.name != about.strategy else about.name
    yield _meta("process_name", 0, name=f"{title} ({about.framework})")
    yield _meta("process_labels", 0, labels=about.state)
    for rank, engine in enumerate(history.engines):
        device = about.devices[rank] if rank < len(about.devices) else ""
        device = history.story.devices.get(rank, device)
        words = [f"rank {rank}", f"engine {engine}", *([device] if device else [])]
        yield _meta("thread_name", _tid(rank), name=" · ".join(words))
        yield _meta("thread_sort_index", _tid(rank), sort_index=rank)


def _meta(name: str, tid: int, /, **args: Any) -> Event:
    return {"name": name, "ph": "M", "ts": 0, "pid": PID, "tid": tid, "args": args}


def _tid(rank: int) -> int:
    return rank + 1  # viewers show thread 0 as idle


def _ends_ns(rows: Rows) -> Any:
    """Return when each row's step ends, at the latest when the same worker's next step begins.

    Lengths are kept as 4 bytes, so a step's end may be computed after the next step's start.
    """
    start = np.round(rows["start_s"] * 1e9).astype(np.int64)
    end = start + np.round(rows["step_s"].astype(float) * 1e9).astype(np.int64)
    for rank in np.unique(rows["rank"]):
        own = np.flatnonzero(rows["rank"] == rank)
        own = own[np.argsort(start[own], kind="stable")]
        end[own[:-1]] = np.minimum(end[own[:-1]], start[own[1:]])
    return end


def _step(
    history: RunHistory, row: np.void, end_ns: int, logged: Mapping[str, float]
) -> Iterator[Event]:
    """Yield a worker's step, the step's parts, and the counters of this worker alone."""
    rank, step = int(row["rank"]), int(row["step"])
    begin_ns = round(float(row["start_s"]) * 1e9)
    args = {name: _known(row[name]) for name in _COLUMNS}
    parts, residual_s = _phases(row), _residual(row)
    args["other_s"] = _known(residual_s)
    args["engine"] = history.engines[rank]
    args |= {name: _known(value) for name, value in logged.items()}
    yield _slice(f"step {step}", "step", rank, begin_ns, end_ns, args)
    at_s, at_ns = 0.0, begin_ns
    for name, seconds in parts:
        at_s += seconds
        next_ns = min(begin_ns + round(at_s * 1e9), end_ns)
        if name == parts[-1][0] and residual_s >= 0:
            next_ns = end_ns  # the parts add up to the step, except for rounding
        if next_ns > at_ns:
            about = {"step": step, "seconds": seconds}
            yield _slice(name, "phase", rank, at_ns, next_ns, about) | {"cname": COLORS[name]}
        at_ns = max(at_ns, next_ns)
    counted = {"staleness": float(row["staleness"]), **logged}
    if not history.joined:
        spent = float(row["step_s"])
        counted["loss"] = float(row["local_loss"])
        counted["samples/s"] = float(row["samples"]) / spent if spent > 0 else math.nan
    for name, value in counted.items():
        yield from _counter(f"{name} rank {rank}", end_ns, value)


def _phases(row: np.void) -> list[tuple[str, float]]:
    """Return the measured phases of a step with their seconds, in the order of drawing.

    A pipeline's bubble is the part of the transfer (and of the rest) in which the worker was idle.
    """
    data, compute, wait, transfer = (_zero(row[name]) for name in PARTS[:-1])
    other, bubble = _residual(row), _zero(row["bubble_s"])
    if other < _ROUNDING * float(row["step_s"]):
        other = 0.0
    in_transfer = min(bubble, transfer)
    in_other = min(bubble - in_transfer, other)
    found = [("data wait", data), ("compute", compute), ("sync wait", wait),
             ("transfer", transfer - in_transfer), ("bubble", in_transfer + in_other),
             ("other", other - in_other)]  # fmt: skip
    return [(name, seconds) for name, seconds in found if seconds > 0]


def _residual(row: np.void) -> float:
    return float(row["step_s"]) - sum(_zero(row[name]) for name in PARTS[:-1])


def _counters(history: RunHistory, rows: Rows) -> Iterator[Event]:
    """Yield the values that all workers of a step have in common."""
    spent = rows["step_s"].astype(float)
    ends_ns = np.round((rows["start_s"] + spent) * 1e9).astype(np.int64)
    samples = rows["samples"].sum() if history.data_parallel else rows["samples"].max()
    yield from _counter("loss", int(ends_ns.max()), float(rows["loss"][0]))
    if spent.max() > 0:
        yield from _counter("samples/s", int(ends_ns.max()), float(samples / spent.max()))


def _counter(name: str, at_ns: int, value: float) -> Iterator[Event]:
    if math.isfinite(value):
        yield {
            "name": name, "ph": "C", "ts": at_ns / 1e3, "pid": PID, "tid": 0, "args": {name: value},
        }  # fmt: skip


def _slice(
    name: str, kind: str, rank: int, begin_ns: int, end_ns: int, args: Mapping[str, Any]
) -> Event:
    return {
        "name": name, "cat": kind, "ph": "X", "ts": begin_ns / 1e3,
        "dur": (end_ns - begin_ns) / 1e3, "pid": PID, "tid": _tid(rank), "args": dict(args),
    }  # fmt: skip


def _moments(history: RunHistory, about: About, rows: Rows, ends_ns: Any) -> Iterator[Event]:
    """Yield single events: evaluations, notes, faults, deaths."""
    times_ns = _StepTimes(rows, ends_ns)
    if about.faults:
        yield _instant(f"faults: {', '.join(about.faults)}", "inject", 0, None, {})
    origin_s = history.origin_s
    for moment in list(history.story.moments):
        at_s = moment.t_s - origin_s
        values = {name: _known(value) for name, value in metrics_of(dict(moment.values))}
        if math.isfinite(at_s):  # an event before the first step is at the start
            at_ns = times_ns.of(moment, round(max(0.0, at_s) * 1e9))
            yield _instant(moment.text, moment.kind, at_ns, moment.rank, values)


class _StepTimes:
    """Finds a moment's time by the steps around it: the notebook received it some time later."""

    def __init__(self, rows: Rows, ends_ns: Any) -> None:
        order = np.argsort(rows["step"], kind="stable")
        self._steps = rows["step"][order]
        self._starts_ns = np.round(rows["start_s"][order] * 1e9).astype(np.int64)
        self._ends_ns = ends_ns[order]

    def of(self, moment: Moment, heard_ns: int) -> int:
        """Return its time, at the latest when it was heard.

        Rows that are later than that are of a repeated step, or of a slower worker that takes its
        steps alone.
        """
        for step, times_ns in ((moment.after, self._ends_ns), (moment.before, self._starts_ns)):
            if step is not None:
                first, end = np.searchsorted(self._steps, (step, step + 1))
                earlier = [int(t) for t in times_ns[first:end] if t <= heard_ns]
                return max(earlier, default=heard_ns)
        return heard_ns


def _instant(
    text: str, kind: str, at_ns: int, rank: int | None, values: Mapping[str, Any]
) -> Event:
    return {
        "name": text, "cat": kind, "ph": "i", "ts": at_ns / 1e3, "pid": PID,
        "tid": 0 if rank is None else _tid(rank), "s": "p" if rank is None else "t",
        "args": dict(values),
    }  # fmt: skip


def _known(value: Any) -> int | float | None:
    """Return a number for JSON: null if it was not measured."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _zero(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 0.0


_TOGETHER = 512


def write(run: RunData, path: str | Path | None = None) -> Path:
    """Write a run's Chrome trace; return the file's path.

    Args:
        path: By default `NAME-trace.json` in the current folder. A file that ends in `.gz` is
            compressed. An existing file is replaced after the new file is complete.

    Raises:
        RunError: The run has no step yet, or the file cannot be written.
    """
    if not len(run.history):
        raise RunError(
            f"Run {run.name} has no complete step, so there is no trace to write.",
            seen=run.state,
            allowed="a run with a complete step",
            code="WB-RUN-089",
        )
    goal = Path(path if path is not None else _name(run.name)).expanduser().absolute()
    fresh = goal.with_name(f".{goal.name}.{os.getpid()}")
    try:
        with _opened(fresh, compressed=goal.suffix == ".gz") as file:
            _write(file, run)
        fresh.replace(goal)
    except OSError as error:
        raise RunError(
            f"The trace cannot be written: {error.strerror}.",
            seen=str(goal),
            allowed="a file in an existing folder in which you may write",
            code="WB-RUN-090",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    return goal


def _write(file: TextIO, run: RunData) -> None:
    plan = run.plan
    about = About(
        run.name,
        plan.strategy,
        plan.framework,
        run.state,
        run.devices,
        [fault.text for fault in plan.faults],
    )
    head = json.dumps(header(run.history, about), allow_nan=False)
    file.write(f'{head[:-1]}, "traceEvents": [\n')
    lines: list[str] = []
    separator = ""
    for event in events(run.history, about):
        lines.append(json.dumps(event, allow_nan=False))
        if len(lines) >= _TOGETHER:
            file.write(separator + ",\n".join(lines))
            lines, separator = [], ",\n"
    if lines:
        file.write(separator + ",\n".join(lines))
    file.write("\n]}\n")


@contextlib.contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[TextIO]:
    opened: Any = gzip.open if compressed else open
    with opened(path, "wt", encoding="utf-8") as file:
        yield file


def _name(name: str) -> str:
    safe = re.sub(r"[^\w.@+-]+", "-", name).strip(".") or "run"
    return f"{safe}-trace.json"
