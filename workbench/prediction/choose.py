"""Finds the fastest strategy: the candidates, the data about each, the next run, the winner.

A few short runs are measured, and the other strategies are predicted from them where possible. A
measurement counts more than a prediction: a prediction wins only if its whole interval lies above
all measured rates. This module runs nothing.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import catalog
from ..catalog import schedules
from ..errors import PlanError, WorkbenchError
from ..history.analysis.steady import rate_of
from ..shared.record import PARTS
from .predict import Knows, compresses, predict, read
from .probe import Probe

if TYPE_CHECKING:
    from ..catalog.spec import Strategy
    from ..history.run_data import RunData

NAN = float("nan")
BASELINE = "one_device"
KNOWN = Literal["measured", "predicted", "bounded", "out"]
WORTH = 1.02
"""Another short run is made only for a candidate that can exceed the best by more than this."""


@dataclass(frozen=True)
class Candidate:
    """A candidate strategy with its options and workers.

    Attributes:
        options: The options that differ from their defaults.
        settings: All options.
    """

    entry: Strategy
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    workers: int

    @property
    def name(self) -> str:
        """The strategy, with options that differ from their defaults."""
        return " ".join([self.entry.name, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def most_efficient(self) -> float:
        """Upper bound of samples per second per worker, relative to one device."""
        if not self.entry.takes_turns:
            return 1.0
        settings, stages = dict(self.settings), self._stages
        if stages < 2 or "schedule" not in settings:
            return 1.0
        return 1.0 - schedules.ideal_bubble(
            settings["schedule"], stages, schedules.microbatches(settings, stages),
            schedules.stages_per_worker(settings),
        )  # fmt: skip

    @property
    def least_rounds(self) -> int:
        """Lower bound of consecutive messages in a step of a strategy that cannot be predicted.

        A pipeline fills and empties. Divided layers are summed at least once in each direction,
        which takes a ring 2 (n - 1) rounds.
        """
        if self.entry.takes_turns:
            return 2 * (self._stages - 1)
        return 4 * (self.workers - 1)

    @property
    def _stages(self) -> int:
        """Workers of one pipeline."""
        return int(
            self.settings.get("stages") or (2 if "stages" in self.settings else self.workers)
        )

    def held_bytes(self, whole_bytes: float, model_bytes: float) -> float:
        """Return the memory of a worker between steps, in bytes.

        Args:
            whole_bytes: Size of weights, gradients and the optimizer's state.
            model_bytes: Size of weights and gradients, none of them compressed or sparse.
        """
        if self.entry.keeps == "weights":
            return min(model_bytes, whole_bytes)
        if self.entry.keeps == "part":
            return whole_bytes / self._stages
        return whole_bytes


@dataclass(frozen=True)
class Row:
    """The data about a candidate.

    Attributes:
        known: `measured`, `predicted`, only `bounded` from above, or `out` of the race.
        samples_per_s: Median (or mean), and the ends of the interval: 95 % for a measured rate, 90
            % for predicted runs. For a bounded candidate: the bound with the likeliest message
            cost, 0, and the bound with the smallest message cost.
        step_s: NaN if unknown.
        memory_bytes: What a worker holds between steps; NaN if unknown.
        why: The basis of the figure, or why there is none.
        run: Name of the measured run; empty: none.
    """

    candidate: Candidate
    known: KNOWN
    samples_per_s: tuple[float, float, float] = (NAN, NAN, NAN)
    step_s: float = NAN
    memory_bytes: float = NAN
    why: str = ""
    run: str = ""


@dataclass(frozen=True)
class Choice:
    """All candidates, best first, and the winner.

    Attributes:
        winner: None if no candidate remains.
        reason: The reason for this winner, in words.
        seconds: Duration of the short runs.
    """

    rows: tuple[Row, ...]
    winner: Row | None
    reason: str
    workers: int
    seconds: float = NAN
    notes: tuple[str, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""

        def plain(value: float) -> float | None:
            return None if value != value else value

        return {
            "winner": None if self.winner is None else self.winner.candidate.name,
            "reason": self.reason, "workers": self.workers, "seconds": plain(self.seconds),
            "notes": list(self.notes),
            "rows": [
                {"strategy": row.candidate.entry.name, "options": dict(row.candidate.options),
                 "workers": row.candidate.workers, "known": row.known, "why": row.why,
                 "run": row.run, "step_s": plain(row.step_s),
                 "memory_bytes": plain(row.memory_bytes),
                 "samples_per_s": [plain(v) for v in row.samples_per_s]}
                for row in self.rows
            ],
        }  # fmt: skip


def candidates(
    framework: str, workers: int, options: Mapping[str, Any], *, allow_stale: bool = False
) -> tuple[list[Candidate], list[Row]]:
    """Return the candidates, and those left out from the start with the reason.

    Args:
        options: Options of the user; each is passed to the strategies that have it.
        allow_stale: Whether to include strategies whose weights differ from those of one device.

    Raises:
        PlanError: No strategy has such an option, or its value is not valid.
    """
    entries = catalog.strategies(framework)
    for name in options:
        if not any(option.name == name for entry in entries for option in entry.options):
            raise PlanError(
                "No strategy has this option.", seen=name,
                allowed=", ".join(sorted({o.name for e in entries for o in e.options})),
                code="WB-PLAN-312",
            )  # fmt: skip
    found, out = [], []
    for entry in entries:
        mine = {o.name: options[o.name] for o in entry.options if o.name in options}
        count = min(workers, entry.max_workers or workers)
        ways = [mine]
        if not entry.sync and entry.sync_option and entry.sync_option not in mine:
            together = {**mine, entry.sync_option: True}
            ways = [together, mine] if allow_stale else [together]
        for way in ways:
            one = _candidate(entry, way, count)
            why = _unfit(one, workers, set(mine), allow_stale=allow_stale)
            if why:
                out.append(Row(one, "out", why=why))
            else:
                found.append(one)
    return found, out


def _candidate(entry: Strategy, way: Mapping[str, Any], workers: int) -> Candidate:
    settings = entry.settings(dict(way))
    usual = {option.name: option.default for option in entry.options}
    changed = {name: settings[name] for name in way if settings[name] != usual[name]}
    return Candidate(entry, changed, settings, workers)


def _unfit(one: Candidate, workers: int, given: set[str], *, allow_stale: bool) -> str:
    """Return why a strategy is not a candidate; empty if it is one.

    Args:
        given: Options of the user; their effects are intended.
    """
    entry, settings = one.entry, dict(one.settings)
    if not entry.anywhere:
        return "needs a special device, such as a TPU"
    if workers > 1 and entry.max_workers is None and entry.takes_turns and "stages" in settings:
        stages = int(settings["stages"] or 2)
        if workers < 2 * stages:
            return (
                f"needs {2 * stages} workers or more: with fewer workers it has only one pipeline, "
                "so it is the same as model_split"
            )
    if workers == 1 and entry.max_workers is None:
        return "needs at least 2 workers"
    if allow_stale or entry.is_exact(settings):
        return ""
    if entry.exact_with and entry.is_sync(settings):
        differs = [name for name, value in entry.exact_with if settings.get(name) != value]
        if given.issuperset(differs):
            return ""
    return (
        "its final weights differ from the weights of a run on one device; to allow this, use "
        "--allow-stale"
    )


@dataclass
class Race:
    """The state so far: the candidates, the measured ones, the refused ones.

    Attributes:
        measured: Runs by the name of their candidate.
        refused: Why a candidate is excluded, by its name.
        most_bytes: Memory limit of a worker; None: no limit.
    """

    entrants: Sequence[Candidate]
    out: Sequence[Row] = ()
    most_bytes: float | None = None
    measured: dict[str, RunData] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def first(self) -> list[Candidate]:
        """Return the candidates that are measured first: replicas and one device."""
        by = {one.entry.name: one for one in self.entrants}
        replicas = [one for one in self.entrants if one.entry.replicated and one.workers > 1]
        return [*replicas[:1], *([by[BASELINE]] if BASELINE in by else [])]

    def next(self) -> Candidate | None:
        """Return the candidate for another short run; None if none can be faster than the best.

        For bounded candidates, only a part of the possible gain is expected. A pipeline divides
        every model at its layers, but tensor parallelism divides only some layers.
        """
        rows = self.rows()
        best = max((r.samples_per_s[0] for r in rows if r.known == "measured"), default=0.0)

        def gain(row: Row) -> float:
            if not best:
                return row.samples_per_s[2]
            if row.known == "bounded":
                hope = 0.5 if row.candidate.entry.takes_turns else 0.25
                return (row.samples_per_s[0] / best - 1) * hope
            return row.samples_per_s[2] / best - 1

        open_ = [r for r in rows if r.known in ("predicted", "bounded") and gain(r) > WORTH - 1]
        return max(open_, key=gain).candidate if open_ else None

    def rows(self) -> list[Row]:
        """Return the data about each candidate, best first, excluded candidates last."""
        found = [self._row(one) for one in self.entrants]
        found.sort(key=_place)
        return [*found, *self.out]

    def choose(self) -> Choice:
        """Return the ranking and the winner."""
        rows = self.rows()
        best = next((row for row in rows if row.known == "measured"), None)
        surer = [
            row for row in rows
            if row.known == "predicted"
            and (best is None or row.samples_per_s[1] > best.samples_per_s[0])
        ]  # fmt: skip
        winner = surer[0] if surer else best
        workers = max((one.workers for one in self.entrants), default=1)
        return Choice(tuple(rows), winner, _reason(winner, rows), workers, notes=_notes(rows, best))

    def _row(self, one: Candidate) -> Row:
        if one.name in self.refused:
            return Row(one, "out", why=self.refused[one.name])
        run = self.measured.get(one.name)
        row = self._predicted(one) if run is None else self._measured(one, run)
        if self.most_bytes is not None and run is None and row.memory_bytes != row.memory_bytes:
            return replace(row, known="out", why="its memory per worker is not known")
        if self.most_bytes is not None and row.memory_bytes > self.most_bytes:
            return replace(
                row, known="out", why="needs more memory per worker than --memory-per-worker allows"
            )
        return row

    def _measured(self, one: Candidate, run: RunData) -> Row:
        rate, held = rate_of(run.history), memory_of(run)
        if rate is None:
            return Row(
                one, "out", memory_bytes=held, why="did not finish a step within its time limit"
            )
        parts = dict(zip(PARTS, rate.parts_s, strict=True))
        lost = (parts["sync_wait_s"] + parts["transfer_s"]) / rate.step_s
        why = f"measured over {rate.steps} steps"
        if one.workers > 1 and lost > 0:
            why += f"; waiting and messages take {lost:.0%} of a step"
        return Row(
            one, "measured", (rate.mean, rate.low, rate.high), rate.step_s, held, why, run.name
        )

    def _predicted(self, one: Candidate) -> Row:
        """Return the prediction for a candidate from the measured runs."""
        held = self._held(one)
        runs = self._predictable()
        why = "its speed cannot be predicted from the measured runs"
        if runs and runs[0].plan.workers > 1:
            try:
                found = predict(runs, one.workers, strategy=one.entry.name,
                                options=dict(one.options))  # fmt: skip
            except WorkbenchError as error:
                why = error.what.rstrip(".")
            else:
                point = found.points[0]
                own, wait, sent = point.share
                words = (
                    f"{own:.0%} work, {wait:.0%} waiting for other workers, and {sent:.0%} messages"
                )
                return Row(one, "predicted", point.samples_per_s, point.step_s[0], held,
                           f"predicted; a step consists of {words}")  # fmt: skip
        return self._bounded(one, held, why)

    def _bounded(self, one: Candidate, held: float, why: str) -> Row:
        """Return a candidate's upper bound: all workers are busy, except for its messages."""
        alone = self.measured.get(BASELINE)
        rate = None if alone is None else rate_of(alone.history)
        if rate is None or not rate.mean > 0:
            return Row(one, "bounded", memory_bytes=held, why=why)
        samples = rate.mean * rate.step_s
        own_s = rate.step_s / (one.workers * one.most_efficient)
        likely_s, least_s = (own_s + one.least_rounds * each_s for each_s in self._message_s())
        return Row(one, "bounded", (samples / likely_s, 0.0, samples / least_s), NAN, held,
                   f"only an upper bound of its speed is known: {why}")  # fmt: skip

    def _message_s(self) -> tuple[float, float]:
        """Return a message's fixed cost: the likeliest value, and the smallest."""
        runs = self._predictable()
        if not runs or runs[0].plan.workers < 2:
            return 0.0, 0.0
        base, probes = read(runs)
        fitted = Knows.of(base, probes, None, None, needed=False).fitted
        if fitted is None:
            return 0.0, 0.0
        if compresses(base):  # the cost of a message includes the time to compress gradients
            return 0.0, 0.0
        cost_s = fitted.cost(None).message_s
        return float(np.median(cost_s)), float(np.quantile(cost_s, 0.05))

    def _predictable(self) -> list[RunData]:
        """Return the runs from which others can be predicted, replicas first."""
        found = []
        for name in self._order():
            run = self.measured.get(name)
            if run is not None and run.plan.entry.data_parallel:
                with contextlib.suppress(WorkbenchError):
                    Probe.of(run)
                    found.append(run)
        return sorted(found, key=lambda run: run.plan.workers == 1)

    def _order(self) -> list[str]:
        """Return names of candidates, replicas first, because they give the best predictions."""
        return [c.name for c in sorted(self.entrants, key=lambda c: not c.entry.replicated)]

    def _held(self, one: Candidate) -> float:
        """Return the memory of a worker, computed from a run in which one worker had everything."""
        for name in self._order():
            run = self.measured.get(name)
            if run is None or run.plan.entry.keeps != "all":
                continue
            return one.held_bytes(memory_of(run), self._model_bytes())
        return NAN

    def _model_bytes(self) -> float:
        """Return the size of the weights and of the gradients; NaN if not known."""
        for run in self.measured.values():
            trained = run.history.story.started.get("parameters")
            numbers, size_bytes = weights_size(run.folder)
            if trained and numbers:
                return size_bytes + int(trained) * size_bytes / numbers
            if trained and run.plan.entry.keeps == "all":
                return 2.0 * np.dtype(np.float32).itemsize * int(trained)
        return NAN


