"""A worker's links to all servers, used as one: each server holds a shard of the parameters.

    push   every server gets its shard's part of the gradients
    take   every server sends its shard of the parameters, one server after another

This module makes several servers act as one: gradients are clipped by the norm of the whole
gradient, all servers count pushes in one order, and parameters are read in one version.

Parameters and gradients that are contiguous in the CPU's memory are sent and received in place,
without a copy. Tensors on a device have a copy on the host; two pinned chunks of memory carry the
data between both. For tables with sparse gradients only rows are sent (`rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....engine.torch import accelerator as accelerators
from ....engine.torch.accelerator import Staged
from ....shared import events
from .rows import Parted, Rows, counts_of, put, rows_of
from .shards import Shard, as_bytes, divide

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.transport import Link, Message

Bytes = NDArray[np.uint8]


class ShardLinks:
    """The parameters of one session on the servers.

    Args:
        parameters: The trained parameters; divided over the servers by bytes.
        clips: Whether the servers clip, over the sum of all workers' gradients.
        snapshot: Whether the parameters of all servers must be of one version.
        tables: The parameters that are sent as rows.

    Attributes:
        sent_bytes: The bytes of the last push to all servers.

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
        tables: Collection[int] = (),
    ) -> None:
        self._context, self._parameters = context, parameters
        servers = context.entry.part_count(context.spec.options)
        # If workers can die, a server takes a step only if all other servers will take it too.
        agrees = context.sync and context.spec.heals and servers > 1
        self._about = {"agrees": True} if agrees else {}
        self._together = agrees or (clips and servers > 1)
        self._sequenced = snapshot and servers > 1
        self._shards = divide(parameters, servers)
        self._parted = [Parted(shard, tables) for shard in self._shards]
        self._tables = frozenset(tables)
        self._staging = Staging(parameters, self._tables)
        self.sent_bytes = 0
        self._held: dict[int, Mapping[str, Any]] = {}  # the servers' reports about their memory

    @property
    def _links(self) -> list[Link]:
        return self._context.links

    @property
    def _rank0(self) -> bool:
        return self._context.spec.rank == 0

    def open(self, about: Mapping[str, Any]) -> list[Message]:
        """Send every server the list of its tensors and what to do with them."""
        self._begin(about)
        return [link.opened() for link in self._links]

    def _begin(self, about: Mapping[str, Any]) -> None:
        about = {**about, **self._about, "tables": sorted(self._tables)}
        for link, shard, parted in zip(self._links, self._shards, self._parted, strict=True):
            link.taken_over = self._taken_over
            most_bytes = parted.most_bytes if parted.tables else None
            link.begin(shard.size_bytes, {**about, "shard": shard.to_wire()}, most_bytes)

    def go_on(self, about: Mapping[str, Any]) -> int:
        """Open a session in which other workers continue; return the number of steps before it.

        Raises:
            LinkClosedError: A server has died, or expects other workers again.
        """
        self._begin(about)
        stands: list[Message | None] = [None for _ in self._links]
        if self._rank0:
            stands = [link.receive() for link in self._links]
            self._settle([one for one in stands if one is not None])
        opened = [
            link.opened(None if one is None or one.kind == "stands" else one)
            for link, one in zip(self._links, stands, strict=True)
        ]
        for link in self._links:
            link.settled()
        return max(int(one.meta["version"]) for one in opened)

    def _settle(self, stands: Sequence[Message]) -> None:
        """Bring all servers to the same version; a copy that took over has opened already."""
        ahead = max(stands, key=lambda one: one.meta["version"]).meta
        decided = {"version": ahead["version"], "factor": ahead.get("factor", 1.0)}
        for link, one in zip(self._links, stands, strict=True):
            if one.kind == "stands":
                link.send("settle", decided)

    def begin(self) -> None:
        """Send rank 0's initial values; all workers receive them back."""
        if self._rank0:
            values = self._staging.gather([p.detach() for p in self._parameters])
            for link, shard in self._each():
                link.push("init", {}, _parts(values, shard))
        else:
            for link in self._links:
                link.expect()
        self._take()

    def _each(self) -> Iterator[tuple[Link, Shard]]:
        return zip(self._links, self._shards, strict=True)

    # -- a step ------------------------------------------------------------------------------------

    def exchange(
        self, gradients: Sequence[torch.Tensor | None], meta: Mapping[str, Any], *, wanted: bool
    ) -> list[Message]:
        """Push the gradients, get the parameters if they are needed; return the answers."""
        pushes = self._pushes(gradients)
        faults = self._context.faults
        self.sent_bytes = sum(part.size for parts, _ in pushes for part in parts)
        faults.travel(self.sent_bytes)
        push = self._push_in_turn if self._sequenced else self._push
        answers = push(pushes, meta, wanted)
        if wanted:
            faults.travel(self._came_bytes)
        self.sent_bytes += sum(answer.meta.get("copied_bytes", 0) for answer in answers)
        return answers

    def _pushes(self, gradients: Sequence[torch.Tensor | None]) -> list[Push]:
        """Return what each server gets of the gradients."""
        held = self._staging.gather(
            [None if i in self._tables else gradient for i, gradient in enumerate(gradients)]
        )
        pushes: list[Push] = []
        for shard, parted in zip(self._shards, self._parted, strict=True):
            if not parted.tables:
                pushes.append((_parts(held, shard), {}))
                continue
            rows = [rows_of(gradients[p.index], self._parameters[p.index]) for p in parted.tables]
            whole = _parts(held, parted.whole)
            pushes.append((parted.parts(whole, rows), {"rows": counts_of(rows)}))
        return pushes

    def _push(self, pushes: Sequence[Push], meta: Mapping[str, Any], wanted: bool) -> list[Message]:
        for link, (parts, rows) in zip(self._links, pushes, strict=True):
            link.push("push", {**meta, **rows}, parts)
        if self._together and self._rank0:
            self._step_together()
        return self._take() if wanted else [link.receive() for link in self._links]

    def _step_together(self) -> None:
        """Let the servers step after all of them have all gradients; each reports this to rank 0.

        Each server knows its part of the norm; rank 0 adds up the parts, as clip_grad_norm_ does.
        """
        told = [link.receive().meta for link in self._links]
        norm, most = math.sqrt(sum(meta["norm"] ** 2 for meta in told)), told[0]["clip_norm"]
        factor = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
        for link in self._links:
            link.complete("scale", {"factor": factor})

    def _push_in_turn(
        self, pushes: Sequence[Push], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        """Push so that all servers count the pushes in the order of server 0's tickets."""
        first, others = self._links[0], self._links[1:]
        parts, rows = pushes[0]
        first.push("push", {**meta, **rows}, parts)
        ticket = {**meta, "ticket": first.receive().meta["ticket"]}
        for link, (parts, rows) in zip(others, pushes[1:], strict=True):
            link.push("push", {**ticket, **rows}, parts)
        for link in others:
            link.receive()
        return [self._take_one_version() if wanted else first.receive()]

    def pull(self) -> None:
        """Get the present parameters."""
        if self._sequenced:
            self._links[0].send("pull")
            self._take_one_version()
            return
        for link in self._links:
            link.send("pull")
        self._take()

    def end(self) -> None:
        """Push no more; wait until no worker pushes, and get the final parameters."""
        for link in self._links:
            link.send("end")
        self._take()

    def _take(self) -> list[Message]:
        """Read the parameters that every server sends.

        A worker releases each board before it waits for the next server, and all workers read the
        servers in the same order. So two workers cannot block each other.
        """
        landing, came = self._landing()
        answers: list[Message] = []
        for at, link in enumerate(self._links):
            answer = self._take_from(at, landing, came)
            link.release(answer)
            self._hear(answer, at)
            answers.append(answer)
        self._arrived(came)
        return answers

    def _landing(self) -> tuple[list[Bytes], dict[int, Rows]]:
        """Return the memory for whole tensors, and for the rows of tables."""
        self._came_bytes = 0
        return self._staging.landing(), {}

    def _take_from(
        self, server: int, landing: Sequence[Bytes], came: dict[int, Rows]
    ) -> Message:  # fmt: skip
        """Read a server's shard; return its answer."""
        parted = self._parted[server]
        size_bytes = 0

        def where(answer: Message) -> list[Bytes]:
            nonlocal size_bytes
            if not parted.tables:
                parts = _parts(landing, self._shards[server])
            else:
                rows = parted.room(answer.meta["rows"])
                came.update(zip((piece.index for piece in parted.tables), rows, strict=True))
                parts = parted.parts(_parts(landing, parted.whole), rows)
            size_bytes = sum(part.size for part in parts)
            return parts

        answer = self._links[server].take(where)
        self._came_bytes += size_bytes
        return answer

    def _arrived(self, came: Mapping[int, Rows]) -> None:
        """Copy the received values to the parameters."""
        self._staging.scatter(self._parameters)
        for index, rows in came.items():
            put(self._parameters[index], rows)

    def _take_one_version(self) -> Message:
        """Read the parameters of one version: server 0 stays at this version until released.

        Until then server 0 gives no further tickets, so the other servers reach this version and
        stop.
        """
        landing, came = self._landing()
        first = self._take_from(0, landing, came)
        for link in self._links[1:]:
            link.send("pull", {"at": first.meta["version"]})
        for at, link in enumerate(self._links[1:], start=1):
            answer = self._take_from(at, landing, came)
            link.release(answer)
            self._hear(answer, at)
        self._links[0].release(first)
        self._hear(first, 0)
        self._arrived(came)
        return first

    def _hear(self, answer: Message, server: int) -> None:
        """Pass on each server's one report about its memory; only rank 0 gets these reports."""
        if "holds" in answer.meta and server not in self._held:
            self._held[server] = answer.meta
            if len(self._held) == len(self._links):
                self._tell_memory()

    def _tell_memory(self) -> None:
        """Report what each server holds: its own part, and a copy of another server's part."""
        context = self._context
        chains = context.entry.chains(context.spec.options)
        for server in range(context.entry.server_count(context.spec.options)):
            own = self._held[server]["holds"] if server in self._held else {}
            copies_bytes = sum(
                sum((self._held[part].get("copy_holds") or {}).values())
                for part, chain in enumerate(chains) if server in chain[1:]
            )  # fmt: skip
            context.emit(
                events.ServerHolds(rank=0, server=server, copies_bytes=copies_bytes, **own)
            )

    def _taken_over(self, gone: int, server: int, seconds: float) -> None:
        if self._rank0:
            text = (
                f"Server s{gone} died. Within {seconds:.2f} s, server s{server} took over the "
                f"parameters of server s{gone}, and no step was lost. These parameters now have no "
                "second copy."
            )
            self._context.emit(events.Noted(rank=0, text=text))

    # -- saving ------------------------------------------------------------------------------------

    def states(self) -> Iterator[bytes]:
        """Yield each server's optimizer state, as the server wrote it."""
        for link in self._links:
            link.send("state")
            yield link.take_bytes()

    def load(self, written: Callable[[Shard], bytes]) -> None:
        """Send each server its optimizer's state, from rank 0."""
        if self._rank0:
            for link, shard in self._each():
                link.send_bytes("load", written(shard))

    def close(self) -> None:
        """End the session; the links stay."""
        for link in self._links:
            link.end_session()


Push = tuple[list[Bytes], dict[str, Any]]
"""The data for one server: the buffers, and how many rows of each table they contain."""


def _parts(tensors: Sequence[Bytes], shard: Shard) -> list[Bytes]:
    return [tensors[piece.index] for piece in shard.pieces]


class Staging:
    """The bytes of each parameter: its own memory, or a copy on the host if it is on a device.

    Args:
        tables: Tables that are sent as rows: after the beginning their values are not received
            here.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], tables: Collection[int] = frozenset()
    ) -> None:
        self._parameters, self._tables = parameters, tables
        device = next((p.device for p in parameters if p.device.type != "cpu"), None)
        self._staged = None if device is None else Staged(accelerators.of(device))
        self._own: list[torch.Tensor | None] = []
        for parameter in parameters:
            direct = parameter.device.type == "cpu" and parameter.is_contiguous()
            self._own.append(None if direct else _host_copy(parameter))
        self._zeros: dict[int, Bytes] = {}

    def landing(self) -> list[Bytes]:
        """Return where each parameter is received: its own memory, or a copy on the host."""
        return [
            as_bytes(parameter.detach() if own is None else own)
            for parameter, own in zip(self._parameters, self._own, strict=True)
        ]

    def scatter(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy what was received in host copies to the parameters."""
        away = []
        with torch.no_grad():
            for index, (parameter, own) in enumerate(zip(parameters, self._own, strict=True)):
                if index in self._tables:
                    continue
                if own is not None and self._is_staged(parameter):
                    away.append((own, parameter))
                elif own is not None:
                    parameter.copy_(own)
            if self._staged is not None:
                self._staged.to_device(away)

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> list[Bytes]:
        """Return the bytes of tensors with the parameters' layout; zeros for missing ones."""
        away = []
        for tensor, own in zip(tensors, self._own, strict=True):
            if own is not None and tensor is not None:
                if self._is_staged(tensor):
                    away.append((tensor, own))
                else:
                    own.copy_(tensor)
        if self._staged is not None:
            self._staged.to_host(away)
        return [self._bytes_of(i, tensor) for i, tensor in enumerate(tensors)]

    def _bytes_of(self, index: int, tensor: torch.Tensor | None) -> Bytes:
        own, parameter = self._own[index], self._parameters[index]
        if tensor is None and index in self._tables:
            return np.empty(0, np.uint8)
        if tensor is None:
            if index not in self._zeros:
                size = parameter.numel() * parameter.element_size()
                self._zeros[index] = np.zeros(size, np.uint8)
            return self._zeros[index]
        return as_bytes(own if own is not None else tensor.contiguous())

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._staged is not None and tensor.device.type != "cpu" and tensor.is_contiguous()


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype)
