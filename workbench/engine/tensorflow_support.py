"""What an engine needs to know of TensorFlow: devices, threads, seeds, the scope of a cell.

Loaded by name (`engine.runtime.support`), so nothing else in the engine names the framework.

TensorFlow fixes devices and threads at its first operation. An engine therefore asks for a generous
number of logical CPU devices at once (`LOGICAL_DEVICES`), so that most runs fit whatever ran
before. Where one does not, TensorFlow's state is made anew (`reset`); where even that fails, the
run ends with `EngineSpentError`, and the kernel puts a fresh engine in its place.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..errors import ClusterError, EngineSpentError, FitError
from ..protocol import RunSpec
from . import settings, tensorflow_temp
from .context import RunContext
from .cores import limited

LOGICAL_DEVICES = 8
"""Logical CPU devices that an engine has at least."""

MADE_ANEW = (
    "TensorFlow had started with fewer devices than this run needs, so it was made anew with "
    "{devices}: tensors, variables and models of earlier cells can no longer be used on this "
    "engine."
)


@dataclass
class _Configured:
    """What TensorFlow was told before its first operation; 0: nothing yet."""

    devices: int = 0
    threads: int = 0
    made_anew: bool = False  # for more devices, and nobody was told yet


_configured = _Configured()


def setup(spec: RunSpec) -> None:
    """Set devices, threads and seeds before a cell; equal seeds give equal initial weights.

    Raises:
        ClusterError: Keras computes with another framework.
        EngineSpentError: TensorFlow has started with settings that this run cannot use.
    """
    if keras.backend.backend() != "tensorflow":
        raise ClusterError(
            "Keras computes with another framework on this engine.",
            seen=f"KERAS_BACKEND={keras.backend.backend()}",
            allowed="tensorflow",
            next_step="set os.environ['KERAS_BACKEND'] = 'tensorflow', then %cluster restart",
        )
    if spec.mode == "run" and os.environ.get("TF_CONFIG"):
        raise ClusterError(
            "TF_CONFIG is set already; here a run finds its devices and workers by itself.",
            seen=os.environ["TF_CONFIG"],
            allowed="no TF_CONFIG",
            next_step="del os.environ['TF_CONFIG'] in a %%distributed cell, then run this one",
        )
    tensorflow_temp.keep_to_cluster()
    # The pool of threads cannot be resized: it has all cores, `around` keeps a worker to its share.
    configure(max(LOGICAL_DEVICES, spec.replicas), max(1, spec.threads, spec.cores))
    if spec.mode == "run":
        seed_all(int(spec.overrides.get("seed", 0)))
        _naming().reset_uids()  # a layer is called `dense` in every run, not `dense_7`


def configure(devices: int, threads: int) -> None:
    """Ask for logical CPU devices and threads, before TensorFlow's first operation.

    Later calls are content with more devices than they ask for, and with other threads: those
    cannot be changed without losing the user's variables.

    Raises:
        EngineSpentError: There are fewer devices, and they cannot be made anew.
    """
    if _configured.devices >= devices:
        return
    if _context()._context_handle is not None:
        have = len(tf.config.list_logical_devices("CPU"))
        if have >= devices:
            _configured.devices = have
            return
        reset()
        _configured.made_anew = True
    try:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # Replicas that wait (for an injected delay, for each other) hold a thread each.
        tf.config.threading.set_inter_op_parallelism_threads(max(threads, devices))
    except RuntimeError as error:
        raise EngineSpentError(
            "TensorFlow has started on this engine with fewer devices than the run needs.",
            seen=str(error),
            allowed=f"{devices} logical CPU devices",
            next_step="%cluster restart",
        ) from error
    _configured.devices, _configured.threads = devices, threads


def reset() -> None:
    """Forget TensorFlow's whole state, as if it had just been imported.

    Tensors and variables of earlier cells die with it. Private, but the only way there is:
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/python/eager/context.py
    """
    _built.clear()
    keras.backend.clear_session()
    gc.collect()
    importlib.import_module("tensorflow.python.eager.context")._reset_context()
    _configured.devices = _configured.threads = 0


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, TensorFlow and Keras."""
    keras.utils.set_random_seed(seed % (1 << 32))