def _place(row: Row) -> tuple[int, float]:
    """Return the sort key of rows: the kind of knowledge, then the rate."""
    group, which = {"measured": (0, 0), "predicted": (0, 0), "bounded": (1, 2), "out": (2, 0)}[
        row.known
    ]
    rate = row.samples_per_s[which]
    return group, -rate if rate == rate else 0.0


_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def weights_size(folder: Path) -> tuple[int, int]:
    """Return how many numbers and bytes a run's final weights have, of rank 0; zeros if unknown."""
    numbers = size_bytes = 0
    try:
        with zipfile.ZipFile(folder / "weights.npz") as found:
            for name in found.namelist():
                with found.open(name) as array:  # its header; the weights may be gigabytes
                    version = np.lib.format.read_magic(array)
                    shape, _, dtype = _HEADERS[version](array)
                numbers += math.prod(shape)
                size_bytes += math.prod(shape) * dtype.itemsize
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return 0, 0
    return numbers, size_bytes


def memory_of(run: RunData) -> float:
    """Return the largest memory of a run's worker between steps; NaN if not measured."""
    held = [value for value in run.history.story.memory_bytes.values() if value == value]
    return max(held, default=NAN)


def _reason(winner: Row | None, rows: Sequence[Row]) -> str:
    if winner is None:
        return "No strategy remains."
    name, rate = winner.candidate.name, winner.samples_per_s[0]
    words = f"{name} on {winner.candidate.workers} worker" + "s" * (winner.candidate.workers > 1)
    words += f": {_rate(rate)} samples/s ({winner.known})"
    alone = next((r for r in rows if r.candidate.entry.name == BASELINE), None)
    if alone is not None and alone is not winner and alone.samples_per_s[0] > 0:
        words += f", {rate / alone.samples_per_s[0]:.2f} times the speed of one device"
    second = next((r for r in rows if r is not winner and r.known in ("measured", "predicted")),
                  None)  # fmt: skip
    if second is None:
        return f"{words}."
    return (
        f"{words}. The second best: {second.candidate.name} with {_rate(second.samples_per_s[0])} "
        f"samples/s ({second.why})."
    )


