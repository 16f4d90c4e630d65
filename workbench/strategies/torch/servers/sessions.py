"""A server's sessions, one after another: who opens them, takes part, and continues.

    open of all workers ---> a session ---> closed by all ---> the next wb.fit of the cell, or none

If workers die and others join (`--on-failure heal`), the values outlive the workers:

    together    Workers that take each step together join on new links, in a new generation, with
                new ranks. Older messages are dropped: pushes of a step for which not all pushes
                came. When all have opened, worker 0 compares:

                    server    stands  --->  worker 0    version, whether all pushes of a step are in
                    server  <---  settle    worker 0    the version in which all servers go on

                With several servers, one can have taken a step for which another only has all
                pushes (`Policy.prepared`). The other takes it now, so that either all servers have
                taken a step or none has. This is two-phase commit (Gray, Notes on Data Base
                Operating Systems, 1978), and its coordinator can die: a server that has taken the
                step shows the decision.
    singly      A worker at its own speed replaces a worker that has left; the others do not notice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ....engine.transport import REGROUP
from .shard_server import Holder, Policy
from .shards import Shard

if TYPE_CHECKING:
    from ....engine.transport import Hub, Message
    from .copies import Successor
    from .shard_server import Meta

Item = tuple[int, "Message"]


class Sessions:
    """A server's work from its first session to its last.

    Args:
        servers: The number over which the parameters are divided.
        successor: The server that holds a copy of this one's part.
    """

    def __init__(
        self,
        hub: Hub,
        servers: int,
        make_policy: Callable[[Holder], Policy],
        successor: Successor | None = None,
    ) -> None:
        self._hub, self._servers = hub, servers
        self._make_policy, self._successor = make_policy, successor
        self._queue: deque[Item] = deque()
        self._opened: dict[int, Meta] = {}  # workers that wait for the next session
        self._before: Holder | None = None  # the session before it

    def serve(self, taken: Holder | None = None, waiting: Sequence[Item] = ()) -> None:
        """Answer the workers until all have left and no other will come.

        Args:
            taken: The session in which this server replaces a dead one.
            waiting: Messages that workers sent to it before.
        """
        self._queue.extend(waiting)
        holder = taken
        while True:
            if holder is not None:
                self._before = holder
                if not self._session(holder):
                    return
            if not self._gather():
                return
            holder = self._next()

    def _heard(self) -> Item | None:
        """Wait for a message; messages from before a new generation are dropped."""
        item = self._queue.popleft() if self._queue else self._hub.next()
        if item is not None and item[1].kind == REGROUP:
            self._opened.clear()
        return item

    def _session(self, holder: Holder) -> bool:
        """Run a session; return whether workers remain, or will come."""
        while holder.open:
            item = self._heard()
            if item is None:
                return False
            rank, message = item
            if message.kind == REGROUP:
                return True
            if message.kind == "open":
                if holder.lacks(rank, message.meta):
                    holder.admit(rank, message.meta)
                elif message.meta.get("joins"):
                    holder.join(rank, message.meta)
                else:
                    self._opened[rank] = message.meta
            elif rank in holder.open:
                holder.handle(rank, message)
        return True

    def _gather(self) -> bool:
        """Wait until all workers of the next session have opened it; return whether they have."""
        while not self._complete:
            item = self._heard()
            if item is None:
                return False
            rank, message = item
            if message.kind == "open":
                self._opened[rank] = message.meta
            elif message.kind == "gone":
                self._opened.pop(rank, None)
        return True

    @property
    def _complete(self) -> bool:
        opened = self._opened
        if not opened:
            return False
        workers = next(iter(opened.values())).get("workers")
        all_here = len(opened) == workers if workers else set(opened) == set(self._hub.living)
        return all_here or bool(self._joining)

    @property
    def _joining(self) -> dict[int, Meta]:
        """Accept a worker at its own speed if the others of its session have already left."""
        return {rank: meta for rank, meta in self._opened.items() if meta.get("joins")}

    def _next(self) -> Holder | None:
        """Open the session; None if it cannot be opened."""
        opened = self._joining or self._opened
        goes_on = bool(opened[min(opened)].get("generation"))
        before = self._before if goes_on else None
        texts = {Shard.from_wire(meta["shard"]).digest for meta in opened.values()}
        if before is not None:
            texts.add(before.shard.digest)
        if len(texts) > 1 or (goes_on and before is None):
            for rank in list(opened):
                del self._opened[rank]
                text = "the parameters of the workers' models have different shapes or types"
                self._hub.reply(rank, "error", {"text": text})
            return None
        if before is not None and not self._joining and not self._settle(before):
            return None
        if left := set(opened).difference(self._hub.living):
            for rank in left:
                self._opened.pop(rank, None)
            return None
        self._opened = {rank: m for rank, m in self._opened.items() if rank not in opened}
        if before is None:
            self._hub.close_session()
        return Holder(
            self._hub, opened, self._servers, self._make_policy, successor=self._successor,
            before=before,
        )  # fmt: skip

    def _settle(self, before: Holder) -> bool:
        """Bring the values to the version from which all servers continue.

        Return whether that worked.
        """
        policy = before.policy
        stands = {"version": before.version, "factor": before.factor, "prepared": policy.prepared}
        self._hub.reply(min(self._opened), "stands", stands)
        while True:
            item = self._heard()
            if item is None:
                return False
            rank, message = item
            if message.kind == REGROUP:
                return False
            if message.kind == "gone":
                self._opened.pop(rank, None)
                return False
            if message.kind == "settle":
                if message.meta["version"] > before.version and policy.prepared:
                    policy.commit(float(message.meta["factor"]))
                return True


class Copy:
    """The copy of a part: it follows the server that answers requests, and can replace it.

    Args:
        hub: Its links: first to every worker, then to that server.
        sender: That server's number in the hub.
        servers: The number over which the parameters are divided.
    """

    def __init__(
        self, hub: Hub, sender: int, servers: int, make_policy: Callable[[Holder], Policy]
    ) -> None:
        self._hub, self._sender, self._servers = hub, sender, servers
        self._make_policy = make_policy
        self._holder: Holder | None = None
        self._waiting: list[Item] = []

    def keep(self) -> None:
        """Follow the server until it ends, then answer the workers."""
        waiting = self._waiting
        while True:
            item = self._hub.next()
            if item is None:
                return
            rank, message = item
            if rank != self._sender:
                if message.kind == REGROUP:  # earlier messages are dropped
                    waiting.clear()
                if message.kind in ("close", "gone") and self._holder is not None:
                    self._holder.handle(rank, message)
                if message.kind != "close":
                    # until it is certain that the other server counts no further push
                    waiting.append(item)
            elif message.kind == "gone":
                break
            else:
                self._follow(message)
        taken, self._holder = self._holder, None
        if taken is not None:
            taken.take_over(self._sender)
        sessions = Sessions(self._hub, self._servers, self._make_policy)
        sessions.serve(taken, waiting)

    def _follow(self, message: Message) -> None:
        """Make the same change as the server, and confirm it."""
        meta, kind, hub = message.meta, message.kind, self._hub
        if kind == "open":
            self._open(meta)
            return
        assert self._holder is not None, "a session is opened first"
        holder = self._holder
        if kind == "update":
            holder.follow(self._sender, {**meta, "size_bytes": message.size_bytes})
        elif kind == "init":
            holder.take_values(self._sender, meta)
        elif kind == "left":
            holder.leave(int(meta["rank"]))
        elif kind == "joined":
            holder.join(int(meta["rank"]))
        else:
            holder.handle(self._sender, message)
        told = {"holds": holder.held_bytes()} if kind != "update" or holder.version <= 2 else {}
        hub.reply(self._sender, "ack", told)

    def _open(self, meta: Mapping[str, object]) -> None:
        """Enter a session that the server has opened."""
        hub = self._hub
        if self._holder is not None:
            self._holder = None
            hub.close_session()
        # Events that the server knew when it opened this session are not news.
        self._waiting[:] = [item for item in self._waiting if item[1].kind != REGROUP]
        ranks: Sequence[int] = meta["ranks"]  # type: ignore[assignment]
        opened = dict.fromkeys(ranks, meta)
        self._holder = Holder(hub, opened, self._servers, self._make_policy, follows=True)
        self._holder.make_mailbox(self._sender, shared=bool(meta["shared"]))
        hub.reply(self._sender, "opened")
        hub.hand_over(self._sender)
