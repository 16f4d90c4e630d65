"""All links of one server: to the workers, to its successor on the ring, and from its predecessor.

    workers --> server s      its own part                       `hub`
                   |          every change of it                 `successor`
                   v
                server s+1    the copy, on its own thread        `copy_hub` (workers, and server s)

The copy has its own thread because every server waits for its successor. If the thread that waits
also had to answer, all servers of a ring would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .server import Hub, Others
from .worker import Link, dial_server

if TYPE_CHECKING:
    from .address import Store

COPY_THREAD = "workbench-copy"


class ServerLinks:
    """The links of one server.

    Args:
        chains: For each part, the server that answers for it, and then the server of its copy.
        server: The index of this server.
        workers: The number of workers.
        others: Whether others may join later (`server.Others`).

    Attributes:
        hub: Links to the workers, for this server's part; None: it has no part.
        copy_hub: Links to the workers and to the server whose part it copies, if there is one.
        successor: Link to the copy of this server's part, if there is one.
    """

    def __init__(
        self, chains: Sequence[Sequence[int]], server: int, workers: int, key: bytes, way: str,
        others: Others = "never",
    ) -> None:  # fmt: skip
        self._server, self._workers, self._key, self._way = server, workers, key, way
        self._chain = chains[server] if server < len(chains) else ()
        followed = [part for part, chain in enumerate(chains) if server in chain[1:]]
        self._followed = followed[0] if followed else None
        self.hub = Hub(workers, key, others) if self._chain else None
        self.copy_hub = Hub(workers + 1, key, others, workers) if followed else None
        self.successor: Link | None = None
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None

    def open(
        self, store: Store, host: str, ports: tuple[int, int] | None, keep: Callable[[], object]
    ) -> None:
        """Wait for all links; from then on this server keeps its copy.

        Args:
            host, ports: The address on which it listens.
            keep: Keeps the copy from the time when all have connected until they have left.

        Raises:
            LinkError: The successor did not start.
        """
        if self.copy_hub is not None and self._followed is not None:
            self.copy_hub.listen(store, self._followed, host, ports, "copy")
            self._thread = threading.Thread(
                target=self._keep, args=(self.copy_hub, keep), name=COPY_THREAD, daemon=True
            )
            self._thread.start()
        if self.hub is None:
            return
        self.hub.admit(store, self._server, host, ports)
        if len(self._chain) > 1:
            successor, rank = self._chain[1], self._workers
            self.successor = dial_server(
                store, successor, rank, self._key, self._way, of_copy=self._server
            )

    def _keep(self, hub: Hub, keep: Callable[[], object]) -> None:
        try:
            hub.gather()
            keep()
        except BaseException as error:
            self._failed = error
            if self.hub is not None:  # the thread that waits for workers receives the error
                self.hub.hang_up()
        finally:
            hub.close()

    def settle(self) -> None:
        """Close the link to the successor, and wait until the copy is no longer needed.

        Raises:
            Exception: The error of the copy.
        """
        if self.successor is not None:
            self.successor.close()
        if self._thread is not None:
            self._thread.join()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Close every link."""
        if self.successor is not None:
            self.successor.close()
        if self.copy_hub is not None:
            self.copy_hub.hang_up()
        if self._thread is not None:
            self._thread.join()
        if self.hub is not None:
            self.hub.close()
