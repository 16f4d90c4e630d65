"""`wb.sweep`: one training with several numbers of workers, batches, options; what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..execution.registry import runs as known
from ..execution.requests import to_recipe
from ..session.queue import sweep as plans_for
from ..shared.flags.several import price_of
from ..views.blocks import ProgressLine
from .compare import Compared, compare
from .recipes import recipes
from .scaling import Scaled, scaled, shows_scaling
from .session import check_ahead, cluster_here

if TYPE_CHECKING:
    from ..cookbook.recipe import Recipe
    from ..execution.run import Run
    from ..session.cluster import Cluster
    from ..session.queue import Queue


def sweep(
    source: str | Callable[..., Any] | Recipe,
    strategies: str | Sequence[str] = ("one_device", "mirrored"),
    *,
    seeds: int | Sequence[int] = (),
    price: float | None = None,
    cluster: Cluster | None = None,
    **settings: Any,
) -> Scaled | Compared:
    """Train one recipe under every combination of the values in lists; return the results.

        wb.sweep("digits_mlp", ["one_device", "mirrored"], workers=[1, 2, 4], seeds=3)
        wb.sweep(source, "mirrored", options={"bucket_mb": [5, 25]}, values={"lr": [0.1, 0.01]})

    Every plan is checked before an engine is touched. A run that fails does not end the rest; it is
    shown as missing.

    Args:
        source: Source of a cell, a function, a recipe, or the name of a run or recipe.
        strategies: One or several; `one_device` is run once and is what others are held against.
        seeds: How many, from 0, or which.
        price: Of a worker-hour, in any currency.
        cluster: By default the notebook's, or the only one.
        settings: As `Cluster.run` takes them, with lists where several are wanted: `workers`,
            `batch_size`, `batch_per_worker`, `options`, `values`, `epochs`, `steps`, ...

    Returns:
        Speed-up over workers, where there are several numbers of them; else a comparison.

    Raises:
        PlanError: A plan cannot be run.
        RunError: Every run failed.
    """
    if price is not None:
        price = price_of(price)
    where = cluster or cluster_here()
    source = recipe_of(source, settings.get("framework") or where.framework)
    plans = plans_for(where, source, strategies, seeds=seeds, **settings)
    check_ahead(where, plans)
    queue = where.queue()
    queue.check_free()
    before = queue.keep_going
    queue.keep_going = True
    progress = _Progress()
    undo = queue.listen(progress)
    try:
        items = queue.add(plans)
        queue.wait()
    except BaseException:
        queue.stop_all("the sweep was interrupted")
        raise
    finally:
        undo()
        progress.line.done()
        queue.keep_going = before
    made = [item.run for item in items if item.run is not None]
    if not any(run.error is None for run in made):
        raise next((item.error for item in items if item.error is not None), None) or PlanError(
            "No run of the sweep has started.", seen=f"{len(plans)} plans", code="WB-PLAN-282"
        )
    return concluded(made, price=price)


def recipe_of(source: str | Callable[..., Any] | Recipe, framework: str | None) -> Recipe:
    """Return what is trained: a recipe, the source of a cell, a function, or a name of one.

    Raises:
        PlanError: There is no run or recipe of that name.
    """
    if isinstance(source, str) and "\n" not in source.strip() and "(" not in source:
        return (
            known[source].plan.recipe if source in known else recipes.find(source, framework or "")
        )
    return to_recipe(source)


class _Progress:
    """Says below the cell which run of how many is active."""

    def __init__(self) -> None:
        self.line = ProgressLine()
        self._said = ""

    def __call__(self, queue: Queue) -> None:
        """Look at the queue, which has changed."""
        current, items = queue.current, queue.items
        if current is None:
            return
        said = f"run {items.index(current) + 1} of {len(items)}: {current.name}"
        if said != self._said:
            self._said = said
            self.line(said)


def concluded(runs: Sequence[Run], *, price: float | None = None) -> Scaled | Compared:
    """Return the results of several runs of one recipe.

    Speed-up over workers, where a plan has several numbers of them, or their price is asked for;
    else the runs side by side.
    """
    summaries = [run.summarise() for run in runs]
    counts = {one.workers for one in summaries}
    if shows_scaling(summaries) or (price is not None and len(counts) > 1):
        return scaled(summaries, price=price, runs=runs)
    return compare(*runs)
