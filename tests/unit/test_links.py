"""Links between workers and servers: in one process, each end on a thread of its own."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.engine.transport import Hub, Link, LinkError, Message, address, connect, connection
from workbench.errors import ClusterError
from workbench.shared import cluster_env
from workbench.shared.protocol import RunSpec

KEY = b"k" * 32
WAYS = ("shared_memory", "unix", "tcp")


class Shelf:
    """A store of keys, as far as the links need one."""

    def __init__(self) -> None:
        self._values: queue.Queue[str] = queue.Queue()

    def set(self, key: str, value: str) -> None:
        self._values.put(value)

    def get(self, key: str) -> bytes:
        value = self._values.get(timeout=10)
        self._values.put(value)
        return value.encode()


class Server:
    """A hub on a thread: mailboxes are copied to the board when `push` comes."""

    def __init__(self, workers: int) -> None:
        self.store, self.hub = Shelf(), Hub(workers, KEY)
        self.pushed: list[bytes] = []
        self.seen: list[str] = []
        self.thread = threading.Thread(target=self._main, args=(workers,))
        self.thread.start()

    def _main(self, workers: int) -> None:
        self.hub.admit(self.store, 0, "127.0.0.1")
        boxes: dict[int, Any] = {}
        while (item := self.hub.next()) is not None:
            rank, message = item
            self.seen.append(message.kind)
            if message.kind == "open":
                size = message.meta["size_bytes"]
                board = self.hub.board(size) if not boxes else board  # noqa: F821
                boxes[rank] = self.hub.mailbox(
                    rank, size, shared=message.meta["shared"], most_bytes=message.meta.get("most")
                )
                self.hub.reply(rank, "opened")
                self.hub.hand_over(rank)
            elif message.kind == "push" and boxes[rank].size != board.size:
                came = boxes[rank][: message.size_bytes]
                self.pushed.append(came.tobytes())
                self.hub.reply_parts(rank, "params", {}, [came[::-1].copy(), came[:1]])
            elif message.kind == "init":
                board[:] = message.meta["payload"]
                self.hub.reply(rank, "params", board=True)
            elif message.kind == "push":
                self.pushed.append(boxes[rank].tobytes())
                board[:] = boxes[rank]
                self.hub.reply(rank, "params", {"n": len(self.pushed)}, board=True)
            elif message.kind == "load":
                self.hub.reply_bytes(rank, "state", bytes(message.meta["payload"])[::-1])
        self.hub.close()

    def connect(self, rank: int, way: str = "auto", key: bytes = KEY) -> Link:
        (link,) = connect(self.store, 1, rank, key, way)
        return link


@pytest.fixture
def serve() -> Iterator[Callable[[int], Server]]:
    servers: list[Server] = []

    def start(workers: int) -> Server:
        servers.append(Server(workers))
        return servers[-1]

    yield start
    for server in servers:
        server.thread.join(10)
        assert not server.thread.is_alive()


def session(link: Link, size_bytes: int) -> None:
    link.begin(size_bytes, {})
    link.opened()


@pytest.mark.parametrize("way", WAYS)
def test_whole_buffers_travel_both_ways(serve: Callable[[int], Server], way: str) -> None:
    server = serve(1)
    link = server.connect(0, way)
    assert link.way == way
    random = np.random.default_rng(1)
    # More parts than one system call may name, some of them empty, larger than a socket's buffer.
    sizes = [0, 1, 3_000_000, 0, *([7] * 1500)]
    for _ in range(2):  # a second session on the same link
        session(link, sum(sizes))
        for _ in range(3):
            sent = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
            link.push("push", {}, sent)
            answer = link.receive()
            back = [np.empty(size, np.uint8) for size in sizes]
            link.read(answer, back)
            assert all((a == b).all() for a, b in zip(sent, back, strict=True))
            assert server.pushed[-1] == b"".join(part.tobytes() for part in sent)
        link.end_session()
    link.send_bytes("load", b"abc" * 1000)
    assert link.read_bytes(link.receive()) == (b"abc" * 1000)[::-1]
    link.close()


@pytest.mark.parametrize("way", WAYS)
def test_pushes_and_answers_of_any_size_up_to_the_most_travel(
    serve: Callable[[int], Server], way: str
) -> None:
    server = serve(1)
    link = server.connect(0, way)
    link.begin(8, {"most": 100}, 100)
    link.opened()
    link.push("init", {}, [np.arange(8, dtype=np.uint8)])
    back = np.empty(8, np.uint8)
    link.read(link.receive(), [back])
    assert back.tolist() == list(range(8))
    for size in (3, 100, 1, 8):
        link.push("push", {}, [np.arange(size, dtype=np.uint8)])
        back = np.empty(size + 1, np.uint8)
        link.read(link.receive(), [back])
        assert back.tolist() == [*reversed(range(size)), 0]
    with pytest.raises(LinkError, match="WB-RUN-127"):
        link.push("push", {}, [np.zeros(101, np.uint8)])
    with pytest.raises(LinkError, match="WB-RUN-025"):
        link.push("init", {}, [np.zeros(9, np.uint8)])
    connection.send(link._sock, Message("push", {}, 101), (), "test")  # past the check here
    with pytest.raises(LinkError, match=r"WB-RUN-026[\s\S]*|too large"):
        link.receive()
    link.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_push_of_another_size_is_refused_before_a_byte_leaves(
    serve: Callable[[int], Server], way: str
) -> None:
    server = serve(1)
    link = server.connect(0, way)
    session(link, 100)
    for size in (99, 101):
        with pytest.raises(LinkError, match="WB-RUN-025"):
            link.push("push", {}, [np.zeros(size, np.uint8)])
    link.push("push", {}, [np.full(100, 5, np.uint8)])
    answer = link.receive()
    with pytest.raises(LinkError, match="WB-RUN-025"):
        link.read(answer, [np.empty(99, np.uint8)])
    link.close()
    assert server.pushed == [b"\x05" * 100]


def test_a_payload_announced_too_large_is_refused_unread(serve: Callable[[int], Server]) -> None:
    server = serve(1)
    link = server.connect(0, "unix")
    session(link, 100)
    connection.send(link._sock, Message("push", {}, 1 << 40), (), "s")
    with pytest.raises(LinkError, match=r"wrong size.*WB-RUN-026"):
        link.receive()
    link.close()
    server.thread.join(10)
    assert server.pushed == []
    assert server.seen == ["open", "gone"]


def test_what_is_no_message_ends_the_link(serve: Callable[[int], Server]) -> None:
    server = serve(1)
    link = server.connect(0, "tcp")
    link._sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(LinkError, match=r"WB-RUN-0(20|26)"):
        link.receive()
    link.close()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_who_does_not_know_the_key_stays_out(serve: Callable[[int], Server], way: str) -> None:
    server = serve(1)
    with pytest.raises(LinkError, match="WB-RUN-014"):
        server.connect(0, way, key=b"x" * 32)
    about = address.look_up(server.store, 0)
    silent = address.dial(about, way)
    silent.close()
    link = server.connect(0, way)
    assert server.hub.strangers == 2
    link.close()


def test_a_rank_is_let_in_once(serve: Callable[[int], Server]) -> None:
    server = serve(2)
    first = server.connect(0)
    again = server.connect(0)
    with pytest.raises(LinkError, match="WB-RUN-020"):
        again.receive()
    again.close()
    second = server.connect(1)
    assert server.hub.strangers == 1
    first.close()
    second.close()


def test_a_false_server_is_found_out() -> None:
    ours, theirs = socket.socketpair()

    def refuse() -> None:
        assert connection.prove_server(theirs, b"another key") is None
        theirs.close()  # as a server does with whom it does not let in

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(LinkError):
        connection.prove_worker(ours, KEY, 0)
    ours.close()
    thread.join()
    # One that cannot check proofs, but lets everybody in.
    ours, theirs = socket.socketpair()
    theirs.sendall(b"n" * 32 + b"p" * 32)
    with pytest.raises(LinkError, match="WB-RUN-015"):
        connection.prove_worker(ours, KEY, 0)
    ours.close()
    theirs.close()


def test_a_server_listens_on_loopback_for_a_run_on_one_host() -> None:
    listeners = address.Listeners("127.0.0.1")
    try:
        names = [sock.getsockname() for sock in listeners.sockets]
        assert names[-1][0] == "127.0.0.1"
        assert len(names) == 2
    finally:
        listeners.close()


def test_a_server_takes_the_first_free_port_of_those_it_may() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    ports = first, first + 1
    before, after = address.Listeners("127.0.0.1", ports), address.Listeners("127.0.0.1", ports)
    try:
        assert [one.about["tcp"][1] for one in (before, after)] == [first, first + 1]
        said = rf"(?s)WB-CLUSTER-046.*{first}.*{first + 1}.*--ports"
        with pytest.raises(ClusterError, match=said):
            address.Listeners("127.0.0.1", ports)
    finally:
        before.close()
        after.close()


def test_what_cannot_be_listened_at_is_said() -> None:
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1\..*WB-CLUSTER-046"):
        cluster_env.listening("192.0.2.1")


@pytest.mark.parametrize("towards", ["fd00::1", "a-name-nobody-knows", ""])
def test_hosts_without_ipv4_are_told_so(towards: str) -> None:
    with pytest.raises(ClusterError, match=r"(?s)WB-CLUSTER-073.*--listen"):
        address.own_address(towards)


def test_the_own_address_is_that_of_the_route_there() -> None:
    assert address.own_address("127.0.0.1") == "127.0.0.1"
    assert address.interface_of("127.0.0.1") in ("lo", "lo0")
    assert address.interface_of("192.0.2.1") == ""
    assert "127.0.0.1" not in address.addresses()


def test_a_run_on_one_host_stays_on_loopback_wherever_its_store_is() -> None:
    spec = RunSpec(mode="run", rank=0, world_size=2, ranks=(0, 1), store=("192.0.2.1", 9))
    assert address.address_in(replace(spec, hosts=("here", "here"))) == "127.0.0.1"
    apart = replace(spec, hosts=("here", "there"), store=None)
    assert address.address_in(replace(apart, address="192.0.2.7")) == "192.0.2.7"
    with pytest.raises(ClusterError, match="WB-CLUSTER-074"):
        address.address_in(apart)


def test_containers_of_one_machine_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = address.host_token()
    assert here == address.host_token()
    network = SimpleNamespace(st_ino=1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(address.os, "stat", lambda path: network)
        there = address.host_token()
    assert there != here


@pytest.mark.parametrize("way", ["shared_memory", "unix"])
def test_near_ways_are_refused_between_hosts(way: str) -> None:
    about = {"host": "elsewhere", "unix": "/nowhere", "tcp": ["127.0.0.1", 9]}
    with pytest.raises(LinkError, match="WB-RUN-013"):
        address.dial(about, way)


def test_shared_memory_of_another_size_is_refused(serve: Callable[[int], Server]) -> None:
    server = serve(1)
    link = server.connect(0, "shared_memory")
    link.begin(100, {})
    link._size_bytes = 200  # what this end believes to have asked for
    with pytest.raises(LinkError, match="WB-RUN-019"):
        link.opened()
    link.close()


def test_a_server_that_is_gone_is_named(serve: Callable[[int], Server]) -> None:
    server = serve(1)
    link = server.connect(0)
    session(link, 8)
    server.hub._peers[0].sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LinkError, match=r"server s0.*WB-RUN-020"):
        link.receive()
    link.close()


def test_a_worker_that_is_gone_is_told_once(serve: Callable[[int], Server]) -> None:
    server = serve(2)
    first, second = server.connect(0), server.connect(1)
    first.close()
    session(second, 8)
    second.push("push", {}, [np.arange(8, dtype=np.uint8)])
    assert second.receive().meta["n"] == 1
    second.close()
    server.thread.join(10)
    assert server.seen.count("gone") == 2


def test_a_folder_whose_name_is_too_long_for_a_socket_leaves_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(address.cluster_env, "folder", lambda: str(long))
    listeners = address.Listeners("127.0.0.1")
    try:
        assert "unix" not in listeners.about
        with address.dial(listeners.about, "auto") as sock:
            assert sock.family == socket.AF_INET
    finally:
        listeners.close()
    assert not list(long.iterdir())
