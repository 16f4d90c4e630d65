"""The tables that notebooks show: engines, one run, the catalog, a calibration.

The table of a calibration has each quantity, its measured value and its allowed range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..history.analysis.comparison import largest_memory, ordered
from ..history.analysis.rows import ASSUMED, SHARES, ComparisonRow, Spread
from ..shared.record import PARTS
from . import text
from .table import COMPARISON, Align, Column, Table
from .text import UNKNOWN, duration, milliseconds, number, percent, size
from .theme import PHASE_NAMES

if TYPE_CHECKING:
    from ..history.analysis.comparison import Comparison
    from ..history.analysis.summary import RunSummary

SHARE_NAMES = {**PHASE_NAMES, "bubble_s": "bubble"}
"""The names of `rows.SHARES`."""


FOLDED = frozenset({
    "framework", "steps", "95 % interval", "all steps", "data wait", "transfer", "other", "elapsed",
    "sent/step", "sent", "memory/worker",
})  # fmt: skip
"""Columns that notebooks fold below the others, because all columns are wider than a page."""


@dataclass(frozen=True)
class _Shown:
    """One column: its heading, and the text of a row's cell; `keys` are the figures it shows."""

    title: str
    cell: Callable[[ComparisonRow], str]
    keys: tuple[str, ...] = ()
    align: Align = "right"


def comparison_table(
    comparison: Comparison, *, sort: str | None = None, descending: bool = True
) -> Table:
    """Return a table with one row per plan, the verdict as title, and unfair points as notes.

    Columns without a value in any row are left out.

    Args:
        sort: Key of the figure to sort by (`history.fields`), or the heading of its column; by
            default rows keep their given order.

    Raises:
        PlanError: The figure does not exist.
    """
    columns = _columns(comparison)
    rows = list(comparison.rows)
    if sort is not None:
        titles = {column.title: column.keys[0] for column in columns if column.keys}
        key = titles.get(sort, sort)
        rows = ordered(rows, comparison.metrics, key, descending=descending)
    cells = [[column.cell(row) for column in columns] for row in rows]
    rates = [row.samples_per_s.mean for row in rows]
    known = [rate for rate in rates if math.isfinite(rate)]
    strong = frozenset([rates.index(max(known))]) if len(known) > 1 else frozenset[int]()
    heads = [Column(column.title, column.align) for column in columns]
    folded = frozenset(k for k, column in enumerate(columns) if column.title in FOLDED)
    return Table(heads, cells, comparison.verdict, notes(comparison), strong, COMPARISON, folded)


def notes(comparison: Comparison) -> list[str]:
    """Return the notes below the table: when more workers are worth it, unfair points, the meaning
    of ±.
    """
    found = [comparison.outlook] if comparison.outlook else []
    if any(row.payoff is not None and row.payoff.kind != "undivided" for row in comparison.rows):
        found += [ASSUMED] if comparison.outlook else []
    found += comparison.notes
    found.append(comparison.rates)
    if any(row.samples_per_s.count > 1 for row in comparison.rows):
        found.append("± is the standard deviation over seeds.")
    return [note for note in found if note]


def between(rate: Spread) -> str:
    """Return a rate's interval in words: `1.2k to 1.4k`."""
    known = math.isfinite(rate.low) and math.isfinite(rate.high)
    return f"{number(rate.low)} to {number(rate.high)}" if known else UNKNOWN


def loss(value: float | None) -> str:
    """Return a loss or metric in four significant digits; a dash if not measured."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{value:.4g}"


def relative_title(comparison: Comparison) -> str:
    """Return the heading for the ratio of throughput to the baseline's."""
    return "speed-up" if comparison.has_one_device else f"vs {comparison.baseline}"


