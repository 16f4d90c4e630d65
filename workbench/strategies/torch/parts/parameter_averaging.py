"""The common part of strategies whose replicas take separate steps and are then mixed.

    own share -> gradient -> own optimizer's step -> meet: parameters are mixed with others'

"Replicas meet" means that they exchange and mix parameters. Each strategy decides when replicas
meet, which of them, and how (`local_sgd.py`, `gossip.py`). An evaluation uses the mean of all
replicas. This mean is also the run's result.

When a worker dies or joins, the others keep their replicas and continue with the present workers
(`engine/training/regrouping.py`). A worker that is behind first takes its missing steps alone:

    steps   0 .. 4         5, 6              7 ..
            as rank 1 of 3  alone, the same   as rank 0 of 2: with all others again

A new worker begins with another worker's replica, including its optimizer's state. When a worker
dies, its steps since the last meeting and its optimizer's state are lost. At the end every worker
waits until all have the mean.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ....engine.contract import Job, Share, Strategy
from ....engine.torch.group import control_wire
from .guard import Message, begin_equal, broadcast
from .replica import Trainer, copied_state, held_bytes, load_parts
from .user_loop import OwnLoop

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.telemetry.recorder import StepResult
    from .guard import Guard


class ParameterAveraging(Strategy):
    """Base of strategies whose replicas differ between meetings.

    Attributes:
        message: This worker's parameters and floating-point buffers, flat.
        done: Steps done, including the current one once it has changed parameters.
        equal: Whether the replicas are equal now.
        guard: Compares replicas that have just been made equal; None if they never become equal.
        sent_bytes: Bytes this worker sent in the latest step.
    """

    trainer: Trainer | None = None
    loop: OwnLoop | None = None
    model: torch.nn.Module | None = None
    done = 0
    equal = True
    guard: Guard | None = None
    state_is_collective = True
    regroups = True
    copies = False
    sent_bytes = wait_s = 0.0
    _mean: list[torch.Tensor] | None = None  # the mean that all replicas have at the end

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        # Its shares (rank, workers) by first step; and the step until which it trains alone.
        self._dealt = [(0, self.rank, self.world_size)]
        self._together = 0
        # whether the current step's meeting has begun, so that the step can fail
        self._breaks = False

    @abstractmethod
    def meets(self, done: int) -> bool:
        """Whether a meeting follows when this many steps are done."""

    @abstractmethod
    def meet(self) -> float:
        """Mix parameters; return the seconds waited, or NaN to compute them from all ranks."""

    def meet_nobody(self) -> None:
        """Do the part of a meeting that remains with only one worker."""

    def weight(self, share: Share) -> float:
        """Return the factor on a share's mean loss with which all samples count equally."""
        return share.samples * self.workers / share.global_samples

    @property
    def workers(self) -> int:
        """The number of workers over which the current step's batch is divided."""
        return next(workers for first, _, workers in reversed(self._dealt) if first <= self.done)

    def prepare(self, job: Job) -> None:
        """Begin with rank 0's model everywhere."""
        self.trainer = trainer = Trainer(self.context, job)
        trainer.wrap(trainer.model)
        self.begin(trainer.model)

    def begin(self, model: torch.nn.Module) -> None:
        """Make all replicas equal."""
        self.model, self.device = model, torch.device(self.context.spec.device)
        if not self.context.membership.waits:
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
            if self.meets(self.done):
                self.meet_nobody()
            return
        self.equal = False
        if self.done <= self._together or not self.meets(self.done):
            return
        self._breaks = True
        timer.ready()
        with timer.blocked():
            self.wait_s = self.meet()
        if self.guard is not None and self.equal:
            with timer.aside():
                self.guard.tick()
        self._breaks = False
        self.have_met()

    def have_met(self) -> None:
        """Note that a meeting is complete here."""

    def complete(self, result: StepResult) -> StepResult:
        """Add the wait; between meetings there is none."""
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
        """Return loss and metrics of the mean of the replicas, which stay unchanged."""
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
            self.met += 1
            self._mean = self.message.copy() if self.context.membership.trains else None
        if self.guard is not None:
            self.guard.settle(last=self.loop is None)
        counters = [b for b in self.model.buffers() if not b.is_floating_point()]
        broadcast(counters, self.device)
        # a worker that has left could no longer pass on the mean
        if self.context.membership.trains:
            dist.all_reduce(torch.zeros(1, device=control_wire(None, self.device)))

    # -- with others -------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Release the guard."""
        self.guard = None

    def completes_alone(self) -> bool:
        """Whether a step counts if its meeting failed: yes, its update stays."""
        broke, self._breaks = self._breaks, False
        return broke

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Take steps alone up to the furthest worker's step, then continue with the others."""
        spec, self._together = self.context.spec, int(agreed["done"])
        self.rank, self.world_size = spec.rank, spec.world_size
        self._trainer.be_one_of(spec.world_size)
        before = [one for one in self._dealt if one[0] < self._together]
        self._dealt = [*before, (self._together, self.rank, self.world_size)]

    def agreed(self) -> dict[str, Any]:
        """Return how many steps are complete."""
        return {"done": self.done - self._breaks}

    def shares(self, first: int) -> list[tuple[tuple[int, int], int | None]]:
        """Return the old shares up to the furthest worker's step, and then the present shares."""
        ends = [*(begin for begin, _, _ in self._dealt[1:]), None]
        found: list[tuple[tuple[int, int], int | None]] = []
        for (begin, rank, workers), end in zip(self._dealt, ends, strict=True):
            steps = None if end is None else end - max(begin, first)
            if steps is None or steps > 0:
                found.append(((rank, workers), steps))
        return found

    def handed_over(self) -> dict[str, Any]:
        """Return this replica, or the mean of all replicas after the end."""
        return {**self._replica(), "equal": self.equal, "met": self.met, "mean": self._mean}

    def take_over(self, state: dict[str, Any], *, comes: bool) -> bool:
        """Begin with another worker's replica.

        Or take over the mean if only this worker lacks it.
        """
        if comes:
            self._load_replica(state)
        elif state["met"] > self.met:
            self.message.restore(state["mean"])
        else:
            return False
        self.equal, self.met, self._mean = bool(state["equal"]), int(state["met"]), state["mean"]
        return False

    def contributed(self, share: Share) -> StepResult:
        """Return the loss of this worker's share."""
        return self._trainer.contributed(share)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name; equal on all workers after `finish`."""
        if self.loop is not None:
            return self.loop.weights()
        return {} if self.trainer is None else self.trainer.weights()

    def state(self) -> dict[str, Any]:
        """Return this replica's model, optimizer and scheduler."""
        return self._replica()

    def _replica(self) -> dict[str, Any]:
        done = self.done - self._breaks
        return {**copied_state(self.loop or self._trainer), "done": done}

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
        """Replace the optimizer's tensors by their mean, if all workers have the same tensors.

        With an optimizer that is linear in the gradient, the mean of the moments equals the moments
        on one device. A worker that sat out every round has no tensors; then rank 0's tensors are
        used.
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
        """Return this replica, which differs from the others'."""
        return {**self._replica(), "equal": self.equal} if self.world_size > 1 else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, in the same way on all workers."""
        self._load_replica(state)

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore this worker's own replica."""
        self._load_replica(state)
        self.equal = bool(state["equal"])

    def _load_replica(self, state: dict[str, Any]) -> None:
        load_parts(self.loop or self._trainer, state)
        self.done = int(state.get("done", 0))

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Let a user's own loop meet after its optimizer's steps.

        The replicas also become their mean when the loader is exhausted: the training may end
        there.
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
        """Return the bytes of model, gradients and optimizer state on this worker."""
        part = self.loop or self._trainer
        return held_bytes(part.model, part.optimizer)

    def close(self) -> None:
        """Release the user's loop."""
        if self.loop is not None:
            self.loop.close()
        self.trainer = self.loop = self.model = self.guard = None

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
