"""`model.fit`, unchanged for the user, reports to the run while a cell is running.

The backend trainer's `fit` is replaced for the duration of a cell. The replacement checks for
mistakes that would give no error, applies the line's overrides, adds one callback after the user's
own, and watches the calls of the function that trains:

    on_train_begin        the run is announced
    on_train_batch_begin
    train_function        one step, or steps_per_execution of them; recorded when it returns, then
                          Pause waits, and Stop makes this batch the last
    on_train_batch_end
    on_epoch_end          validation is reported

A callback for batches would also work, but it would make Keras fetch the logs of every batch.

Source: `keras/src/backend/tensorflow/trainer.py`.

For checkpoints the position of a `model.fit` is known: the epoch, and its batches that are done.

    fit(epochs=5), checkpoint in epoch 2 after 7 batches:
        continues with initial_epoch=2; the first 7 batches are read and skipped; the metrics of
        the epoch are restored

Under the run's seed Keras draws the same order of arrays in every epoch, so the rest of the epoch
has the remaining samples. A tf.data set that shuffles by itself begins its shuffling again.

Several workers can write files at one path, because a Keras cell runs on each of them:

    model.save, save_weights,     each worker writes next to the path, then moves its file there:
    ModelCheckpoint               complete at any moment; a worker can also save alone
    CSVLogger, TensorBoard        written by the first worker that names the path, as in
                                  TensorFlow's guide
    BackupAndRestore              written and deleted by the first, read by all

The workers exchange their paths on the run's board at the beginning of each `fit`.

Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
from tensorflow.python.distribute import values

from ....engine.checkpoints.checkpoints import checkpoints_of
from ....engine.contract import NAN, Strategy
from ....engine.tensorflow.models import parameter_count
from ....engine.training import fit_arguments
from ....engine.training.initial import initialise
from ....errors import FitError, RunStopped
from ....shared import events
from ..coordinator.servers import MEET_S
from ..parts.models import under
from ..parts.steps import Patches
from .batches import Batches, bound, check_call

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ..parts.markers import Measured
    from ..parts.steps import Steps

clock = time.perf_counter


class KerasFit:
    """Replaces `fit` while it is entered.

    Args:
        trained: Called with each model that `fit` has begun to train.
        strategy: The strategy; checkpoints hold its state.

    Attributes:
        under_way: Whether a `fit` is running.
    """

    def __init__(
        self,
        context: RunContext,
        steps: Steps,
        distribution: Any,
        trained: Callable[[Any], None],
        strategy: Strategy,
    ) -> None:
        self.context, self.steps, self.distribution = context, steps, distribution
        self.strategy = strategy
        self.under_way = False
        self._trained = trained
        self._trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        self._original: Any = None

    def __enter__(self) -> KerasFit:
        """Replace `fit`."""
        owner = self._trainer.TensorFlowTrainer
        self._original = original = owner.fit
        watch = self

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **keywords: Any) -> Any:
            return watch.fit(model, args, keywords)

        owner.fit = fit
        return self

    def __exit__(self, *error: object) -> None:
        """Restore Keras' own `fit`."""
        self._trainer.TensorFlowTrainer.fit = self._original

    def fit(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Train as Keras does, recorded.

        Raises:
            FitError: Something would train wrongly; nothing was trained.
            RunStopped: Stop was pressed before the first step.
        """
        if self.under_way:  # a callback of the user's trains another model
            return self._original(model, *args, **keywords)
        given = bound(self._original, model, args, keywords)
        call = given.arguments
        fit_arguments.check_supported(self.context.entry, "keras", ())
        check_model(model, self.distribution)
        check_call(model, call, self.distribution)
        batch = Batches(call, self.context, self.distribution.num_replicas_in_sync)
        batch.override()
        fit_arguments.warn_if_trained(self.context, model)
        callback = Reports(self, model, call, batch)
        callback.place.find(call)
        if isinstance(call["callbacks"], keras.callbacks.CallbackList):
            call["callbacks"].append(callback)
        else:
            callbacks = call["callbacks"] or []
            several = isinstance(callbacks, (list, tuple))
            call["callbacks"] = [*(callbacks if several else [callbacks]), callback]
        if call["verbose"] == "auto":
            call["verbose"] = 0  # the dashboard says it all
        self.under_way = True
        self._trained(model)
        try:
            history = self._original(*given.args, **given.kwargs)
            callback.place.end()
            return history
        finally:
            self.under_way = False
            callback.let_go()


def check_model(model: Any, distribution: Any) -> None:
    """Raise FitError unless the model was built in the strategy's scope."""
    owner = getattr(model, "_distribute_strategy", None)
    if owner is distribution:
        return
    raise FitError(
        "The model was built outside the scope of this run's strategy, so this run cannot train "
        "it.",
        seen=f"a model built {under(owner)}",
        allowed=f"a model built in the scope of this run's {type(distribution).__name__}",
        next_step="build and compile the model in the cell that trains it, because that cell runs "
        "in the strategy's scope",
        code="WB-FIT-074",
    )


class Reports(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the steps of one `fit`, and applies Stop and Pause to it."""

    def __init__(
        self, owner: KerasFit, model: Any, call: Mapping[str, Any], batch: Batches
    ) -> None:
        super().__init__()
        self._owner, self._context, self._steps = owner, owner.context, owner.steps
        self._epochs = call["epochs"] - call["initial_epoch"]
        self._batch = batch
        self.place = FitPlace(self._context, owner.strategy)
        self._base = self._context.trained
        self._done = 0  # batches of the epoch
        self._mean = (0, 0.0)  # samples and summed loss of the epoch, where it comes from the logs
        self._trains = weakref.ref(model)
        self._original: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Announce the run; a Stop that came before the first step ends it here."""
        model: Any = self._trains()
        initialise(self._context, model)
        self.place.begin()
        per_epoch = self._batch.steps_per_epoch
        total = self._batch.total_steps or (per_epoch * self._epochs if per_epoch else None)
        self._steps.announce(
            parameter_count(model),
            batch_size=self._batch.size,
            total_steps=None if total is None else self._base + total,
            epochs=None if self._batch.total_steps else self._epochs,
            epoch_samples=(per_epoch or 0) * (self._batch.size or 0) or None,
        )
        self._original, model.train_function = model.train_function, self._train
        self._steps.start_s = NAN
        if not self._steps.enter():
            raise RunStopped

    def let_go(self) -> None:
        """Restore the model's own function."""
        model: Any = self._trains()
        if model is not None and self._original is not None:
            model.train_function, self._original = self._original, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the time between epochs for no step."""
        self._done, self._mean = 0, (0, 0.0)
        self.place.epoch = epoch
        self._steps.skip()

    def _train(self, iterator: Any) -> Any:
        """Train for one batch or several; pause or end `fit` if that was requested."""
        steps, model = self._steps, self.model
        if passed := self.place.pass_over(iterator, model.steps_per_execution):
            self._done += passed
            return model.get_metrics_result()
        if self._done:  # before an epoch's first batch Keras makes the iterator: a wait for data
            steps.called()
        logs = self._original(iterator)
        steps.wait()
        self._done += steps.end(lambda: self._unmarked(logs))
        self.place.batch = self._done
        if self.place.step_done():
            steps.skip()
        limit = self._batch.total_steps
        done = limit is not None and self._context.trained - self._base >= limit
        if done or not steps.enter():
            trainer: Any = model
            trainer.stop_training = True
        return logs

    def _unmarked(self, logs: Mapping[str, Any]) -> Measured:
        """Return a step that only the logs show: Keras shows the epoch's running mean."""
        samples, (count, total) = self._batch.samples_of(self._done), self._mean
        loss = NAN
        if "loss" in logs and samples:
            self._mean = (count + samples, float(logs["loss"]) * (count + samples))
            loss = (self._mean[1] - total) / samples
        return self._steps.unmarked(samples, loss, has_loss="loss" in logs and samples > 0)

    def on_test_begin(self, logs: Any = None) -> None:
        """Note that the validation of an epoch begins, at the end of its last step."""
        self._steps.settle()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the epoch, and its validation if there was one."""
        self._steps.settle()
        context, step = self._context, self._context.trained - 1
        context.emit(events.EpochBegan(rank=context.spec.rank, epoch=epoch, step=step))
        values = {
            name.removeprefix("val_"): float(value)
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        if values and context.spec.rank == 0:
            seconds = clock() - self._steps.start_s
            context.emit(events.Evaluated(step=step, epoch=epoch, values=values, seconds=seconds))


class FitPlace:
    """One `fit`, with its checkpoints.

    Attributes:
        epoch: The current epoch.
        batch: Batches of it that are done.
    """

    def __init__(self, context: RunContext, strategy: Strategy) -> None:
        self.context, self.strategy = context, strategy
        self.checkpoints = checkpoints_of(context)
        self.epoch = self.batch = 0
        self._about: Mapping[str, Any] | None = None
        self._left = 0  # batches that must still be skipped
        self._restores = False

    def find(self, call: dict[str, Any]) -> None:
        """Find the checkpoint from which this call continues; begin with its epoch."""
        base = {"base": self.context.trained}
        self._about = self.checkpoints.enter(
            self.strategy, lambda: {**base, "epoch": self.epoch, "batch": self.batch}
        )
        if self._about is not None:
            call["initial_epoch"] = self.epoch = int(self._about["epoch"])
            self.batch = self._left = int(self._about["batch"])
            self.context.trained = int(self._about["step"])
            self._restores = True

    def begin(self) -> None:
        """Load the saved state of model and optimizer, before callbacks see them."""
        if self._about is not None:
            self.checkpoints.restore(whole=False)
            self.checkpoints.tell()

    def pass_over(self, iterator: Any, several: int) -> int:
        """Read batches that were already trained on; return how many, 0 if there are none left.

        Args:
            several: Batches that one call trains on.
        """
        if self._restores:  # Keras has reset the epoch's metrics since
            self._restores = False
            self.checkpoints.restore()
        count = min(several, self._left)
        for _ in range(count):
            next(iterator)
        self._left -= count
        return count

    def step_done(self) -> bool:
        """Save if it is time; return whether it was."""
        return self.checkpoints.step_done()

    def end(self) -> None:
        """Save the end."""
        self.checkpoints.save()


PATHS = {
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
"""Keras' callbacks that write to one path during a whole `fit`, and the attribute with this path.

Derived classes are not changed, because they can do other things too.
"""

SAVERS = (
    ("keras.src.saving.saving_lib", "save_model"),
    ("keras.src.saving.saving_lib", "save_weights_only"),
    ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5"),
)


@contextlib.contextmanager
def files_shared(context: RunContext, note: Callable[[str], None]) -> Iterator[None]:
    """Let workers use the same file names; enter it on every one of them.

    Args:
        note: Tells the user.
    """
    if context.spec.world_size == 1:
        yield
        return
    patches = Patches()
    try:
        for module, name in SAVERS:
            patches.replace(importlib.import_module(module), name, _moved_there(context))
        file_utils = importlib.import_module("keras.src.utils.file_utils")
        patches.replace(file_utils, "makedirs", _made_by_anybody)
        trainer = importlib.import_module("keras.src.backend.tensorflow.trainer").TensorFlowTrainer
        patches.replace(trainer, "fit", _agreed(context, note))
        yield
    finally:
        patches.undo()


def _moved_there(context: RunContext) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def save(*args: Any, **keywords: Any) -> Any:
            given = signature.bind(*args, **keywords)
            # A worker that saves alone would wait for the others in a collective. A separate thread
            # is in no strategy's scope, so variables that Keras makes there belong to this worker
            # alone.
            with _read_here(), ThreadPoolExecutor(1, "workbench-save") as thread:
                return thread.submit(write, given).result()

        def write(given: inspect.BoundArguments) -> Any:
            wanted = given.arguments
            path = wanted["filepath"]
            one_file = wanted.get("zipped", True) and wanted.get("max_shard_size") is None
            local = isinstance(path, (str, os.PathLike)) and "://" not in str(path)
            if not (one_file and local) or os.path.isdir(path):
                return original(*given.args, **given.kwargs)
            beside = Path(path).parent / f".rank-{context.spec.rank}-{Path(path).name}"
            wanted["filepath"] = str(beside)
            try:
                result = original(*given.args, **given.kwargs)
                os.replace(beside, path)
            finally:
                beside.unlink(missing_ok=True)
            return result

        return save

    return make


@contextlib.contextmanager
def _read_here() -> Iterator[None]:
    """Read this worker's local values of variables that are joined when read (sums of metrics)."""
    patches = Patches()
    patches.replace(
        values.SyncOnReadVariable, "_get_cross_replica", lambda _: lambda var: var._primary.value()
    )
    patches.replace(
        values.OnReadPolicy, "_get_cross_replica", lambda _: lambda self, var: var._primary.value()
    )
    try:
        yield
    finally:
        patches.undo()


def _made_by_anybody(original: Any) -> Any:
    def makedirs(path: Any) -> Any:
        with contextlib.suppress(FileExistsError):  # another worker was faster
            return original(path)

    return makedirs


def _agreed(context: RunContext, note: Callable[[str], None]) -> Callable[[Any], Any]:
    """Ask before each `fit` which worker writes to which path."""
    number = count(1)

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **keywords: Any) -> Any:
            given = signature.bind(model, *args, **keywords)
            callbacks = given.arguments.get("callbacks")
            if callbacks is not None and not isinstance(callbacks, (list, tuple)):
                callbacks = [callbacks]
            several = isinstance(callbacks, (list, tuple))
            others = _theirs(context, next(number), callbacks if several else [], note)
            if not others:
                return original(model, *args, **keywords)
            given.arguments["callbacks"] = [
                one for one in callbacks or [] if one not in others or _reads(one)
            ]
            with contextlib.ExitStack() as stack:
                for one in filter(_reads, others):
                    stack.enter_context(_only_read(one))
                return original(*given.args, **given.kwargs)

        return fit

    return make


def _theirs(
    context: RunContext, number: int, callbacks: Any, note: Callable[[str], None]
) -> list[Any]:
    """Return the callbacks whose path a worker with a lower rank also uses."""
    paths = [os.path.realpath(getattr(one, PATHS[type(one)])) if type(one) in PATHS else ""
             for one in callbacks]  # fmt: skip
    context.post(f"files of fit {number}", [path for path in paths if path])
    heard = context.board.wait(f"files of fit {number}", range(context.spec.world_size), MEET_S)
    lower = {path for rank, named in heard.items() if rank < context.spec.rank for path in named}
    higher = {path for rank, named in heard.items() if rank > context.spec.rank for path in named}
    for one, path in zip(callbacks, paths, strict=True):
        if path in higher:
            note(
                f"Several workers use the same path for the callback {type(one).__name__}: {path}. "
                "Only one of them, the worker with the lowest rank, writes to this path."
            )
    return [one for one, path in zip(callbacks, paths, strict=True) if path in lower]


def _reads(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.BackupAndRestore)


@contextlib.contextmanager
def _only_read(callback: Any) -> Iterator[None]:
    """Let a BackupAndRestore continue from the existing backup, and keep the backup."""
    hooks = ("_save_model", "on_train_end")
    for name in hooks:
        setattr(callback, name, lambda *args, **keywords: None)
    try:
        yield
    finally:
        for name in hooks:
            delattr(callback, name)
