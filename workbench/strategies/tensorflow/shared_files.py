"""Files that several workers write at one path, as a Keras cell does that runs on each of them.

    model.save, save_weights,     each worker writes beside the path, then moves its file there:
    ModelCheckpoint               whole at any moment; a worker may also save alone
    CSVLogger, TensorBoard        written by the first worker that names the path, as TensorFlow's
                                  guide has it
    BackupAndRestore              written and deleted by the first, read by all

Who names which path is asked on the run's board at the beginning of each `fit`.

Source: https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import keras
from tensorflow.python.distribute import values

from ...engine.context import RunContext
from .patches import Patches
from .servers import MEET_S

PATHS = {
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.BackupAndRestore: "backup_dir",
}
"""Keras' callbacks that write at one path for a whole `fit`, and where they keep it. Derived ones
are left alone: what else they do is theirs."""

SAVERS = (
    ("keras.src.saving.saving_lib", "save_model"),
    ("keras.src.saving.saving_lib", "save_weights_only"),
    ("keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5"),
)


@contextlib.contextmanager
def files_shared(context: RunContext, note: Callable[[str], None]) -> Iterator[None]:
    """Let workers name the same files; enter it on every one of them.

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
            # A worker that saves alone would wait for the others wherever they meet; on a thread
            # of its own it is in no strategy's scope, so what Keras makes meanwhile is its own.
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
    """Read what is joined when it is read (the sums of metrics) as this worker has it."""
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
    """Ask who writes where, before each `fit`."""
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
    """Return the callbacks whose path a worker of a lower rank has too."""
    paths = [os.path.realpath(getattr(one, PATHS[type(one)])) if type(one) in PATHS else ""
             for one in callbacks]  # fmt: skip
    context.post(f"files of fit {number}", [path for path in paths if path])
    heard = context.board.wait(f"files of fit {number}", range(context.spec.world_size), MEET_S)
    lower = {path for rank, named in heard.items() if rank < context.spec.rank for path in named}
    higher = {path for rank, named in heard.items() if rank > context.spec.rank for path in named}
    for one, path in zip(callbacks, paths, strict=True):
        if path in higher:
            note(f"{type(one).__name__} is written by rank 0 alone: all workers name {path}.")
    return [one for one, path in zip(callbacks, paths, strict=True) if path in lower]


def _reads(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.BackupAndRestore)


@contextlib.contextmanager
def _only_read(callback: Any) -> Iterator[None]:
    """Have a BackupAndRestore go on from what is there, and leave it there."""
    hooks = ("_save_model", "on_train_end")
    for name in hooks:
        setattr(callback, name, lambda *args, **keywords: None)
    try:
        yield
    finally:
        for name in hooks:
            delattr(callback, name)
