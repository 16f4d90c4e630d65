"""What kernel and engines say to each other: a class each, whole after its way or refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from workbench.shared import events
from workbench.shared.messages import BadMessageError, CellOutcome, Copy, Down, OwnLoop, Stopped, Up
from workbench.shared.protocol import Packet, decode_down, decode_up, encode, pack, unpack
from workbench.shared.record import RECORD

KEY = b"k" * 32
SAID: dict[str, Any] = {
    "engine": 3, "run": 2, "number": 7, "ask": 5, "rank": 1, "step": 40, "steps": 2, "count": 9,
    "dropped": 4, "rows": bytes(2 * RECORD.itemsize), "event": events.Noted(rank=1, text="so"),
    "asks": "input", "where": "cell line 3", "text": "name?", "patience_s": 1800.0, "since": 1.5,
    "port": 5678, "state": "waits", "at": "cell line 9", "inside": "step", "waits_in": "in barrier",
    "purpose": "stop", "faults": ("slow=1:50ms",), "topic": "up", "value": {"at": [1, None]},
    "reason": "nobody is there", "pid": 12, "host": "here", "python": "3.12", "before": True,
    "missing": "no debugpy", "taken": "in use", "announce": False, "clock": "a1 time:[1]",
    "generation": 2, "places": (0, 2), "ranks": (0, 2), "hosts": ("a", "a"), "past": (1,),
    "fresh": (2,),
    "prefix": "run-1-regrouped", "at_s": 74007.5, "why": "SIGTERM",
    "outcome": CellOutcome(status="ok", trained=3),
}  # fmt: skip
DECODE = {**dict.fromkeys(get_args(Up), decode_up), **dict.fromkeys(get_args(Down), decode_down)}
EVERY = pytest.mark.parametrize("kind", DECODE, ids=lambda kind: kind.__name__)


def full(kind: Any) -> Any:
    """Return a message with all its fields said."""
    return kind(**{one.name: SAID[one.name] for one in dataclasses.fields(kind)})


def bare(kind: Any) -> Any:
    """Return a message with nothing said that has a default."""
    needed = [one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING]
    return kind(**{name: SAID[name] for name in needed})


def sent(message: Any) -> Packet:
    """Return what arrives of a message."""
    return unpack([bytes(frame) for frame in pack(encode(message), KEY)], KEY)


@EVERY
@pytest.mark.parametrize("make", [full, bare])
def test_a_message_is_the_same_after_its_way(kind: Any, make: Any) -> None:
    message = DECODE[kind](sent(make(kind)))
    assert type(message) is kind
    if "event" in vars(message):  # its empty tuples are lists then
        assert message.event.to_wire() == json.loads(json.dumps(make(kind).event.to_wire()))
    else:
        assert message == make(kind)


@EVERY
def test_each_end_takes_what_the_other_may_say_and_nothing_else(kind: Any) -> None:
    other = decode_down if kind in get_args(Up) else decode_up
    with pytest.raises(BadMessageError, match=r"kind|lacks|has no|is a|buffers|event"):
        other(sent(full(kind)))


@EVERY
def test_a_field_that_is_missing_unknown_or_of_another_type_is_refused(kind: Any) -> None:
    packet = sent(full(kind))
    needed = {one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
    for name, value in packet.body.items():
        if name in needed:
            left = {key: one for key, one in packet.body.items() if key != name}
            with pytest.raises(BadMessageError):
                DECODE[kind](Packet(packet.kind, left, packet.payload))
        if name not in ("value", *_of_its_event(kind)):  # anything may be posted
            for other in ({"a": 1}, [[]], *([1.5] if isinstance(value, int) else [])):
                wrong = {**packet.body, name: other}
                with pytest.raises(BadMessageError):
                    DECODE[kind](Packet(packet.kind, wrong, packet.payload))
    if not _of_its_event(kind):  # what an event does not know is left out, as on a disk
        with pytest.raises(BadMessageError, match="invented"):
            DECODE[kind](Packet(packet.kind, {**packet.body, "invented": 1}, packet.payload))


def _of_its_event(kind: Any) -> set[str]:
    return {"rank", "text", "deaths"} if kind.kind == "event" else set()


@EVERY
def test_a_message_has_the_buffers_that_it_declares(kind: Any) -> None:
    packet = sent(full(kind))
    for payload in ((*packet.payload, b"more"), packet.payload[1:] if packet.payload else (b"",)):
        with pytest.raises(BadMessageError, match=r"buffer|`Records`|event"):
            DECODE[kind](Packet(packet.kind, packet.body, payload))


def test_no_two_messages_of_a_direction_are_called_alike() -> None:
    for direction in (Up, Down):
        names = [(one.kind, one.word) for one in get_args(direction)]
        assert len(set(names)) == len(names)
        assert all(kind for kind, _ in names)


@pytest.mark.parametrize("rows", [b"half a row", bytes(RECORD.itemsize + 1)])
def test_records_that_are_no_whole_rows_are_refused(rows: bytes) -> None:
    with pytest.raises(BadMessageError, match="whole number"):
        decode_up(Packet("records", {"run": 1, "dropped": 0}, (rows,)))


@pytest.mark.parametrize("kind", ["never heard of", "", "debugger"])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    for decode in (decode_up, decode_down):
        with pytest.raises(BadMessageError, match="kind"):
            decode(Packet(kind))


def test_a_number_that_fits_no_float_is_refused() -> None:
    body = {**encode(full(Stopped)).body, "since": 10**400}
    with pytest.raises(BadMessageError, match=r"since .*\bint"):
        decode_up(Packet("debugger", body))


# -- outcomes --------------------------------------------------------------------------------------

OUTCOMES = (
    CellOutcome(status="ok"),
    CellOutcome(
        status="stopped", trained=3, loop=OwnLoop(by="wb.prepare", backwards=3, updates=3),
        copies=Copy(rank=1, digest=1 << 60, like=2), weights="weights-0.npz", options_read=True,
        initial_read=True, reassigned=("rank",), kept_step=4,
    ),
    CellOutcome(
        status="error", ename="ValueError", evalue="mine", traceback="...", advice="do this",
        felt="closed", replace=True, group_broken=True, cut_off=True,
    ),
    CellOutcome(
        status="died", how="SIGKILL", log="last", recoverable=True, restarted=True, with_all=True,
        ended="ended", failed_of="KeyError: 'a'",
    ),
)  # fmt: skip


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.status)
@pytest.mark.parametrize("strict", [True, False])
def test_an_outcome_is_the_same_after_its_way(outcome: CellOutcome, strict: bool) -> None:
    wire = json.loads(json.dumps(outcome.to_wire()))
    assert CellOutcome.from_wire(wire, strict=strict) == outcome


def test_what_an_outcome_does_not_say_does_not_travel() -> None:
    assert CellOutcome(status="ok").to_wire() == {"status": "ok"}


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, {"status": "odd"}, {"status": None}, {"status": "ok", "trained": "3"},
        {"status": "ok", "trained": True}, {"status": "ok", "loop": {"by": 1}},
        {"status": "ok", "copies": {"rank": 0}}, {"status": "ok", "reassigned": [1]},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_outcome_is_refused_from_wherever(data: object) -> None:
    for strict in (True, False):
        with pytest.raises(BadMessageError):
            CellOutcome.from_wire(data, strict=strict)


def test_fields_of_another_version_are_left_out_of_a_file_and_refused_in_an_answer() -> None:
    loop = {"by": "wb.watch", "backwards": 1, "updates": 2, "new": 1}
    for more in ({"new": 1}, {"loop": loop}):
        data = {"status": "ok", "trained": 2, **more}
        assert CellOutcome.from_wire(data, strict=False).trained == 2
        with pytest.raises(BadMessageError, match=r"no field 'new'|loop .*\bdict"):
            CellOutcome.from_wire(data)


def test_the_outcome_that_engines_wrote_before_there_was_a_class_is_read() -> None:
    written = {
        "status": "error", "ename": "ValueError", "evalue": "mine", "advice": None,
        "traceback": "...", "kept_step": -1, "trained": 4,
        "loop": {"by": "", "backwards": 0, "updates": 4}, "options_read": True,
        "initial_read": False, "weights": None, "copies": {"rank": 0, "digest": 5, "like": 0},
        "reassigned": ["rank"], "group_broken": True, "cut_off": False,
    }  # fmt: skip
    outcome = CellOutcome.from_wire(written)
    assert (outcome.words, outcome.trained, outcome.reassigned) == (
        "ValueError: mine",
        4,
        ("rank",),
    )
