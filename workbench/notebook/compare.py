"""`wb.compare`, `wb.strategies`, `wb.diagram`, `wb.calibrate`: strategies and their results.

A diagram shows which messages a strategy sends in a step, as a picture and as data. A calibration
injects a known delay and returns the measured delay and the cost of measuring.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import catalog
from ..catalog.diagrams import messages
from ..cookbook.recipe import Recipe
from ..errors import PlanError, RunError
from ..execution.registry import runs as known
from ..execution.run import Run
from ..history.analysis import comparison
from ..shared.cluster_env import export
from ..shared.record import residual
from ..views.explain.diagram import DiagramPicture
from ..views.live.frames import make_frame
from ..views.tables import Reading, calibration_table
from ..views.text import UNKNOWN, duration, milliseconds

if TYPE_CHECKING:
    import pandas as pd

    from ..execution.run import Run
    from ..history.analysis.summary import RunSummary
    from ..session.cluster import Cluster
    from ..views.table import Table
    from .scaling import Scaled

_SMALLEST_IS_BEST = re.compile(
    r"(?:loss|error|cross_?entropy|divergence|hinge"
    r"|(?:^|[_\-/ ])(?:err|mae|mse|rmse|mape|perplexity|ppl|nll|wer|cer))\Z",
    re.I,
)


class Compared:
    """Runs of one recipe side by side: a figure, a table and a verdict in plain words.

    Args:
        summaries: Summaries of the runs, for the speed-up over their numbers of workers.
        runs: The runs of the summaries, for predictions.

    Attributes:
        comparison: The numbers of the figure and the table.
    """

    def __init__(
        self,
        compared: comparison.Comparison,
        summaries: Sequence[RunSummary] = (),
        runs: Sequence[Run] = (),
    ) -> None:
        self.comparison, self._summaries = compared, tuple(summaries)
        self._runs = tuple(runs)

    @property
    def verdict(self) -> str:
        """Which runs were faster and why.

        If known, also the point from which more workers are faster.
        """
        return " ".join(filter(None, (self.comparison.verdict, self.comparison.outlook)))

    def table(self, sort: str | None = None, descending: bool = True) -> Table:
        """Return the table, which displays itself.

        Args:
            sort: The sort key: a heading (`"final loss"`) or a column of `to_pandas`
                (`"samples_per_s"`); rows without a value are last.
            descending: Largest first.

        Raises:
            PlanError: The column does not exist.
        """
        from ..views.tables import comparison_table

        return comparison_table(self.comparison, sort=sort, descending=descending)

    def best(self, metric: str, *, largest: bool | None = None) -> Run:
        """Return the run whose last evaluation has the best value of a metric.

        Args:
            metric: A name in `run.evals`: `"loss"`, or one of `metrics` of `wb.fit`.
            largest: Whether the largest value is the best. By default the smallest value is the
                best for names that end in `loss`, `error`, `crossentropy`, `cross_entropy`,
                `divergence` or `hinge` (Keras' losses), and for names whose last word is `err`,
                `mae`, `mse`, `rmse`, `mape`, `perplexity`, `ppl`, `nll`, `wer` or `cer`. A word
                begins after `_`, `-`, `/` or a space. For all other names the largest value is
                the best.

        Raises:
            PlanError: No run was evaluated with this metric.
        """
        last = {run: run.evals[-1] for run in self._runs if run.evals}
        values = {run: one[metric] for run, one in last.items() if metric in one}
        values = {run: value for run, value in values.items() if not math.isnan(value)}
        if not values:
            numbers = {k for one in last.values() for k, value in one.items() if value == value}
            names = sorted(numbers - {"step", "epoch"})
            raise PlanError(
                "None of these runs has a value of this metric in its last evaluation.",
                seen=metric,
                allowed=", ".join(names) or "nothing: no run was evaluated",
                next_step="name another metric, or train again with this metric in wb.fit"
                if names
                else "train again, with `eval_data` in wb.fit",
                code="WB-PLAN-333",
            )
        if largest is None:
            largest = _SMALLEST_IS_BEST.search(metric) is None
        return (max if largest else min)(values, key=values.__getitem__)

    def scaling(self, *, price: float | None = None) -> Scaled:
        """Return speed-up and efficiency over the numbers of workers, with a figure.

        Args:
            price: Price of a worker-hour, in any currency. The cost of an epoch is then shown too
                (or of 1M samples, if the size of an epoch is not known).

        Raises:
            PlanError: All runs have the same number of workers.
        """
        from .scaling import scaled

        return scaled(self._summaries, price=price, runs=self._runs)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per plan: plain numbers, units in the headings, empty if not measured.

        Args:
            path: A file to which the text is also written.
        """
        from ..views.comparison.exports import csv_of

        return _written(csv_of(self.comparison), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the table as GitHub's Markdown, with the verdict above and the notes below."""
        from ..views.comparison.exports import markdown_of

        return _written(markdown_of(self.table()), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the table as a block of HTML, without scripts; `save("x.html")` makes a page."""
        return _written(self.table().html(), path)

    def to_pandas(self) -> pd.DataFrame:
        """Return the figures of `to_csv` as a DataFrame; NaN if not measured."""
        from ..views.comparison.exports import frame_of

        return frame_of(self.comparison)

    def to_wire(self) -> dict[str, Any]:
        """Return all shown data, including curves, as plain JSON data."""
        return self.comparison.to_wire()

    def save(self, path: str | Path) -> Path:
        """Write it to a file by its suffix: .csv .md .html .png .svg .json; return the path.

        Raises:
            PlanError: No format has this suffix.
        """
        from ..views.comparison.exports import save

        return save(self.comparison, path)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return dict(self.table()._repr_mimebundle_())

    def _ipython_display_(self) -> None:
        from ..views.blocks import show, show_bundle
        from ..views.comparison.picture import comparison_bundle
        from .scaling import shows_scaling

        show_bundle(comparison_bundle(self.comparison))
        show(self.table())
        if shows_scaling(self._summaries):
            show(self.scaling().figure())

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])


def compare(*runs: Run | str) -> Compared:
    """Compare runs, including stopped and failed runs.

    Args:
        runs: Runs, or their names in `wb.runs`.

    The comparison shows the loss by time, samples and steps, the throughput, the speed-up and the
    efficiency. It also shows the parts of a step's time, the sent bytes, the memory, the staleness,
    the final loss and the metrics. A verdict says which runs were faster and why, and when more
    workers would be faster.

    Raises:
        PlanError: No run was given, a value is not a run, or no run has this name.
    """
    if not runs:
        raise PlanError(
            "There is nothing to compare.",
            next_step='give the names of runs: wb.compare("a", "b")',
            code="WB-PLAN-103",
        )
    found = [_run(one) for one in runs]
    summaries = [run.summarise() for run in found]
    return Compared(comparison.compare(summaries), summaries, found)


def _run(one: object) -> Run:
    if isinstance(one, Run):
        return one
    if isinstance(one, str):
        return known[one]
    raise PlanError(
        "wb.compare needs runs or their names.",
        seen=type(one).__name__,
        allowed='a run, or its name in wb.runs ("a")',
        next_step='wb.compare("a", "b")',
        code="WB-PLAN-104",
    )


def strategies() -> Any:
    """Return a table of all strategies: name, term, options, how each is used, and source."""
    from ..views.tables import strategies_table

    return strategies_table(catalog.CATALOG)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        export(Path(path).expanduser(), text.encode())
    return text


def diagram(
    strategy: str, workers: int = 4, *, framework: str = "torch", **options: Any
) -> DiagramPicture:
    """Return the messages of one step: `wb.diagram("parameter_server", workers=3, servers=2)`.

    Args:
        strategy: The name or an alias of a strategy, as in `%%distributed`.
        workers: Number of workers, 1 to 64. Some strategies have a lower limit.
        framework: `torch` or `tensorflow`, the framework of the strategy.
        options: Options of the strategy, as for `-o`.

    Returns:
        A picture (SVG, with its content as text). Its `.data` contains nodes, phases and arrows,
        and its `.to_wire()` returns the same data for JSON.

    Raises:
        PlanError: The strategy or an option is unknown, or the options do not fit the workers.
    """
    return DiagramPicture(messages(strategy, workers, options, framework=framework))


DELAY_S = 0.05
STEPS = 40
SETTLE = 5
FRAME_S = 0.2
MOST_RESIDUAL = 0.01
"""Largest allowed share of a run's wall time outside its steps."""

RECIPE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wb.fit(model, wb.data.synthetic(4096, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""


@dataclass(frozen=True)
class Calibration:
    """The injected and the measured delay, in milliseconds.

    Attributes:
        read_ms: Median of the others' sync waits, over workers and steps.
        spread_ms: Half the distance between their quartiles.
        own_ms: Median of the slow worker's own wait, which should be 0.
        named_share: Share of the waits for which the slow worker was named, 0..1.
        steps: Number of measured steps, without the first `SETTLE`.
        residual: Share of the wall time outside all steps; NaN if unknown.
        wall_s: Seconds from the first step's start to the last one's end.
        chart_cpu: Share of a core used for the live dashboard's frames, as below a cell; NaN if no
            frame was made.
        frames: The number of these frames.
    """

    injected_ms: float
    read_ms: float
    own_ms: float
    named_share: float
    steps: int
    run: Run
    spread_ms: float = float("nan")
    residual: float = float("nan")
    wall_s: float = float("nan")
    chart_cpu: float = float("nan")
    frames: int = 0

    @property
    def tolerance_ms(self) -> float:
        """Largest allowed error of a reading: 5 ms or 10 %."""
        return max(5.0, 0.1 * self.injected_ms)

    @property
    def error_ms(self) -> float:
        """The error of the reading: the measured delay minus the injected one."""
        return self.read_ms - self.injected_ms

    @property
    def passed(self) -> bool:
        """Whether the measurements can be trusted."""
        right = abs(self.error_ms) <= self.tolerance_ms
        return right and self.own_ms <= self.tolerance_ms and self.named_share >= 0.95

    @property
    def did(self) -> tuple[str, ...]:
        """The procedure in sentences."""
        workers = len(self.run.engines)
        return (
            f"Workbench trained a small network under `mirrored` on {workers} workers and delayed "
            f"worker 1 by {self.injected_ms:.0f} ms in each step. The first {SETTLE} steps are not "
            f"counted. The table is computed from the next {self.steps} steps.",
            "The first row of the table combines all workers except worker 1. It shows the "
            "median of their sync waits in these steps. In the column `measured`, the number after "
            "± is half the interquartile range. "
            f"The error is the median minus the injected delay: {self.error_ms:+.1f} ms.",
        )

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The measured values, with their allowed ranges."""
        within, most = self.tolerance_ms, f"at most {self.tolerance_ms:.0f} ms"
        shares = f"{self.residual:.2%} of {duration(self.wall_s)}"
        known = self.residual == self.residual
        return (
            Reading("sync wait of all workers except worker 1",
                    f"{self.read_ms:.1f} ± {self.spread_ms:.1f} ms",
                    f"{self.injected_ms:.0f} ± {within:.0f} ms", abs(self.error_ms) <= within),
            Reading("sync wait of worker 1", milliseconds(self.own_ms), most,
                    self.own_ms <= within),
            Reading("worker 1 is named as the cause of the wait",
                    f"for {self.named_share:.0%} of the waits ({self.steps} steps)", "at least 95%",
                    self.named_share >= 0.95),
            Reading("time between steps (wall time minus the time inside steps)",
                    shares if known else UNKNOWN, f"at most {MOST_RESIDUAL:.0%}",
                    abs(self.residual) <= MOST_RESIDUAL if known else None),
            Reading("drawing the dashboard", _share(self.chart_cpu, self.frames), "", None),
        )  # fmt: skip

    def table(self) -> Table:
        """Return the readings as a table."""
        verdict = (
            "the measurement can be trusted" if self.passed else "do NOT trust the measured waits"
        )
        title = f"Calibration with a delay of {self.injected_ms:.0f} ms: {verdict}"
        return calibration_table(title, self.readings, self.did)

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for values that were not measured."""
        names = (
            "injected_ms", "read_ms", "spread_ms", "error_ms", "tolerance_ms", "own_ms",
            "named_share", "steps", "residual", "wall_s", "chart_cpu", "frames", "passed",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {k: None if v != v else v for k, v in values.items()} | {"did": list(self.did)}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.table()._repr_mimebundle_()

    def __repr__(self) -> str:
        return self.table().text()


def calibrate(cluster: Cluster | None = None) -> Calibration:
    """Slow worker 1 by 50 ms in each step under `mirrored`, and return the measured delay.

    The live dashboard's frames are computed during this run, as for a cell, to measure their cost.

    Args:
        cluster: The cluster for the measurement; by default the notebook's cluster.

    Raises:
        RunError: Fewer than two engines of the cluster answer.
    """
    if cluster is None:
        from .session import session

        cluster = session.need_cluster()
    run = cluster.run(
        Recipe(RECIPE, origin="calibrate"),
        strategy="mirrored",
        workers=max(2, len(cluster.worker_ids)),
        inject=[f"slow=1:{DELAY_S * 1e3:g}ms"],
        steps=STEPS + SETTLE,
        name="calibrate",
    )
    frames = _make_frames(run)
    return read_back(run, frames)


def read_back(run: Run, frames: int = 0) -> Calibration:
    """Evaluate a run in which worker 1 was slowed by `DELAY_S` in each step.

    Args:
        frames: Number of frames made during the run; `run.plot_cpu` is their cost.
    """
    history = run.history
    late = history["step"] >= SETTLE
    others = late & (history["rank"] != 1)
    own = late & (history["rank"] == 1)
    if not others.any():
        raise RunError(
            "The run ended too early for a calibration.",
            seen=f"steps of the run: {history.totals.steps}",
            allowed=f"more than {SETTLE} steps",
            next_step="run wb.calibrate() again, and do not stop the run",
            code="WB-RUN-059",
        )
    waits_ms = history["sync_wait_s"][others] * 1e3
    low_ms, middle_ms, high_ms = np.percentile(waits_ms, (25, 50, 75))
    totals = history.totals
    return Calibration(
        injected_ms=DELAY_S * 1e3,
        read_ms=float(middle_ms),
        own_ms=float(np.median(history["sync_wait_s"][own])) * 1e3,
        named_share=float(np.mean(history["blamed_rank"][others] == 1)),
        steps=int(np.unique(history["step"][late]).size),
        run=run,
        spread_ms=float(high_ms - low_ms) / 2,
        residual=residual(np.asarray([totals.train_s]), totals.wall_s, totals.paused_s),
        wall_s=totals.wall_s,
        chart_cpu=run.plot_cpu,
        frames=frames,
    )


def _make_frames(run: Run) -> int:
    """Make frames until the run is over; record their cost in the run, return their number."""
    began, cpu_s, frames, previous = time.perf_counter(), 0.0, 0, None
    while not run.is_over:
        with contextlib.suppress(TimeoutError):
            run.wait(FRAME_S)
        if not run.history.totals.steps:  # engines start; there is nothing to draw yet
            began = time.perf_counter()
            continue
        before = time.thread_time()
        snapshot = run.snapshot()
        make_frame(snapshot, previous, frames + 1, frames, True)
        cpu_s, frames, previous = cpu_s + time.thread_time() - before, frames + 1, snapshot
    run.wait()
    if frames:
        run.drawn(cpu_s / max(time.perf_counter() - began, 1e-9))
    return frames


def _share(share: float, frames: int) -> str:
    if share != share:
        return UNKNOWN
    return f"{share:.2%} of a core ({frames} frames, at most 5 a second)"
