"""A worker's links to all servers, used as one: each server holds a shard of the parameters.

    push   every server gets its shard's part of the gradients
    take   every server sends its shard of the parameters, one server after the other

Where several servers must act as one, they are told so here: gradients are clipped by the norm of
the whole, pushes are counted in one order by all servers, parameters are read in one version.

Parameters and gradients travel from and to where they lie, without a copy in between, where they
are contiguous in the CPU's memory; those on a GPU pass through pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ... import events
from ...engine.context import RunContext
from ...engine.links import Link, Message
from .shards import Shard, divide
from .staging import Bytes, Staging


class ShardLinks:
    """The parameters of one session on the servers.

    Args:
        parameters: What is trained; dealt out to the servers by bytes.
        clips: Whether the servers clip, over the sum of all workers' gradients.
        snapshot: Whether the parameters of all servers are to be of one version.

    Raises:
        FitError: There are fewer parameters than servers.
    """

    def __init__(
        self,
        context: RunContext,
        parameters: Sequence[torch.Tensor],
        *,
        clips: bool,
        snapshot: bool,
    ) -> None:
        self._context, self._parameters = context, parameters
        self._links: list[Link] = context.links
        self._rank0 = context.spec.rank == 0
        self._clipped_together = clips and len(self._links) > 1
        self._sequenced = snapshot and len(self._links) > 1
        self._shards = divide(parameters, len(self._links))
        self._staging = Staging(parameters)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters on the servers."""
        return sum(shard.size_bytes for shard in self._shards)

    def open(self, about: Mapping[str, Any]) -> None:
        """Tell every server which tensors it holds and what it does with them."""
        for link, shard in self._each():
            link.begin(shard.size_bytes, {**about, "shard": shard.to_wire()})
        for link in self._links:
            link.opened()

    def begin(self) -> None:
        """Rank 0 sends the values to begin with; all workers get them back."""
        if self._rank0:
            values = self._staging.gather([p.detach() for p in self._parameters])
            for link, shard in self._each():
                link.push("init", {}, _parts(values, shard))
        self._take()

    def _each(self) -> Iterator[tuple[Link, Shard]]:
        return zip(self._links, self._shards, strict=True)

    # -- a step ------------------------------------------------------------------------------------

    def exchange(
        self, gradients: Sequence[torch.Tensor | None], meta: Mapping[str, Any], *, wanted: bool
    ) -> list[Message]:
        """Push the gradients, get the parameters if they are wanted; return the answers."""
        held = self._staging.gather(gradients)
        faults, size_bytes = self._context.faults, self.size_bytes
        faults.travel(size_bytes)
        push = self._push_in_turn if self._sequenced else self._push
        answers = push(held, meta, wanted)
        if wanted:
            faults.travel(size_bytes)
        return answers

    def _push(
        self, gradients: Sequence[Bytes], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        for link, shard in self._each():
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
        for link, shard in self._each():
            answer = link.receive()
            link.read(answer, _parts(landing, shard))
            link.release(answer)
            self._hear(answer, len(answers))
            answers.append(answer)
        self._staging.scatter(self._parameters)
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
        self._staging.scatter(self._parameters)
        return first

    def _hear(self, answer: Message, server: int) -> None:
        """Hand on what a server tells once about its memory; only rank 0 is told."""
        if "holds" in answer.meta:
            self._context.emit(events.ServerHolds(rank=0, server=server, **answer.meta["holds"]))

    # -- saving ------------------------------------------------------------------------------------

    def states(self) -> Iterator[bytes]:
        """Yield what each server's optimizer keeps, as the server wrote it."""
        for link in self._links:
            link.send("state")
            yield link.read_bytes(link.receive())

    def load(self, written: Callable[[Shard], bytes]) -> None:
        """Rank 0 gives each server what its optimizer is to keep."""
        if self._rank0:
            for link, shard in self._each():
                link.send_bytes("load", written(shard))

    def close(self) -> None:
        """End the session; the links stay."""
        for link in self._links:
            link.end_session()


def _parts(tensors: Sequence[Bytes], shard: Shard) -> list[Bytes]:
    return [tensors[piece.index] for piece in shard.pieces]
