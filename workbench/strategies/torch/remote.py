"""A worker's side: the user's optimizer steps on servers instead of here.

The optimizer object stays the user's. A hook before its `step` sends the gradients off and brings
the parameters back; then the gradients are out of sight for a moment, so that the step itself finds
nothing to do. Schedulers, scalers and `zero_grad` go on as ever.

Parameters and gradients travel from and to where they lie, without a copy in between, where they
are contiguous in the CPU's memory; those on a GPU pass through pinned memory.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.context import RunContext
from ...engine.links import Link, Message
from ...errors import FitError
from .hyper import hyper_of, importable, plain
from .shards import Shard, divide
from .staging import Bytes, Staging


@dataclass
class Answer:
    """What the servers said to a push.

    Attributes:
        staleness: Updates between this worker's pull and its push's turn, mean over servers.
        blocked_s: How long the slowest server held the answer back (bounded staleness).
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
        exchanged: Callable[[Callable[[], Answer]], None],
    ) -> None:
        self._context, self._optimizer = context, optimizer
        self._links: list[Link] = context.links
        self._rank0 = context.spec.rank == 0
        self._clipped_together = clip_norm is not None and len(self._links) > 1
        self._sequenced = snapshot and len(self._links) > 1
        self._whole, self._pull_every = whole, pull_every
        self._exchanged = exchanged
        self._pushes = 0
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._slots = [i for i, p in enumerate(every) if p.requires_grad]
        self.parameters = [every[i] for i in self._slots]
        self._shards = divide(self.parameters, len(self._links))
        self._staging = Staging(self.parameters)
        self._hyper: list[dict[str, Any]] | None = None
        self._hidden: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._pins: list[Any] = []
        self._open(clip_norm)
        self._pins = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters on the servers."""
        return sum(shard.size_bytes for shard in self._shards)

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
        for link, shard in zip(self._links, self._shards, strict=True):
            link.begin(shard.size_bytes, {**about, "shard": shard.to_wire()})
        for link in self._links:
            link.opened()
        self._begin()

    def _begin(self) -> None:
        """Rank 0 sends the values to begin with; all workers get them back."""
        if self._rank0:
            values = self._staging.gather([p.detach() for p in self.parameters])
            for link, shard in zip(self._links, self._shards, strict=True):
                link.push("init", {}, _parts(values, shard))
        self._take()

    # -- a step ------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(a is not None for a in args[1:]) or kwargs.get("closure") is not None:
            raise FitError(
                "An optimizer whose step takes a closure cannot work on a server: the closure "
                "computes the loss again in the middle of the step.",
                seen=type(optimizer).__name__,
                next_step="use another optimizer, or strategy mirrored",
            )
        self._check_untouched()
        self._exchanged(self.exchange)
        self._hidden = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def _after_step(self, *unused: Any) -> None:
        for parameter, gradient in zip(self.parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []

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
            )
        self._versions = []

    def exchange(self) -> Answer:
        """Push the gradients, get the parameters."""
        self._pushes += 1
        wanted = self._pushes % self._pull_every == 0
        gradients, absent = self._gradients()
        meta: dict[str, Any] = {"pull": wanted}
        if absent:
            meta["absent"] = absent
        hyper = hyper_of(self._optimizer)
        if hyper != self._hyper:
            meta["hyper"] = self._hyper = hyper
        size_bytes = self.size_bytes
        self._context.faults.travel(size_bytes)
        push = self._push_in_turn if self._sequenced else self._push
        answers = push(gradients, meta, wanted)
        if wanted:
            self._context.faults.travel(size_bytes)
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

    def _push(
        self, gradients: Sequence[Bytes], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        for link, shard in zip(self._links, self._shards, strict=True):
            link.push("push", meta, _parts(gradients, shard))
        if self._clipped_together and self._rank0:
            self._clip_together()
        return self._take() if wanted else [link.receive() for link in self._links]

    def _clip_together(self) -> None:
        """Each server knows its part of the norm; rank 0 adds them up, as clip_grad_norm_ does."""
        told = [link.receive().meta for link in self._links]
        norm = math.sqrt(sum(meta["norm"] ** 2 for meta in told))
        factor = min(1.0, told[0]["clip_norm"] / (norm + 1e-6))
        for link in self._links:
            link.send("scale", {"factor": factor})

    def _push_in_turn(
        self, gradients: Sequence[Bytes], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        """Push so that all servers count the pushes in one order: that of server 0's tickets."""
        first, others = self._links[0], self._links[1:]
        first.push("push", meta, _parts(gradients, self._shards[0]))
        ticket = {**meta, "ticket": first.receive().meta["ticket"]}
        for link, shard in zip(others, self._shards[1:], strict=True):
            link.push("push", ticket, _parts(gradients, shard))
        for link in others:
            link.receive()
        return [self._take_one_version() if wanted else first.receive()]

    def pull(self) -> None:
        """Get the parameters as they are now."""
        if self._sequenced:
            self._links[0].send("pull")
            self._take_one_version()
            return
        for link in self._links:
            link.send("pull")
        self._take()

    def end(self) -> None:
        """Push no more; wait until nobody does, and get the final parameters."""
        for link in self._links:
            link.send("end")
        self._take()

    def _take(self) -> list[Message]:
        """Read the parameters that every server sends.

        Each board is let go of before the next server is waited for, and all workers go through the
        servers in one order: so no two of them can each hold what the other waits for.
        """
        landing = self._staging.landing()
        answers: list[Message] = []
        for link, shard in zip(self._links, self._shards, strict=True):
            answer = link.receive()
            link.read(answer, _parts(landing, shard))
            link.release(answer)
            self._hear(answer, len(answers))
            answers.append(answer)
        self._staging.scatter(self.parameters)
        return answers

    def _take_one_version(self) -> Message:
        """Read the parameters of one version: that in which server 0 stays until released.

        It gives no further tickets meanwhile, so the others reach that version and stop there.
        """
        landing = self._staging.landing()
        first = self._links[0].receive()
        self._links[0].read(first, _parts(landing, self._shards[0]))
        for link in self._links[1:]:
            link.send("pull", {"at": first.meta["version"]})
        for at, shard in enumerate(self._shards[1:], start=1):
            link = self._links[at]
            answer = link.receive()
            link.read(answer, _parts(landing, shard))
            link.release(answer)
            self._hear(answer, at)
        self._links[0].release(first)
        self._hear(first, 0)
        self._staging.scatter(self.parameters)
        return first

    def _hear(self, answer: Message, server: int) -> None:
        """Hand on what a server tells once about its memory; only rank 0 is told."""
        if "holds" in answer.meta:
            self._context.emit("server", rank=0, server=server, **answer.meta["holds"])

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What this worker's parameters have of gradients, also while they are out of sight."""
        held = self._hidden or [p.grad for p in self.parameters]
        return [gradient for gradient in held if gradient is not None]

    def _gradients(self) -> tuple[list[Bytes], list[int]]:
        """Return every gradient's bytes on the CPU, and which parameters have none."""
        absent = [i for i, p in enumerate(self.parameters) if p.grad is None]
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise FitError(
                    "Sparse gradients cannot be sent to a server: its memory is laid out for whole "
                    "tensors.",
                    seen=f"parameter {i} of shape {tuple(parameter.shape)}",
                    next_step="make the embedding with sparse=False",
                )
        return self._staging.gather([p.grad for p in self.parameters]), absent

    # -- saving ------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state_dict, its state brought from the servers."""
        state: dict[int, Any] = {}
        for link in self._links:
            link.send("state")
            saved = io.BytesIO(link.read_bytes(link.receive()))
            for index, values in torch.load(saved, weights_only=True).items():
                state[self._slots[index]] = values
        return {**self._optimizer.state_dict(), "state": state}

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Put a saved state, and this worker's parameters, on the servers."""
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})
        if self._rank0:
            for link, shard in zip(self._links, self._shards, strict=True):
                part = {p.index: saved["state"].get(self._slots[p.index]) for p in shard.pieces}
                written = io.BytesIO()
                torch.save({k: v for k, v in part.items() if v is not None}, written)
                link.send_bytes("load", written.getvalue())
        self._begin()

    def close(self) -> None:
        """End the session and take the hooks out."""
        for pin in self._pins:
            pin.remove()
        self._pins.clear()
        for link in self._links:
            link.end_session()


def _parts(tensors: Sequence[Bytes], shard: Shard) -> list[Bytes]:
    return [tensors[piece.index] for piece in shard.pieces]
