"""`wb.fit`: train a model under the run's strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import FitError
from ..context import RunContext, require
from ..contract import Job
from ..telemetry import profiler
from . import fit_arguments
from .initial import initialise
from .loop import FitResult, Training


def fit(
    model: Any = None,
    data: Any = None,
    *,
    loss: Any = None,
    step_fn: Any = None,
    optimizer: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    metrics: Any = None,
    scheduler: Any = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    precision: str | None = None,
    compile: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    callbacks: Any = (),
) -> FitResult:
    """Train `model` in place, under the strategy of the cell.

    A step is one optimizer step. In a step all workers together use `batch_size` samples. With
    `accumulate`, these are the samples of all parts. `--epochs`, `--steps`, `--batch-size`
    and `--seed` in the first line of the cell override the arguments.

    Args:
        model: A module, a list of modules that are applied one after the other, or a function
            without arguments that returns a module or such a list.
        data: A `Dataset`, a pair `(x, y)` of arrays or tensors, or a `DataLoader`, whose dataset,
            batch size, collate function, number of processes and order are used. Every worker reads
            an `IterableDataset` completely. If an `IterableDataset` has no length, give `steps`.
        loss: A function `loss(output, y)` that returns a mean over the batch. The batches must be
            pairs `(x, y)`.
        step_fn: A function `step_fn(model, batch)` that returns the mean loss of the batch. Use it
            instead of `loss` if batches are not pairs.
        optimizer: A function that takes the parameters and returns an optimizer, or an optimizer.
        batch_size: Global batch size: the number of samples of a step on all workers together.
        epochs: Number of passes over the data.
        steps: Number of steps, instead of `epochs`; the data is repeated.
        eval_data: Data of the same kinds as `data`. The model is evaluated on this data at the end
            of each epoch and after the last step.
        eval_every: Number of steps between two evaluations; by default the model is evaluated after
            each epoch.
        metrics: A mapping from names to functions of `(output, y)`; each function returns a mean
            over the batch.
        scheduler: A function that takes the optimizer and returns a scheduler, or a scheduler. The
            scheduler makes a step after each optimizer step, not after each epoch.
        clip_norm: Largest allowed norm of the gradient of the whole batch.
        accumulate: Number of parts into which each worker divides its share.
        precision: None, `"bf16"` or `"fp16"`, the precision of autocast. On CUDA, fp16 uses loss
            scaling.
        compile: Whether to compile the model.
        shuffle: Whether each epoch has a new random order of the samples, drawn from `seed`.
        seed: Seed of the order of the samples. The order is the same for any number of workers.
        callbacks: Functions with the arguments `(step, logs)`, or objects with the methods
            `on_step_end(step, logs)`, `on_epoch_end(epoch, logs)` and `on_train_end(logs)`. On a
            GPU a step waits for the device only if a callback reads `logs["loss"]`.

    Returns:
        A small summary; the model itself is trained in place.

    Raises:
        RunError: There is no run, because the cell does not begin with `%%distributed STRATEGY`.
        FitError: An argument does not fit, or the strategy does not support it. The error is raised
            on every rank before any collective.
    """
    context = require("wb.fit")
    context.options_read = True  # this function applies the overrides of the cell's first line
    needed = {"model": model, "data": data, "optimizer": optimizer}
    if missing := [name for name, value in needed.items() if value is None]:
        raise FitError(
            f"wb.fit needs {' and '.join(f'`{name}`' for name in missing)}.",
            next_step="call wb.fit(model, data, loss=..., optimizer=..., batch_size=...)",
            code="WB-FIT-005",
        )
    used = {
        "step_fn": step_fn, "eval_data": eval_data, "metrics": metrics, "scheduler": scheduler,
        "clip_norm": clip_norm, "accumulate": accumulate != 1, "precision": precision,
        "compile": compile, "callbacks": callbacks,
    }  # fmt: skip
    fit_arguments.check_supported(
        context.entry, "fit", (name for name, value in used.items() if value)
    )
    chosen = fit_arguments.check_objective(loss, step_fn, metrics, context.spec.framework)
    fit_arguments.check_extras(clip_norm, accumulate, precision, eval_every, eval_data)
    hooks = fit_arguments.Callbacks.of(callbacks)
    counts = fit_arguments.check_counts(context, batch_size, epochs, steps, seed)
    sources = _sources(context, data, eval_data, counts, shuffle=shuffle, paired=loss is not None)
    batch = _Sample(sources[0], step_fn)
    module, build = _model(context, model, optimizer, scheduler, batch)
    steps_per_epoch = sources[0].steps_per_epoch
    total_steps = counts.steps or counts.epochs * steps_per_epoch
    profiler.check_profile(context, total_steps)
    job = Job(
        module, loss, step_fn, optimizer, sources[0].batch_size, total_steps,
        steps_per_epoch or total_steps, scheduler, clip_norm, accumulate, precision, compile,
        counts.seed, chosen, build,
    )  # fmt: skip
    training = Training(context, job, sources, hooks, eval_every)
    try:
        return training.run(counts.epochs if counts.steps is None else None)
    finally:
        training.close()


@dataclass(frozen=True)
class _Sample:
    """A batch of one sample, and a function that calls the model on the batch."""

    source: Any
    step_fn: Any

    def make_real(self, support: Any, module: Any) -> Any:
        """Give their shapes to layers that wait for their first batch (`LazyLinear`)."""
        make = getattr(support, "make_real", None)  # Keras builds its layers by itself
        if make is not None:
            make(module, self.source.peek, self.step_fn)
        return module


def _model(
    context: RunContext, model: Any, optimizer: Any, scheduler: Any, sample: _Sample
) -> tuple[Any, Callable[[], Any] | None]:
    """Return the checked model, and a function that builds its parts without memory."""
    support = fit_arguments.support(context.spec.framework)
    if context.entry.whole and not context.entry.fills:
        module, build = support.build_module(model), None
    else:
        module, build = support.sketch_module(model)
    sample.make_real(support, module)
    if build is None:
        if not fit_arguments.lacks_memory(context.entry, module):
            initialise(context, module)
    else:
        make, build = build, lambda: _initialised(context, sample.make_real(support, make()))
    support.check_optimizer(optimizer, module)
    support.check_scheduler(scheduler, optimizer)
    fit_arguments.check_closure(context.entry, optimizer)
    fit_arguments.check_sparse(context.entry, module)
    fit_arguments.warn_if_trained(context, module)
    return module, build


def _initialised(context: RunContext, module: Any) -> Any:
    initialise(context, module)
    return module


def _sources(
    context: RunContext,
    data: Any,
    eval_data: Any,
    counts: fit_arguments.Counts,
    *,
    shuffle: bool,
    paired: bool,
) -> tuple[Any, Any]:
    """Return the checked sources of training and evaluation data; None if there is no data."""
    make = fit_arguments.data_module(context.spec.framework).make_source
    fit_arguments.check_own(context.entry, data, eval_data)
    source = make(data, counts.batch_size, seed=counts.seed, shuffle=shuffle)
    fit_arguments.check_batch(source.batch_size, context)
    if source.steps_per_epoch is None and counts.steps is None:
        raise FitError(
            "The argument `steps` is missing: the data has no length, so Workbench does not know "
            "how many steps an epoch has.",
            seen=type(data).__name__,
            next_step="pass steps=1000",
            code="WB-FIT-006",
        )
    if source.samples is not None and source.samples % source.batch_size:
        fit_arguments.check_supported(context.entry, "fit", ["uneven_batches"])
    evaluation = None
    if eval_data is not None:
        evaluation = make(eval_data, source.batch_size, seed=counts.seed, shuffle=False)
    for name, each in (("data", source), ("eval_data", evaluation)):
        sample = each.peek() if each is not None else None
        if (
            paired
            and sample is not None
            and not (isinstance(sample, (tuple, list)) and len(sample) == 2)
        ):
            raise FitError(
                "`loss(output, y)` needs batches that are pairs (x, y).",
                seen=f"batches of `{name}`: {type(sample).__name__}"
                + (f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""),
                next_step="remove `loss`, and pass `step_fn=lambda model, batch: ...`"
                if name == "data"
                else "make each batch of `eval_data` a pair (x, y), like each batch of `data`",
                code="WB-FIT-007",
            )
    return source, evaluation
