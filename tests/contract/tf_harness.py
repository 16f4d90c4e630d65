"""One engine for TensorFlow's strategies, in this process: what the runtime does around a cell.

Importing TensorFlow takes seconds and half a gigabyte, so all runs follow each other in one
process, as they do in an engine.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_numbers = itertools.count(1)


@dataclass
class Report:
    """What a run brings back."""

    error: str | None = None
    rows: Any = None  # RECORD rows of shape (steps, replicas)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    train_s: float = 0.0
    eval_s: float = 0.0
    trained: int = 0

    def emitted(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def run(
    strategy: str,
    cell: str,
    workers: int = 1,
    *,
    options: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
    faults: tuple[str, ...] = (),
    names: dict[str, Any] | None = None,
    init_from: str = "",
    rank: int = 0,
    board: Any = None,
    post: Any = None,
    told: dict[str, Any] | None = None,
) -> Report:
    """Run the source of a cell under a strategy, as one engine of the run does.

    Args:
        rank: This engine, where it holds one replica of several.
        told: Further fields of the RunSpec.
        board, post: What it hears of the other engines, and how it speaks to them.
    """
    from workbench import catalog
    from workbench.engine import context as run_context
    from workbench.engine import tensorflow_support as support
    from workbench.engine.gate import Gate
    from workbench.engine.injector import FaultInjector
    from workbench.engine.recorder import Recorder
    from workbench.protocol import RunSpec, records_from

    entry = catalog.lookup(strategy, "tensorflow")
    held = workers if entry.one_engine else 1
    number = next(_numbers)
    spec = RunSpec(
        mode="run", rank=rank, world_size=workers, framework="tensorflow",
        ranks=(0,) * workers if entry.one_engine else tuple(range(workers)),
        threads=2, run=number, run_id=f"run{number}", strategy=entry.name,
        options=entry.settings(options or {}), overrides=overrides or {}, faults=faults,
        init_from=init_from, replicas=held, devices=("cpu",) * held,
        hosts=("here",) * workers, **(told or {}),
    )  # fmt: skip
    report = Report()

    def emit(name: str, **fields: Any) -> None:
        if name == "post":
            post(fields)
        else:
            report.events.append((name, fields))

    context = run_context.RunContext(
        spec=spec,
        recorder=Recorder(spec.run, rank),
        gate=Gate(),
        faults=FaultInjector(rank, faults, held),
        emit=emit,
    )
    if board is not None:
        context.board = board
    import workbench

    report.names = {"__name__": "__main__", "wb": workbench, "context": context, **(names or {})}
    report.names.update(rank=rank, world_size=workers, device="cpu")
    before = footprint()
    run_context.set_current(context)
    try:
        support.setup(spec)
        with support.around(context) as injected:
            report.names.update(injected)
            file = f"<cell {number}>"
            # As IPython does: autograph reads the source of what it converts.
            linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
            exec(compile(cell, file, "exec"), report.names)
            if context.checkpoints is not None:
                context.checkpoints.conclude(failed=False)
        if context.weights is not None:
            report.weights = context.weights()
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        if context.strategy is not None:
            context.strategy.close()
        for close in reversed(context.closers):
            close()
        run_context.set_current(None)
    rows = records_from(context.recorder.drain(1 << 20, final=True))
    if len(rows):
        report.rows = rows.reshape(-1, held).copy()
    report.train_s, report.eval_s, report.trained = context.train_s, context.eval_s, context.trained
    after = footprint()
    report.left = [f"{key} changed" for key in before if before[key] != after[key]]
    return report


def footprint() -> dict[str, Any]:
    """What a run must leave as it was."""
    import keras
    import tensorflow as tf
    from tensorflow.python.distribute import distribute_lib, mirrored_run
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    return {
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("workbench")},
        "environ": dict(os.environ),
        "fit": keras.Model.fit,
        "call": polymorphic_function.Function.__call__,
        "apply": keras.optimizers.Optimizer.apply,
        "run": tf.distribute.MirroredStrategy.run,
        "gradient": tf.GradientTape.gradient,
        "all_reduce": distribute_lib.ReplicaContextBase.all_reduce,
        "replicas": mirrored_run._call_for_each_replica,
        "scope": tf.distribute.has_strategy(),
        # The policy is what the first layer of a process found, whatever `floatx` becomes later.
        "dtype": (keras.config.floatx(), keras.config.dtype_policy().name),
    }


def clean(report: Report) -> Report:
    """Check what holds after every run, then hand the report on."""
    assert report.error is None, report.error
    assert report.left == []
    return report


@contextlib.contextmanager
def later(seconds: float, action: Any):
    """Do something from another thread while a run is under way."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
