"""A part of the parameters on two servers, so that either of them may die and no step is lost.

    workers -- push --> server s             takes the step, and answers
                           | update           when its copy has taken it too
                           v
                        server s+1           holds the copy, on a thread beside its own part

Source: van Renesse and Schneider, Chain Replication for Supporting High Throughput and
Availability, OSDI 2004; for parameter servers Li et al., OSDI 2014, section 4.3: a copy is sent
what is left after aggregation, so of a synchronous step one gradient, whatever the number of
workers; of an asynchronous one each push. Servers form a ring: each holds its own part and a copy
of its predecessor's; with one part the second server holds nothing but the copy.

What travels is the gradient of the step, its hyper-parameters, and which pushes count with it. The
copy's optimizer takes the same step, so that parameters, state and version are the same to the last
bit. Nobody is answered before the copy has said so. Pushes that wait for others (a round, a bound)
are not copied: nobody was answered, and their workers send them again.

    the server dies   its link to the copy ends, after all that it had sent; the copy then answers
                      workers. Each opens the session there and asks again what was not answered;
                      pushes carry numbers, so none counts twice.
    the copy dies     the server goes on alone.
    both die          the workers' links end, and with them the run (or it begins again from its
                      checkpoint).

No third server is told to hold the part from then on: a run survives one death of each two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....engine.transport import LinkClosedError

if TYPE_CHECKING:
    from ....engine.transport import Link
    from .rows import Parted
    from .shards import Shard


class Successor:
    """Who holds a copy of what this server holds, seen from here.

    Attributes:
        holds: What the copy takes of memory there, as it has said last.
        lives: Whether it is there still.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.holds: Mapping[str, int] | None = None
        self.lives = True

    def begin(
        self, shard: Shard, parted: Parted, about: Mapping[str, Any], ranks: Sequence[int]
    ) -> None:
        """Open a session, as the workers have opened it here."""
        most_bytes = parted.most_bytes if parted.tables else None

        def opens() -> None:
            self._link.begin(shard.size_bytes, {**about, "ranks": list(ranks)}, most_bytes)
            self._link.opened()

        self._while_it_lives(opens)

    def send(self, kind: str, meta: Mapping[str, Any], parts: Sequence[NDArray[np.uint8]]) -> int:
        """Send a change, for which `wait` has to be called; return the bytes of its payload."""
        size_bytes = sum(part.size for part in parts)
        sends = self._link.push if parts else lambda kind, meta, _: self._link.send(kind, meta)
        self._while_it_lives(lambda: sends(kind, meta, parts))
        return size_bytes if self.lives else 0

    def wait(self) -> None:
        """Wait until the copy has changed."""

        def waits() -> None:
            answer = self._link.receive()
            self.holds = answer.meta.get("holds", self.holds)

        self._while_it_lives(waits)

    def change(
        self, kind: str, meta: Mapping[str, Any], parts: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        """Have the copy change in a way, and wait until it has."""
        self.send(kind, meta, parts)
        self.wait()

    def load(self, payload: bytes) -> None:
        """Hand on a saved state."""
        self._while_it_lives(lambda: self._link.send_bytes("load", payload))
        self.wait()

    def _while_it_lives(self, action: Callable[[], None]) -> None:
        """Do something with the copy; one that is gone is not missed."""
        if self.lives:
            try:
                action()
            except LinkClosedError:
                self.lives, self.holds = False, None
                self._link.close()

    def close(self) -> None:
        """Leave it: from here on it would be asked in this server's place."""
        self._link.close()