def _columns(comparison: Comparison) -> list[_Shown]:
    rows = comparison.rows
    wanted = [
        _Shown("run", lambda row: row.name, ("run",), "left"),
        _Shown("strategy", lambda row: row.strategy, ("strategy",), "left"),
        _Shown("framework", lambda row: row.framework, ("framework",), "left"),
        _Shown("state", lambda row: row.state or UNKNOWN, ("state",), "left"),
        _Shown("workers", lambda row: str(row.workers), ("workers",)),
        _Shown("steps", lambda row: str(row.steps), ("steps",)),
        _Shown("samples/s", lambda row: number(row.samples_per_s.mean), ("samples_per_s",)),
        _Shown("95 % interval", lambda row: between(row.samples_per_s), ("samples_per_s_low",)),
        _Shown("all steps", lambda row: number(row.all_per_s), ("all_samples_per_s",)),
        _Shown(relative_title(comparison), lambda row: times(row.relative), ("relative",)),
        _Shown("efficiency", lambda row: _fraction(row.efficiency), ("efficiency",)),
        _Shown("step", lambda row: milliseconds(row.step_s * 1e3), ("step_s",)),
        *(_share(part) for part in SHARES),
        _Shown("final loss", lambda row: _spread(row.final_loss, loss), ("final_loss",)),
        *(_metric(name) for name in comparison.metrics),
        _Shown("staleness", staleness, ("staleness_mean",)),
        _Shown("elapsed", lambda row: _spread(row.wall_s, duration), ("wall_s",)),
        _Shown("sent/step", lambda row: size(row.sent_step_bytes), ("sent_bytes_per_step",)),
        _Shown("sent", lambda row: size(row.sent_bytes), ("sent_bytes",)),
        _Shown("memory/worker", lambda row: size(largest_memory(row)),
               ("memory_bytes_per_worker",)),
    ]  # fmt: skip
    left_out = _left_out(rows)
    return [column for column in wanted if column.title not in left_out]


def _left_out(rows: Sequence[ComparisonRow]) -> set[str]:
    """Return the headings of columns without information for these rows."""
    left_out: set[str] = set()
    if len({row.framework for row in rows}) < 2:
        left_out.add("framework")
    if all(row.state in ("finished", "") for row in rows):
        left_out.add("state")
    if not any(math.isfinite(row.shares["bubble_s"]) for row in rows):
        left_out.add("bubble")
    if not any(row.efficiency is not None for row in rows):
        left_out.add("efficiency")
    if not any(math.isfinite(row.sent_bytes) for row in rows):
        left_out |= {"sent/step", "sent"}
    if not any(row.staleness for row in rows):
        left_out.add("staleness")
    if not any(row.memory_bytes for row in rows):
        left_out.add("memory/worker")
    return left_out


def staleness(row: ComparisonRow) -> str:
    """Return a row's staleness: its mean and its worst, in updates."""
    late = row.staleness
    return UNKNOWN if late is None else f"mean {late.mean:.1f}, max {late.worst:.0f}"


def times(value: float | None) -> str:
    """Return a ratio: `1.73x`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}x"


def _share(part: str) -> _Shown:
    def cell(row: ComparisonRow) -> str:
        share = row.shares[part]
        return percent(max(share, 0.0) if math.isfinite(share) else share)

    return _Shown(SHARE_NAMES[part], cell, (f"{part.removesuffix('_s')}_share",))


def _metric(name: str) -> _Shown:
    def cell(row: ComparisonRow) -> str:
        return _spread(row.evals[name], loss) if name in row.evals else UNKNOWN

    return _Shown(name, cell, (f"eval_{name}",))


def _fraction(value: float | None) -> str:
    return UNKNOWN if value is None else percent(value)


def _spread(value: Spread, show: Callable[[float], str]) -> str:
    if math.isfinite(value.std):
        spread = f"{value.std:.2g}" if show is loss else show(value.std)
        return f"{show(value.mean)} ± {spread}"
    return show(value.mean)


def _seconds_ago(value: Any) -> str:
    return UNKNOWN if value is None else f"{duration(float(value))} ago"


def _flag(value: Any) -> str:
    return UNKNOWN if value is None else "yes" if value else "no"


LOG_CHARACTERS = 48
"""Largest length of a log line in tables."""


def _percent(value: Any) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def _shortened(line: str) -> str:
    return line if len(line) <= LOG_CHARACTERS else line[: LOG_CHARACTERS - 1] + "…"


_CLUSTER: dict[str, tuple[str, Callable[[Any], str]]] = {
    "memory_bytes": ("memory", size),
    "gpu_memory_bytes": ("GPU memory", size),
    "cpu_percent": ("CPU", _percent),
    "gpu_percent": ("GPU", _percent),
    "log_line": ("last log line", lambda v: UNKNOWN if not v else _shortened(str(v))),
    "heartbeat_s": ("heartbeat", _seconds_ago),
    "uptime_s": ("uptime", lambda v: UNKNOWN if v is None else duration(float(v))),
    "busy": ("busy", _flag),
}
"""Heading and format of columns of `cluster_table`; other columns are shown unchanged."""


def cluster_table(
    rows: Sequence[Mapping[str, Any]], *, title: str = "", notes: Sequence[str] = ()
) -> Table:
    """Return a table with one row per engine.

    Args:
        rows: One mapping per engine; the keys become columns, in the order of their first use.
            `memory_bytes`, `cpu_percent`, `heartbeat_s` and similar values are shown with units;
            None is shown as a dash.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    columns, cells = [], []
    for key in keys:
        values = [row.get(key) for row in rows]
        heading, show = _CLUSTER.get(key, (key.replace("_", " "), _word))
        numeric = all(isinstance(v, (int, float)) for v in values if v is not None)
        columns.append(Column(heading, "right" if numeric else "left"))
        cells.append([show(value) for value in values])
    return Table(columns, list(zip(*cells, strict=True)), title, notes)


