"""What `model.fit` is called with, looked at before anything is trained."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from ... import events
from ...engine.context import RunContext
from ...engine.tensorflow_models import foreign
from ...errors import FitError, nearest


def check_call(model: Any, call: Mapping[str, Any], distribution: Any) -> None:
    """Check the model that `fit` was called on, and what kind of data it was given.

    Raises:
        FitError: Naming what is wrong and the next step; nothing was trained.
    """
    check_compiled(model, distribution)
    check_given(model, call)
    check_kind(call["x"])


def check_compiled(model: Any, distribution: Any) -> None:
    """Raise FitError unless the model was compiled, in the strategy's scope."""
    if not getattr(model, "compiled", False):
        raise FitError(
            "The model is not compiled, so fit knows neither loss nor optimizer.",
            seen=f"{model.name}.fit(...) without compile",
            next_step="model.compile(optimizer='adam', loss=...) in the same cell, before fit",
            code="WB-FIT-082",
        )
    made = getattr(model.optimizer, "_distribution_strategy", distribution)
    if made is not distribution:
        raise FitError(
            "The optimizer was made outside this run's strategy, so it cannot train under it.",
            seen=f"made under {type(made).__name__}",
            allowed=f"made under {type(distribution).__name__}",
            next_step="make it in the cell that trains: that cell runs in the strategy's scope",
            code="WB-FIT-083",
        )


def check_given(model: Any, call: Mapping[str, Any]) -> None:
    """Raise FitError where data or labels are missing, or are lists of numbers."""
    data, labels = call["x"], call["y"]
    if data is None:
        raise FitError(
            "fit was given no data.",
            seen=f"{model.name}.fit(...) without x",
            allowed="arrays, a tf.data.Dataset, or a keras.utils.PyDataset",
            next_step="model.fit(x, y, ...)",
            code="WB-FIT-084",
        )
    for name, one in (("x", data), ("y", labels)):
        if _is_of_numbers(one):
            raise FitError(
                f"fit takes arrays, and {name} is a list of numbers.",
                seen=f"{name}: a {type(one).__name__} of {len(one)}",
                next_step="numpy.array(x), numpy.array(y)",
                code="WB-FIT-085",
            )
    own = any(_is_own(model, name) for name in ("train_step", "compute_loss"))
    loss = getattr(model, "loss", None)
    if labels is None and hasattr(data, "shape") and loss is not None and not own:
        raise FitError(
            "fit was given no labels, and the model's loss needs them.",
            seen=f"x of shape {tuple(data.shape)}, y=None, loss={_named(loss)}",
            next_step="model.fit(x, y, ...); a model that learns its own input: model.fit(x, x)",
            code="WB-FIT-086",
        )


def _is_of_numbers(data: Any) -> bool:
    while isinstance(data, (list, tuple)) and len(data):
        data = data[0]
        if isinstance(data, (int, float)):
            return True
    return False


def _is_own(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _named(loss: Any) -> str:
    return loss if isinstance(loss, str) else str(getattr(loss, "name", type(loss).__name__))


def bound(original: Any, model: Any, args: Any, keywords: Any) -> inspect.BoundArguments:
    """Return what a method of Keras' trainer is called with, defaults included.

    Raises:
        FitError: It has no argument of that name.
    """
    signature = inspect.signature(original)
    for name in keywords:
        if name not in signature.parameters:
            guess = nearest(name, signature.parameters)
            raise FitError(
                f"{original.__name__} takes no argument of that name.",
                seen=name,
                next_step=f"did you mean {guess!r}?" if guess else f"leave {name} out",
                code="WB-FIT-087",
            )
    given = signature.bind(model, *args, **keywords)
    given.apply_defaults()
    return given


def check_kind(data: Any) -> None:
    """Raise FitError for PyTorch's data sets and loaders."""
    if foreign(data) and not hasattr(data, "numpy"):  # a tensor is as good as an array
        raise FitError(
            "The data is PyTorch's, and this is a TensorFlow run.",
            seen=f"{type(data).__module__}.{type(data).__name__}",
            allowed="arrays, a tf.data.Dataset, or a keras.utils.PyDataset",
            next_step="pass arrays: (x.numpy(), y.numpy()), or wb.data.digits(..., arrays=True)",
            code="WB-FIT-088",
        )


def check_batched(data: tf.data.Dataset) -> None:
    """Raise FitError where a tf.data set surely gives single samples instead of batches."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(data.element_spec)]
    kinds = [type(one).__name__ for one in _chain(data)]
    batched = any("Batch" in kind or "Window" in kind for kind in kinds)
    sliced = any("TensorSlice" in kind for kind in kinds) and not batched
    if sliced or any(shape is not None and shape.rank == 0 for shape in shapes):
        raise FitError(
            "The tf.data set gives single samples, not batches.",
            seen=f"parts of shapes {', '.join(map(str, shapes))}",
            next_step="call .batch(64) on it",
            code="WB-FIT-089",
        )


def check_size(given: int | None, made: int | None) -> None:
    """Raise FitError where `batch_size` is not what a tf.data set was batched with.

    Args:
        given: What `fit` was passed.
        made: Size of the data set's batches; None where it is not fixed.
    """
    if given is None or made is None or given == made:
        return
    raise FitError(
        "The data set has its batches made already, of another size.",
        seen=f"batches of {made}, batch_size={given}",
        next_step=f"leave batch_size out, or batch the data set by {given}",
        code="WB-FIT-090",
    )


def note_keras_2(context: RunContext) -> None:
    """Say that `tf_keras` is not watched, where a cell that trained nothing visible has it."""
    if "tf_keras" in sys.modules:
        text = (
            "tf_keras (Keras 2) is imported: its fit trains, but is not recorded, and cannot be "
            "stopped. Write the model with keras (Keras 3)."
        )
        context.emit(events.Noted(rank=context.spec.rank, text=text))


def _chain(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a data set and all it was made from."""
    yield data
    for one in data._inputs():
        yield from _chain(one)


BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
OWN_STEPS = ("train_step", "test_step", "compute_metrics")
OTHER_WAY = "write the loop: coordinator.schedule(step, args=...), then coordinator.join()"


def check_steps(model: Any) -> None:
    """Raise FitError where the model has steps of its own: closures carry Keras'."""
    own = [
        name for name in OWN_STEPS if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if own:
        raise FitError(
            "The model has steps of its own, which closures cannot carry.",
            seen=f"{type(model).__name__}.{own[0]}",
            allowed="models whose steps are Keras' own",
            next_step=OTHER_WAY,
            code="WB-FIT-091",
        )


def check_callbacks(callbacks: Any) -> None:
    """Raise FitError where one wants to be called between batches."""
    given = getattr(callbacks, "callbacks", callbacks) or []
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        kind = type(callback)
        hooks = [
            h for h in BATCH_HOOKS if getattr(kind, h) is not getattr(keras.callbacks.Callback, h)
        ]
        every = getattr(callback, "save_freq", None) or getattr(callback, "update_freq", None)
        if kind.__module__.startswith("keras.") and every in (None, "epoch"):
            hooks = []  # Keras' own: what they do after batches is not needed for their purpose
        if hooks:
            raise FitError(
                "Batches of a parameter server have no order, so none can be told to a callback.",
                seen=f"{kind.__name__}.{hooks[0]}",
                allowed="callbacks of epochs: on_epoch_begin, on_epoch_end, on_train_end",
                next_step=OTHER_WAY,
                code="WB-FIT-092",
            )
