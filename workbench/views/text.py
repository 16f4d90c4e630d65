"""A run in words: the figures that all views show, a progress line and a report for terminals."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TextIO

from .. import catalog
from ..errors import PlanError
from ..history.snapshot import Snapshot, Worker
from ..lifecycle import OVER
from ..metrics import PARTS
from . import stages
from .theme import PHASE_NAMES
from .units import duration, milliseconds, number, percent

_TICKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 20


def term(snapshot: Snapshot) -> str:
    """Return the field's term for the run's strategy, empty where the catalog has none."""
    try:
        return catalog.lookup(snapshot.strategy, snapshot.framework).term
    except PlanError:
        return ""


def worker_label(worker: Worker) -> str:
    """Return what stands before a worker's row: `rank 1 · cuda:0`."""
    where = worker.device.split(" ")[0]  # not known before its first word
    return f"rank {worker.rank}" + (f" · {where}" if where else "")


def progress(snapshot: Snapshot) -> str:
    """Return how far the run is: `step 120 of 400`; a worker may take more than its part."""
    if snapshot.total_steps is None or snapshot.step > snapshot.total_steps:
        return f"step {snapshot.step}"
    return f"step {snapshot.step} of {snapshot.total_steps}"


def slow(snapshot: Snapshot) -> str:
    """Return who makes the others wait and how long; empty when nobody stands out."""
    if snapshot.slow_rank is None:
        return ""
    wait = milliseconds(snapshot.slow_ms)
    others = "the other" if len(snapshot.workers) == 2 else "the others"
    return f"rank {snapshot.slow_rank} makes {others} wait {wait} a step{_window(snapshot)}"


def _window(snapshot: Snapshot) -> str:
    """Return which steps were looked at for who is slow."""
    if not snapshot.slow_steps:
        return ""
    return " (all steps)" if snapshot.state in OVER else f" (latest {snapshot.slow_steps} steps)"


def left_out(snapshot: Snapshot, shown: int) -> str:
    """Return that pauses are cut out of the latest `shown` steps; empty where none is."""
    later = set(snapshot.timeline.step[-shown:][1:].tolist())
    return " · pauses left out" if later.intersection(snapshot.timeline.cuts) else ""


def dropped(snapshot: Snapshot) -> str:
    """Return how many records were lost; empty when none."""
    return f"{number(snapshot.dropped)} records dropped" if snapshot.dropped else ""


def drawing(snapshot: Snapshot) -> str:
    """Return what drawing costs the kernel; empty where it is not measured."""
    if not math.isfinite(snapshot.plot_cpu):
        return ""
    return f"drawing takes {snapshot.plot_cpu * 100:.1f} % of a core"


def nothing_done(snapshot: Snapshot) -> bool:
    """Whether the run failed before its first step: its axes and tables would be empty."""
    return snapshot.state == "failed" and snapshot.step == 0 and not len(snapshot.loss_curve)


def latest_eval(snapshot: Snapshot) -> dict[str, str]:
    """Return the last evaluation's metrics by name; empty without one."""
    if not snapshot.evals:
        return {}
    values = snapshot.evals[-1].items()
    skipped = ("step", "epoch", "seconds")
    return {k: number(v) for k, v in values if k not in skipped and isinstance(v, (int, float))}


def figures(snapshot: Snapshot) -> dict[str, str]:
    """Return the headline figures by label, in the order in which they are shown."""
    over = snapshot.state in OVER  # then it counts the first steps too, a comparison does not
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
    return " · ".join(part for part in (*names, words, workers) if part)


def describe(snapshot: Snapshot) -> str:
    """Return the present figures as a sentence, for screen readers."""
    parts = [f"Run {title(snapshot)}, {snapshot.state}", progress(snapshot)]
    parts += [f"{label} {value}" for label, value in figures(snapshot).items()]
    parts += [line for line in (slow(snapshot), dropped(snapshot), snapshot.banner) if line]
    return ", ".join(parts) + "."


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a row of bar characters, averaged into at most `width` cells.

    NaN values are left out; a cell that holds nothing else is a space.
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
    """Return the run on one line, laid out like tqdm's."""
    total = snapshot.total_steps
    rate = snapshot.step / snapshot.elapsed_s if snapshot.elapsed_s > 0 else math.nan
    if total:
        done = min(1.0, snapshot.step / total)
        filled = int(done * _BAR_CELLS)
        bar = "█" * filled + " " * (_BAR_CELLS - filled)
        left = max(0, total - snapshot.step) / rate if rate > 0 else math.nan
        head = f"{done * 100:3.0f}%|{bar}| {snapshot.step}/{total}"
        clock = f"{duration(snapshot.elapsed_s)}<{duration(left)}"
    else:
        head, clock = f"{snapshot.step} steps", duration(snapshot.elapsed_s)
    fields = [
        clock, f"{number(rate)} steps/s", f"loss {number(snapshot.loss)}",
        f"{number(snapshot.samples_per_s)} samples/s", f"compute {percent(snapshot.compute_share)}",
    ]  # fmt: skip
    fields += [line for line in (slow(snapshot), dropped(snapshot), snapshot.banner) if line]
    return f"{snapshot.name} ({snapshot.strategy}): {head} [{', '.join(fields)}] {snapshot.state}"


def report(snapshot: Snapshot) -> str:
    """Return the whole run as text: headline, a row per worker, the loss as a sparkline."""
    lines = [f"{title(snapshot)} · {snapshot.state}"]
    heads = [progress(snapshot), *(f"{k} {v}" for k, v in figures(snapshot).items())]
    lines.append(" · ".join(heads))
    lines += [line for line in (slow(snapshot), dropped(snapshot)) if line]
    if snapshot.workers:
        lines += ["", *_table(snapshot)]
    if snapshot.split is not None:
        lines += ["", stages.caption(snapshot.split), *stages.lines(snapshot.split)]
    curve = snapshot.loss_curve
    drawn = sparkline(curve.mean.tolist())
    if drawn:
        first, last = number(float(curve.mean[0])), number(float(curve.mean[-1]))
        lines += ["", f"loss {first} {drawn} {last}"]
    for name, more in {**snapshot.extra, **snapshot.logged}.items():
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
        head += ["bubble", "beyond ideal"]
        for row, worker in zip(rows, snapshot.workers, strict=True):
            row += stages.bubble(worker, snapshot.split).words
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


class LineWriter:
    """Writes the progress line over itself."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._width = 0

    def write(self, snapshot: Snapshot) -> None:
        """Show the run's present line."""
        stream = self._stream or sys.stdout
        line = progress_line(snapshot)
        stream.write("\r" + line.ljust(self._width))
        self._width = len(line)
        stream.flush()

    def close(self, snapshot: Snapshot) -> None:
        """Leave the last line standing and write the report below it."""
        self.write(snapshot)
        stream = self._stream or sys.stdout
        stream.write("\n" + ("" if nothing_done(snapshot) else report(snapshot) + "\n"))
        stream.flush()
