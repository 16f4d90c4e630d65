"""`wb.fit` under a coordinator: each global batch becomes one closure per worker.

    batch of 64, 2 workers --> closure of samples 0..31, closure of samples 32..63

A closure runs on any worker that is free, and its push is a separate step: its loss is the mean
over its own samples.

For checkpoints the position of a `model.fit` by closures is known: the epoch, and how much of it is
done.

    fit(epochs=5), checkpoint in epoch 2 after 7 batches:
        continues with initial_epoch=2, from its 8th batch on

A global batch counts once its closures are scheduled. A checkpoint is taken when all closures have
ended, so that no push is in progress. `keras/fit.py` does the same for strategies whose steps have
an order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from ....engine.checkpoints.checkpoints import checkpoints_of
from ....engine.contract import NAN, Share, Strategy
from ....engine.telemetry.recorder import StepResult
from ....engine.tensorflow.data import ArraySource, slice_batch
from ....engine.training.shares import share_bounds
from ....errors import FitError, RunStopped
from .feeds import Fed, Resident, dealt, fits

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.training.loop import Training
    from ..parts.replica import Trainer
    from .closures import Closures

AHEAD = 4
"""Closures scheduled per worker: enough to keep it busy, few enough to end soon."""


class Coordinated:
    """One `wb.fit`, run by closures.

    Args:
        workers: The number of workers over which a global batch is divided.
    """

    def __init__(self, closures: Closures, trainer: Trainer, workers: int) -> None:
        self.closures, self.trainer, self.workers = closures, trainer, workers
        self.last: StepResult | None = None
        self._score: Any = None

    def run_loop(self, training: Training) -> StepResult | None:
        """Take all steps of the training; return the last that ended.

        Raises:
            FitError: An argument needs ordered steps.
        """
        if training.hooks.step_end:
            raise FitError(
                "Strategy parameter_server cannot call `on_step_end`, because its workers take "
                "their steps in no fixed order.",
                seen="a callback with the method on_step_end",
                allowed="callbacks with on_epoch_end or on_train_end",
                next_step="write your own loop: coordinator.schedule(step, args=...), then "
                "coordinator.join()",
                code="WB-FIT-071",
            )
        source, job = training.source, training.job
        resident = isinstance(source, ArraySource) and fits(source.data)
        feed: Any = Resident(self.closures.coordinator, source.data) if resident else Fed()
        train = feed.function(lambda batch: self.trainer.train_all(batch, 1.0))
        first, checkpoints = training.first - training.base, training.checkpoints
        if first:
            self.closures.go_on(training.first)
        batches = self._places(source, first) if resident else self._batches(source, first)
        pieces = dealt(feed, batches)
        waits = training.eval_source is not None or training.hooks.epoch_end
        every = training.eval_every or job.steps_per_epoch
        try:
            for done in range(first + 1, job.total_steps + 1):
                for args, samples in next(pieces):
                    self.closures.wait_for_room(AHEAD * self.workers)
                    self._schedule(train, args, samples, feed.kind)
                ends = done % job.steps_per_epoch == 0
                if waits and (ends or done % every == 0):
                    self.closures.join()
                    self._after(training, done, evaluates=done % every == 0)
                if ends:
                    training.end_epoch(done // job.steps_per_epoch - 1)
                if checkpoints.is_due(training.base + done):
                    self.closures.join()  # no push is being sent then
                    checkpoints.save(training.base + done)
                    self.closures.idle()
            self.closures.join()
            checkpoints.save(training.base + job.total_steps)
        except RunStopped:
            training.result.stopped = True
        return self.last

    def _schedule(self, function: Any, args: Any, samples: int, kind: Any) -> None:
        def told(loss: Any) -> float:
            self.last = StepResult(samples, float(loss), NAN)
            return self.last.loss

        self.closures.coordinator.strategy.extended._being_scheduled = True
        try:
            with self.closures.coordinator.strategy.scope():
                self.closures.schedule(
                    function, args, told=told, samples=samples, alike=kind and (kind, samples)
                )
        finally:
            self.closures.coordinator.strategy.extended._being_scheduled = False

    def _after(self, training: Training, done: int, *, evaluates: bool) -> None:
        training.logs["loss"] = NAN if self.last is None else self.last.loss
        if evaluates and training.eval_source is not None:
            training.evaluate(training.context.strategy, (done - 1) // training.job.steps_per_epoch)
            self.closures.idle()

    def _places(self, source: Any, first: int) -> Iterator[list[tuple[Any, int]]]:
        """Yield each global batch from `first` on as its samples' places, a piece per worker."""
        begin, skip = divmod(first, source.steps_per_epoch)
        for epoch in count(begin):
            for batch in source.order.batches(epoch)[skip if epoch == begin else 0 :]:
                bounds = [share_bounds(len(batch), r, self.workers) for r in range(self.workers)]
                yield [(np.asarray(batch[a:b], np.int64), b - a) for a, b in bounds if b > a]

    def _batches(self, source: Any, first: int) -> Iterator[list[tuple[Any, int]]]:
        """Yield each global batch from `first` on, in pieces."""
        for share in source.shares(0, 1, first):
            bounds = [share_bounds(share.samples, r, self.workers) for r in range(self.workers)]
            yield [(slice_batch(share.data, a, b), b - a) for a, b in bounds if b > a]

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics over an evaluation set.

        Each worker scores some of the batches.
        """
        feed, names = Fed(), ["loss", *self.trainer.metrics]
        if self._score is None:
            self._score = feed.function(lambda given: self.trainer.score_all(given[0], given[1]))
        sums = np.zeros(len(names) + 1)
        values = []
        for share in shares:
            self.closures.wait_for_room(AHEAD * self.workers)
            args = next(feed.args([(share.data, np.float64(share.samples))]))
            values.append(self.closures.coordinator.schedule(self._score, args=args))
        self.closures.join()
        for value in values:
            sums += np.asarray(value.fetch())
        return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


class ClosuresPlace:
    """One `fit`, with its checkpoints.

    Attributes:
        done: Global batches of this `fit` that are done.
        epoch: The current epoch.
        batch: Batches of it that are done.
    """

    def __init__(self, context: RunContext, closures: Closures, strategy: Strategy) -> None:
        self.context, self.closures, self.strategy = context, closures, strategy
        self.checkpoints = checkpoints_of(context)
        self.done = self.epoch = self.batch = 0
        self._base = context.trained
        self._per_epoch: int | None = None

    def find(self, call: dict[str, Any], per_epoch: int | None) -> int:
        """Continue from a checkpoint of this call, if any; return the batches to skip.

        Args:
            per_epoch: Global batches in an epoch; None if unknown.
        """
        self._per_epoch, self.epoch = per_epoch, call["initial_epoch"]
        base = {"base": self._base}
        about = self.checkpoints.enter(
            self.strategy, lambda: {**base, "epoch": self.epoch, "batch": self.batch}
        )
        if about is None:
            return 0
        self.checkpoints.restore()
        self.checkpoints.tell()
        step = int(about["step"])
        self.done = step - self._base
        self.epoch, self.batch = int(about["epoch"]), int(about["batch"])
        call["initial_epoch"] = self.epoch
        self.closures.go_on(step)
        self.context.trained = step
        return self.batch

    def step_done(self, epoch: int, batch: int) -> None:
        """Count a global batch; save if it is time, when no push is in progress."""
        ended = batch == self._per_epoch
        self.done += 1
        self.epoch, self.batch = (epoch + 1, 0) if ended else (epoch, batch)
        if self.checkpoints.is_due(self._base + self.done):
            self.closures.join()
            self.checkpoints.save(self._base + self.done)
            self.closures.idle()

    def end(self) -> None:
        """Save the end."""
        self.checkpoints.save(self._base + self.done)
