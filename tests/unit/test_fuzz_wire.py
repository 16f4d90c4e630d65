"""Whatever comes over a wire, each reader answers with a message or with its own error."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
from fuzz_profile import tries
from hypothesis import example, given
from hypothesis import strategies as st

from workbench.cluster.router import ControlRouter
from workbench.engine.transport import connection
from workbench.engine.transport.connection import LinkError
from workbench.engine.transport.peers import Peers
from workbench.engine.transport.server import _Peer
from workbench.engine.transport.worker import Link
from workbench.shared import protocol
from workbench.shared.messages import BadMessageError, Down, Up
from workbench.shared.protocol import Packet, Seal
from workbench.shared.record import RECORD

KEY = b"k" * 32
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner,
                                                                max_size=4),
    max_leaves=10,
)  # fmt: skip
BODIES = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
MESSAGES = st.builds(
    lambda kind, body, payload: Packet(kind, body, tuple(payload)),
    st.text(max_size=8),
    BODIES.map(lambda body: {k: v for k, v in body.items() if k not in ("v", "kind")}),
    st.lists(st.binary(max_size=200), max_size=3),
)
KINDS = ["hello", "records", "event", "position", "where", "refused", "welcome", "halt", "odd"]


def signed(*frames: bytes) -> list[bytes]:
    """Return frames with a signature that is right, whatever they hold."""
    mac = hmac.new(KEY, digestmod="sha256")
    if len(frames) == 1:
        return [hmac.digest(KEY, frames[0], "sha256"), *frames]
    for frame in frames:
        mac.update(len(frame).to_bytes(8, "big") + frame)
    return [mac.digest(), *frames]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """A message's frames, and the same with one thing wrong."""
    sent = [bytes(frame) for frame in protocol.pack(draw(MESSAGES), KEY)]
    frames = list(sent)
    at = draw(st.integers(0, len(frames) - 1))
    how = draw(st.sampled_from(["flip", "cut", "grow", "drop", "swap", "double", "merge", "noise"]))
    if how == "flip" and frames[at]:
        bit = draw(st.integers(0, 8 * len(frames[at]) - 1))
        changed = bytearray(frames[at])
        changed[bit // 8] ^= 1 << bit % 8
        frames[at] = bytes(changed)
    elif how == "cut":
        frames[at] = frames[at][: draw(st.integers(0, len(frames[at])))]
    elif how == "grow":
        frames[at] += draw(st.binary(min_size=1, max_size=8))
    elif how == "drop":
        frames.pop(at)
    elif how == "swap":
        frames[at], frames[at - 1] = frames[at - 1], frames[at]
    elif how == "double":
        frames.insert(at, frames[at])
    elif how == "merge" and at:
        frames[at - 1 : at + 1] = [frames[at - 1] + frames[at]]
    elif how == "noise":
        frames[at] = draw(st.binary(max_size=64))
    return sent, frames


def _nested(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + closing * depth).encode()


@tries(80)
@given(damaged())
def test_a_damaged_message_is_refused(case: tuple[list[bytes], list[bytes]]) -> None:
    sent, frames = case
    if frames == sent:
        protocol.unpack(frames, KEY)
        return
    with pytest.raises(BadMessageError):
        protocol.unpack(frames, KEY)


@tries(40)
@given(st.lists(st.binary(max_size=80) | JSON.map(lambda v: json.dumps(v).encode()), max_size=4))
@example([_nested(100_000, "[", "]")])
@example([_nested(100_000, '{"a":', "}").replace(b":}", b":1}")])
@example([b'{"v":' + b"9" * 10_000 + b"}"])
@example([b'{"v": 2, "kind": ["x"]}'])
@example([b"\xff\xfe"])
def test_nonsense_with_the_right_signature_is_refused_too(frames: list[bytes]) -> None:
    for read in (lambda f: protocol.unpack(f, KEY), Seal(KEY, open_to_any=True).unpack):
        with contextlib.suppress(BadMessageError):
            read(signed(*frames))


@tries(80)
@given(st.binary(max_size=3 * RECORD.itemsize))
def test_records_are_whole_rows_or_refused(payload: bytes) -> None:
    try:
        rows = protocol.records_from(payload)
    except BadMessageError:
        assert len(payload) % RECORD.itemsize
    else:
        assert rows.nbytes == len(payload)


@tries(80)
@given(st.sampled_from([*get_args(Up), *get_args(Down)]), BODIES, st.data())
def test_fields_of_any_type_make_a_message_or_are_refused(kind: Any, body: Any, data: Any) -> None:
    names = [one.name for one in dataclasses.fields(kind)]
    fields = {name: data.draw(JSON) for name in names} | body
    for decode in (protocol.decode_up, protocol.decode_down):
        with contextlib.suppress(BadMessageError):
            assert json.dumps(decode(Packet(kind.kind, fields)).to_wire())


@pytest.fixture(scope="module")
def router() -> Iterator[ControlRouter]:
    router = ControlRouter(lambda engine, message: None)
    yield router
    router.close()


def test_the_kernels_end_survives_anything_signed(router: ControlRouter) -> None:
    insider = Seal(router.key)

    @tries(40)
    @given(st.sampled_from(KINDS), BODIES, st.sampled_from(["engine", "count", "ask", "via", ""]),
           JSON, st.lists(st.binary(max_size=20), max_size=2))  # fmt: skip
    def check(kind: str, body: Any, field: str, value: Any, payload: list[bytes]) -> None:
        message = Packet(kind, {**body, field: value}, tuple(payload))
        router._accept(b"somebody", [bytes(frame) for frame in insider.pack(message)])
        assert router._thread.is_alive()

    check()


# -- links -----------------------------------------------------------------------------------------

HEADS = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda message, size, header: connection._HEAD.pack(b"wbL1", header, size) + message,
        st.one_of(
            st.binary(max_size=60),
            st.builds(lambda kind, body: json.dumps({**body, "kind": kind}).encode(),
                      st.sampled_from(["push", "init", "load", "open", "odd"]) | JSON, BODIES),
        ),
        st.sampled_from([0, 1, 8, 16, 2**31, 2**40, 2**63, 2**64 - 1]),
        st.integers(0, 80) | st.sampled_from([2**20, 2**26 + 1, 2**32 - 1]),
    ),
    st.builds(
        lambda kind, body, size: connection.pack(connection.Message(kind, body, size)),
        st.sampled_from(["push", "init", "load", "open", "error", "odd"]),
        BODIES.map(lambda body: {k: v for k, v in body.items() if k != "kind"}),
        st.sampled_from([0, 8, 16, 2**31, 2**40, 2**63, 2**64 - 1]),
    ),
)  # fmt: skip
CHUNKS = st.lists(HEADS, max_size=4)


