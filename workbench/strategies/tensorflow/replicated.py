"""What all strategies of tf.distribute do alike: the cell's scope, and the steps of `wb.fit`.

A strategy builds its `tf.distribute.Strategy`; everything here works with any of them. The cell
runs in its scope, so a model that is built there belongs to it:

    with strategy.scope():  the cell    model.fit           recorded by `keras_fit.py`
                                        strategy.run        recorded by `loop.py`
                                        wb.fit(model, ...)  `step` below, once per global batch

Source: https://www.tensorflow.org/guide/distributed_training.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...engine.context import RunContext
from ...engine.initial import initialise
from ...engine.tensorflow_support import built
from ..base import NAN, Job, Share, StepResult, Strategy
from .iterators import datasets_kept
from .keras_fit import KerasFit, check_model
from .keras_patches import losses_noted, shapes_found, statistics_averaged
from .loop import OwnLoop
from .markers import Markers
from .mistakes import note_keras_2
from .models import by_name, owner, restore, state_of
from .pasted import stand_ins
from .steps import Steps, global_loss
from .trainer import Trainer

clock = time.perf_counter


class Replicated(Strategy):
    """Base of TensorFlow's strategies; one object serves the whole cell.

    Attributes:
        devices: Names of this engine's devices, one per replica that it holds.
        distribution: The tf.distribute strategy.
    """

    spans_cell = spends_delays = True
    gathers = True  # reading what is averaged when read is a collective

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        leased = context.spec.devices or (context.spec.device,)
        self.on_gpus = all(device.startswith("cuda") for device in leased)
        numbers = [int(device.partition(":")[2] or 0) for device in leased]
        if not self.on_gpus:
            numbers = list(range(len(leased)))  # logical CPU devices
        self.devices = [f"{'GPU' if self.on_gpus else 'CPU'}:{number}" for number in numbers]
        self.distribution: Any = None
        self.trainer: Trainer | None = None
        self._steps: Steps | None = None
        self._fit: KerasFit | None = None
        self._sample: Any = None
        self._model: Any = None  # trained last by model.fit or wb.fit
        self._optimizer: Any = None
        self._loop: OwnLoop | None = None

    @abstractmethod
    def build(self) -> tf.distribute.Strategy:
        """Return the tf.distribute strategy over this engine's devices."""

    @property
    def _key(self) -> tuple[Any, ...]:
        """What the tf.distribute strategy is built from."""
        return (type(self), *self.devices, *sorted(self.options.items()))

    @property
    def portion(self) -> tuple[int, int]:
        """Which share of each batch this engine takes: (index, number of engines)."""
        held = len(self.devices)
        return self.rank // held, max(1, self.world_size // held)

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """Set up what the cell runs in; yields the names it finds."""
        context = self.context
        self.distribution = distribution = built(self._key, self.build)
        with contextlib.ExitStack() as stack:
            markers = stack.enter_context(self.marks())
            stack.enter_context(losses_noted())
            stack.enter_context(statistics_averaged(distribution))
            stack.enter_context(shapes_found(distribution))
            stack.enter_context(stand_ins(context, distribution))
            stack.enter_context(datasets_kept())
            self._steps = steps = Steps(context, markers, self.synchronise)
            self._fit = KerasFit(context, steps, distribution, self._trains, self)
            stack.enter_context(self._fit)
            self._loop = OwnLoop(context, steps, distribution, self._elsewhere)
            stack.enter_context(self._loop)
            context.weights = self.weights
            stack.enter_context(distribution.scope())
            yield {"strategy": distribution}
        steps.say_set_up()
        if not context.trained:
            note_keras_2(context)

    def marks(self) -> Markers:
        """Return what measures the steps."""
        faults, distribution = self.context.faults.replicas, self.distribution
        marks: Markers = built(("marks", self._key), lambda: Markers(distribution, faults))
        return marks.watch(faults)

    def _trains(self, model: Any) -> None:
        self._model, self._optimizer = model, getattr(model, "optimizer", None)

    def _elsewhere(self) -> bool:
        return self.trainer is not None or (self._fit is not None and self._fit.under_way)

    def synchronise(self) -> None:
        """Wait for the devices; on a CPU every call has ended when it returns."""
        if self.on_gpus:
            tf.test.experimental.sync_devices()

    # -- wb.fit ------------------------------------------------------------------------------------

    def deal(self, source: Any) -> Any:
        """Keep a sample of the data: a model may get its weights' shapes from it."""
        self._sample = source.peek()
        return source

    def prepare(self, job: Job) -> None:
        """Build what is not built yet, in the scope."""
        check_model(job.model, self.distribution)
        self._trains(job.model)
        held = int(self.distribution.num_replicas_in_sync) // self.portion[1]
        self.trainer = Trainer(self.distribution, job, held, self._sample)
        self._optimizer = self.trainer.optimizer
        initialise(self.context, job.model)
        self._watched.forget()

    def step(self, share: Share) -> StepResult:
        """Give each replica its part of the share; every replica takes the same step."""
        began = clock()
        samples, losses = self._working.step(share)
        self.synchronise()
        end = clock()
        seen = self._watched.markers.take(began, end)
        measured, set_up_s = (seen[-1].results, seen[-1].set_up_s) if seen else ((), 0.0)
        self._watched.set_up(set_up_s)
        replicas = self.results(measured, samples, losses, end - began - set_up_s)
        return StepResult(
            share.samples, global_loss(replicas), replicas[0].compute_s, replicas=replicas,
            set_up_s=set_up_s,
        )  # fmt: skip

    def results(
        self,
        measured: Sequence[StepResult],
        samples: list[int],
        losses: list[float],
        spent_s: float,
    ) -> tuple[StepResult, ...]:
        """Return what was measured (empty: nothing), with what is known of each replica."""
        measured = measured or [StepResult(0, NAN, NAN)] * len(samples)
        return tuple(
            # Handing the batch over is part of what the step computes.
            replace(
                one, samples=count, loss=loss, compute_s=spent_s - one.exposed_s, has_loss=count > 0
            )
            for one, count, loss in zip(measured, samples, losses, strict=True)
        )

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics; each replica scores its part, the sums are added up."""
        values = self._working.evaluate(shares)
        self._watched.forget()
        return values

    def finish(self) -> None:
        """Let `model.fit` and own loops be recorded again."""
        self._working.close()
        self.trainer = None
        self._watched.start_s = NAN

    @property
    def _working(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer

    @property
    def _watched(self) -> Steps:
        assert self._steps is not None, "the cell is over"
        return self._steps

    # -- what stays --------------------------------------------------------------------------------

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the trained model's weights by name; empty where no model was trained."""
        model = self._model
        if model is None and self._loop is not None:
            model = owner(self._loop.optimizer)
        return {} if model is None else by_name(model)

    def state(self) -> dict[str, Any]:
        """Return model and optimizer."""
        return state_of(self._model, self._optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        restore(self._model, self._optimizer, state)

    def close(self) -> None:
        """Let go of the user's model."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = self._fit = self._loop = self._steps = self._model = None
