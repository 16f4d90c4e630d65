"""A worker's end of the links to a part of the parameters that two servers hold.

    worker r  -- push, pull -->  server s      (the part's own)
                                    | every update, before it is answered
              ..............>    server s+1    (its copy; silent while s lives)

Source: van Renesse and Schneider, Chain Replication for Supporting High Throughput and
Availability, OSDI 2004. An update is answered after the last server of the chain has it. So an
answered update survives the death of any one server. A request without an answer is sent again to
the copy, with the same number: the copy knows the number of each worker's last counted push.

Both links are open from the beginning. When a server dies, the system closes its link with the
process. When a whole host is silent, a message from the notebook's process ends the link (`cut`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .connection import SEATS, Bytes, LinkClosedError, LinkError, Message
from .worker import Link, dial_server

if TYPE_CHECKING:
    from .address import Store

Ask = Callable[[Link], None]
Heard = TypeVar("Heard")


class ChainedLink(Link):
    """Two links used as one: the second link takes over when the first server has ended.

    Args:
        session: The number of the last earlier session, if there was one. The second link then
            takes over after all servers continue from one step (`settled`).

    Attributes:
        taken_over: Called with (dead server, server that took over, seconds that this took).
    """

    def __init__(self, own: Link, copy: Link, session: int = 0) -> None:
        self._link = own
        self._copy: Link | None = copy
        self._asked: list[Ask] = []  # since the last answer; for the copy
        self._answered = True
        self._opening: tuple[int, Mapping[str, Any], int | None] | None = None
        self._pushes = self._begins = 0
        self._session = session
        self._settled = not session
        self._pulled_version: int | None = None
        self._again: Callable[[Mapping[str, Any]], Ask]
        self.taken_over: Callable[[int, int, float], None] = lambda gone, server, seconds: None

    @property
    def server(self) -> int:  # type: ignore[override]
        """Index of the server that answers."""
        return self._link.server

    @property
    def way(self) -> str:  # type: ignore[override]
        """The medium of buffers."""
        return self._link.way

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the server that answers."""
        return self._link.name

    def begin(
        self, size_bytes: int, meta: Mapping[str, Any], most_bytes: int | None = None
    ) -> None:
        """See `Link`."""
        self._session += 1
        self._pushes = self._begins = 0
        self._pulled_version = None
        self._opening = (size_bytes, {**meta, "session": self._session}, most_bytes)
        self._asked.clear()
        self._answered = True
        with self._unless_closed():
            self._link.begin(*self._opening)

    def opened(self, answer: Message | None = None) -> Message:
        """See `Link`."""
        try:
            return self._link.opened(answer)
        except LinkClosedError as error:
            return self._go_over(error)

    def send(self, kind: str, meta: Mapping[str, Any] | None = None) -> None:
        """See `Link`."""
        self._ask(lambda link: link.send(kind, meta))

    def send_bytes(self, kind: str, payload: bytes) -> None:
        """See `Link`."""
        self._ask(lambda link: link.send_bytes(kind, payload))

    def push(self, kind: str, meta: Mapping[str, Any], parts: Sequence[Bytes]) -> None:
        """See `Link`; the push has a number, and names the version on which it was computed."""
        if kind == "init":
            self._begins += 1
            meta = {**meta, "nth": self._begins}
        else:
            self._pushes += 1
            meta = {**meta, "seq": self._pushes, "pulled": self._pulled_version}

        def again(more: Mapping[str, Any]) -> Ask:
            return lambda link: link.push(kind, {**meta, **more}, parts)

        self._again = again
        self._ask(again({}))

    def complete(self, kind: str, meta: Mapping[str, Any]) -> None:
        """See `Link`; a copy gets this data already with the push."""
        self._asked[-1] = self._again(meta)
        self._answered = False
        with self._unless_closed():
            self._link.complete(kind, meta)

    def expect(self) -> None:
        """See `Link`; a copy must be asked."""
        self._begins += 1
        nth = self._begins
        # A server that has taken over does not know which worker has which data: workers must ask.
        self._ask(lambda link: link.send("await", {"nth": nth}), sends=self._copy is None)

    def _ask(self, ask: Ask, *, sends: bool = True) -> None:
        if self._answered:
            self._asked.clear()
        self._asked.append(ask)
        self._answered = False
        if sends:
            with self._unless_closed():
                ask(self._link)

    def receive(self) -> Message:
        """See `Link`; for answers without a payload."""
        return self._answer(lambda link: link.receive())

    def take(self, where: Callable[[Message], Sequence[Bytes]]) -> Message:
        """See `Link`; an answer that breaks off is requested again."""
        answer = self._answer(lambda link: link.take(where))
        self._pulled_version = answer.meta.get("version", self._pulled_version)
        return answer

    def take_bytes(self) -> bytes:
        """See `Link`."""
        return self._answer(lambda link: link.take_bytes())

    def _answer(self, hear: Callable[[Link], Heard]) -> Heard:
        while True:
            try:
                heard = hear(self._link)
            except LinkClosedError as error:  # noqa: PERF203 - it ends with the second server
                self._go_over(error)
            else:
                self._answered = True
                return heard

    def release(self, message: Message) -> None:
        """See `Link`."""
        with self._unless_closed():
            self._link.release(message)

    def _go_over(self, error: LinkClosedError) -> Message:
        """Switch to the copy, open the session there, and repeat the requests without an answer.

        Raises:
            LinkError: There is no copy, or it has ended too.
        """
        began, gone, copy = time.perf_counter(), self._link, self._copy
        if not self._settled:
            raise error
        if copy is None:
            raise LinkError(
                f"{error.felt}: both servers that stored the same part of the parameters died. "
                f"The server that died last is {gone.name}.",
                felt=error.felt,
                next_step="%cluster restart, and run the cell again. With --checkpoint DIR, a run "
                "continues from its last checkpoint after the death of both servers",
                code="WB-RUN-140",
            ) from error
        self._link, self._copy = copy, None
        gone.close()
        opened = Message("opened")
        try:
            if self._opening is not None:
                copy.begin(*self._opening)
                opened = copy.opened()
            for ask in self._asked:
                ask(copy)
        except LinkClosedError as further:
            self._go_over(further)  # raises
        self.taken_over(gone.server, copy.server, time.perf_counter() - began)
        return opened

    @contextlib.contextmanager
    def _unless_closed(self) -> Any:
        """Ignore a send to a dead server: the missing answer is noticed and handled later."""
        try:
            yield
        except LinkClosedError:
            if self._copy is None:
                raise

    def settled(self) -> None:
        """See `Link`."""
        self._settled = True

    def break_off(self) -> None:
        """See `Link`; breaks off both links."""
        self._link.break_off()
        if (copy := self._copy) is not None:
            copy.break_off()

    def cut(self, server: int) -> None:
        """See `Link`; a copy that has ended is not asked."""
        self._link.cut(server)
        if (copy := self._copy) is not None:
            copy.cut(server)

    def end_session(self) -> None:
        """See `Link`; also tells the copy that no more workers will come."""
        self._link.end_session()
        if self._opening is not None and self._copy is not None:
            with contextlib.suppress(LinkError):
                self._copy.send("close", {"session": self._session})
        self._opening = None

    def close(self) -> None:
        """Close the links to both servers."""
        self._link.close()
        if self._copy is not None:
            self._copy.close()


