"""Checks the arguments of `wb.fit` on every rank, before any collective."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ... import catalog
from ...data import OwnData
from ...errors import FitError
from ...shared import events
from ...shared.events import Topic

if TYPE_CHECKING:
    from ..context import RunContext

PRECISIONS = (None, "bf16", "fp16")

_trained_in: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def support(framework: str) -> Any:
    """Return the engine module of the framework, loaded by name."""
    return importlib.import_module(f"workbench.engine.{framework}.support")


def data_module(framework: str) -> Any:
    """Return the data module of the framework, loaded by name."""
    return importlib.import_module(f"workbench.engine.{framework}.data")


def load_strategy(context: RunContext) -> Any:
    """Return the cell's strategy object, or a new strategy object that replaces an earlier one."""
    if context.strategy is not None:
        if context.strategy.per_cell:
            return context.strategy
        context.strategy.close()
        context.strategy = None
    module, _, name = context.entry.module.partition(":")
    return getattr(importlib.import_module(module), name)(context)


@dataclass(frozen=True)
class Counts:
    """The numbers that say how long to train, after the overrides of the cell's first line."""

    batch_size: int | None
    epochs: int
    steps: int | None
    seed: int


def check_counts(
    context: RunContext, batch_size: Any, epochs: Any, steps: Any, seed: Any
) -> Counts:
    """Apply the overrides of the cell's first line, and check the resulting numbers.

    Raises:
        FitError: A count is not a whole number of at least 1, or a seed is negative.
    """
    given = context.spec.overrides
    # `--epochs` takes effect, even if the cell counts in steps.
    if "epochs" in given and "steps" not in given:
        steps = None
    counts = {
        "batch_size": given.get("batch_size", batch_size),
        "epochs": given.get("epochs", epochs),
        "steps": given.get("steps", steps),
    }
    for name, value in counts.items():
        optional = name != "epochs" and value is None
        if not optional and (isinstance(value, bool) or not _whole(value) or value < 1):
            raise FitError(
                f"`{name}` must be a whole number of at least 1.",
                seen=value,
                allowed="a whole number, at least 1",
                code="WB-FIT-014",
            )
    seed = given.get("seed", seed)
    if isinstance(seed, bool) or not _whole(seed) or seed < 0:
        raise FitError(
            "`seed` must be a whole number of at least 0.",
            seen=seed,
            allowed="0 or more",
            code="WB-FIT-015",
        )
    return Counts(seed=int(seed), **counts)


def check_batch(batch_size: int, context: RunContext) -> None:
    """Raise FitError if some worker would never have a sample."""
    workers = context.spec.world_size
    if context.entry.data_parallel and batch_size < workers:
        raise FitError(
            "batch_size must be at least the number of workers, so that each worker has a sample.",
            seen=f"batch_size={batch_size} over {workers} workers",
            allowed=f"batch_size of at least {workers}",
            next_step=f"increase batch_size, or use fewer workers: -n {batch_size}",
            code="WB-FIT-016",
        )


_LOSSES = {
    "torch": "loss=torch.nn.CrossEntropyLoss()",
    "tensorflow": "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
}


def check_objective(
    loss: Any, step_fn: Any, metrics: Any, framework: str
) -> dict[str, Callable[..., Any]]:
    """Check that either `loss` or `step_fn` is given, but not both; return the metrics.

    Raises:
        FitError: Both or neither are given, or an argument is not callable.
    """
    if (loss is None) == (step_fn is None):
        raise FitError(
            "No loss was given."
            if loss is None
            else "The arguments `loss` and `step_fn` cannot be used together, because step_fn "
            "computes the loss itself.",
            seen="neither `loss` nor `step_fn`" if loss is None else "both `loss` and `step_fn`",
            allowed="loss(output, y) for batches that are pairs, or step_fn(model, batch) -> loss",
            next_step=f"pass {_LOSSES[framework]}"
            if loss is None
            else "remove one of the two arguments",
            code="WB-FIT-017",
        )
    for name, value in (("loss", loss), ("step_fn", step_fn)):
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise FitError(
                f"`{name}` must be a function "
                f"({'output, y' if name == 'loss' else 'model, batch'}) -> loss.",
                seen=value,
                next_step=f"make an instance: {value.__name__}()"
                if isinstance(value, type)
                else f"pass a function, such as {_LOSSES[framework]}"
                if name == "loss"
                else None,
                code="WB-FIT-018",
            )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise FitError(
            "`metrics` must be a dictionary of names and functions.",
            seen=metrics,
            allowed="metrics={name: fn(output, y) -> the mean over the batch}",
            code="WB-FIT-193",
        )
    chosen = dict(metrics or {})
    if chosen and step_fn is not None:
        raise FitError(
            "`metrics` cannot be used with `step_fn`: a metric needs (output, y), but step_fn "
            "returns only the loss.",
            seen=", ".join(chosen),
            next_step="use loss=..., or log the numbers in step_fn with wb.log(...)",
            code="WB-FIT-019",
        )
    for name, metric in chosen.items():
        if not callable(metric):
            raise FitError(
                f"Metric `{name}` must be a function.",
                seen=metric,
                allowed="fn(output, y)",
                code="WB-FIT-020",
            )
    return chosen


