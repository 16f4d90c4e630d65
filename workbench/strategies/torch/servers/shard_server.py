"""A server's side: parameters and optimizer in one place, and the loop that answers workers.

    worker          server
    open   ------->  what the optimizer is, which tensors this server holds
           <-------  opened
    init   ------->  (rank 0) the values to begin with
           <-------  params (to all)
    push   ------->  a gradient: the strategy's policy decides when it counts, and when to answer
           <-------  params
    end    ------->  no more pushes from this worker
           <-------  params, when no worker pushes any more
    close  ------->  the session is over; another wb.fit of the cell can open the next

`sessions.py` decides who opens and ends sessions, also when workers die and others join.

If a part is held twice, every change goes to its copy before a worker is answered (`copies.py`).

The optimizer works as on one device: clip, step. Its hyper-parameters are those of the
user's optimizer on the worker; a scheduler there changes them, and they are sent with each push.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .rows import Changes, Parted, counts_of, norm_of, rows_of, sparse_of, summed
from .shards import Shard, as_bytes, build_optimizer, restored

if TYPE_CHECKING:
    from ....engine.transport import Hub, Message
    from .copies import Successor

Meta = Mapping[str, Any]


class Policy(ABC):
    """Decides when pushes count, and when their workers get an answer.

    Attributes:
        holds: Whether the parameters could change while a worker reads them, so that the server
            must wait for readers.
    """

    holds = False

    def __init__(self, holder: Holder, options: Mapping[str, Any]) -> None:
        self.holder, self.options = holder, options

    @abstractmethod
    def pushed(self, rank: int, meta: Meta) -> None:
        """Accept the gradient in the worker's mailbox."""

    @abstractmethod
    def left(self, rank: int) -> None:
        """Note that the worker will push no more."""

    def asked(self, rank: int, meta: Meta) -> None:
        """Send the worker the present parameters."""
        self.holder.send_parameters(rank)

    def released(self) -> None:  # noqa: B027 - only some policies share the board while it changes
        """Note that a worker has finished reading."""

    def scaled(self, factor: float) -> None:  # noqa: B027 - only where servers clip together
        """Accept rank 0's factor by which clipping scales the gradient."""

    def joined(self, rank: int) -> None:  # noqa: B027 - only where each worker counts for itself
        """Accept a worker that replaces one that has left."""

    @property
    def prepared(self) -> bool:
        """Whether all pushes have arrived for a step not taken yet: all servers must agree."""
        return False

    def commit(self, factor: float) -> None:  # noqa: B027 - only where servers must agree
        """Take the prepared step, scaled by a factor, without an answer."""

    def repeated(self, rank: int, meta: Meta) -> None:
        """Answer a push that already counts; it is sent again because its answer was lost."""
        self.holder.send_parameters(rank, staleness=0, blocked_s=0.0, blamed=-1)

    def followed(self, rank: int, meta: Meta) -> None:  # noqa: B027 - only where pushes are counted
        """On a copy: note that it has made an update of the followed server, too."""