def sessions_before(generation: int) -> int:
    """Return a number above that of any session of earlier generations."""
    return generation * SEATS


def connect_chains(
    store: Store,
    chains: Sequence[Sequence[int]],
    rank: int,
    key: bytes,
    way: str = "auto",
    *,
    generation: int = 0,
    session: int = 0,
    made: list[Link] | None = None,
) -> list[Link]:
    """Connect this worker to the servers of each part of the parameters.

    Args:
        chains: For each part, the server that answers for it, and then the server of its copy.
        generation: The present generation of workers; in a later one servers may have ended.
        session: The number of the last earlier session, if there was one (`ChainedLink`).
        made: Called with each link as soon as it exists, so that another thread can break it off.

    Raises:
        LinkError: A server did not start or does not know the key.
    """
    made = [] if made is None else made
    seat = generation * SEATS + rank

    def linked(server: int, of_copy: int | None = None) -> Link:
        link = dial_server(store, server, seat, key, way, of_copy=of_copy)
        made.append(link)
        return link

    try:
        found = [_chain_of(linked, part, chain, generation) for part, chain in enumerate(chains)]
    except BaseException:
        for link in made:
            link.close()
        raise
    return [link if copy is None else ChainedLink(link, copy, session) for link, copy in found]


def _chain_of(
    linked: Callable[..., Link], part: int, chain: Sequence[int], generation: int
) -> tuple[Link, Link | None]:
    """Return the links to a part's server and to its copy, or to the one that still runs."""
    if len(chain) == 1:
        return linked(part), None
    there: list[Link] = []
    for server, of_copy in ((part, None), (chain[1], part)):
        try:
            there.append(linked(server, of_copy))
        except LinkClosedError:  # noqa: PERF203 - there are two
            if not generation or (of_copy is not None and not there):
                raise
    return there[0], there[1] if len(there) > 1 else None
