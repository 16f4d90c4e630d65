"""Each part of the parameters is on two servers: either server can die, and no step is lost.

    workers -- push --> server s             takes the step, and answers
                           | update           when the copy server has taken it too
                           v
                        server s+1           the copy server: a separate thread holds the copy

Sources: van Renesse and Schneider, Chain Replication for Supporting High Throughput and
Availability, OSDI 2004. For parameter servers: Li et al., OSDI 2014, section 4.3 (there, a second
server receives only the sum of the workers' gradients).

The servers form a ring. Each server holds its own part of the parameters. It also holds a copy of
another part: the part that belongs to the previous server in the ring. If there is only one part,
Workbench starts a second server that holds only the copy.

So each part is on two servers. Below, "the server" is the one to which the part belongs. "The copy
server" is the server that holds the copy of this part. In each step, the server sends the gradient
of the step and a list of the step's pushes to the copy server. If the optimizer's settings have
changed, it sends them too. In a synchronous step, the gradient is the sum over all workers. In
asynchronous training every push is a step, so the server sends the gradient of every push.

The copy server takes the same step. So the copy has the same parameters, optimizer state and
version as the original, bit for bit. The server answers a worker only after the copy server has
confirmed the step.

In a synchronous step, a push waits until the pushes of all workers have arrived. While a push
waits, nothing of it is sent to the copy server. If the server dies, the worker sends this push
again, because the push has no answer yet. Under `parameter_server` with `max_staleness`, a push
does not wait. The server and the copy server take its step immediately. But the server may send
the answer to the push later.

    the server dies       the copy server first receives everything that the server had sent, then
                          it answers the workers. Each worker switches to the copy server and
                          repeats the requests that have no answer. Pushes have numbers, so no
                          push counts twice.
    the copy server dies  the server continues alone.
    both die              the workers' links end, so the run ends (or continues from its last
                          checkpoint).

When one of the two servers of a part has died, no other server gets a copy of this part. The run
survives as long as each part still has one of its two servers.
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
    """This server's connection to the server that holds a copy of its part.

    Attributes:
        holds: The copy's memory there, as last reported.
        lives: Whether the copy still exists.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.holds: Mapping[str, int] | None = None
        self.lives = True

    def begin(
        self, shard: Shard, parted: Parted, about: Mapping[str, Any], ranks: Sequence[int]
    ) -> None:
        """Open the same session there as the workers have opened here."""
        most_bytes = parted.most_bytes if parted.tables else None

        def opens() -> None:
            self._link.begin(shard.size_bytes, {**about, "ranks": list(ranks)}, most_bytes)
            self._link.opened()

        self._while_it_lives(opens)

    def send(self, kind: str, meta: Mapping[str, Any], parts: Sequence[NDArray[np.uint8]]) -> int:
        """Send a change, after which `wait` must be called; return the bytes of its payload."""
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
        """Let the copy make a change, and wait until it has done so."""
        self.send(kind, meta, parts)
        self.wait()

    def load(self, payload: bytes) -> None:
        """Pass on a saved state."""
        self._while_it_lives(lambda: self._link.send_bytes("load", payload))
        self.wait()

    def _while_it_lives(self, action: Callable[[], None]) -> None:
        """Do something with the copy; if the copy no longer exists, ignore it."""
        if self.lives:
            try:
                action()
            except LinkClosedError:
                self.lives, self.holds = False, None
                self._link.close()

    def close(self) -> None:
        """Leave the copy: from now on workers send requests to the copy instead of this server."""
        self._link.close()
