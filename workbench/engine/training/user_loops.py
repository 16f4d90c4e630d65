"""A user's own loop: one line with `wb.prepare` distributes it, `wb.watch` only records it.

`wb.watch` gives a dashboard to loops that use their own DDP or FSDP.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from collections.abc import Sequence
from typing import Any

from ...errors import FitError
from ...shared import events
from ..checkpoints.checkpoints import checkpoints_of
from ..context import RunContext, require
from . import fit_arguments
from .initial import initialise
from .notes import announce as announce_run
from .regrouping import Regrouping

prepared: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models that `wb.prepare` received on this engine."""


def prepare(
    model: Any, optimizer: Any, loader: Any = None, *more: Any, keep: Sequence[Any] = ()
) -> Any:
    """Distribute a model, an optimizer and a loader; use the returned objects in your loop.

    The returned model is the same module, moved to the worker's device. After this call it trains
    in parallel. When the cell ends, it is a plain module again. The batch of the loader is the
    global batch. Each worker receives its share on its device, and the order of the samples is the
    same for any number of workers. A step ends with `optimizer.step()`. Stop ends the loop with
    `RunStopped`.

    If a loop trains several models (such as a GAN), pass each pair of model and optimizer in a
    separate call, and the loader in the first call. The gradients of all models are averaged. A
    step ends with the `step()` of the first pair's optimizer.

    The returned loader is a `DataLoader` with the same `dataset`, `num_workers` and other
    attributes as yours. Its `batch_size` is the global batch size, and its `len` is the number of
    global batches. A `DistributedSampler` is not needed; only the epoch number from its `set_epoch`
    is used, for the order of the samples.

    Args:
        model: A module.
        optimizer: An optimizer of the model's parameters.
        loader: A `DataLoader`. If you give no loader, the loop must divide its data itself.
        more: Nothing. Other libraries take schedulers here; pass these as `keep`.
        keep: Other objects that a checkpoint must hold so that the loop can continue from the
            checkpoint: schedulers, loss scalers, or any object with `state_dict` and
            `load_state_dict`.

    Returns:
        `(model, optimizer, loader)`, or `(model, optimizer)` without a loader.

    Raises:
        RunError: The cell does not begin with `%%distributed STRATEGY`.
        FitError: The strategy cannot distribute this model, optimizer or loader. The error is
            raised before any collective.
    """
    context = require("wb.prepare")
    spec = context.spec
    if more:
        raise FitError(
            "wb.prepare takes one model, one optimizer and one loader.",
            seen=f"{3 + len(more)} values; after the loader: "
            + ", ".join(type(one).__name__ for one in more),
            allowed="wb.prepare(model, optimizer, loader, keep=[...])",
            next_step="do not pass schedulers: call them in the loop as before. If checkpoints "
            "must contain them, pass keep=[scheduler]. Do not pass the loader of the test data. "
            "For a second model, call wb.prepare(model, optimizer) again",
            code="WB-FIT-191",
        )
    fit_arguments.check_supported(context.entry, "prepare", ())
    if context.strategy is not None:
        return _prepare_another(context, model, optimizer, loader, keep)
    source = None
    if loader is not None:
        source = fit_arguments.data_module(spec.framework).divisible(
            loader, seed=int(spec.overrides.get("seed", 0))
        )
        fit_arguments.check_batch(source.batch_size, context)
    module = check_pair(context, model, optimizer, source)
    strategy = fit_arguments.load_strategy(context)
    context.strategy, context.taken_over = strategy, "wb.prepare"
    model, optimizer, shared = strategy.wrap_loop(module, optimizer, source)
    kept = check_kept(keep)
    go_on(context, strategy, kept)
    context.kept = kept
    if (spec.rank == 0 or not context.entry.data_parallel) and not context.membership.waits:
        context.weights = strategy.weights
    announce(context, module, None if source is None else source.batch_size)
    return (model, optimizer) if loader is None else (model, optimizer, shared)


def _prepare_another(
    context: RunContext, model: Any, optimizer: Any, loader: Any, keep: Sequence[Any]
) -> Any:
    """Prepare a further pair of model and optimizer of a loop."""
    after_fit = context.taken_over != "wb.prepare"
    if after_fit or loader is not None or keep:
        raise FitError(
            "wb.fit has already trained in this cell, and wb.prepare cannot follow wb.fit in a "
            "cell."
            if after_fit
            else "This cell has already called wb.prepare. Another wb.prepare can only add a model "
            "to the same loop.",
            seen="wb.prepare after wb.fit"
            if after_fit
            else "a second wb.prepare with `loader` or `keep`",
            allowed="wb.prepare in a cell without wb.fit"
            if after_fit
            else "one loop in a cell; `loader` and `keep` only in the first wb.prepare",
            next_step="put this loop into its own cell"
            if after_fit
            else "for another model of the loop, call wb.prepare(model, optimizer); put a second "
            "loop into its own cell",
            code="WB-FIT-009",
        )
    module = check_pair(context, model, optimizer)
    saved = context.spec.checkpoint or context.spec.resume
    if saved and not all(any(k is each for k in context.kept) for each in (model, optimizer)):
        raise FitError(
            "A checkpoint would not contain this model. A checkpoint contains only the first model "
            "and optimizer, and the objects in `keep`.",
            seen="--checkpoint with several models",
            allowed="several models, if the other models and their optimizers are in `keep` of "
            "the first wb.prepare",
            next_step="call wb.prepare(first, first_optimizer, loader, keep=[other, "
            "other_optimizer])",
            code="WB-FIT-010",
        )
    another: tuple[Any, Any] = context.strategy.wrap_another_loop(module, optimizer)
    return another