def _notes(rows: Sequence[Row], best: Row | None) -> tuple[str, ...]:
    found = []
    if best is not None:
        for row in rows:
            _, low, high = row.samples_per_s
            if row.known == "predicted" and low <= best.samples_per_s[0] < high:
                found.append(
                    f"{row.candidate.name} was not measured. Its predicted speed ({_rate(low)} to "
                    f"{_rate(high)} samples/s) may exceed the best measured speed."
                )
    found += _too_fast(rows, best)
    if any(row.known == "bounded" for row in rows):
        found.append(
            "Some strategies were not measured, and only an upper bound of their speed is known. "
            "The bound assumes the shortest possible waiting times."
        )
    return tuple(found)


def _too_fast(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Return a doubt if the best strategy gains more than its number of workers."""
    alone = next((row for row in rows if row.candidate.entry.name == BASELINE), None)
    if best is None or alone is None or best.candidate.workers == 1:
        return []
    name, workers = best.candidate.name, best.candidate.workers
    if not best.samples_per_s[1] > workers * alone.samples_per_s[2]:
        return []
    return [
        f"{name} was more than {workers} times as fast as {BASELINE}, with only {workers} workers. "
        "Usually this means that another program used the machine during the short run of "
        f"{BASELINE}. To be sure, run this cell again."
    ]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
