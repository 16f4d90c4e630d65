from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.telemetry.recorder import Recorder, StepResult
from workbench.shared import protocol
from workbench.shared.faults import parse_fault
from workbench.shared.messages import BadMessageError, Down, Up
from workbench.shared.protocol import (
    VERSION,
    Packet,
    RunSpec,
    _sign,
    decode_up,
    new_key,
    pack,
    records_from,
    unpack,
)
from workbench.shared.record import RECORD

KEY = b"k" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BODY = st.dictionaries(st.text().filter(lambda name: name not in ("v", "kind")), JSON, max_size=4)


@given(BODY, st.lists(st.binary(max_size=200), max_size=3))
def test_a_message_arrives_as_it_was_sent(body: dict[str, object], payload: list[bytes]) -> None:
    got = unpack(pack(Packet("event", body, payload), KEY), KEY)
    assert (got.kind, dict(got.body), list(got.payload)) == ("event", body, payload)


@given(st.integers(0, 2), st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_noticed(frame: int, at: int, flip: int) -> None:
    frames = [bytearray(part) for part in pack(Packet("records", {"run": 1}, [b"abc" * 30]), KEY)]
    frames[frame][at % len(frames[frame])] ^= flip
    with pytest.raises(BadMessageError, match="signature"):
        unpack([bytes(part) for part in frames], KEY)


def test_another_clusters_key_is_refused() -> None:
    with pytest.raises(BadMessageError, match="signature"):
        unpack(pack(Packet("resume"), new_key()), new_key())
    assert len(new_key()) == 32


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b""]])
def test_too_few_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadMessageError):
        unpack(frames, KEY)


def test_frames_cannot_be_left_out_swapped_or_cut_elsewhere() -> None:
    mac, header, first, second = pack(Packet("records", {}, [b"aabb", b"cc"]), KEY)
    for forged in (
        [mac, header, first],
        [mac, header, second, first],
        [mac, header, b"aab", b"bcc"],
        [mac, header, b"aabbcc"],
        [mac, header, first, second, b""],
    ):
        with pytest.raises(BadMessageError, match="signature"):
            unpack(forged, KEY)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[1, 2]", b'"text"', b"{}", b'{"v": 1}', b"\xff\xfe", b"1"],
)
def test_a_signed_header_that_is_not_ours_is_refused(header: bytes) -> None:
    with pytest.raises(BadMessageError, match="header"):
        unpack([_sign([header], KEY), header], KEY)


def test_another_version_is_refused_by_name() -> None:
    header = json.dumps({"v": VERSION + 1, "kind": "resume"}).encode()
    with pytest.raises(BadMessageError, match=f"version {VERSION + 1}"):
        unpack([_sign([header], KEY), header], KEY)


def test_a_body_cannot_pass_for_another_kind() -> None:
    got = unpack(pack(Packet("event", {"kind": "halt", "v": 9}), KEY), KEY)
    assert got.kind == "event"


def test_rows_are_read_without_a_copy_and_only_whole() -> None:
    rows = np.zeros(5, RECORD)
    rows["step"] = np.arange(5)
    packed = rows.tobytes()
    assert (records_from(packed) == rows).all()
    assert not records_from(packed).flags.owndata
    assert len(records_from(b"")) == 0
    with pytest.raises(BadMessageError, match="whole number"):
        records_from(packed[:-1])


def test_the_recorders_rows_are_the_protocols() -> None:
    recorder = Recorder(run=3, rank=2)
    recorder.add_step(7, StepResult(32, 0.125, 0.5, staleness=4.0), 1.5, 2.5, data_wait_s=0.25)
    (row,) = records_from(recorder.drain())
    assert (row["run"], row["rank"], row["step"], row["samples"]) == (3, 2, 7, 32)
    assert (row["start_s"], row["end_s"], row["data_wait_s"]) == (1.5, 2.5, 0.25)
    assert (row["compute_s"], row["local_loss"], row["staleness"]) == (0.5, 0.125, 4.0)
    assert all(np.isnan(row[name]) for name in ("ready_s", "exposed_s", "wait_s", "sent_bytes"))


def test_a_run_spec_travels_as_json() -> None:
    spec = RunSpec(
        mode="run", rank=1, world_size=2, ranks=(4, 5), store=("127.0.0.1", 29500),
        run_id="r", strategy="mirrored", options={"bucket_mb": 25.0},
        faults=(parse_fault("slow=1:50ms"),), profile=(10, 15), log=("tensorboard:/a",),
        hosts=("a", "b"),
    )  # fmt: skip
    assert RunSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec
    bare = RunSpec("spmd", 0, 1, (0,))
    assert RunSpec.from_wire(json.loads(json.dumps(bare.to_wire()))) == bare


@pytest.mark.parametrize(
    ("hosts", "local"),
    [
        ((), [0, 1, 2, 3]),
        (("a",) * 4, [0, 1, 2, 3]),
        (("a", "b", "a", "b"), [0, 0, 1, 1]),
        (("a",) * 6, [0, 1, 2, 3]),  # two servers behind the workers
    ],
)
def test_a_local_rank_counts_the_workers_of_its_host(
    hosts: tuple[str, ...], local: list[int]
) -> None:
    specs = [RunSpec("run", rank, 4, (0, 1, 2, 3), hosts=hosts) for rank in range(4)]
    assert [spec.local_rank for spec in specs] == local
    assert max(len(spec.host_ranks) for spec in specs) == max(local) + 1


@pytest.mark.parametrize(
    "packet",
    [
        Packet("never heard of"),
        Packet("halt", {"run": 1, "purpose": "stop"}),  # only the kernel says that
        Packet("debugger", {"said": "never heard of", "engine": 1}),
        Packet("debugger", {"do": "line", "number": 1, "text": ""}),
        Packet("event", {"run": 1, "name": "never heard of"}),
        Packet("event", {"run": 1, "name": "death"}),  # the kernel's own
        Packet("event", {"run": 1, "name": ["note"]}),
        Packet("event", {"name": "note"}),
        Packet("event"),
    ],
    ids=lambda packet: f"{packet.kind} {dict(packet.body)}",
)
def test_what_no_engine_says_is_refused(packet: Packet) -> None:
    with pytest.raises(BadMessageError, match=r"^(kind|event) "):
        decode_up(packet)


# -- what is declared is what is sent --------------------------------------------------------------

SOURCES = Path(protocol.__file__).parents[1]
ENGINES = ("engine", "strategies")
"""Folders of the engines' side; the rest is the kernel's."""


def made_by(side: str) -> set[str]:
    """Return the names of all classes that one side, `engines` or `kernel`, makes."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        inside = path.relative_to(SOURCES).as_posix()
        if path.name == "messages.py" or inside.startswith(ENGINES) != (side == "engines"):
            continue
        calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
        found |= {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
    return found


ASKED = {"AskWhere", "AskStacks"}
"""Handed as classes to `questions.Questions`, which makes them."""


def test_engines_say_all_that_is_declared_for_them_and_nothing_of_the_kernels() -> None:
    made = made_by("engines")
    assert {one.__name__ for one in get_args(Up)} - made == set()
    assert {one.__name__ for one in get_args(Down)} & made == set()


def test_the_kernel_says_all_that_is_declared_for_it_and_nothing_of_the_engines() -> None:
    made = made_by("kernel")
    assert {one.__name__ for one in get_args(Down)} - made == ASKED
    # A call of debugpy answers with the fields of `Served` where no cell is under way; the kernel's
    # `Left` is an event.
    assert {one.__name__ for one in get_args(Up)} & made <= {"Served", "Left"}
