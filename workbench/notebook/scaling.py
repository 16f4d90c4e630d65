"""Runs with several numbers of workers: their speed-up, efficiency, scaling law and price.

`wb.sweep(...)`, a line with `-n 1,2,4` and `wb.compare(...).scaling()` end in a `Scaled`. It also
has a prediction from each plan's run with the fewest workers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, WorkbenchError
from ..history.analysis.scaling.curves import Predicted, PredictedPoint
from ..history.analysis.scaling.of_runs import scaling as scaling_of
from ..history.analysis.scaling.of_runs import why_not, worth_showing
from ..history.analysis.scaling.words import words_of_predictions
from ..shared.flags.several import price_of

if TYPE_CHECKING:
    import pandas as pd

    from ..history.analysis.scaling.curves import Curve, Point, Scaling
    from ..history.analysis.summary import RunSummary
    from ..history.run_data import RunData
    from ..views.scaling.published import Published
    from ..views.table import Table

log = logging.getLogger("workbench.notebook")
Beside = bool | str | Sequence[str]
"""Selection of published curves: all, none, or by their keys."""
MOST_SEEDS = 3
"""Number of runs of a plan that predictions use; more runs take longer and add little."""


class ScalingPicture:
    """The picture of scaling, which displays itself.

    Attributes:
        scaling: The numbers behind it.
        published: The published curves next to it.
    """

    def __init__(self, scaling: Scaling, published: Sequence[Published] = ()) -> None:
        self.scaling, self.published = scaling, tuple(published)

    def save(self, path: str | Path) -> Path:
        """Write it to a file by its suffix, `.png` or `.svg`; return the path."""
        from ..views.scaling.exports import save

        return save(self.scaling, path, self.published)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from ..views.scaling.picture import scaling_bundle

        return scaling_bundle(self.scaling, self.published)

    def _ipython_display_(self) -> None:
        from ..views.blocks import show_bundle

        show_bundle(self._repr_mimebundle_())
        if self.published:
            from ..views.blocks import show
            from ..views.scaling.published import published_table

            show(published_table(self.published))

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])


class Scaled:
    """Runs with several numbers of workers: a figure, a table, and advice on more workers.

    Args:
        measured: The measured numbers.
        runs: The runs by name, for predictions; without them nothing is predicted.
    """

    def __init__(self, measured: Scaling, runs: Mapping[str, RunData] | None = None) -> None:
        self._measured, self._runs = measured, dict(runs or {})

    @functools.cached_property
    def scaling(self) -> Scaling:
        """The measured and predicted numbers; computed at the first use."""
        return with_predictions(self._measured, self._runs) if self._runs else self._measured

    @property
    def verdict(self) -> str:
        """The gain of the best number of workers, or the advice to use one worker, and why."""
        return self._measured.verdict

    @property
    def distribute(self) -> bool | None:
        """Whether more workers are clearly faster; None if unknown."""
        return self._measured.distribute

    def figure(self, published: Beside = False, predicted: bool = True) -> ScalingPicture:
        """Return the picture: speed-up, efficiency, a step's time, and costs if a price is given.

        Args:
            published: Draw published curves next to your own: True for all, or their keys
                (`wb.published()` lists them).
            predicted: Draw dashed curves, predicted from each plan's run with the fewest workers.

        Raises:
            PlanError: The curve does not exist.
        """
        from ..views.scaling.published import chosen

        return ScalingPicture(self._shown(predicted), chosen(published))

    def _shown(self, predicted: bool) -> Scaling:
        return self.scaling if predicted else self._measured

    def table(self) -> Table:
        """Return the table, which displays itself: one row per plan and number of workers."""
        from ..views.scaling.table import scaling_table

        return scaling_table(self.scaling)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per plan and number of workers: plain numbers, empty if not measured.

        Args:
            path: Where to write it as well.
        """
        from ..views.scaling.exports import csv_of

        return _written(csv_of(self.scaling), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the table as GitHub's Markdown, with the verdict above and the notes below."""
        from ..views.comparison.exports import markdown_of

        return _written(markdown_of(self.table()), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the table as a block of HTML, without scripts; `save("x.html")` makes a page."""
        return _written(self.table().html(), path)

    def to_pandas(self) -> pd.DataFrame:
        """Return the figures of `to_csv` as a DataFrame; NaN where not measured."""
        from ..views.scaling.exports import frame_of

        return frame_of(self.scaling)

    def to_wire(self) -> dict[str, Any]:
        """Return all shown data as plain JSON data."""
        return self.scaling.to_wire()

    def save(self, path: str | Path, published: Beside = False, predicted: bool = True) -> Path:
        """Write it to a file by its suffix: .csv .md .html .png .svg .json; return the path.

        Args:
            published, predicted: As `figure` takes them.

        Raises:
            PlanError: No format has this suffix.
        """
        from ..views.scaling.exports import save
        from ..views.scaling.published import chosen

        return save(self._shown(predicted), path, chosen(published))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return dict(self.table()._repr_mimebundle_())

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.figure())
        show(self.table())

    def __repr__(self) -> str:
        return self.table().text()


def scaled(
    summaries: Sequence[RunSummary], *, price: float | None = None, runs: Iterable[RunData] = ()
) -> Scaled:
    """Return the speed-up of runs with several numbers of workers.

    Args:
        runs: The runs of the summaries in the same order, for predictions.

    Raises:
        PlanError: All runs have the same number of workers, or the price is not a number above 0.
    """
    asked = None if price is None else price_of(price)
    found = scaling_of(summaries, price=asked)
    if found is None:
        raise PlanError(
            why_not(summaries),
            allowed="-n 1,2,4 in the cell's first line, or wb.sweep(..., workers=[1, 2, 4])",
            code="WB-PLAN-281",
        )
    return Scaled(found, {one.name: run for one, run in zip(summaries, runs, strict=False)})


def with_predictions(scaling: Scaling, runs: Mapping[str, RunData]) -> Scaling:
    """Return the scaling with predictions from each curve's run with the fewest workers (2 or
    more).

    The prediction covers all numbers of workers on the axis, and twice and four times the largest.
    Runs with one worker help to estimate how computation time depends on a worker's samples. Runs
    with more than the fewest workers are compared with the prediction, so the prediction does not
    use them.
    """
    counts = (*scaling.workers, *scaling.beyond)
    curves = [replace(one, predicted=_predicted(one, counts, runs)) for one in scaling.curves]
    found = replace(scaling, curves=tuple(curves))
    return replace(found, notes=(*scaling.notes, *words_of_predictions(found.curves)))


def _predicted(curve: Curve, counts: Iterable[int], runs: Mapping[str, RunData]) -> Predicted:
    from ..prediction.predict import predict

    several = [point for point in curve.known if point.workers > 1]
    base = next((found for point in several[:1] for found in _runs_of(point, runs)), None)
    if base is None:
        return Predicted("", 0, why_not="There is no run with two or more workers.")
    point = several[0]
    wanted = [count for count in counts if count > point.workers and _fits(curve, point, count)]
    if not wanted:
        return Predicted(base.name, point.workers)
    try:
        probes = _helpful(curve, point, runs)
        made = predict(probes, wanted, scaling=curve.mode)
    except WorkbenchError as error:
        return Predicted(base.name, point.workers, why_not=error.what)
    except (
        Exception
    ) as error:  # the picture of measured values must not fail because of a prediction
        log.exception("Scaling of %r could not be predicted", curve.name)
        return Predicted(
            base.name, point.workers, why_not=f"The prediction failed ({type(error).__name__})."
        )
    rate = curve.base.samples_per_s.mean
    points = []
    for one in made.points:
        middle, low, high = one.samples_per_s
        gains = (middle / rate, low / rate, high / rate)
        points.append(PredictedPoint(one.workers, middle, low, high, *gains, one.far))
    return Predicted(base.name, point.workers, tuple(points), notes=made.notes)


def _fits(curve: Curve, point: Point, count: int) -> bool:
    """Whether each of so many workers gets a sample of the unchanged batch."""
    return curve.mode == "weak" or not point.row.shares_batch or not count > point.batch


def _runs_of(point: Point, runs: Mapping[str, RunData]) -> list[RunData]:
    """Return a point's runs, up to the useful number."""
    return [runs[name] for name in point.row.names if name in runs][:MOST_SEEDS]


def _helpful(curve: Curve, point: Point, runs: Mapping[str, RunData]) -> list[RunData]:
    """Return the runs for a prediction: a point's runs, and useful runs with one worker.

    Raises:
        PlanError: The strategy cannot be predicted.
        RunError: The first run has too little data.
    """
    from ..prediction.probe import Probe

    found = _runs_of(point, runs)
    first = Probe.of(found[0])
    kept = found[:1]
    ones = [one for one in (*curve.known, curve.baseline) if one.workers == 1]
    for run in (*found[1:], *(run for one in ones[:1] for run in _runs_of(one, runs))):
        try:
            other = Probe.of(run)
        except WorkbenchError:  # this run is useful but not necessary
            continue
        # A slowed worker, or a worker with a stage, does not show what samples cost other workers.
        if other.workers > 1 or not (first.slow or other.slow or first.setting.piped):
            kept.append(run)
    return kept


def shows_scaling(runs: Sequence[RunSummary]) -> bool:
    """Whether to show runs over their numbers of workers, not side by side."""
    return worth_showing(runs)


def _written(text: str, path: str | Path | None) -> str:
    from ..shared.cluster_env import export

    if path is not None:
        export(Path(path).expanduser(), text.encode())
    return text


def published() -> Table:
    """Return a table of the published scaling curves: numbers, hardware, source and key."""
    from ..views.scaling.published import curves, published_table

    return published_table(curves())
