"""What central storage and the parameter server do alike on a worker.

    pull -> forward -> backward -> push -> (the server steps) -> pull -> ...

A strategy of this family says when pushes count (its policy, on the server), how a share's loss is
weighted, and what is a wait. Gradients and parameters travel on links (`engine/transport`), the
user's optimizer steps on the servers (`Remote`, `shard_server.py`).

What a step measures: compute is forward and backward; the exchange with the servers (pushing,
their sums and optimizer steps, pulling) is blocked time, of which the strategy calls a part wait;
the rest is transfer. `sent_bytes` are the gradients pushed; as many bytes of parameters come back.
Of layers with sparse gradients only the rows of the gradient are pushed, and those rows come back
that any worker has changed (`rows.py`).
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
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
from ..parts.replica import Trainer, bytes_of, copied_state, to_numpy
from ..parts.user_loop import OwnLoop
from .copies import Successor
from .links import ShardLinks
from .rows import check_row_wise, tables_of
from .shard_server import Copy, Holder, Policy, serve
from .shards import Shard, hyper_of, importable, plain

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.telemetry.recorder import StepResult


@dataclass
class Answer:
    """What the servers said to a push.

    Attributes:
        staleness: Updates between this worker's pull and its push's turn, mean over servers.
        blocked_s: How long the slowest server held the answer back, for others (bounded staleness,
            or the last push of a round).
        sent_bytes: What was pushed.
        blamed: The worker whose push let that answer go; -1 where nothing was held back.
    """

    staleness: float = 0.0
    blocked_s: float = 0.0
    sent_bytes: float = 0.0
    blamed: int = -1


class Remote:
    """The parameters of one session on the servers, seen from a worker.

    Args:
        clip_norm: Clip there, over the sum of all workers' gradients.
        whole: Whether gradients must reach the servers as backward left them: what they hold is one
            worker's share of a sum, so that a norm taken of it here would be wrong.
        snapshot: Whether the parameters of all servers are to be of one version.
        tables: Parameters whose gradients are sparse: of them rows travel.
        exchanged: Called with a function that does the exchange, and times it.

    Raises:
        FitError: The optimizer or the model cannot be put on servers.
    """

    def __init__(
        self,
        context: RunContext,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        whole: bool = False,
        snapshot: bool = False,
        pull_every: int = 1,
        tables: Collection[torch.Tensor] = (),
        exchanged: Callable[[Callable[[], Answer]], None],
    ) -> None:
        self._context, self._optimizer = context, optimizer
        self._whole, self._pull_every = whole, pull_every
        self._exchanged = exchanged
        self._pushes = 0
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._slots = [i for i, p in enumerate(every) if p.requires_grad]
        self.parameters = [every[i] for i in self._slots]
        self._known = set(self.parameters)
        self._tables = frozenset(i for i, p in enumerate(self.parameters) if p in tables)
        check_row_wise(optimizer, tables)
        self._servers = ShardLinks(
            context,
            self.parameters,
            clips=clip_norm is not None,
            snapshot=snapshot,
            tables=self._tables,
        )
        self._hyper: list[dict[str, Any]] | None = None
        self._hidden: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._pins: list[Any] = []
        self._open(clip_norm)
        self._pins = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _open(self, clip_norm: float | None) -> None:
        optimizer = self._optimizer
        index = {id(p): i for i, p in enumerate(self.parameters)}
        about = {
            "optimizer": importable(type(optimizer)),
            "defaults": plain(optimizer.defaults),
            "hyper": hyper_of(optimizer),
            "groups": [
                [index[id(p)] for p in group["params"] if id(p) in index]
                for group in optimizer.param_groups
            ],
            "clip_norm": clip_norm,
        }
        self._servers.open(about)
        self._servers.begin()

    # -- a step ------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in args[1:]) or kwargs.get("closure") is not None:
            raise FitError(
                "An optimizer whose step takes a closure cannot work on a server: the closure "
                "computes the loss again in the middle of the step.",
                seen=type(optimizer).__name__,
                next_step="use another optimizer, or strategy mirrored",
                code="WB-FIT-123",
            )
        self._check_known()
        self._check_untouched()
        self._exchanged(self.exchange)
        self._hidden = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def _after_step(self, *unused: Any) -> None:
        for parameter, gradient in zip(self.parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []

    def _check_known(self) -> None:
        """Raise FitError where the step would change what is on no server: here alone."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._known:
                    raise FitError(
                        "A parameter is trained that was frozen, or not the optimizer's, when the "
                        "others were put on the servers; this worker's copy alone would change.",
                        seen=f"a parameter of shape {tuple(parameter.shape)}",
                        allowed="requires_grad and param_groups as they were; freezing is possible",
                        next_step="call wb.prepare with all layers unfrozen and freeze some after "
                        "it, or use strategy mirrored",
                        code="WB-FIT-124",
                    )

    def backward_ended(self) -> None:
        """Note what the gradients are like when backward leaves them."""
        if self._whole:
            self._versions = [-1 if p.grad is None else p.grad._version for p in self.parameters]

    def _check_untouched(self) -> None:
        if not self._whole or not self._versions or self._context.spec.world_size == 1:
            return
        now = [-1 if p.grad is None else p.grad._version for p in self.parameters]
        if now != self._versions:
            raise FitError(
                "The gradients were changed between backward and optimizer.step(). On this worker "
                "they are only its share of the sum, so a norm taken of them is not the whole's.",
                seen="clipping, or another change in place",
                next_step="use wb.fit(clip_norm=...), which clips on the server, or strategy "
                "mirrored",
                code="WB-FIT-125",
            )
        self._versions = []

    def exchange(self) -> Answer:
        """Push the gradients, get the parameters."""
        self._pushes += 1
        wanted = self._pushes % self._pull_every == 0
        self._check_dense()
        gradients = [p.grad for p in self.parameters]
        absent = [i for i, gradient in enumerate(gradients) if gradient is None]
        meta: dict[str, Any] = {"pull": wanted}
        if absent:
            meta["absent"] = absent
        hyper = hyper_of(self._optimizer)
        if hyper != self._hyper:
            check_row_wise(self._optimizer, {self.parameters[i] for i in self._tables})
            meta["hyper"] = self._hyper = hyper
        answers = self._servers.exchange(gradients, meta, wanted=wanted)
        size_bytes = self._servers.sent_bytes
        told = [answer.meta for answer in answers if "staleness" in answer.meta]
        if not told:
            return Answer(sent_bytes=size_bytes)
        longest = max(told, key=lambda m: m["blocked_s"])
        return Answer(
            sum(m["staleness"] for m in told) / len(told),
            longest["blocked_s"],
            size_bytes,
            longest["blamed"],
        )

    def pull(self) -> None:
        """Get the parameters as they are now."""
        self._servers.pull()

    def end(self) -> None:
        """Push no more; wait until nobody does, and get the final parameters."""
        self._servers.end()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What this worker's parameters have of gradients, also while they are out of sight."""
        held = self._hidden or [p.grad for p in self.parameters]
        return [gradient for gradient in held if gradient is not None]

    def _check_dense(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if i not in self._tables and parameter.grad is not None and parameter.grad.is_sparse:
                raise FitError(
                    "A sparse gradient came where none was expected: the servers' memory is laid "
                    "out before the first step, for whole tensors where no layer says otherwise.",
                    seen=f"parameter {i} of shape {tuple(parameter.shape)}",
                    allowed="sparse gradients of layers made with sparse=True",
                    next_step="make the embedding with nn.Embedding(..., sparse=True), or look it "
                    "up with sparse=False",
                    code="WB-FIT-126",
                )

    # -- saving ------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state_dict, its state brought from the servers."""
        state: dict[int, Any] = {}
        for written in self._servers.states():
            for index, values in torch.load(io.BytesIO(written), weights_only=True).items():
                state[self._slots[index]] = values
        return {**self._optimizer.state_dict(), "state": state}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put a saved state, and this worker's parameters, on the servers."""
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})

        def written(shard: Shard) -> bytes:
            part = {p.index: saved["state"].get(self._slots[p.index]) for p in shard.pieces}
            whole = io.BytesIO()
            torch.save({k: v for k, v in part.items() if v is not None}, whole)
            return whole.getvalue()

        self._servers.load(written)
        self._servers.begin()

    def close(self) -> None:
        """End the session and take the hooks out."""
        for pin in self._pins:
            pin.remove()
        self._pins.clear()
        self._servers.close()