def summary_table(run: RunSummary) -> Table:
    """Return one run's key figures: one row per worker; title and notes describe the whole run."""
    waited = "sync_wait_s" not in run.unmeasured
    weighed = bool(run.servers) or any(math.isfinite(w.memory_bytes) for w in run.workers_table)
    elsewhere = any(worker.host for worker in run.workers_table)
    columns = [
        Column("rank"), Column("engine"),
        *([Column("host", "left")] if elsewhere else []), Column("device", "left"),
        Column("samples/s"), Column("potential"),
        *(Column(PHASE_NAMES[part]) for part in PARTS), Column("median wait"),
        *([Column("bubble"), Column("above ideal")] if run.split else []),
        *([Column("memory")] if weighed else []),
    ]  # fmt: skip
    rows = [
        [
            str(worker.rank),
            str(worker.engine),
            *([worker.host or UNKNOWN] if elsewhere else []),
            worker.device or UNKNOWN,
            number(worker.samples_per_s),
            number(worker.potential_per_s) if waited else UNKNOWN,
            *_shares(worker.share, run.unmeasured),
            milliseconds(worker.wait_ms),
            *(text.bubble(worker, run.split).words if run.split else []),
            *([size(worker.memory_bytes)] if weighed else []),
        ]
        for worker in run.workers_table
    ]
    rows += [
        [f"s{held['server']}", *[UNKNOWN] * (len(columns) - 2), size(_held_bytes(held))]
        for held in run.servers
    ]
    return Table(columns, rows, _headline(run), _figures(run))


def strategies_table(entries: Sequence[catalog.Strategy] = catalog.CATALOG) -> Table:
    """Return the catalog: each strategy, when to use it, its options and their defaults."""
    columns = [
        Column("name", "left"), Column("framework", "left"),
        Column("term", "left", 24), Column("what it does", "left", 40),
        Column("suits", "left", 30), Column("options", "left", 28),
    ]  # fmt: skip
    rows = [
        [
            " / ".join([entry.name, *entry.aliases]),
            entry.framework,
            entry.term,
            entry.summary,
            entry.suits,
            ", ".join(f"{o.name}={_default(o)}" for o in entry.options) or "none",
        ]
        for entry in entries
    ]
    return Table(columns, rows, notes=["Set an option with -o name=value."])


def _word(value: Any) -> str:
    if value is None:
        return UNKNOWN
    return number(value) if isinstance(value, float) else str(value)


def _default(option: catalog.Option) -> str:
    value = option.default
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _shares(share: Sequence[float], unmeasured: Sequence[str]) -> list[str]:
    return [
        UNKNOWN if part in unmeasured else percent(max(value, 0.0))
        for part, value in zip(PARTS, share, strict=True)
    ]


def _headline(run: RunSummary) -> str:
    parts = [run.name or run.strategy]
    if run.strategy and run.strategy != run.name:
        parts.append(run.strategy)
    parts += [run.framework, _count(run.workers, "worker"), run.state]
    return " · ".join(parts)


