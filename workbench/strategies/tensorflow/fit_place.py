"""Where a `model.fit` stands, for checkpoints: the epoch, and the batches of it that are done.

    fit(epochs=5), checkpoint in epoch 2 after 7 batches:
        goes on with initial_epoch=2; the first 7 batches are read and passed over; the metrics of
        the epoch are what they were

Under the run's seed Keras draws the order of arrays alike in every epoch, so the rest of the epoch
has the samples that were left. A tf.data set that shuffles by itself begins its shuffling anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.checkpoints import checkpoints_of
from ...engine.context import RunContext
from ..base import Strategy


class FitPlace:
    """One `fit`, saved and gone on with.

    Attributes:
        epoch: Epoch under way.
        batch: Batches of it that are done.
    """

    def __init__(self, context: RunContext, strategy: Strategy) -> None:
        self.context, self.strategy = context, strategy
        self.checkpoints = checkpoints_of(context)
        self.epoch = self.batch = 0
        self._about: Mapping[str, Any] | None = None
        self._left = 0  # batches still to be passed over
        self._restores = False

    def find(self, call: dict[str, Any]) -> None:
        """Look for the checkpoint that this call goes on from; begin with its epoch."""
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
        """Give model and optimizer what was saved, before callbacks see them."""
        if self._about is not None:
            self.checkpoints.restore(whole=False)
            self.checkpoints.tell()

    def pass_over(self, iterator: Any, several: int) -> int:
        """Read batches that were trained on before; return how many, 0 when there are none left.

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
