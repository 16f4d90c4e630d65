"""Training on one device: the baseline that every other strategy is compared with.

Source: Robbins and Monro, A Stochastic Approximation Method, 1951.

    worker 0:  batch -> forward -> loss -> backward -> optimizer

For each batch of B samples, g is the mean of the gradients of the B losses. The step changes the
parameters w to w - lr g. Nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...engine.contract import Job, Share, Strategy
from .parts.replica import Trainer, copied_state, held_bytes, load_parts
from .parts.user_loop import OwnLoop

if TYPE_CHECKING:
    from torch import Tensor

    from ...engine.telemetry.recorder import StepResult


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one step on a batch: x (B, ...), y (B, ...). Return its mean loss."""
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)  # mean over the B samples
    loss.backward()  # p.grad has the shape of p
    optimizer.step()
    return float(loss)


class OneDevice(Strategy):
    """Single-device training."""

    trainer: Trainer | None = None
    loop: OwnLoop | None = None

    def prepare(self, job: Job) -> None:
        """Put the model on the device."""
        self.trainer = Trainer(self.context, job)
        self.trainer.wrap(self.trainer.model)

    def step(self, share: Share) -> StepResult:
        """Compute the gradient of the whole batch and update the parameters."""
        trainer = self._trainer
        trainer.gradients(share)
        trainer.update()
        return trainer.measured(share)

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics over an evaluation set."""
        return self._trainer.evaluate(shares)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name."""
        return self._trainer.weights() if self.loop is None else self.loop.weights()

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler."""
        return copied_state(self.loop or self._trainer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        load_parts(self.loop or self._trainer, state)

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Watch a user's own loop; the model moves to the device and stays the same object."""
        model.to(self.context.spec.device)
        self.loop = OwnLoop(self.context, model, optimizer, loader, sent_bytes=0.0)
        return model, optimizer, self.loop.loader

    def wrap_another_loop(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Move another model of the loop to the device."""
        assert self.loop is not None
        model.to(self.context.spec.device)
        self.loop.wrap_another_loop(model, optimizer)
        return model, optimizer

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        part = self.loop or self._trainer
        return held_bytes(part.model, part.optimizer)

    def close(self) -> None:
        """Release the objects that the run built."""
        if self.loop is not None:
            self.loop.close()
        self.trainer = self.loop = None

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
