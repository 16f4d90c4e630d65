"""The weights from which a run starts: the final weights of another run (`--init-from RUN`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import RunError
from ...history.disk import FILES, META, read_weights
from ...shared.checkpoints import fit_weights
from . import fit_arguments

if TYPE_CHECKING:
    from ..context import RunContext


def initialise(context: RunContext, model: Any) -> None:
    """Give the first model of the cell the weights that `--init-from` names, if it is given.

    A model that does not know its shapes yet stays unchanged. Its strategy calls this function
    again later.

    Raises:
        PlanError: The weights are of a different model.
        RunError: The weights cannot be read here.
    """
    folder, support = context.spec.init_from, fit_arguments.support(context.spec.framework)
    if not folder or context.initial_read:
        return
    shapes = support.weight_shapes(model)
    if not shapes:
        return
    arrays, framework = read(Path(folder))
    support.load_weights(model, fit_weights(arrays, framework, shapes, context.spec.framework))
    context.initial_read = True


def read(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the final weights of a run by name, from all its ranks, and the run's framework.

    Raises:
        RunError: The run has no final weights, or they cannot be read.
    """
    arrays: dict[str, Any] = {}
    try:
        meta = json.loads((folder / META).read_text())
        framework, written = str(meta["framework"]), dict(meta.get(FILES) or {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "This engine cannot read the weights of the run given to --init-from.",
            seen=str(error),
            next_step="if this engine is on another host, make the run's folder readable there",
            code="WB-RUN-010",
        ) from error
    names = {name for name in written if name.endswith(".npz")}
    for name in sorted(names | {path.name for path in folder.glob("weights*.npz")}):
        arrays.update(read_weights(folder / name, written.get(name, ())))
    if not arrays:
        raise RunError(
            "The run given to --init-from has no weights.", seen=str(folder), code="WB-RUN-011"
        )
    return arrays, framework
