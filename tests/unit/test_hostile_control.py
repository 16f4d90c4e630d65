"""What somebody can do to a control path without the key, with recorded or senseless messages."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from workbench.cluster.router import ControlRouter
from workbench.engine.telemetry.control_link import ControlLink
from workbench.engine.transport import connection
from workbench.shared.events import Noted
from workbench.shared.messages import Halt, Happened, Hello, Up
from workbench.shared.protocol import Packet, Seal, new_key, pack

WAIT_S = 20


@pytest.fixture
def heard() -> queue.Queue[tuple[int, Up]]:
    return queue.Queue()


@pytest.fixture
def router(heard: queue.Queue[tuple[int, Up]]) -> Iterator[ControlRouter]:
    router = ControlRouter(lambda engine, message: heard.put((engine, message)))
    yield router
    router.close()


@pytest.fixture
def stranger(router: ControlRouter) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.RCVTIMEO, 500)
        socket.connect(router.url)
        yield socket


def soon(condition: Any) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_recorded_hello_does_not_take_an_engines_place(
    router: ControlRouter, heard: queue.Queue[tuple[int, Up]], stranger: Any
) -> None:
    engine, recorded = Seal(router.key), []
    with zmq.Context() as context, context.socket(zmq.DEALER) as friend:
        friend.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        friend.connect(router.url)
        recorded.append(engine.pack(Packet("hello", {"engine": 3})))
        friend.send_multipart(recorded[0])
        welcome, kernel = engine.unpack(friend.recv_multipart())
        assert welcome.kind == "welcome"
        recorded.append(engine.pack(Packet("event", {"run": 1, "name": "note"}), kernel))
        friend.send_multipart(recorded[1])
        assert [type(heard.get(timeout=WAIT_S)[1]) for _ in "ab"] == [Hello, Happened]

        for frames in recorded:
            stranger.send_multipart(frames)
        assert soon(lambda: router.rejected == 2)
        router.send(3, Halt(run=1, purpose="stop"))
        down = friend.recv_multipart()
        assert engine.unpack(down)[0].kind == "halt"
        with pytest.raises(zmq.Again):  # nothing went to who sent the recorded hello
            stranger.recv_multipart()
    assert heard.empty()


def test_signed_messages_that_make_no_sense_are_counted_and_the_rest_goes_on(
    router: ControlRouter, heard: queue.Queue[tuple[int, Up]], stranger: Any
) -> None:
    insider = Seal(router.key)
    senseless = [
        Packet("hello"),
        Packet("hello", {"engine": "3"}),
        Packet("hello", {"engine": None}),
        Packet("event", {"engine": {}, "name": "note"}),
        Packet("event", {"name": "never heard of"}),
        Packet("event", {"name": ["note"]}),
        Packet("event"),
        Packet("never heard of"),
        Packet("halt", {"run": 1, "purpose": "stop"}),  # what the kernel says
        Packet("refused", {"engine": 1, "count": "many"}),
        Packet("position", {"run": 1, "rank": 0}),
        Packet("records", {"run": 1, "dropped": 0}, (b"half a row",)),
    ]
    for message in senseless:
        stranger.send_multipart(insider.pack(message))
    for frames in ([], [b""], [b"", b""], pack(Packet("hello", {"engine": 1}), router.key)):
        stranger.send_multipart(frames or [b""])
    assert soon(lambda: router.rejected == len(senseless) + 4)
    stranger.send_multipart(insider.pack(Packet("hello", {"engine": 3})))
    assert heard.get(timeout=WAIT_S) == (3, Hello(engine=3))
    assert router.refused == {}


def test_an_engine_obeys_nobody_without_the_key_and_survives_nonsense() -> None:
    key, unheard = new_key(), Seal(new_key())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as kernel:
        kernel.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
        port = kernel.bind_to_random_port("tcp://127.0.0.1")
        link = ControlLink(3, f"tcp://127.0.0.1:{port}", key, {})
        mine = Seal(key, open_to_any=True)
        identity, *frames = kernel.recv_multipart()
        _, engine = mine.unpack(frames)
        for seal in (unheard, mine):
            kernel.send_multipart([identity, *seal.pack(Packet("welcome"), engine)])
        question = mine.pack(Packet("where", {"ask": 1}), engine)
        kernel.send_multipart([identity, *question])
        kinds = [mine.unpack(kernel.recv_multipart()[1:])[0].kind]
        kernel.send_multipart([identity, *question])
        kernel.send_multipart([identity, *mine.pack(Packet("debugger", {"value": []}), engine)])
        assert soon(lambda: link.rejected >= 2)
        for unknown in ("never heard of", "hello"):  # the second is what engines say
            kernel.send_multipart([identity, *mine.pack(Packet(unknown), engine)])
        assert soon(lambda: link.rejected >= 4)
        kernel.send_multipart([identity, *mine.pack(Packet("where", {"ask": 1}), engine)])
        while kinds.count("where") < 2 or "refused" not in kinds:
            kinds.append(mine.unpack(kernel.recv_multipart()[1:])[0].kind)
        link.close()


def test_refused_connections_of_engines_reach_the_kernel(
    router: ControlRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ControlLink(5, router.url, router.key, {})
    assert soon(lambda: 5 in router.connected)
    monkeypatch.setattr(connection.refused, "count", connection.refused.count + 3)
    link.emit(Noted(rank=0, text="wake up"))
    assert soon(lambda: router.refused.get(5, 0) >= 3)
    link.close()
