"""What somebody can do to the sockets of a cluster with agents who knows a part of its keys."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from workbench.cluster.hosts import wire
from workbench.cluster.hosts.agents import Agents, Ears, Host
from workbench.cluster.router import ControlRouter
from workbench.shared.messages import Hello, Up
from workbench.shared.protocol import Packet, Seal

WAIT_S = 20
MANY = 10_000


class Kernel:
    """The kernel's end, and what it was told."""

    def __init__(self) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.agents = Agents(
            "127.0.0.1",
            None,
            Ears(
                left=lambda *told: self.heard.put(told),
                logged=lambda engine, data: self.heard.put((engine, data)),
                lost=self.heard.put,
            ),
        )


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.agents.close()


@contextlib.contextmanager
def dealer(url: str, server_key: str = "") -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        if server_key:
            socket.curve_serverkey = server_key.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        socket.connect(url)
        yield socket


class Agent:
    """An agent of a host that is none."""

    def __init__(self, socket: Any, word: bytes, place: int, name: str = "") -> None:
        self._socket, self._word = socket, word
        name = name or f"host{place}"
        facts = wire.HostFacts(name, name, f"10.0.0.{place}", 1, 1, 7, {})
        self.say(wire.Arrived(place=place, slots=1, facts=facts))

    def say(self, message: wire.Up) -> None:
        self._socket.send_multipart(wire.pack(message, self._word))

    def hears(self) -> wire.Down:
        return wire.unpack_down(self._socket.recv_multipart(), self._word)


@contextlib.contextmanager
def agent(kernel: Kernel, place: int, name: str = "") -> Iterator[Agent]:
    join = kernel.agents.join
    with dealer(join.url, join.key) as socket:
        yield Agent(socket, bytes.fromhex(join.word), place, name)


def soon(condition: Any) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def works(kernel: Kernel, one: Agent, host: Host) -> bool:
    """Whether an agent that is asked is heard."""
    future = kernel.agents.begin(host, wire.Signal(ask=0, engine=1, number=0))
    asked = one.hears()
    assert isinstance(asked, wire.Signal)
    one.say(wire.Answer(ask=asked.ask, value=True))
    return kernel.agents.answer(host, future, WAIT_S).value is True


class _Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_who_does_not_know_the_pass_is_counted_and_the_agents_go_on(
    kernel: Kernel, tmp_path: Path
) -> None:
    marker = tmp_path / "unpickled"
    bomb, join = pickle.dumps(_Bomb(marker)), kernel.agents.join
    head = json.dumps({"kind": "alive"}).encode()
    with agent(kernel, 0) as one:
        assert soon(lambda: kernel.agents.living)
        (host,) = kernel.agents.living
        with dealer(join.url, join.key) as stranger:
            bad = [[b""], [bomb], [b"x" * 32, head], [b"x" * 32, bomb, bomb], [head] * 500]
            for frames in bad:
                stranger.send_multipart(frames)
            for _ in range(MANY):
                stranger.send_multipart([b"x" * 32, head])
            assert works(kernel, one, host)
            assert soon(lambda: kernel.agents.refused == len(bad) + MANY)
        with dealer(join.url, join.key) as stranger:
            stranger.send(b"\0" * ((64 << 20) + 1))  # its connection is shut
            assert works(kernel, one, host)
        one.say(wire.Alive())
        assert works(kernel, one, host)
    assert not marker.exists()
    assert kernel.heard.empty()


def test_a_flood_does_not_keep_the_others_waiting(kernel: Kernel) -> None:
    """Messages that come without end are read in portions; what is asked meanwhile goes out."""
    served, agents = 0, kernel.agents

    class Endless:
        def recv_multipart(self, flags: int) -> list[bytes]:
            nonlocal served
            served += 1
            assert served <= MANY, "nobody else would have his turn"
            return [b"id", b"x" * 32, b"{}"]

    kernel.agents.close()
    agents._socket = Endless()
    agents._receive()
    assert agents.refused == served < MANY


