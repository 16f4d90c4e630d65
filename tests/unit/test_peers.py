"""Links between the workers of one host: in one process, each worker on a thread of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # a class of its own in 3.10
from typing import Any

import pytest

from workbench.engine.transport import LinkError, connection, peers
from workbench.engine.transport.peers import Doorway, Peers

KEY = b"k" * 32
LARGE = 5 << 20  # far more than the system keeps under way
pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets")


def connect(n: int, keys: list[bytes] | None = None) -> list[Any]:
    """Return each worker's links, or the error it met instead."""
    doorways = [Doorway() for _ in range(n)]
    paths = [doorway.path for doorway in doorways]

    def one(rank: int) -> Any:
        try:
            return doorways[rank].connect(paths, rank, keys[rank] if keys else KEY)
        except (LinkError, OSError) as error:
            return error

    with ThreadPoolExecutor(n) as pool:
        found = list(pool.map(one, range(n)))
    for doorway in doorways:
        doorway.close()
        assert not os.path.exists(os.path.dirname(doorway.path))
    return found


def together(links: list[Peers], work: Callable[[int, Peers], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(work, range(len(links)), links, timeout=30))


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    both = Peers({1: ours}), Peers({0: theirs})
    yield both
    for each in both:
        each.close()


def test_who_feels_anothers_end_says_so_beside_its_words():
    from workbench.engine.runtime import outcome_of
    from workbench.engine.transport.connection import closed, ended

    assert outcome_of(closed("server s0")).felt == "Connection closed by peer"
    assert outcome_of(ended("worker 1")).felt == "Connection closed by peer"
    assert not outcome_of(
        LinkError("Connection closed by peer: worker 1 is gone.", code="WB-RUN-000")
    ).felt


def test_only_this_user_may_enter_the_folder() -> None:
    doorway = Doorway()
    assert os.stat(os.path.dirname(doorway.path)).st_mode & 0o077 == 0
    doorway.close()


@pytest.mark.parametrize("size", [0, 1, 100_000, LARGE])
def test_everybody_reaches_everybody(size: int) -> None:
    n = 4
    links = connect(n)

    def work(rank: int, own: Peers) -> list[bytes]:
        heard = []
        for hop in range(1, n):  # all send at once: nobody may wait for the other to read first
            into = bytearray(size)
            data = memoryview(bytes([rank]) * size)
            own.exchange((rank + hop) % n, data, (rank - hop) % n, memoryview(into))
            heard.append(bytes(into))
        return heard

    for rank, heard in enumerate(together(links, work)):
        assert heard == [bytes([(rank - hop) % n]) * size for hop in range(1, n)]
    for own in links:
        own.close()


def test_messages_keep_their_order(pair: tuple[Peers, Peers]) -> None:
    def work(rank: int, own: Peers) -> list[bytes]:
        if rank == 0:
            for k in range(200):
                own.send(1, memoryview(bytes([k]) * (1 + 997 * k)))
            return []
        into = [bytearray(1 + 997 * k) for k in range(200)]
        for each in into:
            own.receive(0, memoryview(each))
        return [bytes(each) for each in into]

    assert together(list(pair), work)[1] == [bytes([k]) * (1 + 997 * k) for k in range(200)]


@pytest.mark.parametrize("announced", [10, 30])
def test_a_message_of_another_size_is_refused(pair: tuple[Peers, Peers], announced: int) -> None:
    ours, theirs = pair
    ours.send(1, memoryview(b"x" * announced))
    with pytest.raises(LinkError, match=f"(?s)WB-RUN-017.*{announced} bytes"):
        theirs.receive(0, memoryview(bytearray(20)))
    with pytest.raises(LinkError, match=r"worker 1.*WB-RUN-021"):  # the other end learns of it
        ours.receive(1, memoryview(bytearray(20)))


@pytest.mark.parametrize("doing", ["send", "receive", "exchange"])
@pytest.mark.parametrize("who", [0, 1], ids=["own end", "other end"])
def test_a_link_that_is_closed_ends_the_wait_by_name(
    pair: tuple[Peers, Peers], doing: str, who: int
) -> None:
    def wait() -> None:
        data, into = memoryview(bytes(LARGE)), memoryview(bytearray(LARGE))
        if doing == "send":
            pair[0].send(1, data)
        elif doing == "receive":
            pair[0].receive(1, into)
        else:
            pair[0].exchange(1, data, 1, into)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        with pytest.raises(FutureTimeout):
            waiting.exception(0.1)
        pair[who].close()
        assert "Connection closed by peer: worker 1" in str(waiting.exception(10))


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.5)
    found = connect(2, [KEY, b"?" * 32])
    assert [type(error) for error in found] == [LinkError, LinkError]
    assert "[1]" in str(found[0])


def test_a_stranger_does_not_take_a_workers_place() -> None:
    doorways = [Doorway(), Doorway()]
    paths = [doorway.path for doorway in doorways]
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(paths[0])
    stranger.shutdown(socket.SHUT_WR)
    with ThreadPoolExecutor(2) as pool:
        links = list(pool.map(lambda r: doorways[r].connect(paths, r, KEY), range(2)))
    together(links, lambda r, own: own.exchange(1 - r, memoryview(b"a"), 1 - r,
                                                memoryview(bytearray(1))))  # fmt: skip
    stranger.close()
    for each in (*doorways, *links):
        each.close()


def test_a_silent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TIMEVAL", peers.struct.pack("ll", 0, 50_000))
    ours, theirs = socket.socketpair()
    own = Peers({7: ours})
    with pytest.raises(LinkError, match=r"7.*WB-RUN-018"):
        own.receive(7, memoryview(bytearray(4)))
    theirs.close()
