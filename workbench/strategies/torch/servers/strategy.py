"""The common part of central storage and the parameter server on a worker.

    pull -> forward -> backward -> push -> (the server steps) -> pull -> ...

A strategy of this family decides when pushes count (its policy, on the server), how a share's loss
is weighted, and what counts as wait. Gradients and parameters are sent on links
(`engine/transport`), and the user's optimizer steps on the servers (`Remote`, `shard_server.py`).

The measurements of a step: compute is forward and backward. The exchange with the servers (pushing,
the servers' sums and optimizer steps, pulling) is blocked time. The strategy counts a part of it as
wait, and the rest is transfer. `sent_bytes` counts the gradients pushed; the same number of bytes
of parameters comes back. For layers with sparse gradients only the rows of the gradient are pushed,
and the rows that any worker has changed come back (`rows.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ....engine.contract import Job, Share, Strategy
from ....errors import FitError
from ....shared import events
from ....shared.faults import ON_LINKS
from ..parts.guard import Guard, broadcast_buffers
from ..parts.replica import Trainer, bytes_of, copied_state, on_host, to_numpy
from ..parts.user_loop import OwnLoop
from .copies import Successor
from .remote import Answer, Remote
from .rows import tables_of
from .sessions import Copy, Sessions

if TYPE_CHECKING:
    from ....engine.telemetry.recorder import StepResult
    from .shard_server import Holder, Policy


class Served(Strategy):
    """A strategy whose parameters are on servers."""

    trainer: Trainer | None = None
    loop: OwnLoop | None = None
    remote: Remote | None = None
    guard: Guard | None = None
    answer = Answer()
    regroups = True
    _steps = 0  # counted steps of this training since it began here
    _first = 0  # earlier steps that the scheduler must still count
    _scheduled = 0  # how many of these the scheduler has counted
    _model: torch.nn.Module | None = None
    _timer: Any = None
    _ended = False

    # -- what differs ------------------------------------------------------------------------------

    @abstractmethod
    def make_policy(self, holder: Holder) -> Policy:
        """Return the policy that decides, on a server, when pushes count."""

    @abstractmethod
    def settle(self, result: StepResult, answer: Answer) -> None:
        """Write the measurements of the exchange into the step's result."""

    # -- on a server -------------------------------------------------------------------------------

    def serve(self) -> None:
        """Hold parameters until the workers are done."""
        context = self.context
        if context.hub is None:  # this server holds only a copy
            return
        successor = None if context.successor is None else Successor(context.successor)
        Sessions(context.hub, self._parts, self.make_policy, successor).serve()

    def keep_copy(self) -> None:
        """Hold a copy of another server's part, and replace that server when it is gone."""
        context = self.context
        assert context.copy_hub is not None, "internal error: copy_hub is not open"
        Copy(context.copy_hub, context.spec.world_size, self._parts, self.make_policy).keep()

    @property
    def _parts(self) -> int:
        """The number of parts into which servers divide the parameters."""
        return self.context.entry.part_count(self.context.spec.options)

    # -- on a worker -------------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Put model and optimizer on the servers; all workers begin with rank 0's values."""
        sync = self.context.sync
        # A worker's gradient is its share of a sum, which only the server can clip. A push that is
        # a separate step is clipped on the worker.
        own = replace(job, clip_norm=None) if sync else job
        self.trainer = trainer = Trainer(self.context, own)
        if trainer.scaler is not None:
            self._refuse_scaling("precision='fp16'")
        trainer.wrap(trainer.model)
        self._model, self._timer = trainer.model, trainer.timer
        self._join(trainer.optimizer, job.clip_norm if sync else None)

    def step(self, share: Share) -> StepResult:
        """Compute the gradient of this worker's share; the optimizer's step is an exchange."""
        trainer = self._trainer
        if self.context.sync:
            weight = share.samples / share.global_samples
        else:  # a worker without a sample pushes an empty message
            weight = 1.0 if share.samples else 0.0
        if self.context.membership.trains:
            trainer.buffers.keep()
        trainer.gradients(share, weight=weight)
        trainer.update()
        self._scheduled += 1
        result = trainer.measured(share)
        self._complete(result)
        self._steps += 1
        return result

    # -- with others -------------------------------------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether workers never meet because they are asynchronous."""
        return not self.context.sync

    def leave_group(self) -> None:
        """Close the links: servers drop a step without all its pushes."""
        self.guard = None
        self.context.disconnect()

    def break_off(self) -> None:
        """End waits for servers; from another thread."""
        self.context.break_off()

    def settle_steps(self, generation: int) -> int:
        """Ask the servers which steps count, or how many pushes of this rank count."""
        remote, membership = self._remote, self.context.membership
        if self.apart:
            taken = remote.join(membership.place, generation)
        else:
            taken = remote.go_on(generation)
        further, self._steps = taken - self._steps, taken
        if not further and not self.apart:
            self._trainer.buffers.restore()
        if self.apart or not membership.waits:  # otherwise another worker's scheduler is taken over
            for _ in range(self._first + taken - self._scheduled):
                self._trainer.schedule()
        self._scheduled = self._first + taken
        return further

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Take the servers' parameters, under the present rank."""
        spec, waits = self.context.spec, self.context.membership.waits
        self.rank = spec.rank
        if self.apart:
            if waits:
                self._remote.pull()
            return
        self.world_size = spec.world_size
        self._trainer.be_one_of(spec.world_size)
        self._compare_copies()
        self._remote.pull()

    def contributed(self, share: Share) -> StepResult:
        """Return the loss of this worker's share."""
        return self._trainer.contributed(share)

    def member_state(self) -> dict[str, Any]:
        """Return the state that is not on servers: buffers, optimizer settings, scheduler."""
        trainer = self._trainer
        return {
            "steps": self._steps,
            "first": self.context.trained - self._steps,
            "buffers": on_host(dict(trainer.model.named_buffers())),
            "groups": trainer.optimizer.state_dict()["param_groups"],
            "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        }

    def load_member_state(self, state: dict[str, Any]) -> None:
        """Continue from another worker's state; if asynchronous, with its own scheduler."""
        trainer, self._steps = self._trainer, int(state["steps"])
        with torch.no_grad():
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        if self.apart and trainer.scheduler is not None:
            self._first = int(state["first"])
            return
        for group, saved in zip(trainer.optimizer.param_groups, state["groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(state["scheduler"])

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Let a user's own loop train on servers: its `optimizer.step()` is an exchange."""
        model.to(self.context.spec.device)
        self._model = model
        sync = self.context.sync
        self.loop = OwnLoop(
            self.context,
            model,
            optimizer,
            loader,
            weighted=sync,
            adds_up=sync,
            epoch_end=self._epoch_end,
            exchanged=self._refuse_another,
            scaled=lambda: self._refuse_scaling("a GradScaler in the loop"),
            backward_ended=lambda: self.remote.backward_ended() if self.remote else None,
            complete=self._complete,
        )
        self._timer = self.loop.timer
        self._join(optimizer, None, whole=sync)
        return model, optimizer, self.loop.loader

    def _epoch_end(self) -> None:
        if self.guard is not None and self._model is not None:
            self.guard.settle(last=False)
            broadcast_buffers(self._model)

    def _refuse_scaling(self, seen: str) -> None:
        raise FitError(
            "This strategy does not support loss scaling. Loss scaling skips a step if gradients "
            "overflow. Each worker would decide alone whether to skip a step, so the workers would "
            "skip different steps.",
            seen=seen,
            allowed="precision bf16, which needs no scaling; fp16 with the strategies "
            "`mirrored`, `sharded`, `local_sgd`, `gossip`",
            next_step="use precision='bf16'; in your own loop, use torch.autocast(..., "
            "dtype=torch.bfloat16) without a GradScaler",
            code="WB-FIT-128",
        )

    def _refuse_another(self) -> None:
        raise FitError(
            "The servers use the optimizer that wb.prepare received. Another optimizer would train "
            "only this worker's copy of the model.",
            seen="a call of another optimizer's step()",
            allowed="one optimizer for the whole loop",
            next_step="use only the optimizer that wb.prepare received. You can change its "
            "param_groups (lr, momentum, ...): the servers use the changed values. Or use the "
            "strategy `mirrored`",
            code="WB-FIT-129",
        )

    def _join(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, *, whole: bool = False
    ) -> None:
        options, model = self.options, self._model
        assert model is not None
        waits = self.context.membership.waits
        if not waits:  # a worker that joins later does this with the others at that time
            broadcast_buffers(model)
            self._compare_copies()
        self._note_simulation()
        self.remote = Remote(
            self.context,
            optimizer,
            clip_norm=clip_norm,
            whole=whole,
            snapshot=options.get("consistency") == "snapshot",
            pull_every=options.get("pull_every", 1),
            tables=tables_of(model),
            waits=waits,
            exchanged=self._exchange,
        )

    def _compare_copies(self) -> None:
        if self.context.sync and self._model is not None:
            self.guard = Guard(self.context, "copies", at_end=True)
            self.guard.add(self._model)

    def _exchange(self, exchange: Callable[[], Answer]) -> None:
        if self.context.sync:
            self._timer.ready()
        with self._timer.blocked():
            self.answer = exchange()

    def _complete(self, result: StepResult) -> None:
        answer = self.answer
        result.sent_bytes = answer.sent_bytes
        if self.context.sync and len(set(self.context.spec.hosts)) > 1:
            # The times when gradients were ready cannot be compared; the times when pushes came
            # can.
            result.wait_s, result.waited_for = answer.blocked_s, answer.blamed
        self.settle(result, answer)
        if self.guard is not None:
            result.aside_s = self.guard.tick()

    def _note_simulation(self) -> None:
        if self.rank == 0 and self.context.faults.on_links:
            faults = self.context.spec.faults
            simulated = ", ".join(fault.text for fault in faults if fault.kind in ON_LINKS)
            text = f"The links to the servers are simulated with {simulated}."
            self.context.emit(events.Noted(rank=0, text=text))

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share, the sums are all-reduced."""
        broadcast_buffers(self._trainer.model)
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    def finish(self) -> None:
        """Take the final parameters, when no worker pushes any more."""
        self._end()
        if self.guard is not None and self._model is not None:
            self.guard.settle()
            broadcast_buffers(self._model)

    def _end(self) -> None:
        if self.remote is not None and not self._ended:
            self._ended = True
            self.remote.end()

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name: the servers', after the last push."""
        self._end()
        assert self._model is not None, "prepare comes first"
        return to_numpy(self._model.state_dict())

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler, including the parts on servers."""
        assert self.remote is not None, "prepare comes first"
        self.remote.pull()
        own = copied_state(self.loop or self._trainer)
        return {**own, "optimizer": self.remote.optimizer_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        assert self.remote is not None, "prepare comes first"
        parts = self.loop or self._trainer
        parts.model.load_state_dict(state["model"])
        if parts.scheduler is not None and state.get("scheduler") is not None:
            parts.scheduler.load_state_dict(state["scheduler"])
        self.remote.load_optimizer_state(state["optimizer"])

    def memory_bytes(self) -> float:
        """Return this worker's memory of model and gradients; the rest is on the servers."""
        assert self._model is not None, "prepare comes first"
        assert self.remote is not None, "prepare comes first"
        held = [p.data for p in self._model.parameters()]
        return bytes_of([*held, *self._model.buffers(), *self.remote.gradients])

    def close(self) -> None:
        """Remove every hook; the links stay for the cell's next training."""
        if self.remote is not None:
            self.remote.close()
        if self.loop is not None:
            self.loop.close()
        self.trainer = self.loop = self.remote = self._model = self._timer = self.guard = None

    @property
    def _remote(self) -> Remote:
        assert self.remote is not None, "prepare comes first"
        return self.remote

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
