"""A run's numbers as series by step, for tools that draw such: what is new since the last time.

Decimated as the history is: steps that are multiples of a stride, which doubles as a run grows
long, so a run of any length gives a bounded number of points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS
from .reducer import Rows
from .store import RunHistory
from .table import STORED

OCTAVE_POINTS = 20_000
"""Points after which the stride doubles; as many may wait for a later turn."""
TURN_POINTS = 1_000
"""Points of one turn, while a run goes on: MLflow takes a fifth of a second for so many."""
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
    """What is new.

    Attributes:
        scalars: Finite values; those of one series in the order of steps.
        rewound: The run went back: values of this step and later were taken back, and come again.
    """

    scalars: list[Scalar]
    rewound: int | None = None


class Feed:
    """Follows a history; every value is given once.

    Series: `loss` and `samples_per_s` of the run; per worker `step_s`, `sync_wait_s`, the share of
    each part of the step, `staleness`, `bubble_share` (as `sync_wait_s/rank_1`); `eval/<metric>`;
    `log/<name>` for what rank 0 gave to `wb.log`, `log/<name>/rank_1` for others.
    """

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._ranks = len(history.engines)
        self._last = np.full(self._ranks, -1)  # latest step seen, by rank
        self._given = np.full(self._ranks, -1)  # and given
        self._last_logged: dict[str, NDArray[np.int64]] = {}
        self._evals: set[tuple[int, object]] = set()
        self._rewinds = 0
        per_step = 2 + 8 * self._ranks
        self._octave = max(LEAST_STEPS, OCTAVE_POINTS // per_step)
        self._turn = max(LEAST_TURN_STEPS, TURN_POINTS // per_step)
        self._stride, self._in_octave = 1, 0
        self._at_s: dict[int, float] = {}  # ends of steps, for what has no time of its own
        self._backlog: Rows = np.empty(0, STORED)  # chosen, for later turns
        self._tail: Rows = np.empty(0, STORED)  # the latest step, where it was left out
        self._logged_count: Counter[str] = Counter()
        self._pending: dict[int, list[Rows]] = {}  # asynchronous: steps some worker has not done

    def fresh(self, *, over: bool = False) -> Batch:
        """Return what is new since the last call.

        Args:
            over: The run has ended: nothing is held back for a later turn.
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
        """Return the rows of the steps that are given, be it in a later turn."""
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
        """Return the rows of this turn; while a run is too fast, thin out those that wait."""
        if over:  # how it ended is never left out
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
        # A worker that has died would hold all steps back.
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
            weight = np.where(np.isfinite(rows["local_loss"]), rows["samples"], 0)
            summed = float((np.nan_to_num(rows["local_loss"]) * weight).sum())
            loss = summed / float(weight.sum()) if weight.any() else math.nan
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
        """Return when a step ended; of one that was left out, when the latest one did."""
        near = (self._at_s[s] for s in (step, step - 1) if s in self._at_s)
        return next(near, next(reversed(self._at_s.values()), 0.0))


def metrics_of(evaluation: dict[str, object]) -> Iterable[tuple[str, float]]:
    """Return an evaluation's metrics that are numbers, by name."""
    for name, value in evaluation.items():
        if name not in ("step", "epoch") and isinstance(value, (int, float)):
            yield name, float(value)
