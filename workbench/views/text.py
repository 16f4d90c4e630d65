"""A run in words: the figures that all views show, a progress line and a report for terminals.

Numbers are written here for all views, with their units. All views describe a pipeline in the same
way: its stages, and each worker's bubble.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from .. import catalog
from ..errors import PlanError
from ..shared.events import OVER
from ..shared.record import PARTS
from .theme import PHASE_NAMES

if TYPE_CHECKING:
    from ..history.snapshot import Snapshot, Split, Worker

UNKNOWN = "–"
"""Shown for values that were not or cannot be measured; never 0."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Return a number in three significant digits, with k, M, G from a thousand up."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    for limit, scale, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k")):
        if size >= limit * 0.9995:
            return _digits(value / scale) + suffix
    if size != 0 and size < 1e-3:
        return f"{value:.2e}"
    return _digits(value)


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95 or value == int(value):
        return f"{value:.0f}"
    if size >= 1:
        return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a span of time: `340 ms`, `12.3 s`, `4:05`, `1:02:03`."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 1:
        return milliseconds(seconds * 1e3)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def milliseconds(value: float) -> str:
    """Return milliseconds with a precision that depends on their size: `0.42 ms`, `4.2 ms`, `48
    ms`.
    """
    if not math.isfinite(value):
        return UNKNOWN
    places = 0 if abs(value) >= 9.95 or value == 0 else 1 if abs(value) >= 0.995 else 2
    return f"{value:.{places}f} ms"


def percent(fraction: float) -> str:
    """Return a fraction as whole percent."""
    return f"{fraction * 100:.0f} %" if math.isfinite(fraction) else UNKNOWN


def size(value: float | None) -> str:
    """Return bytes in binary units: `512 B`, `1.5 MiB`; a dash if not measured."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 1023.5 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    places = 1 if power and abs(value) < 99.5 else 0
    return f"{value:.{places}f} {_UNITS[power]}"


_TICKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 20


def term(snapshot: Snapshot) -> str:
    """Return the field's term for the run's strategy; empty if the catalog has none."""
    try:
        return catalog.lookup(snapshot.strategy, snapshot.framework).term
    except PlanError:
        return ""


HOST_CHARACTERS = 10
"""Largest length of a host's name in a worker's row; longer names are cut."""


def worker_label(worker: Worker) -> str:
    """Return the text before a worker's row: `rank 1 · cuda:0`, `rank 1 · node2 · away`."""
    where = worker.device.split(" ")[0]  # not known before its first word
    host = worker.host if len(worker.host) <= HOST_CHARACTERS else worker.host[:9] + "…"
    device = "away" if worker.away else "" if host and where == "cpu" else where
    return " · ".join(filter(None, [f"rank {worker.rank}", host, device]))


def progress(snapshot: Snapshot) -> str:
    """Return how far the run is.

    Its forms are `step 120 of 400` and `workers between step 70 and step 120 of 400`.
    The last rows of a killed worker can be lost, so a failed run has only `2 of 40 steps recorded`.
    The total is left out if a worker took more than its share of the steps.
    """
    if snapshot.state == "failed":
        of = f" of {snapshot.total_steps}" if snapshot.total_steps is not None else ""
        return f"{snapshot.step}{of} steps recorded"
    least, most = snapshot.least_step, snapshot.step
    found = f"step {most}" if least == most else f"workers between step {least} and step {most}"
    if snapshot.total_steps is None or most > snapshot.total_steps:
        return found
    return f"{found} of {snapshot.total_steps}"


def slow(snapshot: Snapshot) -> str:
    """Return which worker makes the others wait and how long; empty if there is none."""
    if snapshot.slow_rank is None:
        return ""
    wait = milliseconds(snapshot.slow_ms)
    others = "the other worker" if len(snapshot.workers) == 2 else "the other workers"
    hosts = {worker.rank: worker.host for worker in snapshot.workers}
    where = f" on {hosts[snapshot.slow_rank]}" if hosts.get(snapshot.slow_rank) else ""
    return f"rank {snapshot.slow_rank}{where} makes {others} wait {wait} a step{_window(snapshot)}"


