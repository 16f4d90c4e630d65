"""A signed message is good once, for the end it was meant for."""

from __future__ import annotations

import pytest

from workbench.shared import protocol
from workbench.shared.messages import BadMessageError
from workbench.shared.protocol import WINDOW, Packet, Seal

KEY = b"k" * 32


@pytest.fixture
def kernel() -> Seal:
    return Seal(KEY, open_to_any=True)


@pytest.fixture
def engine() -> Seal:
    return Seal(KEY)


def test_a_message_comes_through_whole(kernel: Seal, engine: Seal) -> None:
    sent = Packet("records", {"run": 1}, (b"rows", b"more"))
    message, sender = kernel.unpack(engine.pack(sent, kernel.name))
    assert (message, sender) == (sent, engine.name)


def test_an_engines_first_words_name_no_receiver(kernel: Seal, engine: Seal) -> None:
    message, sender = kernel.unpack(engine.pack(Packet("hello", {"engine": 3})))
    assert (message.body, sender) == ({"engine": 3}, engine.name)
    with pytest.raises(BadMessageError, match="receiver"):
        engine.unpack(kernel.pack(Packet("welcome")))


def test_a_recorded_message_is_refused(kernel: Seal, engine: Seal) -> None:
    up = [engine.pack(Packet("event", {"i": i}), kernel.name) for i in range(5)]
    for frames in (up[0], up[2], up[1], up[4]):  # the order does not matter
        kernel.unpack(frames)
    for frames in (up[0], up[1], up[2], up[4]):
        with pytest.raises(BadMessageError, match="replay"):
            kernel.unpack(frames)
    assert kernel.unpack(up[3])[0].body == {"i": 3}
    down = kernel.pack(Packet("halt"), engine.name)
    engine.unpack(down)
    with pytest.raises(BadMessageError, match="replay"):
        engine.unpack(down)


def test_a_message_is_not_sent_back_to_who_sent_it(kernel: Seal, engine: Seal) -> None:
    with pytest.raises(BadMessageError, match="receiver"):
        kernel.unpack(kernel.pack(Packet("halt"), engine.name))
    with pytest.raises(BadMessageError, match="receiver"):
        engine.unpack(engine.pack(Packet("hello")))
    with pytest.raises(BadMessageError, match="receiver"):
        kernel.unpack(kernel.pack(Packet("hello")))


def test_another_session_with_the_same_key_refuses_it(kernel: Seal, engine: Seal) -> None:
    later_kernel, fresh_engine = Seal(KEY, open_to_any=True), Seal(KEY)
    with pytest.raises(BadMessageError, match="receiver"):
        later_kernel.unpack(engine.pack(Packet("records"), kernel.name))
    with pytest.raises(BadMessageError, match="receiver"):
        fresh_engine.unpack(kernel.pack(Packet("halt"), engine.name))


def test_what_is_too_old_to_tell_is_refused(kernel: Seal, engine: Seal) -> None:
    up = [engine.pack(Packet("event", {"i": i}), kernel.name) for i in range(WINDOW + 1)]
    kernel.unpack(up[-1])
    kernel.unpack(up[1])
    with pytest.raises(BadMessageError, match="replay"):
        kernel.unpack(up[0])


@pytest.mark.parametrize(
    "via",
    [None, "a", [], ["a", "b"], ["a", "b", -1], ["a", "b", 1.5], ["a", "b", True],
     [1, "b", 1], ["a", None, 1], ["a", "b", 1, 2], {"a": 1}],
)  # fmt: skip
def test_envelopes_that_make_no_sense(kernel: Seal, via: object) -> None:
    frames = protocol.pack(Packet("event", {"via": via}), KEY)
    with pytest.raises(BadMessageError, match="envelope"):
        kernel.unpack(frames)
    with pytest.raises(BadMessageError, match="envelope"):
        kernel.unpack(protocol.pack(Packet("event"), KEY))


def test_an_absurd_number_costs_nothing(kernel: Seal) -> None:
    for number in (10**300, 0, 10**300 - 5):
        frames = protocol.pack(Packet("event", {"via": ["a", kernel.name, number]}), KEY)
        if number:
            kernel.unpack(frames)
        else:
            with pytest.raises(BadMessageError, match="replay"):
                kernel.unpack(frames)


def test_another_key_is_refused(kernel: Seal) -> None:
    with pytest.raises(BadMessageError, match="signature"):
        kernel.unpack(Seal(b"x" * 32).pack(Packet("hello")))