@contextlib.contextmanager
def written(chunks: list[bytes]) -> Iterator[socket.socket]:
    """A connected socket on which these have come, and then the other end has closed."""
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(5)
        for chunk in chunks:
            far.sendall(chunk)
        far.shutdown(socket.SHUT_WR)
        yield near


@tries(40)
@given(CHUNKS)
@example([connection._HEAD.pack(b"wbL1", 200_000, 0) + _nested(100_000, "[", "]")])
@example([connection.pack(connection.Message("load", {}, 2**63))])
@example([connection.pack(connection.Message("load", {}, 2**39))])
def test_a_servers_end_gives_messages_or_a_link_error(chunks: list[bytes]) -> None:
    with written(chunks) as sock:
        peer = _Peer(sock, 0)
        peer.make_mailbox(8, shared=False)
        until_link_error(lambda: isinstance(peer.advance(), connection.Message))


@tries(40)
@given(CHUNKS)
@example([connection._HEAD.pack(b"wbL1", 200_000, 0) + _nested(100_000, "[", "]")])
@example([connection.pack(connection.Message("load", {}, 2**63))])
@example([connection.pack(connection.Message("load", {}, 2**39))])
def test_a_workers_end_gives_messages_or_a_link_error(chunks: list[bytes]) -> None:
    with written(chunks) as sock:
        link, into = Link(sock, 0, "unix"), np.zeros(8, np.uint8)
        until_link_error(lambda: _read_into(link, into))
    with written(chunks) as sock:
        link = Link(sock, 0, "unix")
        until_link_error(lambda: isinstance(link.read_bytes(link.receive()), bytes))


def _read_into(link: Link, into: connection.Bytes) -> bool:
    message = link.receive()
    if message.size_bytes:
        link.read(message, [into])
    return isinstance(message.kind, str)


def until_link_error(take: Callable[[], bool]) -> None:
    """Take messages until there are no more, which ends in the link's own error."""
    try:
        while True:
            assert take()
    except LinkError:
        return


@tries(80)
@given(st.binary(max_size=40), st.sampled_from([0, 8, 16]))
@example((8).to_bytes(8, "big") + b"whatever", 8)
@example((0).to_bytes(8, "big"), 0)
def test_a_peers_message_fits_or_is_refused(data: bytes, size_bytes: int) -> None:
    with written([data]) as sock:
        peers, into = Peers({1: sock}), bytearray(size_bytes)
        try:
            peers.receive(1, memoryview(into))
        except LinkError:
            return
        assert data[:8] == size_bytes.to_bytes(8, "big")
        assert into == data[8 : 8 + size_bytes]


@tries(50)
@given(st.binary(max_size=120))
def test_nobody_without_the_key_is_let_in(said: bytes) -> None:
    with written([said]) as sock:
        assert connection.prove_server(sock, KEY) is None
    with written([said]) as sock, pytest.raises(LinkError):
        connection.prove_worker(sock, KEY, 1)


@tries(40)
@given(st.integers(0, 4 + 32 + 32 - 1), st.integers(0, 7))
def test_a_proof_with_one_bit_changed_is_none(at: int, bit: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        ranks: list[int | None] = []
        server = threading.Thread(target=lambda: ranks.append(connection.prove_server(near, KEY)))
        server.start()
        theirs, mine, name = far.recv(32), b"m" * 32, (1).to_bytes(4, "big")
        said = bytearray(name + mine + connection._proof(KEY, b"worker", name, theirs, mine))
        said[at] ^= 1 << bit
        far.sendall(said)
        server.join(10)
    assert ranks == [None]
