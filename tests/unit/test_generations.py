"""Workers of a later generation come to a server in the place of those before."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workbench.engine.transport import REGROUP, Hub, Link, LinkClosedError
from workbench.engine.transport.chained import connect_chains

KEY = b"k" * 32


class Shelf:
    """A store of keys, as far as the links need one."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._there = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._there:
            self._values[key] = value
            self._there.notify_all()

    def get(self, key: str) -> bytes:
        with self._there:
            self._there.wait_for(lambda: key in self._values, 10)
            return self._values[key].encode()


class Server:
    """A hub on a thread, which writes down who said what."""

    def __init__(self, others: Any) -> None:
        self.store, self.hub = Shelf(), Hub(2, KEY, others)
        self.said: queue.Queue[tuple[int, str]] = queue.Queue()
        self.thread = threading.Thread(target=self._main)
        self.thread.start()
        self.links = [self.come(rank, 0) for rank in (0, 1)]

    def _main(self) -> None:
        self.hub.admit(self.store, 0, "127.0.0.1")
        while (item := self.hub.next()) is not None:
            self.said.put((item[0], item[1].kind))
        self.hub.close()

    def come(self, rank: int, generation: int) -> Link:
        """Connect a worker."""
        (link,) = connect_chains(self.store, [(0,)], rank, KEY, "unix", generation=generation)
        return link

    def heard(self) -> tuple[int, str]:
        """Return who said what."""
        return self.said.get(timeout=10)


@pytest.fixture
def serve() -> Iterator[Callable[[Any], Server]]:
    servers: list[Server] = []

    def start(others: Any) -> Server:
        servers.append(Server(others))
        return servers[-1]

    yield start
    for server in servers:
        server.hub.expect_nobody()
        for link in server.links:
            link.close()
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_nothing_of_an_earlier_generation_is_heard_once_the_next_has_come(
    serve: Callable[[Any], Server],
) -> None:
    server = serve("together")
    late = server.links[1]
    late.send("push")
    assert server.heard() == (1, "push")
    server.links.append(server.come(0, 1))
    assert server.heard()[1] == REGROUP
    with contextlib.suppress(LinkClosedError):
        late.send("push")
    server.links[-1].send("open")
    assert server.heard() == (0, "open")
    assert server.hub.living == [0]
    with pytest.raises(LinkClosedError):
        late.receive()


def test_who_is_late_for_its_generation_is_not_let_in(serve: Callable[[Any], Server]) -> None:
    server = serve("together")
    server.links.append(server.come(0, 2))
    with pytest.raises(LinkClosedError):
        server.come(1, 1).receive()
    assert server.hub.living == [0]
    assert server.hub.strangers == 1


def test_at_their_own_pace_one_comes_and_the_others_are_heard(
    serve: Callable[[Any], Server],
) -> None:
    server = serve("singly")
    server.links[0].send("push")
    server.links.append(server.come(1, 1))
    assert sorted([server.heard(), server.heard()]) == [(0, "push"), (1, "gone")]
    server.links[-1].send("open")
    assert server.heard() == (1, "open")
    with pytest.raises(LinkClosedError):
        server.come(1, 1).receive()


def test_a_server_waits_for_others_until_nobody_is_to_come(
    serve: Callable[[Any], Server],
) -> None:
    server = serve("together")
    for link in server.links:
        link.close()
    assert sorted([server.heard(), server.heard()]) == [(0, "gone"), (1, "gone")]
    assert server.thread.is_alive()
    server.links.append(server.come(0, 1))
    assert server.heard()[1] == REGROUP
    server.links.pop().close()
    assert server.heard() == (0, "gone")
    server.hub.expect_nobody()
    server.thread.join(10)
    assert not server.thread.is_alive()
