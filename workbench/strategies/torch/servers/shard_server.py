"""A server's side: parameters and optimizer in one place, and the loop that answers workers.

    worker          server
    open   ------->  what the optimizer is, which tensors this server holds
           <-------  opened
    init   ------->  (rank 0) the values to begin with
           <-------  params (to all)
    push   ------->  a gradient: the strategy's policy says when it counts, and when to answer
           <-------  params
    end    ------->  no more pushes from this worker
           <-------  params, once nobody pushes any more
    close  ------->  the session is over; another wb.fit of the cell may open the next

What is done to the optimizer is what one device does: clip, step. Its hyper-parameters are those of
the user's optimizer on the worker; a scheduler there changes them, and they travel with each push.
"""

from __future__ import annotations

import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..parts.replica import bytes_of
from .rows import Changes, Parted, counts_of, norm_of, sparse_of, summed
from .shards import Shard, as_bytes, restored

if TYPE_CHECKING:
    from ....engine.transport import Hub, Message

Meta = Mapping[str, Any]


class Policy(ABC):
    """When pushes count, and when their workers get an answer.

    Attributes:
        holds: Whether the parameters may change while some worker reads them, so that a reader
            must be waited for.
    """

    holds = False

    def __init__(self, holder: Holder, options: Mapping[str, Any]) -> None:
        self.holder, self.options = holder, options

    @abstractmethod
    def pushed(self, rank: int, meta: Meta) -> None:
        """A gradient lies in the worker's mailbox."""

    @abstractmethod
    def left(self, rank: int) -> None:
        """The worker will push no more."""

    def asked(self, rank: int, meta: Meta) -> None:
        """The worker wants the parameters as they are."""
        self.holder.send_parameters(rank)

    def released(self) -> None:  # noqa: B027 - only some policies share the board while it changes
        """A worker has finished reading."""

    def scaled(self, factor: float) -> None:  # noqa: B027 - only where servers clip together
        """Rank 0 says by how much clipping shortens the gradient."""


