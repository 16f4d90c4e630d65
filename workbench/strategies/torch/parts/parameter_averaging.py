"""What strategies have in common whose replicas take steps of their own and meet afterwards.

    own share -> gradient -> own optimizer's step -> meet: parameters are mixed with others'

How often they meet, whom, and how parameters are mixed is in the strategies (`local_sgd.py`,
`gossip.py`). What is evaluated, and what a run ends with, is the mean of all replicas.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ....engine.contract import Job, Share, Strategy
from .guard import Message, begin_equal, broadcast
from .replica import Trainer, copied_state, held_bytes, load_parts
from .user_loop import OwnLoop

if TYPE_CHECKING:
    from ....engine.telemetry.recorder import StepResult
    from .guard import Guard


class ParameterAveraging(Strategy):
    """Replicas that are not equal between meetings.

    Attributes:
        message: This worker's parameters and floating-point buffers, flat.
        done: Steps done.
        equal: Whether the replicas are equal now.
        guard: Compares replicas that have just been made equal; None where they never are.
        sent_bytes: Bytes this worker sent in the latest step.
    """

    trainer: Trainer | None = None
    loop: OwnLoop | None = None
    model: torch.nn.Module | None = None
    done = 0
    equal = True
    guard: Guard | None = None
    state_is_collective = True
    sent_bytes = wait_s = 0.0

    @abstractmethod
    def meets(self) -> bool:
        """Whether the step just done ends in a meeting."""

    @abstractmethod
    def meet(self) -> float:
        """Mix parameters; return the seconds waited, NaN to have them derived from all ranks."""

    def meet_nobody(self) -> None:
        """Do what is left of a meeting where there is one worker."""

    def weight(self, share: Share) -> float:
        """Return the factor on a share's mean loss: a mean over workers is one over samples."""
        return share.samples * self.world_size / share.global_samples

    def prepare(self, job: Job) -> None:
        """Begin with rank 0's model everywhere."""
        self.trainer = trainer = Trainer(self.context, job)
        trainer.wrap(trainer.model)
        self.begin(trainer.model)

    def begin(self, model: torch.nn.Module) -> None:
        """Make all replicas equal."""
        self.model, self.device = model, torch.device(self.context.spec.device)
        begin_equal(model, self.device)
        self.message = Message(model, self.device)

    def step(self, share: Share) -> StepResult:
        """Take a step alone, then meet the others if it is time."""
        trainer = self._trainer
        trainer.gradients(share, weight=self.weight(share))
        trainer.update()
        self.step_done(trainer.timer)
        return self.complete(trainer.measured(share, self.sent_bytes))

    def step_done(self, timer: Any) -> None:
        """Count a step and meet, timed."""
        self.done += 1
        self.wait_s = self.sent_bytes = 0.0
        if self.world_size == 1:
            if self.meets():
                self.meet_nobody()
            return
        self.equal = False
        if self.meets():
            timer.ready()
            with timer.blocked():
                self.wait_s = self.meet()
        if self.guard is not None and self.equal:
            with timer.aside():
                self.guard.tick()

    def complete(self, result: StepResult) -> StepResult:
        """Add the wait: nobody waits between meetings."""
        result.wait_s = min(self.wait_s, result.exposed_s) if self.wait_s else self.wait_s
        return result

    def mean(self) -> None:
        """Replace every replica by the mean of all."""
        self.message.fill()
        for flat in self.message.flats:
            flat.div_(self.world_size)
            dist.all_reduce(flat)
        self.message.spread()

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics of the mean of the replicas, which go on as they were."""
        if self.equal:
            return self._trainer.evaluate(shares, add_up=dist.all_reduce)
        self.message.fill()
        own = self.message.copy()
        self.mean()
        try:
            return self._trainer.evaluate(shares, add_up=dist.all_reduce)
        finally:
            self.message.restore(own)

    def finish(self) -> None:
        """End with the mean of the replicas; all workers have done the same number of steps."""
        if self.model is None:
            return
        if not self.equal:
            self.mean()
            self.equal = True
        if self.guard is not None:
            self.guard.settle(last=self.loop is None)
        counters = [b for b in self.model.buffers() if not b.is_floating_point()]
        broadcast(counters, self.device)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name; equal on all workers after `finish`."""
        if self.loop is not None:
            return self.loop.weights()
        return {} if self.trainer is None else self.trainer.weights()

    def state(self) -> dict[str, Any]:
        """Return this replica's model, optimizer and scheduler."""
        return self._replica()

    def _replica(self) -> dict[str, Any]:
        return {**copied_state(self.loop or self._trainer), "done": self.done}

    def snapshot(self) -> dict[str, Any]:
        """Return the mean of the replicas and of their optimizers' states. Collective."""
        if self.world_size == 1:
            return self.state()
        if self.equal:
            return self._mean_moments(self.state())
        self.message.fill()
        own = self.message.copy()
        self.mean()
        try:
            return self._mean_moments(self.state())
        finally:
            self.message.restore(own)

    def _mean_moments(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the optimizer's tensors by their mean, where all workers have the same ones.

        With an optimizer that is linear in the gradient, the mean of the moments is that of one
        device. A worker that sat out every round has none: rank 0's then stand for all.
        """
        moments = [
            tensor
            for _, slots in sorted(state["optimizer"]["state"].items())
            for _, tensor in sorted(slots.items())
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        ]
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, [tuple(tensor.shape) for tensor in moments])
        if moments and all(shapes == every[0] for shapes in every):
            for tensor in moments:
                total = tensor.to(self.device) / self.world_size
                dist.all_reduce(total)
                tensor.copy_(total)
        return state

    def own_state(self) -> dict[str, Any]:
        """Return this replica, which is not as the others' are."""
        return {**self._replica(), "equal": self.equal} if self.world_size > 1 else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, alike on all workers."""
        self._load_replica(state)

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Be the replica that this worker had."""
        self._load_replica(state)
        self.equal = bool(state["equal"])

    def _load_replica(self, state: dict[str, Any]) -> None:
        load_parts(self.loop or self._trainer, state)
        self.done = int(state.get("done", 0))

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Let a user's own loop meet after its optimizer's steps.

        The replicas also become their mean when the loader is exhausted: that may be the end.
        """
        model.to(self.context.spec.device)
        self.begin(model)
        self.loop = OwnLoop(
            self.context,
            model,
            optimizer,
            None if loader is None else self.shard_source(loader),
            sent_bytes=lambda: self.sent_bytes,
            weighted=True,
            stepped=self._after_step,  # before the step is recorded
            complete=self.complete,
            epoch_end=self.finish,
        )
        return model, optimizer, self.loop.loader

    def _after_step(self) -> None:
        assert self.loop is not None
        self.step_done(self.loop.timer)

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        part = self.loop or self._trainer
        return held_bytes(part.model, part.optimizer)

    def close(self) -> None:
        """Leave the user's loop alone again."""
        if self.loop is not None:
            self.loop.close()
        self.trainer = self.loop = self.model = self.guard = None

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
