"""`wb.compare` and `wb.strategies`: runs side by side, and what there is to pick from."""

from __future__ import annotations

from typing import Any

from .. import catalog
from ..errors import PlanError
from ..history import comparison
from .run import Run


class Compared:
    """Runs of one recipe side by side: a figure, a table and a verdict in plain words.

    Attributes:
        comparison: The numbers behind them.
    """

    def __init__(self, compared: comparison.Comparison) -> None:
        self.comparison = compared

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        from ..views.tables import comparison_table

        return dict(comparison_table(self.comparison)._repr_mimebundle_())

    def _ipython_display_(self) -> None:
        from ..views.blocks import show, show_bundle
        from ..views.comparison_figure import comparison_bundle
        from ..views.tables import comparison_table

        show_bundle(comparison_bundle(self.comparison))
        show(comparison_table(self.comparison))

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])


def compare(*runs: Run) -> Compared:
    """Compare runs: loss by time and by samples, samples/s, speed-up, waits, final loss.

    Raises:
        PlanError: Fewer than one run was given, or something that is no run.
    """
    if not runs:
        raise PlanError("Nothing to compare.", next_step="wb.compare(run_a, run_b)")
    for run in runs:
        if not isinstance(run, Run):
            raise PlanError(
                "wb.compare takes runs.",
                seen=type(run).__name__,
                next_step='wb.compare(wb.runs["a"], wb.runs["b"])',
            )
    return Compared(comparison.compare([run.summarise() for run in runs]))


def strategies() -> Any:
    """A table of every strategy: name, term, options, how it can be used, source."""
    from ..views.tables import strategies_table

    return strategies_table(catalog.CATALOG)