def _context() -> Any:
    return importlib.import_module("tensorflow.python.eager.context").context()


def _naming() -> Any:
    return importlib.import_module("keras.src.utils.naming")


_built: dict[Any, Any] = {}
"""tf.distribute strategies of this engine, by what they were built from."""


def built(key: Any, build: Any) -> Any:
    """Return the strategy that was built under `key`, building it the first time.

    A model belongs to the strategy in whose scope it was made: with the same strategy in the next
    run, it can be trained further there.
    """
    if key not in _built:
        _built[key] = build()
    return _built[key]


@contextlib.contextmanager
def around(run: RunContext) -> Iterator[dict[str, Any]]:
    """Surround the cell of a training run with the strategy's scope.

    The cell runs as plain Keras code, so all that is ours is set up before it and undone after it:
    the strategy is built, steps are recorded, `model.fit` reports.

    Yields:
        The names that the cell finds besides.
    """
    spec = run.spec
    engines = 1 if run.entry.remote_workers else spec.world_size // spec.replicas + spec.servers
    with limited(spec.cores if spec.device == "cpu" else 0, engines, spec.rank // spec.replicas):
        if _configured.made_anew:
            _configured.made_anew = False
            run.emit("note", rank=spec.rank, text=MADE_ANEW.format(devices=_configured.devices))
        run.strategy = strategy = settings.load_strategy(run)
        with strategy.around_cell() as names:
            yield names


def environ(spec: RunSpec) -> dict[str, str]:
    """Return what the environment says besides; TF_CONFIG is the strategies' own matter."""
    return {}


def ensure_group(spec: RunSpec) -> None:
    """Do nothing: TensorFlow's strategies meet by themselves."""


def has_group() -> bool:
    """Return True: there is no group that a cell could destroy."""
    return True


def destroy_group() -> None:
    """Do nothing: see `ensure_group`."""


def shutdown_group_sockets(*, store: bool = False) -> int:
    """Break collectives in which this engine waits for others; return in how many clusters.

    Called from another thread than the one that waits. TensorFlow itself notices after seconds that
    a worker is dead, and never that one has stalled.
    """
    context = _context()
    if context._context_handle is None or context._collective_ops_server_def is None:
        return 0
    context.abort_collective_ops(tf.errors.UNAVAILABLE, "the workbench ended this run")
    return 1


def names(spec: RunSpec) -> dict[str, Any]:
    """Return the names that cells find besides rank, world_size and device."""
    return {"strategy": tf.distribute.get_strategy()}


def device_label(device: str) -> str:
    """Return `cpu`, or `cuda:0 NVIDIA H200`."""
    if not device.startswith("cuda"):
        return device
    gpus = tf.config.list_physical_devices("GPU")
    index = int(device.partition(":")[2] or 0)
    details = tf.config.experimental.get_device_details(gpus[index]) if index < len(gpus) else {}
    return f"{device} {details.get('device_name', '')}".strip()


def save_weights(folder: Path, rank: int, arrays: dict[str, Any]) -> str:
    """Write the weights as `weights.npz`; return the file's name.

    Ranks other than 0 write `weights-rank{r}.npz`.
    """
    name = "weights.npz" if rank == 0 else f"weights-rank{rank}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, **arrays)
    return name


def explain(error: BaseException) -> str | None:
    """Return what lies behind a well-known mistake in a cell; None for all others."""
    text = str(error)
    for words, cause in _CAUSES.items():
        if words in text:
            return f"Why: {cause}"
    return None


_OUTSIDE = (
    "the optimizer was called outside a replica. Put forward, backward and optimizer into a "
    "function `step`, and call strategy.run(step, args=(batch,))."
)
_CAUSES = {
    "cannot be modified after being initialized": "this engine's devices were set before the cell: "
    f"{LOGICAL_DEVICES} logical CPU devices or more. Say how many replicas with -n instead.",
    "AddN must have the same size and shape": "the replicas were given shares of different size, "
    "and something was added up that has a row per sample. Drop the smaller last batch with "
    "data.batch(64, drop_remainder=True).",
    "optimizer can only optimize Tensors": "a PyTorch optimizer was made for a Keras model; pass "
    "one of keras.optimizers.",
    "No module named 'tf_keras'": "tf_keras (Keras 2) is not installed, and not needed: write the "
    "model with keras.",
    "outside the replica context": _OUTSIDE,
    "cross-replica context": _OUTSIDE,
}
"""Words in TensorFlow's errors, and what lies behind them."""


# -- what wb.fit is passed ---------------------------------------------------------------------


def build_module(model: Any) -> Any:
    """Return the Keras model that `wb.fit` was given, calling a function that makes one.

    Raises:
        FitError: It is neither, or of another framework.
    """
    built = model
    if not isinstance(model, (keras.Model, type)) and callable(model) and not foreign(model):
        built = model()
    if isinstance(built, keras.Model) and not isinstance(model, type):
        return built
    raise FitError(
        "The model is no Keras model.",
        seen=foreign(built)
        or (f"class {model.__name__}" if isinstance(model, type) else type(built).__name__),
        allowed="a keras.Model, or a function without arguments that returns one",
        next_step="pass the model itself: wb.fit(model, ...)",
    )


def foreign(model: Any) -> str:
    """Return what a model of tf_keras or of PyTorch is called; empty for all others."""
    kinds = {re.split(r"[.]", cls.__module__)[0] for cls in type(model).__mro__}
    if "tf_keras" in kinds:
        return "a model of tf_keras (Keras 2)"
    return "a torch module" if "torch" in kinds else ""


def sketch_module(model: Any) -> tuple[Any, None]:
    """Return the model; TensorFlow has no form of one without memory."""
    return build_module(model), None


def check_optimizer(optimizer: Any, model: Any) -> None:
    """Raise FitError unless `optimizer` is one of Keras', or a function that makes one."""
    if isinstance(optimizer, type) or not (
        isinstance(optimizer, keras.optimizers.Optimizer) or callable(optimizer)
    ):
        raise FitError(
            "The optimizer was not understood.",
            seen=optimizer,
            allowed="a keras.optimizers.Optimizer, or a function of the variables that returns one",
            next_step="optimizer=keras.optimizers.SGD(0.1)",
        )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise FitError unless `scheduler` gives a learning rate for a step."""
    if scheduler is None:
        return
    try:
        float(scheduler(0))
    except Exception as error:
        raise FitError(
            "In TensorFlow a scheduler is a function of the step that returns the learning rate.",
            seen=f"scheduler(0) raised {type(error).__name__}: {error}",
            allowed="a function of the step, or one of keras.optimizers.schedules",
            next_step="scheduler=keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)",
        ) from error


def weight_names(model: Any) -> dict[str, Any]:
    """Return a model's weights by path, `sequential/dense/kernel`; equal paths get a number."""
    found: dict[str, Any] = {}
    for variable in model.weights:
        name, count = variable.path, 1
        while name in found:
            name, count = f"{variable.path}_{count}", count + 1
        found[name] = variable
    return found


def weight_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, in the model's order; empty before it is built."""
    return {name: tuple(variable.shape) for name, variable in weight_names(model).items()}


def load_weights(model: Any, arrays: dict[str, Any]) -> None:
    """Give a model weights by name, also while a step is traced; those not named stay."""
    variables, tracing = weight_names(model), not tf.executing_eagerly()
    with tf.init_scope():
        for name, array in arrays.items():
            # In a replica's context a variable with copies would have to ask the other replicas.
            for copy in _copies(variables[name].value) if tracing else [variables[name]]:
                copy.assign(array)


def _copies(value: Any) -> list[Any]:
    """Return the variables of TensorFlow's own that a distributed one is made of."""
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.values)
    return [getattr(value, "_v", value)]  # parameters on one device


def parameter_count(model: Any) -> int:
    """Return how many numbers the model learns."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
