"""`wb.sweep`: one training with several numbers of workers, batches or options, and the results."""

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
    """Train one recipe under every combination of the listed values, and return the results.

        wb.sweep("digits_mlp", ["one_device", "mirrored"], workers=[1, 2, 4], seeds=3)
        wb.sweep(source, "mirrored", options={"bucket_mb": [5, 25]}, values={"lr": [0.1, 0.01]})

    Every plan is checked before an engine is used. If a run fails, the other runs are still made,
    and the failed run is shown as missing.

    Args:
        source: Source of a cell, a function, a recipe, or the name of a run or recipe.
        strategies: One strategy or several strategies. `one_device` is run only with one worker,
            and is the baseline.
        seeds: The number of seeds, counted from 0, or a list of seeds.
        price: Price of a worker-hour, in any currency.
        cluster: The cluster for the runs; by default the notebook's cluster, or the only cluster.
        settings: Settings as for `Cluster.run`: `workers`, `batch_size`, `batch_per_worker`,
            `options`, `values`, `epochs`, `steps`, ... A list gives several values of a setting.

    Returns:
        The speed-up by number of workers, if there are several numbers of workers; otherwise a
        comparison.

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
            "No run of the sweep has started.",
            seen=next((item.why for item in items if item.why), None),
            code="WB-PLAN-282",
        )
    return concluded(made, price=price)


def recipe_of(source: str | Callable[..., Any] | Recipe, framework: str | None) -> Recipe:
    """Return the training: a recipe, the source of a cell, a function, or the recipe of a name.

    Raises:
        PlanError: There is no run or recipe with this name.
    """
    if isinstance(source, str) and "\n" not in source.strip() and "(" not in source:
        return (
            known[source].plan.recipe if source in known else recipes.find(source, framework or "")
        )
    return to_recipe(source)


class _Progress:
    """Shows below the cell the active run and the number of runs."""

    def __init__(self) -> None:
        self.line = ProgressLine()
        self._said = ""

    def __call__(self, queue: Queue) -> None:
        """Update the line after a change of the queue."""
        current, items = queue.current, queue.items
        if current is None:
            return
        said = f"run {items.index(current) + 1} of {len(items)}: {current.name}"
        if said != self._said:
            self._said = said
            self.line(said)


def concluded(runs: Sequence[Run], *, price: float | None = None) -> Scaled | Compared:
    """Return the results of several runs of one recipe.

    The result is the speed-up over workers if a plan has several numbers of workers or a price is
    given. Otherwise it is the runs side by side.
    """
    summaries = [run.summarise() for run in runs]
    counts = {one.workers for one in summaries}
    if shows_scaling(summaries) or (price is not None and len(counts) > 1):
        return scaled(summaries, price=price, runs=runs)
    return compare(*runs)