class Holder:
    """The state of one server in one session.

    Attributes:
        shard: The tensors that it holds.
        parameters: Views on the board, in the order of the shard.
        version: Updates so far.
        training: Ranks that can still push.
        reading: Ranks that may be reading the board.
        parted: The tensors that are sent as rows.
        gradients: Each worker's latest push, in the order of the shard.
        session: Its number, if the part is held twice.
        counted: The number of each worker's last push that counts.
        pushes: How many of each worker's pushes count.
        agrees: Whether a step is taken only when all servers have all its pushes.
        factor: The factor by which clipping has scaled the last step.
    """

    factor = 1.0

    def __init__(
        self,
        hub: Hub,
        opened: Mapping[int, Meta],
        servers: int,
        make_policy: Callable[[Holder], Policy],
        *,
        successor: Successor | None = None,
        follows: bool = False,
        before: Holder | None = None,
    ) -> None:
        """Open a session.

        Args:
            opened: Each worker's message about the session.
            successor: The server that holds a copy of everything.
            follows: Whether this server is the copy: workers join when it has taken over (`admit`).
            before: The earlier session that this session continues with other workers.
        """
        self.hub, self.servers = hub, servers
        first = opened[min(opened)]
        self.session = int(first.get("session", 0))
        self._successor, self._follows = successor, follows
        self.generation = int(first.get("generation", 0))
        self.agrees = bool(first.get("agrees"))
        self.counted = dict.fromkeys(opened, 0)
        self.pushes = dict.fromkeys(opened, 0)
        self._came = dict.fromkeys(opened, 0)
        self._begins = 0
        self._awaiting: dict[int, int] = {}  # which rank waits for which
        self._copied: dict[int, int] = {}  # bytes sent on for a worker's push
        self._hyper_sent: dict[int, Any] = {}
        self.shard = Shard.from_wire(first["shard"])
        self.clip_norm: float | None = first["clip_norm"]
        self._about = first
        self.workers = len(opened)
        self.version = int(first.get("version", 0))
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
        self.board = hub.board(self.shard.size_bytes)
        self.mailboxes: dict[int, NDArray[np.uint8]] = {}
        self.gradients: dict[int, list[torch.Tensor]] = {}
        for rank, meta in () if follows else opened.items():
            self.make_mailbox(rank, shared=bool(meta["shared"]))
        self.parameters = [torch.nn.Parameter(view) for view in self.shard.views(self.board)]
        self.hyper: dict[int, list[dict[str, Any]]] = {}
        if before is not None:
            self._go_on_from(before)
        self.policy = make_policy(self)
        if successor is not None:
            about = {**first, "version": self.version}
            successor.begin(self.shard, self.parted, about, sorted(opened))
            if before is not None:
                successor.load(self._state())
                successor.change("init", {}, [self.board])
        for rank in self.mailboxes:
            self._welcome(rank)

    def _go_on_from(self, before: Holder) -> None:
        """Take over the values of a session that had other workers."""
        self.board[:] = before.board
        self.version, self._begins, self._told = before.version, before._begins, before._told
        self.factor = before.factor
        self.pushes |= {rank: before.pushes.get(rank, 0) for rank in self.pushes}
        self.optimizer = build_optimizer(self._about, self.shard, self.parameters)
        states = before.optimizer.state if before.optimizer is not None else {}
        for old, new in zip(before.parameters, self.parameters, strict=True):
            if old in states:
                self.optimizer.state[new] = states[old]

    def make_mailbox(self, rank: int, *, shared: bool) -> None:
        """Make the memory for a worker's pushes."""
        most_bytes = self.parted.most_bytes if self._tables else None
        size_bytes = self.shard.size_bytes
        mailbox = self.hub.mailbox(rank, size_bytes, shared=shared, most_bytes=most_bytes)
        self.mailboxes[rank], self.gradients[rank] = mailbox, self._views(mailbox)

    def _welcome(self, rank: int) -> None:
        about = {"version": self.version, "pushes": self.pushes[rank]}
        self.hub.reply(rank, "opened", about)
        self.hub.hand_over(rank)

    def lacks(self, rank: int, meta: Meta) -> bool:
        """Whether a worker that opens a session moves from another server into this one."""
        same = self._follows and rank in self.open and meta.get("session") == self.session
        return same and rank not in self.mailboxes and rank in self.hub.living

    def join(self, rank: int, meta: Meta | None = None) -> None:
        """Accept a worker that replaces one that has left. Workers keep their own pace.

        Args:
            meta: Its message about the session; None on a copy, because the worker joins it on a
                takeover.
        """
        if self._successor is not None:
            self._successor.change("joined", {"rank": rank})
        self.counted[rank] = self._came[rank] = 0
        self.open.add(rank)
        self.training.add(rank)
        self.mailboxes.pop(rank, None)
        self.policy.joined(rank)
        if meta is not None:
            self.admit(rank, meta)

    def admit(self, rank: int, meta: Meta) -> None:
        """Accept a worker whose server has died; this server does not know the worker's rows."""
        self.make_mailbox(rank, shared=bool(meta["shared"]))
        self._changes.everything()
        self._welcome(rank)

    def _views(self, mailbox: NDArray[np.uint8]) -> list[torch.Tensor]:
        """Return a mailbox's tensors; tables are empty until a push has come."""
        whole = iter(self.parted.whole.views(mailbox))
        tables = {place for place, _ in self._tables}
        return [
            torch.empty(0) if place in tables else next(whole)
            for place in range(len(self.shard.pieces))
        ]

    # -- the session's messages --------------------------------------------------------------------

    def handle(self, rank: int, message: Message) -> None:
        """Handle a worker's message."""
        meta = message.meta
        if message.kind == "push":
            if meta.get("hyper") is not None:
                self.hyper[rank] = meta["hyper"]
            self.reading.discard(rank)  # a worker that pushes has finished reading
            self._came[rank] = int(meta.get("seq", 0))
            if 0 < self._came[rank] <= self.counted[rank]:
                self.policy.repeated(rank, meta)
                return
            if self._tables:
                self._filled_bytes[rank] = max(self._filled_bytes[rank], message.size_bytes)
                try:
                    self._read_rows(rank, meta)
                except (KeyError, TypeError, ValueError, RuntimeError) as error:
                    self.fail(f"the server cannot use the rows that worker {rank} pushed: {error}")
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
            self._begin(rank, meta)
        elif message.kind == "await":
            if self._follows:  # otherwise all workers get the values when they have arrived
                self._awaiting[rank] = int(meta["nth"])
                self._answer_awaiting()
        elif message.kind == "end":
            self._waiting_for_end.add(rank)
            self.leave(rank)
        elif message.kind in ("close", "gone"):
            if meta.get("session", self.session) != self.session:
                return  # it left another one
            self.open.discard(rank)
            self._waiting_for_end.discard(rank)
            self.leave(rank)
        elif message.kind == "load":
            self._saved = meta["payload"]
            if self._successor is not None:
                self._successor.load(meta["payload"])
        elif message.kind == "state":
            self._send_state(rank)

    def _read_rows(self, rank: int, meta: Meta) -> None:
        """Turn a push's rows into sparse gradients."""
        found = self.parted.read(self.mailboxes[rank], meta["rows"])
        for (place, _), rows in zip(self._tables, found, strict=True):
            self.gradients[rank][place] = sparse_of(rows, self.parameters[place])

    def _begin(self, rank: int, meta: Meta) -> None:
        """Take the initial values (again, if a saved state is loaded)."""
        # requested again because the answer was lost
        if 0 < int(meta.get("nth", 0)) <= self._begins:
            self._saved = None
            self.send_parameters(rank)
            return
        self.take_values(rank, meta)
        if self._successor is not None:
            self._successor.change("init", {}, [self.board])
        if self._follows:  # it answers the worker that asks
            self.send_parameters(rank)
            self._answer_awaiting()
            return
        for member in sorted(self.open):
            self.send_parameters(member)

    def _answer_awaiting(self) -> None:
        for rank, nth in list(self._awaiting.items()):
            if nth <= self._begins:
                del self._awaiting[rank]
                self.send_parameters(rank)

    def take_values(self, rank: int, meta: Meta) -> None:
        """Take the values, and the saved state of the optimizer.

        Args:
            meta: Has the values as `payload`, if they are not a push in the sender's mailbox.
        """
        self._begins += 1
        payload = meta.get("payload")
        self.board[:] = self.mailboxes[rank] if payload is None else payload
        self._changes.everything()
        self.optimizer = build_optimizer(self._about, self.shard, self.parameters)
        if self._saved is not None:
            saved = torch.load(io.BytesIO(self._saved), weights_only=True)
            for piece, parameter in zip(self.shard.pieces, self.parameters, strict=True):
                if piece.index in saved:
                    self.optimizer.state[parameter] = saved[piece.index]
            self._saved = None

    def take_over(self, sender: int) -> None:
        """On a copy: note that the followed server, the source of its updates, has died."""
        del self.mailboxes[sender], self.gradients[sender]

    def leave(self, rank: int) -> None:
        """Stop waiting for a worker that has ended or died."""
        if rank in self.training:
            if self._successor is not None:
                self._successor.change("left", {"rank": rank})
            self.training.discard(rank)
            self.reading.discard(rank)
            self.policy.left(rank)
        if not self.training:
            for waiting in sorted(self._waiting_for_end):
                self.send_parameters(waiting)
            self._waiting_for_end.clear()

    def _send_state(self, rank: int) -> None:
        self.hub.reply_bytes(rank, "state", self._state())

    def _state(self) -> bytes:
        assert self.optimizer is not None
        state = {
            piece.index: self.optimizer.state[parameter]
            for piece, parameter in zip(self.shard.pieces, self.parameters, strict=True)
            if parameter in self.optimizer.state
        }
        saved = io.BytesIO()
        torch.save(state, saved)
        return saved.getvalue()

    def fail(self, text: str, felt: str = "") -> None:
        """End the session: every worker's next wait raises.

        Args:
            felt: A short text if the cause is the end of another process (`LinkError`).
        """
        for rank in sorted(self.open):
            self.hub.reply(rank, "error", {"text": text, "felt": felt})
        self.training.clear()
        self._waiting_for_end.clear()
        self.open.clear()

    # -- what policies do --------------------------------------------------------------------------

    def send_parameters(self, rank: int, *, keep: bool = False, **meta: Any) -> None:
        """Send a worker the parameters; a worker that shares the board reads until `release`.

        Args:
            keep: Whether the board must not change until it is released, even if a copy was sent.
        """
        held = keep or (self.policy.holds and self.hub.shares(rank))
        if held:
            self.reading.add(rank)
        about = {"version": self.version, "held": held, **meta}
        if copied := self._copied.pop(rank, 0):
            about["copied_bytes"] = copied
        if rank == 0 and not self._told and (self.version >= 2 or not self.training):
            self._told = True  # now the optimizer has its state
            about["holds"] = self.held_bytes()
            about["copy_holds"] = None if self._successor is None else self._successor.holds
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
            "optimizer_bytes": sum(tensor.nbytes for tensor in tensors),
            "gradients_bytes": sum(self._filled_bytes.values())
            if self._tables  # memory that was never written does not exist physically
            else sum(len(mailbox) for mailbox in self.mailboxes.values()),
        }

    def send(self, rank: int, kind: str, **meta: Any) -> None:
        """Send a worker a message."""
        about = {"version": self.version, **meta}
        if kind == "ack" and (copied := self._copied.pop(rank, 0)):
            about["copied_bytes"] = copied
        self.hub.reply(rank, kind, about)

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Return the norm of this server's part of a gradient."""
        return norm_of(gradients)

    def flats(self, rank: int) -> list[torch.Tensor]:
        """Return a worker's push of whole tensors, one flat tensor per dtype."""
        return self.parted.whole.flats(self.mailboxes[rank])

    def add_rows(self, ranks: Sequence[int]) -> None:
        """Sum the embedding gradients of all ranks, in rank order, into those of the first."""
        for place, _ in self._tables:
            every = [self.gradients[rank][place] for rank in ranks]
            self.gradients[ranks[0]][place] = summed(every, self.parameters[place])

    def scale_rows(self, rank: int, factor: float) -> None:
        """Scale a rank's gradients of tables."""
        for place, _ in self._tables:
            self.gradients[rank][place] = self.gradients[rank][place] * factor

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        rank: int,
        *,
        of: Collection[int] = (),
        absent: frozenset[int] = frozenset(),
        lr_factor: float = 1.0,
        staleness: int = 0,
    ) -> None:
        """Take the optimizer's step; when this returns, the copy has taken it too.

        Args:
            gradients: In the order of the shard.
            rank: The rank whose hyper-parameters are used.
            of: Ranks whose pushes count with this step; by default only `rank`.
            absent: Indices of parameters that took no part in the loss: they are not changed, as on
                one device.
            lr_factor: Factor on the learning rates of this step only.
            staleness: The staleness of the push, for a copy that has to repeat the answer.
        """
        for member in of or (rank,):
            self.counted[member] = self._came[member]
            self.pushes[member] += 1
        if self._successor is not None:
            hyper = self.hyper[rank]
            about: dict[str, Any] = {"rank": rank, "staleness": staleness}
            about["counted"] = [[member, self.counted[member]] for member in of or (rank,)]
            if self._hyper_sent.get(rank) is not hyper:
                about["hyper"] = self._hyper_sent[rank] = hyper
            if absent:
                about["absent"] = sorted(absent)
            if lr_factor != 1.0:
                about["lr_factor"] = lr_factor
            parts, rows = self._sent_on(gradients, rank)
            # The copy takes the step at the same time as this server.
            self._copied[rank] = self._successor.send("update", about | rows, parts)
        self._step(gradients, rank, absent, lr_factor)
        if self._successor is not None:
            self._successor.wait()

    def follow(self, sender: int, meta: Meta) -> None:
        """On a copy: take the step that the followed server has taken."""
        rank = int(meta["rank"])
        if "hyper" in meta:
            self.hyper[rank] = meta["hyper"]
        if self._tables:
            self._filled_bytes[rank] = max(self._filled_bytes[rank], int(meta["size_bytes"]))
            self._read_rows(sender, meta)
        absent = frozenset(meta.get("absent", ()))
        self._step(self.gradients[sender], rank, absent, float(meta.get("lr_factor", 1.0)))
        for member, number in meta["counted"]:
            self.counted[member] = number
            self.pushes[member] += 1
        self.policy.followed(rank, meta)

    def _sent_on(
        self, gradients: Sequence[torch.Tensor], rank: int
    ) -> tuple[list[NDArray[np.uint8]], dict[str, Any]]:
        """Return the part of a gradient for a copy, and the number of rows of each table."""
        if not self._tables:  # they are in the worker's mailbox, one after another
            return [self.mailboxes[rank]], {}
        tables = {place for place, _ in self._tables}
        whole = [as_bytes(g) for place, g in enumerate(gradients) if place not in tables]
        rows = [rows_of(gradients[place], self.parameters[place]) for place, _ in self._tables]
        return self.parted.parts(whole, rows), {"rows": counts_of(rows)}

    def _step(
        self, gradients: Sequence[torch.Tensor], rank: int, absent: frozenset[int], lr_factor: float
    ) -> None:
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
