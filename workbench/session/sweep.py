"""Plans of every recipe under every strategy with every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..errors import PlanError
from ..plan import Plan, check_count, check_seed, plan_of
from ..run_request import from_arguments
from .checkpoints import apart
from .checks import to_recipe

if TYPE_CHECKING:
    from ..cookbook.recipe import Recipe
    from .access import ClusterAccess

Source: TypeAlias = "str | Callable[..., Any] | Recipe"


def sweep(
    cluster: ClusterAccess,
    recipes: Source | Sequence[Source],
    strategies: str | Sequence[str],
    *,
    seeds: int | Sequence[int] = (),
    args: tuple[Any, ...] = (),
    name: str = "",
    **settings: Any,
) -> list[Plan]:
    """Return the plans, all validated; every strategy with every seed, recipe after recipe.

    Args:
        recipes: Source of a cell, a function, a recipe; one or several.
        seeds: How many, from 0, or which; none leaves the seed to the cell.
        name: Of the runs; the strategy, the recipe's number and the seed are added where there are
            several.
        settings: What else `Cluster.run` takes: `options`, `checkpoint`, `epochs`, ...

    Raises:
        PlanError: One of them cannot be run.
    """
    several = isinstance(recipes, Sequence) and not isinstance(recipes, str)
    sources = list(cast("Sequence[Source]", recipes)) if several else [cast("Source", recipes)]
    chosen = [strategies] if isinstance(strategies, str) else list(strategies)
    if not sources or not chosen:
        missing = "recipe" if not sources else "strategy"
        raise PlanError(
            f"A sweep needs at least one {missing}.",
            allowed="one, or a list of them",
            code="WB-PLAN-133",
        )
    asked = from_arguments("", settings)
    wanted = list(range(check_count("seeds", seeds)) if isinstance(seeds, int) else seeds)
    found = []
    for number, source in enumerate(sources, 1):
        recipe = to_recipe(source, args)
        stem = name
        if len(sources) > 1:
            stem = f"{name or recipe.name or recipe.function or 'recipe'}-{number}"
        for strategy in chosen:
            plan = plan_of(
                replace(asked, name=f"{stem}-{strategy}" if stem and len(chosen) > 1 else stem),
                recipe,
                strategy=strategy,
                framework=cluster.framework,
                workers=max(1, len(cluster.worker_ids)),
            )
            found += [plan.with_seed(check_seed(seed)) for seed in wanted] or [plan]
    return apart(found)