OVERFIT_RISE = 1.05
"""An eval loss of this multiple of its minimum counts as risen."""


def overfitting(snapshot: Snapshot) -> str:
    """Return the warning that the eval loss rises and the training loss falls; empty if not.

    The lowest eval loss must be at least two evaluations old, so that one bad value says nothing.
    """
    known = [(int(e["step"]), float(e["loss"])) for e in snapshot.evals if "loss" in e]
    known = [(step, loss) for step, loss in known if math.isfinite(loss)]
    if len(known) < 3:
        return ""
    best = min(range(len(known)), key=lambda i: known[i][1])
    (step, lowest), (_, last) = known[best], known[-1]
    curve = snapshot.loss_curve
    if not len(curve):
        return ""
    then = float(np.interp(step, curve.step, curve.mean))
    rises = lowest > 0 and min(loss for _, loss in known[-2:]) > OVERFIT_RISE * lowest
    if best > len(known) - 3 or not rises or not curve.mean[-1] < then:
        return ""
    return (
        f"overfitting: the eval loss was {number(lowest)} at step {step} and is {number(last)} "
        "now, but the training loss still falls"
    )


def _window(snapshot: Snapshot) -> str:
    """Return the steps in which a slow worker was searched."""
    if not snapshot.slow_steps:
        return ""
    return " (all steps)" if snapshot.state in OVER else f" (latest {snapshot.slow_steps} steps)"


def left_out(snapshot: Snapshot, shown: int) -> str:
    """Return the note that pauses are cut out of the latest `shown` steps; empty if none."""
    later = set(snapshot.timeline.step[-shown:][1:].tolist())
    return " · pauses not shown" if later.intersection(snapshot.timeline.cuts) else ""


def dropped(snapshot: Snapshot) -> str:
    """Return the number of lost records in words; empty if none was lost."""
    many = snapshot.dropped
    if not many:
        return ""
    what = "record of a step was" if many == 1 else "records of steps were"
    return f"{number(many)} {what} lost, so the totals shown are smaller than the real totals"


def findings(snapshot: Snapshot) -> list[str]:
    """Return remarkable facts of a run: a straggler, overfitting, lost records."""
    found = (slow(snapshot), overfitting(snapshot), dropped(snapshot))
    return [line for line in found if line]


def drawing(snapshot: Snapshot) -> str:
    """Return the kernel's CPU share for drawing; empty if it was not measured."""
    if not math.isfinite(snapshot.plot_cpu):
        return ""
    return f"drawing the dashboard takes {snapshot.plot_cpu * 100:.1f} % of a CPU core"


def nothing_done(snapshot: Snapshot) -> bool:
    """Whether the run failed before its first step: its axes and tables would be empty."""
    return snapshot.state == "failed" and snapshot.step == 0 and not len(snapshot.loss_curve)


CHANGES = {
    "healed": ("{} died", ""),
    "joined": ("{} joined", ""),
    "left": ("{} left", "a server left"),
    "shed": ("less work for {}", "equal shares"),
    "replaced": ("{} replaced", ""),
}
"""The label of an event of `run.events`: with ranks, and without ranks."""
AGAIN = frozenset({"replaced"})
"""Events with more detail about ranks that `joined` at the same step; they replace it."""
MOST_LABELS = 6
"""If there are more changes, marks have no words, because words would overlap."""


def change_words(event: str, ranks: Sequence[int]) -> str:
    """Return the event and its ranks: `rank 1 died`; an unknown event by its name."""
    some, none = CHANGES.get(event, (f"{{}} {event}", ""))
    if not ranks:
        return none or event
    return some.format(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}")


