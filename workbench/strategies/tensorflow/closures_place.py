"""Where a `model.fit` by closures stands, for checkpoints: the epoch, and how much of it is done.

    fit(epochs=5), checkpoint in epoch 2 after 7 batches:
        goes on with initial_epoch=2, from its 8th batch on

A global batch counts once its closures are scheduled; a checkpoint is taken when all closures have
ended, so no push is under way then. `fit_place.py` is the same for strategies whose steps have an
order.
"""

from __future__ import annotations

from typing import Any

from ...engine.checkpoints import checkpoints_of
from ...engine.context import RunContext
from ..base import Strategy
from .closures import Closures


class ClosuresPlace:
    """One `fit`, saved and gone on with.

    Attributes:
        done: Global batches of this `fit` that are done.
        epoch: Epoch under way.
        batch: Batches of it that are done.
    """

    def __init__(self, context: RunContext, closures: Closures, strategy: Strategy) -> None:
        self.context, self.closures, self.strategy = context, closures, strategy
        self.checkpoints = checkpoints_of(context)
        self.done = self.epoch = self.batch = 0
        self._base = context.trained
        self._per_epoch: int | None = None

    def find(self, call: dict[str, Any], per_epoch: int | None) -> int:
        """Go on from a checkpoint of this call, if any; return the batches to leave out.

        Args:
            per_epoch: Global batches in an epoch; None where nobody knows.
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
        """Count a global batch; save if it is time, when no push is under way."""
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
