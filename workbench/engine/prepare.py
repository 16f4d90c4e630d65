"""`wb.prepare`: a user's own loop, distributed by one line."""

from __future__ import annotations

from typing import Any

from ..errors import FitError
from . import settings
from .announce import announce as announce_run
from .context import RunContext, require
from .initial import initialise


def prepare(model: Any, optimizer: Any, loader: Any = None) -> Any:
    """Hand a loop's model, optimizer and loader to the strategy; go on with what comes back.

    The model is the same module, moved to the device: it trains in parallel from now on, and is
    plain again when the cell ends. The loader's batch is the global batch; each worker is given
    its share, on its device, in the same order whatever the number of workers. A step ends with
    `optimizer.step()`. Stop ends the loop by `RunStopped`.

    Args:
        model: A module.
        optimizer: A built optimizer of its parameters.
        loader: A DataLoader; without one, the loop divides its data itself.

    Returns:
        `(model, optimizer, loader)`, or `(model, optimizer)` without a loader.

    Raises:
        RunError: The cell lacks `%%distributed STRATEGY`.
        FitError: Something cannot be distributed; raised before any collective.
    """
    context = require("wb.prepare")
    spec = context.spec
    settings.check_supported(context.entry, "prepare", ())
    if context.strategy is not None:
        raise FitError(
            "This cell is training already.",
            allowed="one wb.fit or wb.prepare at a time",
            next_step="put the second loop into a cell of its own",
        )
    module = check_pair(context, model, optimizer)
    source = None
    if loader is not None:
        source = settings.data_module(spec.framework).divisible(
            loader, seed=int(spec.overrides.get("seed", 0))
        )
        settings.check_batch(source.batch_size, context)
    strategy = settings.load_strategy(context)
    context.strategy = strategy
    model, optimizer, shared = strategy.adopt(module, optimizer, source)
    if spec.rank == 0 or not context.entry.data_parallel:
        context.weights = strategy.weights
    announce(context, module, None if source is None else source.batch_size)
    return (model, optimizer) if loader is None else (model, optimizer, shared)


def check_pair(context: RunContext, model: Any, optimizer: Any) -> Any:
    """Check a model and its built optimizer; return the model.

    Raises:
        FitError: One of them cannot be trained with.
    """
    support = settings.support(context.spec.framework)
    module = support.build_module(model)
    if not hasattr(optimizer, "param_groups"):
        raise FitError(
            "An own loop needs a built optimizer.",
            seen=type(optimizer).__name__,
            next_step="optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        )
    support.check_optimizer(optimizer, module)
    settings.check_sparse(context.entry, module)
    settings.warn_if_trained(context, module)
    initialise(context, module)
    return module


def announce(context: RunContext, model: Any, batch_size: int | None) -> None:
    """Say that training begins, and how the batch is divided."""
    spec = context.spec
    workers = spec.world_size if context.entry.data_parallel else 1
    parameters = settings.support(spec.framework).parameter_count(model)
    announce_run(context, parameters, batch_size=batch_size)
    if batch_size is not None and spec.rank == 0 and workers > 1:
        shares = [
            (r + 1) * batch_size // workers - r * batch_size // workers for r in range(workers)
        ]
        even = len(set(shares)) == 1
        words = f"{workers} x {shares[0]}" if even else " + ".join(map(str, shares))
        context.emit("note", rank=0, text=f"global batch {batch_size} = {words}")
