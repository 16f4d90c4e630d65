"""`wb.resume`: go on with a run from its checkpoint, under as many workers as there are now."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError, PlanError
from ..execution import registry
from ..session import checkpoints
from ..shared.plan import MOST_NAME, Plan, make_plan

if TYPE_CHECKING:
    from ..execution.run import Run
    from ..session.cluster import Cluster


def resume(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    on_failure: str = "",
    name: str = "",
    args: tuple[Any, ...] | None = None,
    cluster: Cluster | None = None,
    **overrides: Any,
) -> Run:
    """Run the cell (or function) again that a checkpoint belongs to, from where it stood.

    Its code is beside the checkpoints and is run on the engines: resume only from folders whose
    content you would run yourself. Injected faults do not come back.

    Args:
        path: The folder that `--checkpoint DIR` named (its last checkpoint), or a `DIR/step-N`.
        workers: Replicas; by default as many as then.
        strategy: Another strategy of the same framework.
        options: Options of the strategy; they win over the run's.
        checkpoint: Where further checkpoints go; by default into the same folder.
        checkpoint_every: Steps between them; by default as before.
        on_failure: As `--on-failure`; by default as before.
        name: Name of the run in `wb.runs`; by default as before.
        args: Arguments of a function that was given some.
        cluster: By default the notebook's, or the only one.
        overrides: `epochs`, `steps`: how far to train; `seed` and `batch_size` must stay.

    Returns:
        The run, under way; its steps count on from the checkpoint's.

    Raises:
        RunError: There is no checkpoint, or it cannot be read.
        PlanError: What was asked for cannot be run.
    """
    one = checkpoints.at(path)
    about = checkpoints.described(Path(one.path).parent)
    before = Plan.from_wire(about["plan"])
    recipe = before.recipe
    if args is None and about.get("arguments"):
        raise PlanError(
            "The function was given arguments, which are not kept with its checkpoints.",
            seen=recipe.origin,
            allowed=f"args=({about['arguments']} values)",
            next_step="wb.resume(path, args=(...))",
            code="WB-PLAN-117",
        )
    same = strategy in (None, before.strategy)
    plan = make_plan(
        replace(recipe, args=args or ()),
        strategy or before.strategy,
        framework=before.framework,
        workers=workers or before.workers,
        options={**(before.options if same else {}), **(options or {})},
        overrides={**before.overrides, **overrides},
        name=name or str(about["name"])[:MOST_NAME],
        checkpoint=str(checkpoint or Path(one.path).parent),
        checkpoint_every=checkpoint_every or before.checkpoint_every,
        on_failure=on_failure or before.on_failure,
    )
    return (cluster or _cluster()).start(plan, resume_from=one.path)


def _cluster() -> Cluster:
    """Return the notebook's cluster, or the only one of this process.

    Raises:
        ClusterError: There is none, or which one is not clear.
    """
    from .session import session

    if session.cluster is not None:
        return session.cluster
    running: list[Cluster] = registry.running_clusters()
    if len(running) == 1:
        return running[0]
    raise ClusterError(
        "No cluster is running in this notebook." if not running else "Which cluster?",
        next_step="run %cluster start 2 first" if not running else "pass cluster=...",
        code="WB-CLUSTER-042",
    )