class Holder:
    """What one server holds in one session.

    Attributes:
        shard: Which tensors.
        parameters: Views on the board, in the order of the shard.
        version: Updates so far.
        training: Ranks that may still push.
        reading: Ranks that may be reading the board.
        parted: Which of the tensors travel as rows.
        gradients: What each worker has pushed last, in the order of the shard.
    """

    def __init__(
        self,
        hub: Hub,
        opened: Mapping[int, Meta],
        servers: int,
        make_policy: Callable[[Holder], Policy],
    ) -> None:
        self.hub, self.servers = hub, servers
        first = opened[min(opened)]
        self.shard = Shard.from_wire(first["shard"])
        self.clip_norm: float | None = first["clip_norm"]
        self._about = first
        self.workers = len(opened)
        self.version = 0
        self.training, self.open = set(opened), set(opened)
        self.reading: set[int] = set()
        self._waiting_for_end: set[int] = set()
        self.optimizer: torch.optim.Optimizer | None = None
        self._saved: bytearray | None = None
        self._told = False
        self.parted = Parted(self.shard, first.get("tables", ()))
        self._tables = [
            (place, piece) for place, piece in enumerate(self.shard.pieces)
            if piece in self.parted.tables
        ]  # fmt: skip
        self._changes = Changes(self.parted, opened)
        self._filled_bytes = dict.fromkeys(opened, 0)
        size_bytes = self.shard.size_bytes
        most_bytes = self.parted.most_bytes if self._tables else None
        self.board = hub.board(size_bytes)
        self.mailboxes = {
            rank: hub.mailbox(rank, size_bytes, shared=bool(meta["shared"]), most_bytes=most_bytes)
            for rank, meta in opened.items()
        }
        self.parameters = [torch.nn.Parameter(view) for view in self.shard.views(self.board)]
        self.gradients = {r: self._views(mailbox) for r, mailbox in self.mailboxes.items()}
        self.hyper: dict[int, list[dict[str, Any]]] = {}
        self.policy = make_policy(self)
        for rank in opened:
            hub.reply(rank, "opened")
            hub.hand_over(rank)

    def _views(self, mailbox: NDArray[np.uint8]) -> list[torch.Tensor]:
        """Return what a mailbox holds of each tensor; of tables nothing, until a push has come."""
        whole = iter(self.parted.whole.views(mailbox))
        tables = {place for place, _ in self._tables}
        return [
            torch.empty(0) if place in tables else next(whole)
            for place in range(len(self.shard.pieces))
        ]

    # -- the session's messages --------------------------------------------------------------------

    def handle(self, rank: int, message: Message) -> None:
        """Do what a worker's message asks for."""
        meta = message.meta
        if message.kind == "push":
            if meta.get("hyper") is not None:
                self.hyper[rank] = meta["hyper"]
            self.reading.discard(rank)  # who pushes has finished reading
            if self._tables:
                self._filled_bytes[rank] = max(self._filled_bytes[rank], message.size_bytes)
                try:
                    self._read_rows(rank, meta)
                except (KeyError, TypeError, ValueError, RuntimeError) as error:
                    self.fail(f"worker {rank} pushed rows that no table has: {error}")
                    return
            self.policy.pushed(rank, meta)
        elif message.kind == "pull":
            self.policy.asked(rank, meta)
        elif message.kind == "release":
            self.reading.discard(rank)
            self.policy.released()
        elif message.kind == "scale":
            self.policy.scaled(float(meta["factor"]))
        elif message.kind == "init":
            self._begin(rank, meta.get("payload"))
        elif message.kind == "end":
            self._waiting_for_end.add(rank)
            self._leave(rank)
        elif message.kind in ("close", "gone"):
            self.open.discard(rank)
            self._waiting_for_end.discard(rank)
            self._leave(rank)
        elif message.kind == "load":
            self._saved = meta["payload"]
        elif message.kind == "state":
            self._send_state(rank)

    def _read_rows(self, rank: int, meta: Meta) -> None:
        """Take a push's rows for the sparse gradients that they are."""
        found = self.parted.read(self.mailboxes[rank], meta["rows"])
        for (place, _), rows in zip(self._tables, found, strict=True):
            self.gradients[rank][place] = sparse_of(rows, self.parameters[place])

    def _begin(self, rank: int, payload: memoryview | None) -> None:
        """Take the values to begin with (again, where a saved state is loaded).

        Args:
            payload: They, where they are no push in the worker's mailbox.
        """
        self.board[:] = self.mailboxes[rank] if payload is None else payload
        self._changes.everything()
        self.optimizer = build_optimizer(self._about, self.shard, self.parameters)
        if self._saved is not None:
            saved = torch.load(io.BytesIO(self._saved), weights_only=True)
            for piece, parameter in zip(self.shard.pieces, self.parameters, strict=True):
                if piece.index in saved:
                    self.optimizer.state[parameter] = saved[piece.index]
            self._saved = None
        for member in sorted(self.open):
            self.send_parameters(member)

    def _leave(self, rank: int) -> None:
        if rank in self.training:
            self.training.discard(rank)
            self.reading.discard(rank)
            self.policy.left(rank)
        if not self.training:
            for waiting in sorted(self._waiting_for_end):
                self.send_parameters(waiting)
            self._waiting_for_end.clear()

    def _send_state(self, rank: int) -> None:
        assert self.optimizer is not None
        state = {
            piece.index: self.optimizer.state[parameter]
            for piece, parameter in zip(self.shard.pieces, self.parameters, strict=True)
            if parameter in self.optimizer.state
        }
        saved = io.BytesIO()
        torch.save(state, saved)
        self.hub.reply_bytes(rank, "state", saved.getvalue())

    def fail(self, text: str, felt: str = "") -> None:
        """End the session: every worker's next wait raises.

        Args:
            felt: Where it is for somebody else's end, that in short (`LinkError`).
        """
        for rank in sorted(self.open):
            self.hub.reply(rank, "error", {"text": text, "felt": felt})
        self.training.clear()
        self._waiting_for_end.clear()
        self.open.clear()

    # -- what policies do --------------------------------------------------------------------------

    def send_parameters(self, rank: int, *, keep: bool = False, **meta: Any) -> None:
        """Send a worker the parameters; who shares the board reads it until `release`.

        Args:
            keep: Whether the board must not change until released, also where a copy was sent.
        """
        held = keep or (self.policy.holds and self.hub.shares(rank))
        if held:
            self.reading.add(rank)
        about = {"version": self.version, "held": held, **meta}
        if rank == 0 and not self._told and (self.version >= 2 or not self.training):
            self._told = True  # by now an optimizer has its state
            about["holds"] = self.held_bytes()
        if not self._tables:
            self.hub.reply(rank, "params", about, board=True)
            return
        rows = self._changes.take(rank, [self.parameters[place] for place, _ in self._tables])
        whole = [
            as_bytes(parameter)
            for piece, parameter in zip(self.shard.pieces, self.parameters, strict=True)
            if piece not in self.parted.tables
        ]
        about["rows"] = counts_of(rows)
        self.hub.reply_parts(rank, "params", about, self.parted.parts(whole, rows))

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, optimizer state and the workers' mailboxes here."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        tensors = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
        return {
            "parameters_bytes": self.shard.size_bytes,
            "optimizer_bytes": bytes_of(tensors),
            "gradients_bytes": sum(self._filled_bytes.values())
            if self._tables  # of memory that was never written to there is none
            else sum(len(mailbox) for mailbox in self.mailboxes.values()),
        }

    def send(self, rank: int, kind: str, **meta: Any) -> None:
        """Send a worker a message."""
        self.hub.reply(rank, kind, {"version": self.version, **meta})

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Return the norm of this server's part of a gradient."""
        return norm_of(gradients)

    def flats(self, rank: int) -> list[torch.Tensor]:
        """Return what a worker has pushed of whole tensors, one flat tensor per dtype."""
        return self.parted.whole.flats(self.mailboxes[rank])

    def add_rows(self, ranks: Sequence[int]) -> None:
        """Have the first rank's gradients of tables be the sum of all, in the order of ranks."""
        for place, _ in self._tables:
            every = [self.gradients[rank][place] for rank in ranks]
            self.gradients[ranks[0]][place] = summed(every, self.parameters[place])

    def scale_rows(self, rank: int, factor: float) -> None:
        """Shorten a rank's gradients of tables."""
        for place, _ in self._tables:
            self.gradients[rank][place] = self.gradients[rank][place] * factor

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        rank: int,
        *,
        absent: frozenset[int] = frozenset(),
        lr_factor: float = 1.0,
    ) -> None:
        """Step the optimizer along a gradient.

        Args:
            gradients: In the order of the shard.
            rank: Whose hyper-parameters hold.
            absent: Indices of parameters that took no part in the loss: they are left alone, as
                one device leaves them.
            lr_factor: Factor on the learning rates of this step alone.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        for group, values in zip(optimizer.param_groups, self.hyper[rank], strict=True):
            group.update(restored(values))
            if lr_factor != 1.0:
                group["lr"] *= lr_factor
        for piece, parameter, gradient in zip(
            self.shard.pieces, self.parameters, gradients, strict=True
        ):
            parameter.grad = None if piece.index in absent else gradient
        optimizer.step()
        if self._tables:
            self._changes.note(
                {piece.index: self.parameters[place].grad for place, piece in self._tables}
            )
        self.version += 1


def build_optimizer(
    about: Meta, shard: Shard, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of the user's class over this server's parameters.

    It is made as unpickling makes one, from its class, defaults and groups: constructors differ,
    and would ask for arguments that nobody knows any more.
    """
    module, _, name = str(about["optimizer"]).partition(":")
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    mine = {piece.index: p for piece, p in zip(shard.pieces, parameters, strict=True)}
    groups = [
        {**restored(values), "params": [mine[i] for i in indices if i in mine]}
        for values, indices in zip(about["hyper"], about["groups"], strict=True)
    ]
    optimizer: torch.optim.Optimizer = cls.__new__(cls)
    torch.optim.Optimizer.__init__(optimizer, groups, restored(about["defaults"]))
    optimizer.__setstate__({})
    return optimizer


def serve(hub: Hub, servers: int, make_policy: Callable[[Holder], Policy]) -> None:
    """Answer the workers, one session (one `wb.fit`, one `wb.prepare`) after the other."""
    early: dict[int, Meta] = {}
    while True:
        opened, early = early, {}
        while set(opened) != set(hub.living) or not opened:
            item = hub.next()
            if item is None:
                return
            rank, message = item
            if message.kind == "open":
                opened[rank] = message.meta
            elif message.kind == "gone":
                opened.pop(rank, None)
        texts = {Shard.from_wire(meta["shard"]).digest for meta in opened.values()}
        if len(texts) > 1:
            for rank in opened:
                text = "the workers' models differ in the shapes or types of their parameters"
                hub.reply(rank, "error", {"text": text})
            continue
        holder = Holder(hub, opened, servers, make_policy)
        while holder.open:
            item = hub.next()
            if item is None:
                return
            rank, message = item
            if message.kind == "open":
                early[rank] = message.meta
            elif rank in holder.open:
                holder.handle(rank, message)
        del holder
        hub.close_session()