def check_extras(
    clip_norm: Any, accumulate: Any, precision: Any, eval_every: Any, eval_data: Any
) -> None:
    """Check the other arguments of `wb.fit`.

    Raises:
        FitError: An argument is not valid; the error names the value seen and the allowed values.
    """
    if clip_norm is not None and (not isinstance(clip_norm, (int, float)) or clip_norm <= 0):
        raise FitError(
            "clip_norm must be a positive number.",
            seen=clip_norm,
            allowed="a number above 0",
            code="WB-FIT-021",
        )
    if not _whole(accumulate) or accumulate < 1:
        raise FitError(
            "`accumulate` must be a whole number: the number of parts into which each worker "
            "divides its share.",
            seen=accumulate,
            allowed="1 or more",
            code="WB-FIT-022",
        )
    if precision not in PRECISIONS:
        raise FitError(
            "`precision` must be None, 'bf16' or 'fp16'.",
            seen=precision,
            allowed="None, 'bf16' or 'fp16'",
            code="WB-FIT-023",
        )
    if eval_every is not None and (not _whole(eval_every) or eval_every < 1):
        raise FitError(
            "eval_every must be a whole number of steps.",
            seen=eval_every,
            allowed="1 or more, or None",
            code="WB-FIT-024",
        )
    if eval_every is not None and eval_data is None:
        raise FitError(
            "eval_every needs eval_data.",
            next_step="pass eval_data=..., or remove eval_every",
            code="WB-FIT-025",
        )


_EXPLAINED = {
    "built_optimizer": "an optimizer that you have already built",
    "own_data": "a separate data set on each worker",
    "uneven_batches": "a last batch with fewer samples",
    "sparse_gradients": "sparse gradients",
}
"""What the features are that are no arguments of `wb.fit`."""

_INSTEAD = {
    "built_optimizer": "a function that makes the optimizer",
    "own_data": "the same data on every worker",
    "uneven_batches": "a number of samples that is a multiple of batch_size",
}


def _change(feature: str) -> str:
    """Return what to change in a call that uses a feature."""
    return f"with {_INSTEAD[feature]}" if feature in _INSTEAD else f"without {feature}"


def check_supported(entry: catalog.Strategy, way: catalog.Way, used: Iterable[str]) -> None:
    """Raise FitError if the strategy cannot be used this way, or does not support a feature.

    Args:
        used: Names of the `catalog.FIT_FEATURES` that the call uses.
    """
    if way not in entry.ways:
        words = {
            "fit": "wb.fit",
            "prepare": "wb.prepare",
            "keras": "model.fit",
            "loop": "your own loop",
        }
        able = [e.name for e in catalog.strategies(entry.framework) if way in e.ways]
        allowed = [words[other] for other in entry.ways]
        raise FitError(
            f"Strategy {entry.name} cannot be used with {words[way]}.",
            seen=words[way],
            allowed=", ".join(allowed),
            next_step=f"use {' or '.join(allowed)} instead of {words[way]}"
            + (f", or another strategy: {', '.join(able)}" if able else ""),
            code="WB-FIT-026",
        )
    missing = sorted(set(used) - entry.supports)
    if missing:
        named = [_EXPLAINED.get(one, one) for one in missing]
        able = [
            e.name for e in catalog.strategies(entry.framework) if e.supports.issuperset(missing)
        ]
        raise FitError(
            f"Strategy {entry.name} does not support {', '.join(named)}.",
            allowed="with this strategy: "
            + (
                ", ".join(_EXPLAINED.get(one, one) for one in sorted(entry.supports))
                or "no optional argument"
            ),
            next_step=f"call wb.fit {' and '.join(map(_change, missing))}"
            + (f", or use another strategy: {', '.join(able)}" if able else ""),
            code="WB-FIT-027",
        )


def check_own(entry: catalog.Strategy, data: Any, eval_data: Any) -> None:
    """Raise FitError if workers have their own data and the strategy or the call cannot use it."""
    if isinstance(eval_data, OwnData):
        raise FitError(
            "eval_data must be the same on all workers.",
            seen="wb.data.own(...)",
            next_step="pass the same data on every worker, or remove eval_data and evaluate with "
            "your own code after the call of wb.fit",
            code="WB-FIT-187",
        )
    if isinstance(data, OwnData):
        check_supported(entry, "fit", ["own_data"])