class Served(Strategy):
    """A strategy whose parameters are on servers."""

    trainer: Trainer | None = None
    loop: OwnLoop | None = None
    remote: Remote | None = None
    guard: Guard | None = None
    answer = Answer()
    _model: torch.nn.Module | None = None
    _timer: Any = None
    _ended = False

    # -- what differs ------------------------------------------------------------------------------

    @abstractmethod
    def make_policy(self, holder: Holder) -> Policy:
        """Say, on a server, when pushes count."""

    @abstractmethod
    def settle(self, result: StepResult, answer: Answer) -> None:
        """Write what the exchange measured into the step's result."""

    # -- on a server -------------------------------------------------------------------------------

    def serve(self) -> None:
        """Hold parameters until the workers are done."""
        context = self.context
        if context.hub is None:  # it holds a copy and nothing else
            return
        successor = None if context.successor is None else Successor(context.successor)
        serve(context.hub, self._parts, self.make_policy, successor)

    def keep_copy(self) -> None:
        """Hold a copy of another server's part, and take its place when it is gone."""
        context = self.context
        assert context.copy_hub is not None, "the runtime opens the links first"
        Copy(context.copy_hub, context.spec.world_size, self._parts, self.make_policy).keep()

    @property
    def _parts(self) -> int:
        """In how many parts servers hold the parameters."""
        return self.context.entry.part_count(self.context.spec.options)

    # -- on a worker -------------------------------------------------------------------------------

    def prepare(self, job: Job) -> None:
        """Put model and optimizer on the servers; all workers begin with rank 0's values."""
        sync = self.context.sync
        # What one worker has is its share of a sum, which only the server can clip. Pushes that
        # stand alone are clipped where they are made.
        own = replace(job, clip_norm=None) if sync else job
        self.trainer = trainer = Trainer(self.context, own)
        if trainer.scaler is not None:
            self._refuse_scaling("precision='fp16'")
        trainer.wrap(trainer.model)
        self._model, self._timer = trainer.model, trainer.timer
        self._join(trainer.optimizer, job.clip_norm if sync else None)

    def step(self, share: Share) -> StepResult:
        """Compute the gradient of the own share; the optimizer's step is an exchange."""
        trainer = self._trainer
        if self.context.sync:
            weight = share.samples / share.global_samples
        else:  # a worker without a sample pushes nothing but its turn
            weight = 1.0 if share.samples else 0.0
        trainer.gradients(share, weight=weight)
        trainer.update()
        result = trainer.measured(share)
        self._complete(result)
        return result

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
            scaled=lambda: self._refuse_scaling("a GradScaler"),
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
            "Loss scaling and servers do not go together: each worker would skip other steps.",
            seen=seen,
            allowed="bf16, which needs none; fp16 under mirrored, sharded, local_sgd, gossip",
            next_step="use precision='bf16', in a loop torch.autocast(..., dtype=torch.bfloat16), "
            "without a GradScaler",
            code="WB-FIT-128",
        )

    def _refuse_another(self) -> None:
        raise FitError(
            "The servers step the optimizer that wb.prepare was given; a new one would train this "
            "worker's copy alone.",
            seen="optimizer.step() of another optimizer",
            allowed="one optimizer for the whole loop",
            next_step="change its param_groups (lr, momentum, ...), which reach the servers, or "
            "use strategy mirrored",
            code="WB-FIT-129",
        )

    def _join(
        self, optimizer: torch.optim.Optimizer, clip_norm: float | None, *, whole: bool = False
    ) -> None:
        options, model = self.options, self._model
        assert model is not None
        broadcast_buffers(model)
        if self.context.sync:
            self.guard = Guard(self.context, "copies", at_end=True)
            self.guard.add(model)
        self._note_simulation()
        self.remote = Remote(
            self.context,
            optimizer,
            clip_norm=clip_norm,
            whole=whole,
            snapshot=options.get("consistency") == "snapshot",
            pull_every=options.get("pull_every", 1),
            tables=tables_of(model),
            exchanged=self._exchange,
        )

    def _exchange(self, exchange: Callable[[], Answer]) -> None:
        if self.context.sync:
            self._timer.ready()
        with self._timer.blocked():
            self.answer = exchange()

    def _complete(self, result: StepResult) -> None:
        answer = self.answer
        result.sent_bytes = answer.sent_bytes
        if self.context.sync and len(set(self.context.spec.hosts)) > 1:
            # When each gradient was ready cannot be compared; when each push came can be.
            result.wait_s, result.waited_for = answer.blocked_s, answer.blamed
        self.settle(result, answer)
        if self.guard is not None:
            result.aside_s = self.guard.tick()

    def _note_simulation(self) -> None:
        if self.rank == 0 and self.context.faults.on_links:
            faults = self.context.spec.faults
            simulated = ", ".join(fault.text for fault in faults if fault.kind in ON_LINKS)
            text = f"Simulated on the links to the servers: {simulated}."
            self.context.emit(events.Noted(rank=0, text=text))

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share, the sums are all-reduced."""
        broadcast_buffers(self._trainer.model)
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    def finish(self) -> None:
        """Take the final parameters, once nobody pushes any more."""
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
        """Return model, optimizer and scheduler, what is on servers included."""
        assert self.remote is not None, "prepare comes first"
        self.remote.pull()
        own = copied_state(self.loop or self._trainer)
        return {**own, "optimizer": self.remote.optimizer_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        assert self.remote is not None, "prepare comes first"
        parts = self.loop or self._trainer
        parts.model.load_state_dict(state["model"])
        if parts.scheduler is not None and state.get("scheduler") is not None:
            parts.scheduler.load_state_dict(state["scheduler"])
        self.remote.load_optimizer_state(state["optimizer"])

    def memory_bytes(self) -> float:
        """Return what this worker holds of model and gradients; the rest is on the servers."""
        assert self._model is not None, "prepare comes first"
        assert self.remote is not None, "prepare comes first"
        held = [p.data for p in self._model.parameters()]
        return bytes_of([*held, *self._model.buffers(), *self.remote.gradients])

    def close(self) -> None:
        """Take every hook out; the links stay for the cell's next training."""
        if self.remote is not None:
            self.remote.close()
        if self.loop is not None:
            self.loop.close()
        self.trainer = self.loop = self.remote = self._model = self._timer = self.guard = None

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
