"""What strategies have in common that lay one model out over the workers, as DTensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from ..base import Strategy
from .layout import Layout, load_whole_state, release_mesh, whole_state
from .memory import held_bytes
from .replicas import broadcast
from .trainer import Trainer


class Partitioned(Strategy):
    """Keeps parts of parameters; gives the user the whole, plain model back at the end."""

    trainer: Trainer | None = None
    layout: Layout | None = None
    mesh: DeviceMesh | None = None
    gathers = True

    def equal_buffers(self) -> None:
        """Give all workers rank 0's buffers (BatchNorm's statistics): training reads none."""
        trainer = self._trainer
        broadcast(trainer.model.buffers(), trainer.device)

    def finish(self) -> None:
        """Gather the trained model: on every worker, or on rank 0 (`gather=first`)."""
        if self.layout is not None and self.layout.laid_out:
            self.equal_buffers()
            self.layout.gather(everywhere=self.options["gather"] == "all")

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the gathered parameters and buffers by name; nothing before `finish`."""
        if self.layout is None or self.layout.laid_out:
            return {}  # parts of a run that failed: the others' are out of reach
        if self.rank and self.options["gather"] == "first":
            return {}
        return self._trainer.weights()

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler, whole: independent of the world size."""
        return whole_state(self._trainer)

    def snapshot(self) -> dict[str, Any]:
        """Return the same on rank 0; the others only help to gather it."""
        return whole_state(self._trainer, keep=self.rank == 0)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave: each worker takes its part."""
        load_whole_state(self._trainer, state)

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        trainer = self._trainer
        return held_bytes(trainer.model, trainer.optimizer)

    def close(self) -> None:
        """Give the user's module back as it was."""
        if self.layout is not None and self.layout.laid_out:
            self.layout.abandon()
        release_mesh(self.mesh)
        self.trainer = self.layout = self.mesh = None

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return torch.device(self.context.spec.device)

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
