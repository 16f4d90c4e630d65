"""A run's history as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens.

Format: "Trace Event Format", Google, 2016,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Used of it: complete events (`X`) for steps and their phases, counters (`C`), instant events (`i`),
metadata (`M`).

A step's phases are drawn one after the other in the order of `metrics.PARTS`; what is known of them
is how long they took, not how they alternated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..metrics import PARTS
from .feed import metrics_of
from .reducer import Rows
from .store import RunHistory

Event = dict[str, Any]
PID = 1
"""All workers stand in one process, so that their tracks lie below each other."""
COLORS = {
    "data wait": "thread_state_iowait",
    "compute": "thread_state_running",
    "sync wait": "terrible",
    "transfer": "rail_response",
    "bubble": "grey",
    "other": "generic_work",
}
"""Phases, and the colours of theirs in viewers that heed `cname`."""
_CHUNK_STEPS = 2048
_ROUNDING = 1e-6  # of a step: what numbers of 4 bytes make of nothing
_COLUMNS = ("rank", "step", "step_s", *PARTS[:-1], "samples", "loss", "local_loss", "sent_bytes",
            "staleness", "bubble_s", "blamed_rank")  # fmt: skip


@dataclass(frozen=True)
class About:
    """What a history does not know of its run.

    Attributes:
        devices: Of each rank.
        faults: Those the run began with, as typed.
    """

    name: str
    strategy: str
    framework: str
    state: str
    devices: Sequence[str] = ()
    faults: Sequence[str] = ()


def header(history: RunHistory, about: About) -> Event:
    """Return what stands beside `traceEvents` in the trace."""
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
    What was not measured has no slice, and is null in the arguments.
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
    yield from _moments(history, about)


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
    return rank + 1  # viewers take thread 0 for an idle one


def _ends_ns(rows: Rows) -> Any:
    """Return when each row's step ends; not after the same worker's next one begins.

    Lengths are kept as 4 bytes, so the end of a step may come out behind the next one's start.
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
    """Yield a worker's step, what it consists of, and what it counts alone."""
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
            next_ns = end_ns  # they add up to the step, but for rounding
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
    """Return the phases of a step that were measured, with their seconds, in the order drawn.

    A pipeline's bubble is the part of the transfer (and of the rest) in which it was idle.
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
    """Yield what all workers of a step have together."""
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


def _moments(history: RunHistory, about: About) -> Iterator[Event]:
    """Yield what happened once: evaluations, notes, faults, deaths."""
    if about.faults:
        yield _instant(f"faults: {', '.join(about.faults)}", "inject", 0.0, None, {})
    origin_s = history.origin_s
    for moment in list(history.story.moments):
        at_s = moment.t_s - origin_s
        values = {name: _known(value) for name, value in metrics_of(dict(moment.values))}
        if math.isfinite(at_s):  # what came before the first step stands at its beginning
            rank = moment.rank
            yield _instant(moment.text, moment.kind, max(0.0, at_s), rank, values)


def _instant(
    text: str, kind: str, at_s: float, rank: int | None, values: Mapping[str, Any]
) -> Event:
    return {
        "name": text, "cat": kind, "ph": "i", "ts": round(at_s * 1e9) / 1e3, "pid": PID,
        "tid": 0 if rank is None else _tid(rank), "s": "p" if rank is None else "t",
        "args": dict(values),
    }  # fmt: skip


def _known(value: Any) -> int | float | None:
    """Return a number as JSON knows it: null for what was not measured."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _zero(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 0.0
