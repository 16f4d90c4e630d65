"""What runs with several numbers of workers gained: speed-up, efficiency, their law, their price.

`wb.sweep(...)`, a line with `-n 1,2,4` and `wb.compare(...).scaling()` end in a `Scaled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..history.analysis.scaling.of_runs import scaling as scaling_of
from ..history.analysis.scaling.of_runs import why_not, worth_showing
from ..shared.flags.several import price_of

if TYPE_CHECKING:
    import pandas as pd

    from ..history.analysis.scaling.curves import Scaling
    from ..history.analysis.summary import RunSummary
    from ..views.scaling.published import Published
    from ..views.table import Table

Beside = bool | str | Sequence[str]
"""Which published curves: all, none, or by their keys."""


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

    Attributes:
        scaling: The numbers behind them.
    """

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling

    @property
    def verdict(self) -> str:
        """What the best number of workers gains, or that you should not distribute, and why."""
        return self.scaling.verdict

    @property
    def distribute(self) -> bool | None:
        """Whether more workers are faster beyond doubt; None where that is not known."""
        return self.scaling.distribute

    def figure(self, published: Beside = False) -> ScalingPicture:
        """Return the picture: speed-up, efficiency, a step's time, and costs where priced.

        Args:
            published: Draw published curves beside one's own: True for all, or their keys
                (`wb.published()` lists them).

        Raises:
            PlanError: There is no such curve.
        """
        from ..views.scaling.published import chosen

        return ScalingPicture(self.scaling, chosen(published))

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

    def save(self, path: str | Path, published: Beside = False) -> Path:
        """Write it to a file by its suffix: .csv .md .html .png .svg .json; return the path.

        Raises:
            PlanError: There is no form for that suffix.
        """
        from ..views.scaling.exports import save
        from ..views.scaling.published import chosen

        return save(self.scaling, path, chosen(published))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return dict(self.table()._repr_mimebundle_())

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.figure())
        show(self.table())

    def __repr__(self) -> str:
        return self.table().text()


def scaled(runs: Sequence[RunSummary], *, price: float | None = None) -> Scaled:
    """Return what runs with several numbers of workers gained.

    Raises:
        PlanError: They have one number of workers, or the price is no number above 0.
    """
    asked = None if price is None else price_of(price)
    found = scaling_of(runs, price=asked)
    if found is None:
        raise PlanError(
            why_not(runs),
            allowed="-n 1,2,4 above the cell, or wb.sweep(..., workers=[1, 2, 4])",
            code="WB-PLAN-281",
        )
    return Scaled(found)


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