def go_on(context: RunContext, strategy: Any, kept: tuple[Any, ...]) -> None:
    """Allow checkpoints of the loop; load the checkpoint that the run continues from, if any."""
    checkpoints, loop = checkpoints_of(context), strategy.loop
    loop.checkpoints = checkpoints
    base = {"base": context.trained}
    about = checkpoints.enter(
        strategy, lambda: {**base, **loop.position()}, kept, ends_with_cell=True
    )
    if about is not None:
        loop.go_on(about)
        checkpoints.restore()
        checkpoints.tell()
    if context.spec.heals:
        strategy.heal_loop(kept, Regrouping)


def check_kept(keep: Sequence[Any]) -> tuple[Any, ...]:
    """Return the objects that a checkpoint must hold in addition to model and optimizer.

    Raises:
        FitError: An object cannot be saved and loaded.
    """
    for thing in keep:
        if not all(callable(getattr(thing, n, None)) for n in ("state_dict", "load_state_dict")):
            raise FitError(
                "The objects in `keep` must have a state.",
                seen=type(thing).__name__,
                allowed="objects with state_dict and load_state_dict, for example schedulers",
                next_step="call wb.prepare(model, optimizer, loader, keep=[scheduler])",
                code="WB-FIT-011",
            )
    return tuple(keep)


def check_pair(context: RunContext, model: Any, optimizer: Any, source: Any = None) -> Any:
    """Check a model and its built optimizer; return the model.

    Raises:
        FitError: The model or the optimizer cannot be used for training.
    """
    support = fit_arguments.support(context.spec.framework)
    module = support.build_module(model)
    if not hasattr(optimizer, "param_groups"):
        raise FitError(
            "In your own loop, `optimizer` must be an optimizer object.",
            seen=type(optimizer).__name__,
            next_step="optimizer = torch.optim.SGD(model.parameters(), 0.1)",
            code="WB-FIT-012",
        )
    if make_real := getattr(support, "make_real", None):
        make_real(module, (lambda: None) if source is None else source.peek)
    support.check_optimizer(optimizer, module)
    fit_arguments.check_sparse(context.entry, module)
    fit_arguments.warn_if_trained(context, module)
    fit_arguments.lacks_memory(context.entry, module)
    initialise(context, module)
    prepared.add(module)
    return module


def announce(context: RunContext, model: Any, batch_size: int | None) -> None:
    """Report that training begins, and how the batch is divided."""
    spec = context.spec
    workers = spec.world_size if context.entry.data_parallel else 1
    parameters = fit_arguments.support(spec.framework).parameter_count(model)
    announce_run(context, parameters, batch_size=batch_size)
    if batch_size is not None and spec.rank == 0 and workers > 1:
        shares = [
            (r + 1) * batch_size // workers - r * batch_size // workers for r in range(workers)
        ]
        even = len(set(shares)) == 1
        words = f"{workers} x {shares[0]}" if even else " + ".join(map(str, shares))
        context.emit(events.Noted(rank=0, text=f"global batch {batch_size} = {words}"))


def watch(model: Any, optimizer: Any, loader: Any = None) -> None:
    """Record the steps of a loop that already distributes its training, without changing the loop.

    A step begins when the loop requests a batch from `loader`, and ends with `optimizer.step()`.
    Without a loader, a step begins with its first forward pass, and data waits are not measured. If
    the end of the backward pass is blocked, this time counts as communication. Communication in the
    forward pass (FSDP gathers parameters) counts as compute.

    Args:
        model: The module, either plain or wrapped in DDP or FSDP.
        optimizer: The model's optimizer.
        loader: The loader over which the loop iterates. Its waiting times are measured.

    Raises:
        RunError: The cell does not begin with `%%distributed STRATEGY`.
        FitError: Workbench already watches another loop of this cell.
    """
    context = require("wb.watch")
    framework = context.spec.framework
    if context.spec.checkpoint or context.spec.resume:
        raise FitError(
            "--checkpoint cannot be used with wb.watch, which does not save your loop's state.",
            seen="--checkpoint with wb.watch",
            allowed="--checkpoint with wb.fit or wb.prepare",
            next_step="remove --checkpoint and save the state in your loop, or use wb.prepare",
            code="WB-FIT-068",
        )
    if importlib.util.find_spec(f"workbench.strategies.{framework}.parts.watched") is None:
        raise FitError(
            f"wb.watch is not needed in {framework}: loops are recorded automatically.",
            next_step="remove wb.watch, and call optimizer.apply_gradients within strategy.run. "
            "There, the optimizer adds up the gradients of all replicas",
            code="WB-FIT-069",
        )
    module = importlib.import_module(f"workbench.strategies.{framework}.parts.watched")
    initialise(context, model)
    context.taken_over = "wb.watch"
    watched = module.watch(context, model, optimizer, loader)
    context.closers.append(watched.close)
    context.weights = watched.weights
    size = fit_arguments.data_module(framework).global_batch(loader, context.spec.world_size)
    announce(context, model, size)
    if loader is None:
        context.emit(events.Unmeasured(columns={"data_wait_s": "wb.watch was given no loader"}))