def _figures(run: RunSummary) -> list[str]:
    # Workers that take the next free step can exceed their share; "27 of 20" would be confusing.
    of = f" of {run.total_steps}" if run.total_steps and run.steps < run.total_steps else ""
    exceeds = not run.joined and run.total_steps and run.steps > run.total_steps
    whose = " (taken by the worker with the most steps)" if exceeds else ""
    by = " of all workers" if exceeds else ""
    lines = [
        f"{run.steps}{of} steps{whose}, {number(run.samples)} samples{by} in "
        f"{duration(run.wall_s)}.",
        f"After a warm-up of {_count(run.warm_up, 'step')}: {number(run.samples_per_s)} samples/s"
        f"{_believed(run)}. A step takes {milliseconds(run.step_s * 1e3)}; compute is "
        f"{percent(run.compute_share)} of this time.",
        f"Over all steps, warm-up included: {number(run.all_per_s)} samples/s. "
        "The values in the table above include the warm-up, too.",
        f"Final loss {loss(run.final_loss)}" + _evals(run) + _sent(run) + ".",
    ]
    if run.batch_size:
        lines[0] = lines[0][:-1] + f"; global batch {run.batch_size}."
    if run.stride > 1:
        lines.append(
            f'Only one of every {run.stride} steps is stored. The column "median wait" comes '
            "only from the stored steps. The 95 % interval, the time of a step, and the "
            "percentage of compute in a step also come only from the stored steps."
        )
    lines += [_server(held) for held in run.servers]
    if run.changes:
        lines.append(f"Workers: {'; '.join(map(_change, run.changes))}.")
    if run.split is not None:
        lines += [f"{text.caption(run.split)}.", *text.sentences(run.split)]
    if run.unmeasured:
        names = ", ".join(PHASE_NAMES[part] for part in run.unmeasured)
        lines.append(f"Not measured: {names}.")
    return [*lines, *run.notes]


def _change(change: Mapping[str, Any]) -> str:
    """Return the step, the event and the number of remaining workers: `step 60: rank 1 died (2
    workers from then on)`.
    """
    words = text.change_words(str(change["event"]), change["ranks"])
    now = _count(change["workers"], "worker")
    return f"step {change['step']}: {words} ({now} from then on)"


def _believed(run: RunSummary) -> str:
    """Return the interval of a run's rate, if there is one."""
    if not math.isfinite(run.low_per_s):
        return ""
    return f" (95 % interval {number(run.low_per_s)} to {number(run.high_per_s)})"


def _sent(run: RunSummary) -> str:
    """Return the bytes that a run sent, or that they were not measured."""
    known = math.isfinite(run.sent_bytes)
    return f"; sent {size(run.sent_bytes)}" if known else "; the sent bytes were not measured"


def _held_bytes(held: Mapping[str, Any]) -> float:
    """Return the total memory of a server by content."""
    kinds = ("parameters", "optimizer", "gradients", "copies")
    return float(sum(held.get(f"{kind}_bytes", 0) for kind in kinds))


def _server(held: Mapping[str, Any]) -> str:
    names = {"parameters": "parameters", "optimizer": "optimizer state",
             "gradients": "arriving gradients", "copies": "copies for another server"}  # fmt: skip
    copies = held.get("copies_bytes", 0)  # an older run tells of none
    parts = [f"{size(held[f'{kind}_bytes'])} of {name}" for kind, name in names.items()
             if kind != "copies" or copies]  # fmt: skip
    return f"Server s{held['server']} holds {', '.join(parts)}."


def _evals(run: RunSummary) -> str:
    shown = {k: v for k, v in run.evals.items() if k not in ("step", "epoch")}
    return "".join(
        f"; eval {name} {loss(value) if isinstance(value, (int, float)) else value}"
        for name, value in shown.items()
    )


def _count(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


@dataclass(frozen=True)
class Reading:
    """One line of a calibration.

    Attributes:
        passed: Whether the value is in its allowed range; None if there is no range or the value is
            unknown.
    """

    quantity: str
    measured: str
    allowed: str
    passed: bool | None


def calibration_table(verdict: str, readings: Sequence[Reading], did: Sequence[str]) -> Table:
    """Return the readings as a table, with the verdict above and the procedure below."""
    marks = {True: "yes", False: "NO", None: ""}
    rows = [[r.quantity, r.measured, r.allowed, marks[r.passed]] for r in readings]
    columns = [
        Column("", "left", 44), Column("measured", "left"), Column("allowed", "left"),
        Column("in the allowed range", "left"),
    ]  # fmt: skip
    strong = frozenset(i for i, reading in enumerate(readings) if reading.passed is False)
    return Table(columns, rows, verdict, did, strong)
