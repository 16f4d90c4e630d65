"""`wb.compare`, `wb.strategies`, `wb.diagram`: runs side by side, and what there is to pick from.

A diagram says who sends what to whom in a step of a strategy, as a picture and as data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..catalog.diagrams import messages
from ..errors import PlanError
from ..execution.registry import runs as known
from ..execution.run import Run
from ..history.analysis import comparison
from ..shared.cluster_env import export
from ..views.explain.diagram import DiagramPicture

if TYPE_CHECKING:
    import pandas as pd

    from ..views.table import Table


class Compared:
    """Runs of one recipe side by side: a figure, a table and a verdict in plain words.

    Attributes:
        comparison: The numbers behind them.
    """

    def __init__(self, compared: comparison.Comparison) -> None:
        self.comparison = compared

    @property
    def verdict(self) -> str:
        """Which plan was fastest and why, and when distributing begins to pay if that is known."""
        return " ".join(filter(None, (self.comparison.verdict, self.comparison.outlook)))

    def table(self, sort: str | None = None, descending: bool = True) -> Table:
        """Return the table, which displays itself.

        Args:
            sort: What to sort by: a heading (`"final loss"`) or a column of `to_pandas`
                (`"samples_per_s"`); rows that lack it stand last.
            descending: Largest first.

        Raises:
            PlanError: There is no such column.
        """
        from ..views.comparison.table import comparison_table

        return comparison_table(self.comparison, sort=sort, descending=descending)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return a line per plan: plain numbers, units in the headings, empty where not measured.

        Args:
            path: Where to write it as well.
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
        """Return the figures of `to_csv` as a DataFrame; NaN where not measured."""
        from ..views.comparison.exports import frame_of

        return frame_of(self.comparison)

    def to_wire(self) -> dict[str, Any]:
        """Return everything that is shown, curves too, as plain JSON data."""
        return self.comparison.to_wire()

    def save(self, path: str | Path) -> Path:
        """Write it to a file by its suffix: .csv .md .html .png .svg .json; return the path.

        Raises:
            PlanError: There is no form for that suffix.
        """
        from ..views.comparison.exports import save

        return save(self.comparison, path)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return dict(self.table()._repr_mimebundle_())

    def _ipython_display_(self) -> None:
        from ..views.blocks import show, show_bundle
        from ..views.comparison.picture import comparison_bundle

        show_bundle(comparison_bundle(self.comparison))
        show(self.table())

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])


def compare(*runs: Run | str) -> Compared:
    """Compare runs, also ones that were stopped or failed.

    Args:
        runs: Runs, or their names in `wb.runs`.

    Shows loss by time, samples and steps, throughput, speed-up and efficiency, where a step's time
    goes, what is sent and held, staleness, final loss and metrics, and says in a sentence which
    plan was faster, why, and when distributing would begin to pay.

    Raises:
        PlanError: No run was given, something that is none, or a name that no run has.
    """
    if not runs:
        raise PlanError("Nothing to compare.", next_step='wb.compare("a", "b")', code="WB-PLAN-103")
    return Compared(comparison.compare([_run(one).summarise() for one in runs]))


def _run(one: object) -> Run:
    if isinstance(one, Run):
        return one
    if isinstance(one, str):
        return known[one]
    raise PlanError(
        "wb.compare takes runs, or their names.",
        seen=type(one).__name__,
        allowed='a run, or its name in wb.runs ("a")',
        next_step='wb.compare("a", "b")',
        code="WB-PLAN-104",
    )


def strategies() -> Any:
    """A table of every strategy: name, term, options, how it can be used, source."""
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
        strategy: A name or alias, as `%%distributed` takes it.
        workers: How many, 1 to 64; a strategy with a lower limit takes fewer.
        options: The strategy's, as `-o` takes them.

    Returns:
        A picture (SVG, with its content as text); `.data` are nodes, phases and arrows,
        `.to_wire()` the same for JSON.

    Raises:
        PlanError: The strategy or an option is unknown, or the options do not fit the workers.
    """
    return DiagramPicture(messages(strategy, workers, options, framework=framework))
