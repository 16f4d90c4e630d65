"""Point-to-point messages between workers; the all-reduce algorithms are written with them.

    links.send(tensor, to)              links.exchange(out, to, into, source)
    links.receive(into, source)         links.gather(own) -> one tensor per worker

If all workers are on one host, messages use direct sockets (`connect_near`), read and written by
the calling thread; otherwise they use the process group. Every byte that leaves this worker is
counted. Gloo ends the process if a message is longer than its receiver's buffer, and does not
report a shorter message. So before tensors of a new size are sent for the first time, the workers
compare sizes in a message of fixed size.

The faults `bandwidth` and `latency` are simulated here: the sender delays a message for as long as
the link would take.

Workers of one host are connected by separate sockets (`engine/transport/peers.py`). Gloo's messages
pass through another thread in each worker, and this costs one or two wake-ups per message. On one
host a worker can read and write its messages itself. All workers use the same way: if one worker
cannot be reached through its socket, all use gloo.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....engine.debugging.marks import ALL_REDUCE, waits_in
from ....engine.torch.group import backend_of, control_wire, data_wire
from ....engine.transport.connection import LinkError
from ....engine.transport.peers import Doorway, Peers
from ....errors import FitError
from ....shared.cluster_env import host_token


class Links:
    """The connections of one worker to the other members of a group.

    Args:
        group: A process group; its ranks are the workers.
        hosts: Host of each worker, by rank; empty if all are on one host.
        members: Group ranks taking part, in order; all of them by default.
        travel: Called with the bytes of each message before it is sent; can delay the message.
        peers: Sockets to the other workers, for tensors on the CPU; by default messages go
            through the group.

    Attributes:
        rank: This worker's place among the members.
        size: Number of members.
        sent_bytes: Bytes this worker has sent so far, also through links made with `among`.
    """

    def __init__(
        self,
        group: Any,
        *,
        hosts: Sequence[str] = (),
        members: Sequence[int] = (),
        travel: Callable[[int], object] = lambda size_bytes: None,
        peers: Peers | None = None,
    ) -> None:
        self.group, self.peers, self._travel = group, peers, travel
        self._members = list(members) or list(range(group.size()))
        self.rank = self._members.index(group.rank())
        self.size = len(self._members)
        self.hosts = [hosts[member] if hosts else "" for member in self._members]
        self.sent_bytes = 0.0
        self._parent: Links | None = None
        self._parts: dict[tuple[int, ...], Links] = {}
        self._agreed: set[tuple[int, torch.dtype]] = set()
        self._buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    @waits_in(ALL_REDUCE)
    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send a contiguous tensor to a member; call `wait()` on the result.

        The call can block until the member has begun to receive.
        """
        self._leave(tensor)
        if self.peers is not None:
            self.peers.send(self._members[to], _bytes(tensor))
            return _SENT
        return self.group.send([tensor], self._members[to], 0)

    @waits_in(ALL_REDUCE)
    def receive(self, into: torch.Tensor, source: int) -> torch.Tensor:
        """Fill a contiguous tensor with a member's message; return it."""
        if self.peers is not None:
            self.peers.receive(self._members[source], _bytes(into))
            return into
        self._post(into, source).wait()
        return into

    def _post(self, into: torch.Tensor, source: int) -> Any:
        return self.group.recv([into], self._members[source], 0)

    @waits_in(ALL_REDUCE)
    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int) -> torch.Tensor:
        """Send to one member while receiving from another; return what was received.

        Both tensors can be empty (both ends know this); then nothing is sent.
        """
        if self.peers is not None:
            return self._exchange_near(out, to, into, source)
        # NCCL starts operations in their order, so a send and its matching receive must be one
        # operation.
        if backend_of(self.group, out.device) != "gloo":
            return self._exchange_grouped(out, to, into, source)
        # The receive is posted first, because a message with a waiting buffer leaves without a
        # handshake.
        receiving = self._post(into, source) if into.numel() else None
        sending = self.send(out, to) if out.numel() else None
        for work in (receiving, sending):
            if work is not None:
                work.wait()
        return into

    def _exchange_near(
        self, out: torch.Tensor, to: int, into: torch.Tensor, source: int
    ) -> torch.Tensor:
        assert self.peers is not None
        if out.numel() and into.numel():
            self._leave(out)
            there, here = self._members[to], self._members[source]
            self.peers.exchange(there, _bytes(out), here, _bytes(into))
        elif out.numel():
            self.send(out, to)
        elif into.numel():
            self.receive(into, source)
        return into

    def _exchange_grouped(
        self, out: torch.Tensor, to: int, into: torch.Tensor, source: int
    ) -> torch.Tensor:
        self._leave(out)
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=self._members[member])
            for operation, tensor, member in ((dist.isend, out, to), (dist.irecv, into, source))
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return into

    @waits_in(ALL_REDUCE)
    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return every member's tensor, by rank; each is passed on around the ring.

        Args:
            own: Contiguous; of the same shape on every member.
        """
        self.agree(own)
        parts = [own if r == self.rank else torch.empty_like(own) for r in range(self.size)]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for k in range(self.size - 1):
            mine, theirs = (self.rank - k) % self.size, (self.rank - k - 1) % self.size
            self.exchange(parts[mine], following, parts[theirs], previous)
        return parts

    @waits_in(ALL_REDUCE)
    def agree(self, tensor: torch.Tensor) -> None:
        """When a size occurs for the first time, check that all workers will send this size.

        Raises:
            FitError: The sizes differ; raised on every worker.
        """
        key = (tensor.numel(), tensor.dtype)
        if key in self._agreed or self.size == 1:
            return
        device = control_wire(self.group, tensor.device)
        own = torch.tensor([tensor.numel(), _code(tensor.dtype)], device=device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        if any(not torch.equal(other, own) for other in every):
            raise FitError(
                "The workers' gradients have different sizes or types, so they cannot be averaged.",
                seen=", ".join(
                    f"rank {rank}: {int(one[0])} numbers, {_name(int(one[1]))}"
                    for rank, one in enumerate(every)
                ),
                next_step="build the same model on every worker",
                code="WB-FIT-107",
            )
        self._agreed.add(key)

    def among(self, ranks: Sequence[int]) -> Links:
        """Return the links between some of the members; this worker is one of them."""
        key = tuple(self._members[rank] for rank in ranks)
        if key not in self._parts:
            part = self._parts[key] = Links(
                self.group, members=key, travel=self._travel, peers=self.peers
            )
            part._parent = self
        return self._parts[key]

    def _leave(self, tensor: torch.Tensor) -> None:
        size_bytes = tensor.numel() * tensor.element_size()
        self.count(size_bytes)
        self._travel(size_bytes)

    def count(self, sent_bytes: float) -> None:
        """Add to the bytes this worker has sent."""
        self.sent_bytes += sent_bytes
        if self._parent is not None:
            self._parent.count(sent_bytes)

    def buffer(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return memory to receive into, shape (numel,); kept from call to call."""
        key = (like.dtype, like.device)
        held = self._buffers.get(key)
        if held is None or held.numel() < numel:
            held = self._buffers[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return held[:numel]

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor from which messages can be sent: gloo's must be on the CPU."""
        return tensor.to(data_wire(self.group, tensor.device))


class _Sent:
    """The result of `send` if there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


_SENT = _Sent()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _code(dtype: torch.dtype) -> int:
    """Return a number that encodes a dtype, the same in every process."""
    return zlib.crc32(str(dtype).encode())


def _name(code: int) -> str:
    """Return the name of the dtype that a number of `_code` encodes."""
    types = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    return next((str(one) for one in types if _code(one) == code), "a type unknown to this worker")


_CARD_BYTES = 1024


@waits_in(ALL_REDUCE)
def connect_near(group: Any) -> Peers | None:
    """Connect all workers of a gloo group; all of them call this together.

    Returns:
        None if they are not all on one host, or cannot see each other's sockets.
    """
    if group.size() == 1:
        return None
    doorway = peers = None
    try:
        with contextlib.suppress(OSError):
            doorway = Doorway()
        cards = _swap_cards(group, "" if doorway is None else doorway.path)
        same_host = len({card["host"] for card in cards}) == 1
        if not same_host or not all(card["path"] for card in cards):
            return None
        if doorway is not None:
            paths, key = [card["path"] for card in cards], bytes.fromhex(cards[0]["key"])
            with contextlib.suppress(OSError, LinkError):
                peers = doorway.connect(paths, group.rank(), key)
    finally:
        if doorway is not None:
            doorway.close()
    everybody = torch.tensor([peers is not None], dtype=torch.int32)
    dist.all_reduce(everybody, dist.ReduceOp.MIN, group=group)
    if not everybody and peers is not None:
        peers.close()
    return peers if everybody else None


def _swap_cards(group: Any, path: str) -> list[dict[str, str]]:
    """Return each worker's host, path and proposed key, by rank; rank 0's key will be used."""
    card = {"host": host_token(), "path": path, "key": secrets.token_hex(32)}
    text = json.dumps(card).encode().ljust(_CARD_BYTES)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return [json.loads(bytes(other.tolist())) for other in every]