def check_sparse(entry: catalog.Strategy, model: Any) -> None:
    """Raise FitError if layers give sparse gradients and the strategy cannot use them."""
    if "sparse_gradients" in entry.supports:
        return
    find = getattr(support(entry.framework), "sparse_layers", None)  # only some have them
    if find is not None and (sparse := find(model)):
        able = [e.name for e in catalog.strategies(entry.framework)
                if "sparse_gradients" in e.supports]  # fmt: skip
        raise FitError(
            f"Strategy {entry.name} needs dense gradients, but this model has sparse gradients.",
            seen=", ".join(sparse),
            allowed=f"dense gradients, or one of these strategies: {', '.join(able)}",
            next_step="make the embedding with sparse=False",
            code="WB-FIT-028",
        )


def lacks_memory(entry: catalog.Strategy, model: Any) -> bool:
    """Return whether a part of a built model has no memory yet; the strategy will allocate it.

    Raises:
        FitError: The strategy cannot allocate memory for the model.
    """
    find = getattr(support(entry.framework), "forms", None)  # only some have such layers
    lacking = [] if find is None else find(model)
    if lacking and not entry.fills:
        able = [e.name for e in catalog.strategies(entry.framework) if e.fills]
        share = [e.name for e in catalog.strategies(entry.framework) if not e.whole]
        raise FitError(
            f"Strategy {entry.name} needs a model whose tensors have values, but tensors of this "
            "model are on device `meta` and have no values.",
            seen=f"tensors on device `meta`: {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            allowed="a model whose tensors have values, or one of these strategies: "
            f"{', '.join(able)}",
            next_step=f"build the model without torch.device('meta'), or use {able[0]}"
            if entry.name not in share
            else "pass the function that builds the model: wb.fit(lambda: make_model(), ...)",
            code="WB-FIT-162",
        )
    return bool(lacking)


def check_closure(entry: catalog.Strategy, optimizer: Any) -> None:
    """Raise FitError if the optimizer needs a closure (only some frameworks have closures)."""
    check = getattr(support(entry.framework), "check_closure", None)
    if check is not None:
        check(optimizer)


@dataclass
class Callbacks:
    """The user's callbacks: objects or functions.

    An object may have `on_step_end(step, logs)`, `on_epoch_end(epoch, logs)` and
    `on_train_end(logs)`. A function is called as `on_step_end`. `logs` maps names to numbers: the
    worker's own `loss`, and after an evaluation also the values of the evaluation.
    """

    step_end: list[Callable[[int, dict[str, float]], object]] = field(default_factory=list)
    epoch_end: list[Callable[[int, dict[str, float]], object]] = field(default_factory=list)
    train_end: list[Callable[[dict[str, float]], object]] = field(default_factory=list)

    @staticmethod
    def of(given: Any) -> Callbacks:
        """Sort the given callbacks by the moment at which they are called.

        Raises:
            FitError: A callback has none of these methods and cannot be called.
        """
        found = Callbacks()
        hooks = {"on_step_end": found.step_end, "on_epoch_end": found.epoch_end}
        every: Mapping[str, list[Any]] = {**hooks, "on_train_end": found.train_end}
        for callback in given if isinstance(given, (tuple, list)) else (given,):
            methods = [name for name in every if callable(getattr(callback, name, None))]
            for name in methods:
                every[name].append(getattr(callback, name))
            if methods:
                continue
            if not callable(callback) or isinstance(callback, type):
                raise FitError(
                    "A callback must be a function, or an object with one of the methods below.",
                    seen=callback,
                    allowed=f"a function (step, logs), or an object with {', '.join(every)}",
                    code="WB-FIT-029",
                )
            found.step_end.append(callback)
        return found


def warn_if_trained(context: RunContext, model: Any) -> None:
    """Warn if an earlier run trained this module; remember that this run trains it."""
    earlier = _trained_in.get(model)
    this = context.spec.run_id or str(context.spec.run)
    if earlier is not None and earlier != this:
        context.emit(
            events.Warned(
                rank=context.spec.rank,
                text="An earlier run has trained this model, so this run does not begin with new "
                "weights. The loss of this run cannot be compared with the loss of other runs. "
                "Build the model in the cell that trains it.",
                topic=Topic.TRAINED_BEFORE,
            )
        )
    _trained_in[model] = this


def _whole(value: Any) -> bool:
    return hasattr(value, "__index__")
