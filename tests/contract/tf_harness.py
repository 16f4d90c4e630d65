"""One engine for TensorFlow's strategies, in this process: cells run as an engine runs them.

Importing TensorFlow takes seconds and half a gigabyte, so all runs follow each other in one
process, as they do in an engine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.engine.testing import CollectingLink, EngineHarness
from workbench.shared.faults import parse_fault

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
    link: CollectingLink | None = None,
    told: dict[str, Any] | None = None,
) -> Report:
    """Run the source of a cell under a strategy, as one engine of the run does.

    Args:
        rank: This engine, where it holds one replica of several.
        told: Further fields of the RunSpec.
        link: Its control link, where there are other engines to hear from.
    """
    import workbench
    from workbench import catalog
    from workbench.shared.protocol import RunSpec

    entry = catalog.lookup(strategy, "tensorflow")
    held = workers if entry.one_engine else 1
    number = next(_numbers)
    spec = RunSpec(
        mode="run", rank=rank, world_size=workers, framework="tensorflow",
        threads=2, run=number, run_id=f"run{number}", strategy=entry.name,
        options=entry.settings(options or {}), overrides=overrides or {},
        faults=tuple(map(parse_fault, faults)),
        init_from=init_from, replicas=held,
        **{
            "ranks": (0,) * workers if entry.one_engine else tuple(range(workers)),
            "devices": ("cpu",) * held,
            "hosts": ("here",) * workers,
            **(told or {}),
        },
    )  # fmt: skip
    report = Report()
    report.names = {"__name__": "__main__", "wb": workbench, **(names or {})}

    def begun(context: Any) -> None:
        report.names["context"] = context

    def ended(context: Any) -> None:  # each engine's, where the run keeps rank 0's alone
        if context.weights is not None:
            report.weights = context.weights()

    link = link or CollectingLink()
    link.begun, link.ended = begun, ended
    before = footprint()
    with EngineHarness() as engine:
        found = engine.run(spec, cell, report.names, link)
    report.error, report.events = found.error or None, found.events
    if len(found.rows):
        report.rows = found.rows.reshape(-1, held)
    report.train_s, report.eval_s, report.trained = found.train_s, found.eval_s, found.trained
    after = footprint()
    report.left = [f"{key} changed" for key in before if before[key] != after[key]]
    return report


def footprint() -> dict[str, Any]:
    """What a run must leave as it was."""
    import keras
    import tensorflow as tf
    from keras.src.backend.tensorflow import core
    from keras.src.saving import saving_lib
    from tensorflow.python.distribute import distribute_lib, mirrored_run
    from tensorflow.python.eager.polymorphic_function import polymorphic_function
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    return {
        "threads": {t.name for t in threading.enumerate() if t.name.startswith("workbench")},
        "environ": dict(os.environ),
        "fit": keras.Model.fit,
        "call": polymorphic_function.Function.__call__,
        "apply": keras.optimizers.Optimizer.apply,
        "run": tf.distribute.MirroredStrategy.run,
        "gradient": tf.GradientTape.gradient,
        "all_reduce": distribute_lib.ReplicaContextBase.all_reduce,
        "kinds": (tf.distribute.MirroredStrategy, tf.distribute.experimental.TPUStrategy),
        "assign": (ResourceVariable.assign, core.Variable._direct_assign),
        "scale": keras.optimizers.LossScaleOptimizer.check_finite,
        "save": saving_lib.save_model,
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
