"""The common part of all strategies of tf.distribute: the cell's scope, the steps of `wb.fit`.

A strategy builds its `tf.distribute.Strategy`; everything here works with any of them. The cell
runs in its scope, so a model that is built there belongs to it:

    with strategy.scope():  the cell    model.fit           recorded by `keras/fit.py`
                                        strategy.run        recorded by `steps.py`
                                        wb.fit(model, ...)  `step` below, once per global batch

Source: https://www.tensorflow.org/guide/distributed_training.

Data sets are kept alive as long as an iterator over several devices reads them.
`MultiDeviceIterator` reads ahead on its own thread. When it is deleted, it first frees its data set
and then waits for this thread:

    deletion:   data set freed --- waits for the thread . . . .
    thread:     - reads the next batch ----> asks the data set for its types: memory that was freed

If an iterator is dropped while it reads ahead, this sometimes ends the process with a segmentation
fault. Keras does so after each evaluation in `fit`: it makes the iterator of the next evaluation at
once, and later replaces it without reading it. Here each iterator also holds its data set from
Python, until the one in C++ is gone.

Source: `~MultiDeviceIterator` in `tensorflow/core/kernels/data/multi_device_iterator_ops.cc`
(`dataset_` is declared last, so destroyed first),
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/kernels/data/multi_device_iterator_ops.cc.

Such an iterator consists of one iterator that reads the data set and one for each device. Each
iterator has a thread that tunes it (`Model::OptimizeLoop` in `tensorflow/core/framework/model.cc`),
and its deletion waits for this thread: tens of milliseconds, on a busy machine a second, once more
than two minutes. Here iterators are not tuned, unless the user's data set asks for it. `AUTOTUNE`
in the data set then means TensorFlow's default: as many calls at a time as there are threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.ops import gen_dataset_ops

from ....engine.contract import NAN, Job, Share, Strategy
from ....engine.telemetry.recorder import StepResult
from ....engine.tensorflow import accelerator
from ....engine.tensorflow.support import built
from ....engine.training.initial import initialise
from ..parts.markers import Markers
from ..parts.models import by_name, owner, restore, state_of
from ..parts.replica import Trainer
from ..parts.steps import OwnLoop, Steps, global_loss, stand_ins
from .batches import note_keras_2
from .fit import KerasFit, check_model
from .patches import losses_noted, shapes_found, statistics_averaged

if TYPE_CHECKING:
    from ....engine.context import RunContext

clock = time.perf_counter


class Replicated(Strategy):
    """Base of TensorFlow's strategies; one object serves the whole cell.

    Attributes:
        devices: Names of this engine's devices, one per replica that it holds.
        distribution: The tf.distribute strategy.
    """

    per_cell = injects_data_delay = True
    state_is_collective = True  # reading a variable that is averaged when read is a collective

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        leased = context.spec.devices or (context.spec.device,)
        self.on_gpus = all(map(accelerator.is_gpu, leased))
        self.devices = accelerator.names(leased)  # without GPUs logical CPU devices
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
        """The arguments for the tf.distribute strategy."""
        return (type(self), *self.devices, *sorted(self.options.items()))

    @property
    def shard(self) -> tuple[int, int]:
        """The share of each batch that this engine takes: (index, number of engines)."""
        held = len(self.devices)
        return self.rank // held, max(1, self.world_size // held)

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """Set up the context of the cell; yields its names."""
        context = self.context
        self.distribution = distribution = built(self._key, self.build)
        with contextlib.ExitStack() as stack:
            markers = stack.enter_context(self.marks())
            stack.enter_context(losses_noted())
            stack.enter_context(statistics_averaged(distribution))
            stack.enter_context(shapes_found(distribution))
            stack.enter_context(stand_ins(context, distribution))
            stack.enter_context(datasets_kept())
            wait = accelerator.synchronise if self.on_gpus else None
            self._steps = steps = Steps(context, markers, wait)
            self._fit = KerasFit(context, steps, distribution, self._trains, self)
            stack.enter_context(self._fit)
            self._loop = OwnLoop(context, steps, distribution, self._elsewhere)
            stack.enter_context(self._loop)
            context.weights = self.weights
            stack.enter_context(distribution.scope())
            yield {"strategy": distribution}
            steps.settle()
        steps.say_set_up()
        if not context.trained:
            note_keras_2(context)

    def marks(self) -> Markers:
        """Return the object that measures the steps."""
        faults, distribution = self.context.faults.replicas, self.distribution
        marks: Markers = built(("marks", self._key), lambda: Markers(distribution, faults))
        return marks.watch(faults)

    def _trains(self, model: Any) -> None:
        self._model, self._optimizer = model, getattr(model, "optimizer", None)

    def _elsewhere(self) -> bool:
        return self.trainer is not None or (self._fit is not None and self._fit.under_way)

    # -- wb.fit ------------------------------------------------------------------------------------

    def shard_source(self, source: Any) -> Any:
        """Keep a sample of the data, from which a model may get its weights' shapes."""
        self._sample = source.peek()
        return source

    def prepare(self, job: Job) -> None:
        """Build the model and the optimizer in the scope if they are not built yet."""
        check_model(job.model, self.distribution)
        self._trains(job.model)
        held = int(self.distribution.num_replicas_in_sync) // self.shard[1]
        self.trainer = Trainer(self.distribution, job, held, self._sample)
        self._optimizer = self.trainer.optimizer
        initialise(self.context, job.model)
        self._watched.forget()

    def step(self, share: Share) -> StepResult:
        """Give each replica its part of the share; every replica takes the same step."""
        began = clock()
        samples, losses = self._working.step(share)
        if self.on_gpus:
            accelerator.synchronise()
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
        """Return the measurements (empty: none), with each replica's known values."""
        measured = measured or [StepResult(0, NAN, NAN)] * len(samples)
        return tuple(
            # Passing the batch to the replicas counts as the step's compute time.
            replace(
                one, samples=count, loss=loss, compute_s=spent_s - one.exposed_s, has_loss=count > 0
            )
            for one, count, loss in zip(measured, samples, losses, strict=True)
        )

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics; each replica scores its part, and the sums are added up."""
        values = self._working.evaluate(shares)
        self._watched.forget()
        return values

    def finish(self) -> None:
        """Let `model.fit` and users' own loops be recorded again."""
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
        """Return the trained model's weights by name; empty if no model was trained."""
        model = self._model
        if model is None and self._loop is not None:
            model = owner(self._loop.optimizer)
        return {} if model is None else by_name(model)

    def state(self) -> dict[str, Any]:
        """Return model and optimizer."""
        return state_of(self._model, self._optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        restore(self._model, self._optimizer, state)

    def close(self) -> None:
        """Release the user's model."""
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = self._fit = self._loop = self._steps = self._model = None


_here = threading.local()  # .opened: the data sets of the iterator that is being made


def untuned(dataset: Any) -> Any:
    """Return a data set that is not tuned while it is read, unless it has its own setting."""
    if dataset is None or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


@contextlib.contextmanager
def datasets_kept() -> Iterator[None]:
    """Let new iterators hold their data sets, and end as soon as they are dropped."""
    module = multi_device_iterator_ops
    kind = module.OwnedMultiDeviceIterator
    make, init = kind.__init__, gen_dataset_ops.multi_device_iterator_init
    on_device = module._create_device_dataset

    @functools.wraps(init)
    def opened(dataset: Any, *args: Any, **keywords: Any) -> Any:
        getattr(_here, "opened", []).append(dataset)
        return init(dataset, *args, **keywords)

    @functools.wraps(make)
    def made(iterator: Any, dataset: Any = None, *args: Any, **keywords: Any) -> None:
        _here.opened = []
        try:
            make(iterator, untuned(dataset), *args, **keywords)
            # The last attribute is the last to be dropped.
            iterator._workbench_datasets = _here.opened
        finally:
            _here.opened = []

    @functools.wraps(on_device)
    def made_on_device(*args: Any, **keywords: Any) -> Any:
        return untuned(on_device(*args, **keywords))

    kind.__init__, gen_dataset_ops.multi_device_iterator_init = made, opened
    module._create_device_dataset = made_on_device
    try:
        yield
    finally:
        kind.__init__, gen_dataset_ops.multi_device_iterator_init = make, init
        module._create_device_dataset = on_device