def test_sense_that_is_none_from_who_knows_the_pass_deafens_nobody(kernel: Kernel) -> None:
    deep = b'{"kind": "answer", "ask": 1, "value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    join = kernel.agents.join
    word = bytes.fromhex(join.word)
    with agent(kernel, 0) as one:
        assert soon(lambda: kernel.agents.living)
        (host,) = kernel.agents.living
        bad = [
            [word],
            [word, deep],
            [word, b"[]"],
            [word, b'{"kind": []}'],
            [word, b'{"kind": "x"}'],
        ]
        with dealer(join.url, join.key) as stranger:
            for frames in bad:
                stranger.send_multipart(frames)
            assert soon(lambda: kernel.agents.refused == len(bad))
        assert works(kernel, one, host)


def test_no_agent_is_taken_in_at_a_place_that_is_taken(kernel: Kernel) -> None:
    with agent(kernel, 0) as first, agent(kernel, 1):
        assert soon(lambda: len(kernel.agents.living) == 2)
        host = kernel.agents.living[0]
        with agent(kernel, 0, "thief") as second:
            assert isinstance(second.hears(), wire.End)
            assert works(kernel, first, host)
    assert {one.name for one in kernel.agents.hosts} == {"host0", "host1"}
    assert kernel.agents.refused == 1
    (words,) = kernel.agents.turned_away
    assert "thief" in words
    assert "host0" in words


def test_agents_that_do_not_know_their_place_get_one(kernel: Kernel) -> None:
    with agent(kernel, -1, "a"), agent(kernel, 0, "b"), agent(kernel, -1, "c"):
        assert soon(lambda: len(kernel.agents.living) + kernel.agents.refused == 3)
        living = kernel.agents.living
        assert len({one.place for one in living}) == len(living) >= 2


def test_no_agent_is_taken_in_when_all_are_there_until_one_is_gone(kernel: Kernel) -> None:
    kernel.agents.expected = 2
    with agent(kernel, 0), agent(kernel, 1):
        assert soon(lambda: len(kernel.agents.living) == 2)
        with agent(kernel, 2, "late") as late:
            assert isinstance(late.hears(), wire.End)
        assert "all 2" in kernel.agents.turned_away[0]
        kernel.agents.lose([kernel.agents.living[1]], "its cable was pulled")
        with agent(kernel, 1, "again"):
            assert soon(lambda: len(kernel.agents.living) == 2)
    assert {one.name for one in kernel.agents.living} == {"host0", "again"}


@pytest.mark.parametrize("of", ["agents", "router"])
def test_who_does_not_encrypt_or_has_another_key_is_not_heard(kernel: Kernel, of: str) -> None:
    heard: queue.Queue[tuple[int, Up]] = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put((engine, message)), secret=True)
    url = router.url if of == "router" else kernel.agents.join.url
    other, _ = zmq.curve_keypair()
    seen = []
    try:
        for key in ("", other.decode()):
            with dealer(url, key) as stranger:
                monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                stranger.send_multipart(Seal(router.key).pack(Packet("hello", {"engine": 3})))
                seen.append(monitor.poll(500))
                stranger.disable_monitor()
        assert seen == [0, 0]
        assert heard.empty()
        assert (router.rejected, kernel.agents.refused) == (0, 0)
    finally:
        router.close()


def test_who_encrypts_but_does_not_sign_is_counted_by_the_control_socket(tmp_path: Path) -> None:
    heard: queue.Queue[tuple[int, Up]] = queue.Queue()
    router = ControlRouter(lambda engine, message: heard.put((engine, message)), secret=True)
    marker = tmp_path / "unpickled"
    bomb = pickle.dumps(_Bomb(marker))
    try:
        with dealer(router.url, router.public_key) as stranger:
            guessed = Seal(b"guessed" * 5)
            for _ in range(MANY):
                stranger.send_multipart(guessed.pack(Packet("hello", {"engine": 3})))
            for frames in ([b""], [bomb], [bomb] * 4, [b"\xff" * 100] * 300):
                stranger.send_multipart(frames)
            assert soon(lambda: router.rejected == MANY + 4)
        with dealer(router.url, router.public_key) as friend:
            friend.send_multipart(Seal(router.key).pack(Packet("hello", {"engine": 3})))
            assert isinstance(heard.get(timeout=WAIT_S)[1], Hello)
        assert heard.empty()
        assert not marker.exists()
    finally:
        router.close()
