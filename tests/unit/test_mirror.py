"""A mirror of a followed run takes only what a run has, in bounds, and changes nothing."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from followed import Job, code_of, content, try_again_soon, until
from fuzz_profile import tries
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import RunError
from workbench.history import folders
from workbench.jobs import frames
from workbench.jobs.frames import Mirror
from workbench.jobs.places import open_place


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_soon(monkeypatch)


def frame(name: str, at: Any, data: bytes = b"x", **more: Any) -> dict[str, Any]:
    text = base64.b64encode(zlib.compress(data)).decode()
    return {"f": name, "a": at, "d": text, **more}


@pytest.mark.parametrize(
    "name",
    [
        "../run.json", "/etc/passwd", "a/run.json", "run.json/", "run.json\n", "run.json\0", ".",
        "", "control.key", "control/1.json", ".in-use", "log.txt", "weights.pt", "weights/a.npz",
        "records-rank.bin", "records-rank1.bin.exe", "records-rank\uff11.bin", "records-rank-1.bin",
        "events-rank../a.jsonl", "log-rank1234567.txt", None, 5, ["run.json"],
    ],
)  # fmt: skip
def test_only_files_of_a_run_are_written(name: Any, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    for at in (0, -1, -2):
        with pytest.raises(ValueError, match="file"):
            mirror.apply(frame(name, at))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [-1, -2, -3, 1, 0.0, True, "0", None, 1 << 60, [0]])
def test_an_append_stands_where_the_file_ends(at: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Mirror(tmp_path).apply(frame("records-rank0.bin", at))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [0, -2, -3, -1.0, None])
def test_what_is_written_anew_has_a_beginning(at: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Mirror(tmp_path).apply(frame("run.json", at, v=1))
    assert list(tmp_path.iterdir()) == []


BOMB = base64.b64encode(zlib.compress(bytes(50 << 20), 9)).decode()


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        base64.b64encode(zlib.compress(bytes(frames.RAW_BYTES + 1))).decode(),
        base64.b64encode(zlib.compress(b"cut")[:-1]).decode(),
        base64.b64encode(zlib.compress(b"more") + b"behind").decode(),
        base64.b64encode(b"no zlib").decode(),
        "****", "YQ", "ü", "", None, 5,
    ],
)  # fmt: skip
def test_bombs_and_damaged_frames_are_refused(text: Any, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    with pytest.raises(ValueError):
        mirror.apply({"f": "records-rank0.bin", "a": 0, "d": text})
    assert list(tmp_path.iterdir()) == []


def test_what_was_told_is_never_changed(tmp_path: Path) -> None:
    mirror, name = Mirror(tmp_path), "events-rank0.jsonl"
    assert mirror.apply(frame(name, 0, b"abcdef"))
    assert not mirror.apply(frame(name, 0, b"ABC"))
    assert mirror.apply(frame(name, 3, b"DEFghi"))
    with pytest.raises(ValueError):
        mirror.apply(frame(name, 10, b"z"))
    assert (tmp_path / name).read_bytes() == b"abcdefghi"


def test_a_file_in_parts_is_seen_when_it_is_whole(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    meta = json.dumps({"state": "finished", "cell": os.urandom(40_000).hex()}).encode()
    lines = frames.lines_of("run.json", -1, meta, 4096, 1)
    assert len(lines) > 5
    parts = [json.loads(line[len(frames.MARK) :]) for line in lines]
    for part in parts[:-1]:
        assert not mirror.apply(part)
    assert not mirror.over
    assert mirror.apply(parts[-1])
    assert mirror.over
    assert (tmp_path / "run.json").read_bytes() == meta
    assert not mirror.apply(parts[0])
    for later in ({**parts[1], "v": 2}, {**parts[0], "v": 3, "a": -2}):
        with pytest.raises(ValueError):
            mirror.apply(later)  # its beginning is not there
    assert (tmp_path / "run.json").read_bytes() == meta


def test_an_older_version_of_a_file_changes_nothing(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    assert mirror.apply(frame("run.json", -1, b"new", v=5))
    for version in (4, 5):
        assert not mirror.apply(frame("run.json", -1, b"old", v=version))
    for version in (0, -1, True, 1.5, None, "6", 1 << 60):
        with pytest.raises(ValueError):
            mirror.apply(frame("run.json", -1, b"odd", v=version))
    assert (tmp_path / "run.json").read_bytes() == b"new"


def test_parts_that_never_end_are_refused(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    part = bytes(1 << 20)
    for at in (-1, -2, -2, -2):
        mirror.apply(frame("run.json", at, part, v=1, m=1))
    with pytest.raises(ValueError):
        mirror.apply(frame("run.json", -2, part, v=1, m=1))
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_for_the_mirror_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "new_run_dir", lambda name: tmp_path / "none")
    with pytest.raises(RunError) as error:
        open_place(["cat"])
    assert code_of(error) == "WB-RUN-113"


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
GOOD = st.sampled_from(["run.json", "alive", "records-rank0.bin", "events-rank0.jsonl"])
FRAMES = st.fixed_dictionaries(
    {},
    optional={
        "f": GOOD | VALUES,
        "a": st.integers(-3, 40) | VALUES,
        "d": st.binary(max_size=30).map(lambda data: base64.b64encode(zlib.compress(data)).decode())
        | VALUES,
        "m": VALUES,
        "v": st.integers(1, 5) | VALUES,
    },
)


@tries(80)
@given(st.lists(FRAMES, max_size=12), st.booleans())
def test_whatever_is_told_a_mirror_only_grows(
    tmp_path_factory: pytest.TempPathFactory, told: list[dict[str, Any]], skips: bool
) -> None:
    folder = tmp_path_factory.mktemp("mirror")
    mirror, before = Mirror(folder, skips=skips), dict[str, bytes]()
    for one in told:
        try:
            mirror.apply(one)
        except ValueError:
            assert content(folder) == before
        after = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert after.keys() <= {"run.json", "alive", "records-rank0.bin", "events-rank0.jsonl"}
        for name, data in before.items():
            assert name in frames.WHOLE or after[name].startswith(data)
        before = after


@tries(40)
@given(st.lists(st.binary(max_size=60) | FRAMES.map(frames.line_of).map(str.encode), max_size=12))
def test_whatever_a_command_prints_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("output") / "output"
    path.write_bytes(b"\n".join(lines))
    place = open_place(["cat", str(path)])
    try:
        until(place, lambda: place.over or place._tries)  # type: ignore[attr-defined]
    finally:
        place.close()


@tries(40)
@given(st.binary(max_size=5000), st.integers(300, 5000), st.sampled_from([1, 7, 88]))
def test_bytes_in_lines_are_the_same_bytes_again(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, line_bytes: int, row_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("mirror")
    mirror = Mirror(folder)
    for name, at in (("run.json", -1), ("records-rank0.bin", 0)):
        for line in frames.lines_of(name, at, data, line_bytes, row_bytes):
            mirror.apply(json.loads(line[len(frames.MARK) :]))
        found = (folder / name).read_bytes() if data or at < 0 else b""
        assert found == data