def change_labels(snapshot: Snapshot) -> list[tuple[int, str]]:
    """Return the steps at which workers left or joined, with labels: `(60, "rank 1 died")`.

    Several changes at one step share a label.
    """
    found: dict[tuple[int, str], set[int]] = {}
    for change in snapshot.changes:
        found.setdefault((int(change["step"]), str(change["event"])), set()).update(change["ranks"])
    for (step, event), ranks in found.items():
        if event in AGAIN and (step, "joined") in found:
            found[step, "joined"] -= ranks
    return sorted(
        (step, change_words(event, sorted(ranks)))
        for (step, event), ranks in found.items()
        if ranks or event != "joined"
    )


def change_lines(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one aligned line for each time that workers left or joined."""
    rows = [
        (
            f"step {change['step']}",
            change_words(str(change["event"]), change["ranks"]),
            f"{change['workers']} worker{'s' if change['workers'] != 1 else ''}",
            f"training paused for {milliseconds(1e3 * float(change['seconds']))}",
        )
        for change in changes
    ]
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def change_places(
    marks: Sequence[tuple[float, float]], left: float, right: float
) -> list[float | None]:
    """Return the left edges of labels, which are right of their marks, or left of them at the edge.

    Args:
        marks: The position of each mark from left to right, and the width of its label. left,
        right: The limits for labels.

    Returns:
        The left edge of each label; None for labels without room.
    """
    found: list[float | None] = []
    free = left
    for index, (at, wide) in enumerate(marks):
        later = marks[index + 1][0] if index + 1 < len(marks) else right
        begin: float | None = at + GAP
        if at + GAP + wide > later:  # it would cover the next mark
            begin = at - GAP - wide if at - GAP - wide >= free else None
        found.append(begin)
        free = max(free, at if begin is None else max(at, begin + wide) + GAP)
    return found


GAP = 4.0
"""Distance between a mark and its label, in their units."""


def latest_eval(snapshot: Snapshot) -> dict[str, str]:
    """Return the last evaluation's metrics by name; empty without an evaluation."""
    if not snapshot.evals:
        return {}
    values = snapshot.evals[-1].items()
    skipped = ("step", "epoch", "seconds")
    return {k: number(v) for k, v in values if k not in skipped and isinstance(v, (int, float))}


def figures(snapshot: Snapshot) -> dict[str, str]:
    """Return the headline figures by label, in the order in which they are shown."""
    over = snapshot.state in OVER  # then it also counts the first steps; a comparison does not
    found = {
        "throughput, all steps" if over else "throughput": (
            f"{number(snapshot.samples_per_s)} samples/s"
        ),
        "loss": number(snapshot.loss),
        "compute share": percent(snapshot.compute_share),
        "elapsed": duration(snapshot.elapsed_s),
    }
    return found | {f"eval {name}": value for name, value in latest_eval(snapshot).items()}


def title(snapshot: Snapshot) -> str:
    """Return the run's name, strategy and size in one line."""
    count = len(snapshot.workers)
    words = term(snapshot)
    workers = f"{count} worker{'s' if count != 1 else ''}"
    names = dict.fromkeys((snapshot.name, snapshot.strategy))  # unnamed runs have the strategy's
    return " · ".join(part for part in (*names, words, workers, snapshot.place) if part)


def describe(snapshot: Snapshot) -> str:
    """Return the current figures as a sentence, for screen readers."""
    parts = [f"Run {title(snapshot)}, {snapshot.state}", progress(snapshot)]
    parts += [f"{label} {value}" for label, value in figures(snapshot).items()]
    parts += [line for line in (*findings(snapshot), snapshot.banner) if line]
    return ", ".join(parts) + "."


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a row of bar characters, averaged into at most `width` cells.

    NaN values are left out; a cell with only NaN values is a space.
    """
    count = min(width, len(values))
    cells: list[float] = []
    for cell in range(count):
        low, high = cell * len(values) // count, (cell + 1) * len(values) // count
        finite = [float(v) for v in values[low:high] if math.isfinite(v)]
        cells.append(sum(finite) / len(finite) if finite else math.nan)
    known = [c for c in cells if math.isfinite(c)]
    if not known:
        return ""
    least, span = min(known), max(known) - min(known)
    top = len(_TICKS) - 1
    return "".join(
        " " if math.isnan(c) else _TICKS[round((c - least) / span * top) if span > 0 else 0]
        for c in cells
    )


def progress_line(snapshot: Snapshot) -> str:
    """Return the run on one line, in the layout of tqdm."""
    elapsed_s, done = snapshot.elapsed_s, snapshot.done
    rate = snapshot.step / elapsed_s if elapsed_s > 0 else math.nan
    if done is not None:
        filled = int(done * _BAR_CELLS)
        bar = "█" * filled + " " * (_BAR_CELLS - filled)
        left_s = elapsed_s * (1 - done) / done if done > 0 else math.nan
        head = f"{done * 100:3.0f}%|{bar}| {snapshot.least_step}/{snapshot.total_steps}"
        clock = f"{duration(elapsed_s)}<{duration(left_s)}"
    else:
        head, clock = f"{snapshot.step} steps", duration(snapshot.elapsed_s)
    fields = [
        clock, f"{number(rate)} steps/s", f"loss {number(snapshot.loss)}",
        f"{number(snapshot.samples_per_s)} samples/s", f"compute {percent(snapshot.compute_share)}",
    ]  # fmt: skip
    fields += [line for line in (*findings(snapshot), snapshot.banner) if line]
    return f"{snapshot.name} ({snapshot.strategy}): {head} [{', '.join(fields)}] {snapshot.state}"


def report(snapshot: Snapshot) -> str:
    """Return the whole run as text: headline, a row per worker, the loss as a sparkline."""
    lines = [f"{title(snapshot)} · {snapshot.state}"]
    heads = [progress(snapshot), *(f"{k} {v}" for k, v in figures(snapshot).items())]
    lines.append(" · ".join(heads))
    failed = snapshot.banner if snapshot.state == "failed" else ""
    lines += [line for line in (failed, *findings(snapshot)) if line]
    if snapshot.workers:
        lines += ["", *_table(snapshot)]
    if snapshot.changes:
        lines += ["", *change_lines(snapshot.changes)]
    if snapshot.split is not None:
        lines += ["", caption(snapshot.split), *stage_lines(snapshot.split)]
    curve = snapshot.loss_curve
    drawn = sparkline(curve.mean.tolist())
    if drawn:
        first, last = number(float(curve.mean[0])), number(float(curve.mean[-1]))
        lines += ["", f"loss {first} {drawn} {last}"]
    for name, more in snapshot.more.items():
        if len(more):
            lines.append(
                f"{name} {sparkline(more.mean.tolist(), 24)} {number(float(more.mean[-1]))}"
            )
    lines += [f"note: {note}" for note in snapshot.notes]
    return "\n".join(lines)


def _table(snapshot: Snapshot) -> list[str]:
    head = ["worker", "samples/s", "potential", *(PHASE_NAMES[p] for p in PARTS), "median wait"]
    rows = [
        [
            worker_label(w), number(w.samples_per_s), number(w.potential_per_s),
            *(percent(share) for share in w.share), milliseconds(w.wait_ms),
        ]
        for w in snapshot.workers
    ]  # fmt: skip
    if snapshot.split is not None:
        head += ["bubble", "above ideal"]
        for row, worker in zip(rows, snapshot.workers, strict=True):
            row += bubble(worker, snapshot.split).words
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


class LineWriter:
    """Writes each progress line over the previous line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._width = 0

    def write(self, snapshot: Snapshot) -> None:
        """Show the run's current line."""
        stream = self._stream or sys.stdout
        line = progress_line(snapshot)
        stream.write("\r" + line.ljust(self._width))
        self._width = len(line)
        stream.flush()

    def close(self, snapshot: Snapshot) -> None:
        """Keep the last line and write the report below it."""
        self.write(snapshot)
        stream = self._stream or sys.stdout
        stream.write("\n" + ("" if nothing_done(snapshot) else report(snapshot) + "\n"))
        stream.flush()


COLUMNS = ("stage", "worker", "layers", "parameters", "per microbatch", "sends")
NUMERIC = frozenset({"parameters", "per microbatch", "sends"})
"""Columns of `rows` that are aligned right."""

MOST_ROWS = 12
TITLE = "Pipeline bubble: bubble / (bubble + compute)"
NAMES = ("ideal bubble", "excess bubble", "work")
"""Names of the parts of a worker's bar: ideal bubble, excess, the rest."""


@dataclass(frozen=True)
class Bubble:
    """One worker's bubble as shares of its pipeline's time, 0..1: its work and its bubble.

    Attributes:
        ideal: The bubble that the schedule has with equal stages, at most `whole`. A worker with
            more work than the others has a smaller bubble, and the others wait for it.
        excess: The part above the ideal bubble.
    """

    whole: float
    ideal: float
    excess: float

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return math.isfinite(self.whole)

    @property
    def words(self) -> tuple[str, str]:
        """The size of the bubble, and its part above the schedule's share."""
        if not self.known:
            return UNKNOWN, UNKNOWN
        points = round(self.excess * 100)
        return percent(self.whole), f"{'+' if points else '±'}{points} %"


def bubble(worker: Worker, split: Split) -> Bubble:
    """Return a worker's bubble, compared with its schedule."""
    ideal = min(worker.bubble, split.ideal_bubble)
    return Bubble(worker.bubble, ideal, max(worker.bubble - split.ideal_bubble, 0.0))


def caption(split: Split) -> str:
    """Return the split in one line."""
    count = len(split.stages)
    parts = [f"{count} stage{'s' if count != 1 else ''}"]
    if split.pipelines > 1:
        parts.append(f"{split.pipelines} pipelines")
    batches = f"{split.microbatches} microbatches" if split.microbatches != 1 else "1 microbatch"
    if split.microbatch_samples:
        batches += f" of {split.microbatch_samples} samples"
    parts += [split.schedule, batches, ideal(split)]
    return " · ".join(parts)


def ideal(split: Split) -> str:
    """Return the idle share that the schedule itself causes."""
    return f"ideal bubble {percent(split.ideal_bubble)}"


def rows(split: Split) -> list[tuple[str, ...]]:
    """Return one row of `COLUMNS` per stage; only the first stages if there are many."""
    found: list[tuple[str, ...]] = [
        (
            str(stage.number),
            ", ".join(map(str, stage.ranks)),
            stage.layers,
            f"{stage.parameters:,}",
            milliseconds(stage.microbatch_s * 1e3),
            size(stage.handed_bytes) if stage.handed_bytes else "",
        )
        for stage in split.stages[:MOST_ROWS]
    ]
    more = len(split.stages) - len(found)
    return [*found, ("…", "", f"{more} more", "", "", "")] if more else found


def stage_lines(split: Split) -> list[str]:
    """Return the stages as lines of aligned text."""
    table = [COLUMNS, *rows(split)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if name in NUMERIC else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def sentences(split: Split) -> list[str]:
    """Return the stages as sentences, for notes below a table."""
    found = []
    for stage in split.stages[:MOST_ROWS]:
        who = "worker" if len(stage.ranks) == 1 else "workers"
        text = (
            f"Stage {stage.number} on {who} {', '.join(map(str, stage.ranks))}: "
            f"{_layers(stage.layers)}, {stage.parameters:,} parameters"
        )
        if math.isfinite(stage.microbatch_s):
            text += f", {milliseconds(stage.microbatch_s * 1e3)} per microbatch"
        found.append(
            text
            + (
                f", sends {size(stage.handed_bytes)} per microbatch to the next stage."
                if stage.handed_bytes
                else "."
            )
        )
    more = len(split.stages) - len(found)
    return [*found, f"And {more} more stages."] if more else found


def _layers(named: str) -> str:
    """Return the layers of a stage in words: `layers 0 to 1`, `layer 2`, or `dense`."""
    if not named[:1].isdigit():
        return named
    several = " to " in named or "," in named
    return f"layer{'s' if several else ''} {named}"
