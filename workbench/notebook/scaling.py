"""Runs with several numbers of workers: their speed-up, efficiency, scaling law and price.

`wb.sweep(...)`, a line with `-n 1,2,4` and `wb.compare(...).scaling()` end in a `Scaled`. It
also has the prediction that follows from each plan's run with the fewest workers.
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
"""Which published curves: all, none, or by their keys."""
MOST_SEEDS = 3
"""So many runs of a plan are predicted from: more take longer, and tell little more."""


class ScalingPicture:
    """The picture of scaling, which displays itself.

    Attributes:
        scaling: The numbers behind it.
        published: The published curves beside it.
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
    """Runs with several numbers of workers: a figure, a table, and whether to distribute.

    Args:
        measured: The numbers behind them.
        runs: The runs by name, to predict from; without them nothing is predicted.
    """

    def __init__(self, measured: Scaling, runs: Mapping[str, RunData] | None = None) -> None:
        self._measured, self._runs = measured, dict(runs or {})

    @functools.cached_property
    def scaling(self) -> Scaling:
        """The numbers behind them, with what is predicted; computed when first asked for."""
        return with_predictions(self._measured, self._runs) if self._runs else self._measured

    @property
    def verdict(self) -> str:
        """What the best number of workers gains, or that you should not distribute, and why."""
        return self._measured.verdict

    @property
    def distribute(self) -> bool | None:
        """Whether more workers are faster beyond doubt; None where that is not known."""
        return self._measured.distribute

    def figure(self, published: Beside = False, predicted: bool = True) -> ScalingPicture:
        """Return the picture: speed-up, efficiency, a step's time, and costs where priced.

        Args:
            published: Draw published curves next to your own: True for all, or their keys
                (`wb.published()` lists them).
            predicted: Draw, dashed, what each plan's run with the fewest workers let expect.

        Raises:
            PlanError: The curve does not exist.
        """
        from ..views.scaling.published import chosen

        return ScalingPicture(self._shown(predicted), chosen(published))

    def _shown(self, predicted: bool) -> Scaling:
        return self.scaling if predicted else self._measured

    def table(self) -> Table:
        """Return the table, which displays itself: a row per plan and number of workers."""
        from ..views.scaling.table import scaling_table

        return scaling_table(self.scaling)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return a line per plan and number of workers: plain numbers, empty where not measured.

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
        """Return everything that is shown as plain JSON data."""
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
    """Return the gain of runs with several numbers of workers.

    Args:
        runs: Those of the summaries, in their order, to predict from.

    Raises:
        PlanError: They have one number of workers, or the price is not a number above 0.
    """
    asked = None if price is None else price_of(price)
    found = scaling_of(summaries, price=asked)
    if found is None:
        raise PlanError(
            why_not(summaries),
            allowed="-n 1,2,4 above the cell, or wb.sweep(..., workers=[1, 2, 4])",
            code="WB-PLAN-281",
        )
    return Scaled(found, {one.name: run for one, run in zip(summaries, runs, strict=False)})


def with_predictions(scaling: Scaling, runs: Mapping[str, RunData]) -> Scaling:
    """Return the same with what each curve's run with the fewest workers, 2 or more, let expect.

    It is predicted for all numbers of workers that stand on the axis, and for twice and four times
    the most. Runs with one worker help to tell how own work changes with a worker's samples; those
    with more than the fewest are what the prediction is held against, so it knows nothing of them.
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
    except Exception as error:  # a picture of what was measured must not fail for it
        log.exception("Scaling of %r could not be predicted", curve.name)
        return Predicted(base.name, point.workers, why_not=f"It failed ({type(error).__name__}).")
    rate = curve.base.samples_per_s.mean
    points = []
    for one in made.points:
        middle, low, high = one.samples_per_s
        gains = (middle / rate, low / rate, high / rate)
        points.append(PredictedPoint(one.workers, middle, low, high, *gains, one.far))
    return Predicted(base.name, point.workers, tuple(points), notes=made.notes)


def _fits(curve: Curve, point: Point, count: int) -> bool:
    """Whether so many workers have a sample each, where the batch stays."""
    return curve.mode == "weak" or not point.row.shares_batch or not count > point.batch


def _runs_of(point: Point, runs: Mapping[str, RunData]) -> list[RunData]:
    """Return a point's runs, as many as are of use."""
    return [runs[name] for name in point.row.names if name in runs][:MOST_SEEDS]


def _helpful(curve: Curve, point: Point, runs: Mapping[str, RunData]) -> list[RunData]:
    """Return what is predicted from: a point's runs, and those with one worker that tell more.

    Raises:
        PlanError: The strategy cannot be predicted.
        RunError: The first run does not tell enough.
    """
    from ..prediction.probe import Probe

    found = _runs_of(point, runs)
    first = Probe.of(found[0])
    kept = found[:1]
    ones = [one for one in (*curve.known, curve.baseline) if one.workers == 1]
    for run in (*found[1:], *(run for one in ones[:1] for run in _runs_of(one, runs))):
        try:
            other = Probe.of(run)
        except WorkbenchError:  # it would have helped; it is not needed
            continue
        # Who is slowed, and who holds a stage, tells nothing of what samples cost the others.
        if other.workers > 1 or not (first.slow or other.slow or first.setting.piped):
            kept.append(run)
    return kept


def shows_scaling(runs: Sequence[RunSummary]) -> bool:
    """Whether runs are better shown over their numbers of workers than side by side."""
    return worth_showing(runs)


def _written(text: str, path: str | Path | None) -> str:
    from ..shared.cluster_env import export

    if path is not None:
        export(Path(path).expanduser(), text.encode())
    return text


def published() -> Table:
    """A table of the published scaling curves: numbers, hardware, source, key."""
    from ..views.scaling.published import curves, published_table

    return published_table(curves())
