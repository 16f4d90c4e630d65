"""A followed run, wherever it is, is told whole, once and in bounds; what is hostile is refused."""

from __future__ import annotations

import ast
import base64
import json
import os
import shlex
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fuzz_profile import tries
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import PlanError, RunError
from workbench.history import disk, folders
from workbench.jobs import control, frames, places
from workbench.jobs.control import Inbox, Order
from workbench.jobs.frames import LineWriter, Mirror
from workbench.jobs.places import FolderPlace, LinesPlace, Place, SshPlace, open_place
from workbench.shared.record import RECORD

WITHIN_S = 20.0


def rows(count: int, first: int = 0) -> bytes:
    """Return packed rows, of which no two are alike."""
    table = np.zeros(count, RECORD)
    table["step"] = np.arange(first, first + count)
    return table.tobytes()


class Job:
    """A job folder whose run this test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "1"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"format": "workbench-job/1"}))
        self.written = 0

    def begin(self, number: int = 1) -> Inbox:
        self.run = self.folder / "runs" / str(number)
        self.run.mkdir(parents=True)
        self.state("running")
        return Inbox(self.run, control.make_key(self.run))

    def state(self, state: str) -> None:
        disk.write_meta(self.run, {"plan": {}, "state": state})

    def step(self, count: int = 1, rank: int = 0) -> None:
        with disk.records_path(self.run, rank).open("ab") as file:
            file.write(rows(count, self.written))
        with disk.events_path(self.run, rank).open("ab") as file:
            file.write(b'{"name": "step", "t_s": %d}\n' % self.written)
        self.written += count


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


def until(place: Place, so: Callable[[], Any]) -> None:
    """Refresh until something is so."""
    pause, end = threading.Event(), int(WITHIN_S / 0.01)
    for _ in range(end):
        place.refresh()
        if so():
            return
        pause.wait(0.01)
    raise AssertionError(f"not within {WITHIN_S} s; problem: {place.problem!r}")


def content(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the files of a run by their names, of those that are followed."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if frames._NAME.fullmatch(path.name) and not path.name.startswith(without)
    }


def same(place: Place, run: Path, *, without: tuple[str, ...] = ()) -> bool:
    return content(place.folder) == content(run, without=without)


def code_of(error: pytest.ExceptionInfo[Any]) -> str:
    assert error.value.code
    return str(error.value.code)


# -- which place -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "http://host/dir", "s3://bucket", [], (), 5, b"dir", [5]])
def test_what_is_no_place_is_told(place: Any) -> None:
    with pytest.raises(PlanError) as error:
        open_place(place)
    assert code_of(error) == "WB-PLAN-239"


@pytest.mark.parametrize(
    "place",
    [
        "ssh://",
        "ssh://host",
        "ssh:///dir",
        "ssh://host:0/dir",
        "ssh://host:99999/dir",
        "ssh://host:x/dir",
        "ssh://-oProxyCommand=id/dir",
        "ssh://-l@host/dir",
        "ssh://user:word@host/dir",
        "ssh://ho st/dir",
        "ssh://host;id/dir",
        "ssh://$(id)@host/dir",
        "ssh://host/a%00b",
    ],
)
def test_an_address_that_could_mean_something_else_is_refused(place: str) -> None:
    with pytest.raises(PlanError) as error:
        open_place(place, ssh=("false",))
    assert code_of(error) == "WB-PLAN-240"


@pytest.mark.parametrize(
    ("place", "told", "folder"),
    [
        ("ssh://host/a/b", ["--", "host"], "/a/b"),
        ("ssh://Me.2@Host-1:22/a%20b", ["-p", "22", "-l", "Me.2", "--", "Host-1"], "/a b"),
        ("ssh://[::1]:22/a?b#c", ["-p", "22", "--", "::1"], "/a?b#c"),
        ("ssh://host/$(id);'\"", ["--", "host"], "/$(id);'\""),
    ],
)
def test_an_address_is_taken_apart(place: str, told: list[str], folder: str) -> None:
    assert places._address(place) == (told, folder)


def test_a_string_is_a_folder_or_a_command(job: Job, tmp_path: Path) -> None:
    job.begin()
    spaced = tmp_path / "cat a folder"
    job.folder.rename(spaced)
    found = [open_place(str(spaced)), open_place(spaced), open_place("cat /dev/null")]
    assert [type(one) for one in found] == [FolderPlace, FolderPlace, LinesPlace]
    found[2].close()
    with pytest.raises(RunError) as error:
        open_place("no-such-program of mine")
    assert code_of(error) == "WB-RUN-112"


# -- a folder --------------------------------------------------------------------------------------


def test_a_job_folder_is_its_newest_run_and_waits_for_the_first(job: Job) -> None:
    place = FolderPlace(str(job.folder))
    assert (place.folder, place.over) == (job.folder / "runs" / "1", False)
    for number in (2, 10):
        job.begin(number)
    until(place, lambda: place.folder == job.folder / "runs" / "10")
    assert FolderPlace(str(job.folder), "2").folder == job.folder / "runs" / "2"
    assert FolderPlace(str(job.run)).folder == job.run
    job.state("stopped")
    until(place, lambda: place.over)
    assert place.problem == ""
    place.close()


def test_a_run_that_has_only_begun_is_waited_for(job: Job) -> None:
    (job.folder / "runs" / "3").mkdir(parents=True)
    place = FolderPlace(str(job.folder / "runs" / "3"))
    place.refresh()
    assert (place.over, place.problem) == (False, "")


def test_a_folder_that_goes_away_is_told(job: Job) -> None:
    job.begin()
    place = FolderPlace(str(job.run))
    job.folder.rename(job.folder.with_name("moved"))
    until(place, lambda: place.problem)
    assert not place.over


def broken(kind: str, folder: Path) -> tuple[Path, str]:
    """Make a folder that cannot be followed; return it, and which run is asked for."""
    if kind == "none":
        return folder / "none", ""
    folder.mkdir()
    if kind == "other":
        (folder / "notes.txt").touch()
    if kind == "deep":
        (folder / "run.json").write_text("[" * 100_000)
        (folder / "run.json").rename(folder / "other.json")
    if kind == "absent":
        (folder / "run.json").write_text('{"format": "workbench-job/1"}')
        return folder, "7"
    if kind == "file":
        (folder / "file").touch()
        return folder / "file", ""
    return folder, ""


BROKEN = ("none", "other", "deep", "absent", "file", "empty")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_is_no_run_and_no_job_is_told(kind: str, tmp_path: Path) -> None:
    folder, run = broken(kind, tmp_path / "folder")
    with pytest.raises(RunError) as error:
        open_place(folder, run=run)
    assert code_of(error) == "WB-RUN-112"
    assert error.value.next_step


def test_orders_go_into_a_folder(job: Job) -> None:
    inbox = job.begin()
    open_place(job.folder).send(Order("pause"))
    assert [order.do for order in inbox.take()] == ["pause"]


# -- over ssh --------------------------------------------------------------------------------------

STAND_IN = """
echo "Welcome to this host"
while [ "$1" != -- ]; do shift; done
shift 2
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> tuple[str, str]:
    """Return what is called in place of ssh: it runs the command here."""
    path = tmp_path / "ssh.sh"
    path.write_text(STAND_IN)
    return "sh", str(path)


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(places, "CONNECT_S", WITHIN_S)
    monkeypatch.setattr(places, "ANSWER_S", WITHIN_S)


@pytest.fixture
def over_ssh(job: Job, ssh: tuple[str, str]) -> Iterator[Callable[..., SshPlace]]:
    made: list[SshPlace] = []

    def follow(folder: Path | str = "", run: str = "") -> SshPlace:
        place = open_place(f"ssh://host{folder or job.folder}", run=run, ssh=ssh)
        assert isinstance(place, SshPlace)
        made.append(place)
        return place

    yield follow
    for place in made:
        place.close()


def reader(place: SshPlace) -> psutil.Process:
    assert place._process is not None
    return psutil.Process(place._process._popen.pid)


def test_a_run_is_followed_over_ssh_from_before_its_beginning_to_its_end(
    job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    place = over_ssh()
    assert (place.problem, place.over) == ("", False)
    job.begin()
    job.step(3)
    (job.run / "log-rank0.txt").write_text("hello")
    (job.run / "alive").write_text('{"t": 1}')
    (job.run / "secret.txt").write_text("not for you")
    until(place, lambda: same(place, job.run))
    job.step(30_000, rank=1)
    (job.run / "alive").write_text('{"t": 2, "pid": 5}')
    until(place, lambda: same(place, job.run))
    np.savez(job.run / "weights.npz", a=np.arange(100_000))
    job.state("finished")
    until(place, lambda: place.over)
    assert same(place, job.run)
    assert place.problem == ""
    assert not (place.folder / "secret.txt").exists()
    assert not (place.folder / control.KEY).exists()
    assert place._process is None


def test_a_run_that_is_over_is_told_whole(job: Job, over_ssh: Callable[..., SshPlace]) -> None:
    job.begin()
    job.step(200_000)
    job.state("failed")
    place = over_ssh(job.run)
    until(place, lambda: place.over)
    assert same(place, job.run)


def test_large_weights_stay_where_they_are(job: Job, over_ssh: Callable[..., SshPlace]) -> None:
    job.begin()
    (job.run / "weights.npz").write_bytes(b"0" * (frames.WEIGHTS_BYTES + 1))
    job.state("finished")
    place = over_ssh()
    until(place, lambda: place.over)
    assert content(place.folder).keys() == {"run.json"}


def test_a_lost_connection_goes_on_where_it_was(
    job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    job.begin()
    place = over_ssh()
    for _ in range(4):
        job.step(20_000)
        until(place, lambda: (place.folder / "records-rank0.bin").exists())
        reader(place).send_signal(signal.SIGKILL)
        job.step(7)
        until(place, lambda: same(place, job.run))
    assert place.refused == 0
    Job.begin(job, 2)  # another run of the job is another one to follow
    job.run = job.folder / "runs" / "1"
    reader(place).send_signal(signal.SIGKILL)
    job.step(5)
    until(place, lambda: same(place, job.run))


def test_a_connection_that_stays_lost_is_told_until_it_is_back(
    job: Job, over_ssh: Callable[..., SshPlace], ssh: tuple[str, str]
) -> None:
    job.begin()
    place = over_ssh()
    Path(ssh[1]).write_text("echo 'Host is \x1b[31mdown' >&2; exit 255")
    reader(place).send_signal(signal.SIGKILL)
    until(place, lambda: "Host is" in place.problem)
    assert "\x1b" not in place.problem
    assert not place.over
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-115"
    Path(ssh[1]).write_text(STAND_IN)
    job.step(3)
    until(place, lambda: same(place, job.run))
    assert place.problem == ""


def test_a_host_that_cannot_be_reached_is_told_in_the_words_of_ssh(
    job: Job, over_ssh: Callable[..., SshPlace], ssh: tuple[str, str]
) -> None:
    before = set(folders.runs_root().iterdir())
    Path(ssh[1]).write_text("echo 'Permission denied (publickey).' >&2; exit 255")
    with pytest.raises(RunError, match="publickey") as error:
        over_ssh()
    assert code_of(error) == "WB-RUN-114"
    assert set(folders.runs_root().iterdir()) == before


def test_a_host_that_says_nothing_is_not_waited_for_long(
    over_ssh: Callable[..., SshPlace], ssh: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CONNECT_S", 0.05)
    Path(ssh[1]).write_text("exec cat >/dev/null")
    with pytest.raises(RunError) as error:
        over_ssh()
    assert code_of(error) == "WB-RUN-114"


def test_a_machine_without_ssh_is_told(job: Job) -> None:
    with pytest.raises(RunError) as error:
        open_place(f"ssh://host{job.folder}", ssh=("/no/such/ssh",))
    assert code_of(error) == "WB-RUN-114"


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_on_a_host_that_is_no_run_is_told(
    kind: str, tmp_path: Path, over_ssh: Callable[..., SshPlace]
) -> None:
    folder, run = broken(kind, tmp_path / "folder")
    with pytest.raises(RunError) as error:
        over_ssh(folder, run)
    assert code_of(error) == "WB-RUN-112"


def test_names_of_folders_are_data_on_the_other_side(
    tmp_path: Path, over_ssh: Callable[..., SshPlace]
) -> None:
    job = Job(tmp_path / 'it\'s $(touch owned) `x` ; "q" \\ ü\n!')
    job.begin()
    job.step()
    quoted = str(job.folder).replace("%", "%25")
    place = over_ssh(quoted)
    until(place, lambda: same(place, job.run))
    assert not list(tmp_path.rglob("owned"))


def test_links_in_a_run_folder_are_not_followed(
    job: Job, tmp_path: Path, over_ssh: Callable[..., SshPlace]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    job.begin()
    (job.run / "log-rank0.txt").symlink_to(secret)
    (job.run / "alive").symlink_to(secret)
    os.mkfifo(job.run / "log-rank1.txt")
    job.step()
    place = over_ssh()
    until(place, lambda: (place.folder / "records-rank0.bin").exists())
    assert content(place.folder).keys() == {"run.json", "records-rank0.bin", "events-rank0.jsonl"}


@pytest.mark.parametrize("how", ["gone", "shrank"])
def test_a_run_that_was_removed_or_begun_anew_ends_the_following(
    how: str, job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    job.begin()
    job.step(5)
    place = over_ssh()
    until(place, lambda: same(place, job.run))
    if how == "gone":
        job.run.rename(job.run.with_name("moved"))
    else:
        os.truncate(job.run / "records-rank0.bin", RECORD.itemsize)
    until(place, lambda: place.over)
    assert place.problem == places._WRONG[how][0]


def test_orders_go_over_ssh_signed_and_are_answered(
    job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    place = over_ssh()
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-116"
    inbox = job.begin()
    until(place, lambda: place._key)
    given = [Order("pause"), Order("inject", faults=("slow=1:5ms",)), Order("step", steps=3)]
    for order in given:
        place.send(order)
    assert inbox.take() == given
    late = Order("stop", number=1)  # this clock is far behind
    place.send(late)
    assert [order.do for order in inbox.take()] == ["stop"]
    assert inbox.refused == 0


def test_an_order_that_cannot_be_put_there_is_told(
    job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    job.begin()
    place = over_ssh()
    until(place, lambda: place._key)
    (job.run / control.INBOX).rename(job.run / "elsewhere")
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-115"
    (job.run / control.INBOX).symlink_to(job.run / "elsewhere")
    with pytest.raises(RunError):
        place.send(Order("stop"))
    assert os.listdir(job.run / "elsewhere") == []


def test_a_key_that_others_can_read_is_not_told(
    job: Job, over_ssh: Callable[..., SshPlace]
) -> None:
    job.begin()
    (job.run / control.KEY).chmod(0o644)
    place = over_ssh()
    until(place, lambda: same(place, job.run))
    assert place._key == b""


def test_the_reader_ends_with_who_follows(job: Job, over_ssh: Callable[..., SshPlace]) -> None:
    job.begin()
    place = over_ssh()
    process = reader(place)
    family = [process, *process.children(recursive=True)]
    place.close()
    place.close()
    assert psutil.wait_procs(family, timeout=WITHIN_S)[1] == []
    place.refresh()
    assert place._process is None


def test_the_other_side_is_asked_for_python_3_6_and_nothing_else() -> None:
    tree = ast.parse(frames.far_source(), feature_version=(3, 6))
    loaded = {
        one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names
    }
    assert loaded <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


# -- printed lines ---------------------------------------------------------------------------------


class Printed:
    """A job's output in a file, and what follows it."""

    def __init__(self, job: Job, path: Path) -> None:
        self.job, self.path = job, path
        self.path.touch()
        self._writer: LineWriter | None = None

    def pump(self) -> None:
        self._writer = self._writer or LineWriter(self.job.run, self.say)
        self._writer.pump()

    def say(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line)

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines(keepends=True)


@pytest.fixture
def printed(job: Job, tmp_path: Path) -> Printed:
    return Printed(job, tmp_path / "output")


@pytest.fixture
def follow() -> Iterator[Callable[..., LinesPlace]]:
    made: list[LinesPlace] = []

    def start(command: list[str], **more: Any) -> LinesPlace:
        place = open_place(command, **more)
        assert isinstance(place, LinesPlace)
        made.append(place)
        return place

    yield start
    for place in made:
        place.close()


def tail(printed: Printed) -> list[str]:
    return ["tail", "-n", "+1", "-f", "-s", "0.05", str(printed.path)]


def test_printed_lines_tell_all_but_what_the_ranks_printed(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    (job.run / "log-rank0.txt").write_text("hello")
    (job.run / "alive").write_text('{"t": 1}')
    place = follow(tail(printed))
    for count in (1, 500, 3):
        job.step(count, rank=count % 2)
        printed.say("loss 0.5\n")
        printed.pump()
    until(place, lambda: same(place, job.run, without=("log",)))
    np.savez(job.run / "weights.npz", a=np.arange(9))
    job.step()
    job.state("finished")
    printed.pump()
    until(place, lambda: place.over)
    assert same(place, job.run, without=("log",))
    assert (place.folder / places.LOG).read_bytes() == b"loss 0.5\n" * 3
    assert (place.problem, place.refused) == ("", 0)


def test_printed_lines_are_short_and_rows_whole(job: Job, printed: Printed) -> None:
    job.begin()
    with disk.records_path(job.run, 0).open("ab") as file:
        file.write(os.urandom(3000 * RECORD.itemsize) + b"half a row")
    printed.pump()
    assert max(map(len, printed.lines)) <= frames.PRINTED_BYTES
    told = [json.loads(line[len(frames.MARK) :]) for line in printed.lines]
    assert told[0]["h"]["dir"] == str(job.run)
    whole = [frames._inflated(one["d"]) for one in told if one["f"].startswith("records")]
    assert sum(map(len, whole)) == 3000 * RECORD.itemsize
    assert not any(len(one) % RECORD.itemsize for one in whole)


def test_a_call_prints_a_bounded_amount_and_the_rest_later(job: Job, printed: Printed) -> None:
    job.begin()
    for rank in range(3):
        disk.records_path(job.run, rank).write_bytes(os.urandom(20_000 * RECORD.itemsize))
    job.state("finished")
    sizes = []
    while not sizes or sizes[-1]:
        before = printed.path.stat().st_size
        printed.pump()
        sizes.append(printed.path.stat().st_size - before)
    assert len(sizes) > 3
    assert max(sizes) < frames.PUMP_BYTES * 1.1
    first, last = printed.lines[1], printed.lines[-1]
    states = [json.loads(frames._inflated(json.loads(line[5:])["d"])) for line in (first, last)]
    assert [one["state"] for one in states] == ["running", "finished"]


def test_what_every_reader_needs_is_told_again(
    job: Job, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.begin()
    (job.run / "alive").write_text("{}")
    printed.pump()
    told = len(printed.lines)
    printed.pump()
    assert len(printed.lines) == told
    monkeypatch.setattr(frames, "AGAIN_S", 0.0)
    printed.pump()
    assert ['"h"' in line or "run.json" in line for line in printed.lines[told:]] == [True, True]


def test_signs_of_life_are_not_printed_all_the_time(job: Job, printed: Printed) -> None:
    job.begin()
    for turn in range(5):
        (job.run / "alive").write_text(f"{turn:05}" * turn)
        printed.pump()
    assert sum('"alive"' in line for line in printed.lines) == 1


@pytest.mark.parametrize("before", ["", "2026-01-01T00:00:00Z ", "half a line of a rank "])
def test_a_marked_line_may_stand_behind_something(
    before: str, job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    job.step(5)
    printed.pump()
    printed.path.write_text("".join(before + line for line in printed.lines))
    place = follow(["cat", str(printed.path)])
    until(place, lambda: same(place, job.run))


def test_a_command_that_ends_is_begun_again_and_tells_nothing_twice(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    place = follow(["cat", str(printed.path)])
    for turn in range(4):
        printed.say(f"turn {turn}\n")
        job.step(50)
        printed.pump()
        until(place, lambda: same(place, job.run))
    job.state("stopped")
    printed.pump()
    until(place, lambda: place.over)
    text = (place.folder / places.LOG).read_text()
    assert text == "".join(f"turn {turn}\n" for turn in range(4))
    assert place.problem == ""


def test_a_stream_that_is_killed_loses_nothing(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    place = follow(tail(printed))
    for _ in range(3):
        job.step(50)
        printed.pump()
        until(place, lambda: same(place, job.run))
        place._process._popen.kill()  # type: ignore[union-attr]
    assert not place._mirror.missing


def test_lines_that_are_missing_are_said_so_and_the_rest_is_taken(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    kept = []
    for _ in range(3):
        printed.path.write_text("")
        job.step(10)
        printed.pump()
        kept.append(printed.path.read_text())
    printed.path.write_text(kept[0] + kept[2])
    place = follow(tail(printed))
    until(place, lambda: place.problem == "lines are missing")
    steps = np.concatenate(list(disk.Tail(place.folder).rows()))["step"]
    assert steps.tolist() == [*range(10), *range(20, 30)]
    assert not place.over


def test_another_run_in_the_same_output_is_not_mixed_in(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    job.step(10)
    printed.pump()
    place = follow(tail(printed))
    until(place, lambda: same(place, job.run))
    before = content(place.folder)
    printed._writer = None
    job.step(10)
    printed.pump()
    until(place, lambda: place.over)
    assert "another run" in place.problem
    assert content(place.folder) == before


def test_a_command_that_cannot_be_started_is_told() -> None:
    with pytest.raises(RunError) as error:
        open_place(["/no/such/program", "logs"])
    assert code_of(error) == "WB-RUN-117"


def test_a_command_that_fails_is_tried_again_and_told(follow: Callable[..., LinesPlace]) -> None:
    place = follow(["sh", "-c", "echo 'pod is waiting to start' >&2; exit 1"])
    until(place, lambda: place._tries > places.FRUITLESS + 3)
    assert "waiting to start" in place.problem
    assert not place.over


def test_a_command_that_tells_nothing_new_any_more_is_given_up(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    job.begin()
    printed.pump()
    place = follow(["cat", str(printed.path)])
    until(place, lambda: place.over)
    assert "exit code 0" in place.problem
    other = follow(["echo", "no marked line"])
    until(other, lambda: other.over)
    assert "marked" in other.problem


def test_the_log_keeps_the_newest(
    follow: Callable[..., LinesPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LOG_BYTES", 10_000)
    place = follow(["sh", "-c", "seq 1 100000; exec cat"])
    path = place.folder / places.LOG
    until(place, lambda: path.exists() and path.read_bytes().endswith(b"\n100000\n"))
    assert path.stat().st_size <= 10_000


def test_a_line_without_an_end_is_kept_in_pieces(follow: Callable[..., LinesPlace]) -> None:
    long = 40 * frames.LINE_BYTES
    place = follow([sys.executable, "-c", f"print('#wb1 {{' * {long // 6})"])
    path = place.folder / places.LOG
    until(place, lambda: path.exists() and place._tries)
    assert place.refused


def test_a_flood_is_taken_in_bounded_parts(
    follow: Callable[..., LinesPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    place = follow(["sh", "-c", "yes 'a line of text' | head -c 20000000; exec tail -f /dev/null"])
    monkeypatch.setattr(place, "_other", lambda line: taken.append(len(line) + 1))
    sizes = []
    while sum(taken) < 19_000_000:
        before = sum(taken)
        place.refresh()
        sizes.append(sum(taken) - before)
    assert max(sizes) <= frames.REFRESH_BYTES + (1 << 20)


def test_a_history_that_was_packed_small_is_taken_in_bounded_parts(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "REFRESH_BYTES", 1 << 20)
    job.begin()
    disk.records_path(job.run, 0).write_bytes(bytes(60_000 * RECORD.itemsize))
    job.state("finished")
    while not printed._writer or not printed._writer._seen["done"]:
        printed.pump()
    place = follow(["cat", str(printed.path)])
    sizes = [0]

    def grown() -> bool:
        sizes.append(place._mirror.size_bytes)
        return place.over

    until(place, grown)
    assert max(np.diff(sizes)) < 1.2 * (1 << 20)
    assert same(place, job.run)


# -- orders to what prints -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "control_command"),
    [
        ("kubectl logs -f pod", "exec -i pod --"),
        ("/usr/bin/kubectl logs pod -f", "exec -i pod --"),
        ("kubectl -n ns logs -f pod -c trainer", "exec -i pod -n ns -c trainer --"),
        ("kubectl logs pod trainer --namespace=ns", "exec -i pod --namespace ns -c trainer --"),
        ("kubectl logs -f --tail 5 --timestamps pod/x --context c", "exec -i pod/x --context c --"),
        ("kubectl logs -f -l app=x", ""),
        ("kubectl logs -f pod --previous", ""),
        ("kubectl get pod", ""),
        ("kubectl logs", ""),
        ("cat output", ""),
    ],
)
def test_kubectl_logs_has_a_way_back(command: str, control_command: str) -> None:
    found = places.kubectl_control(command.split())
    program = "python -m workbench control --stdin {dir}"
    expected = f"{command.split()[0]} {control_command} {program}" if control_command else ""
    assert shlex.join(found).replace("'{dir}'", "{dir}") == expected


RELAY = """
import sys
from workbench.jobs import control
control.give(sys.argv[1], control.read_order(sys.stdin.buffer.read()))
"""


def test_orders_go_through_a_command(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    inbox = job.begin()
    place = follow(tail(printed), control=[sys.executable, "-c", RELAY, "{dir}"])
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-119"
    printed.pump()
    until(place, lambda: place._about)
    place.send(Order("step", steps=4))
    assert [(order.do, order.steps) for order in inbox.take()] == [("step", 4)]
    (job.run / control.KEY).unlink()
    with pytest.raises(RunError, match="WB-RUN-108") as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-120"


@pytest.mark.parametrize(
    ("command", "code"), [(None, "WB-RUN-118"), (["/no/such/program"], "WB-RUN-120")]
)
def test_output_alone_takes_no_orders(
    command: list[str] | None, code: str, job: Job, printed: Printed,
    follow: Callable[..., LinesPlace],
) -> None:  # fmt: skip
    job.begin()
    printed.pump()
    place = follow(tail(printed), control=command)
    until(place, lambda: place._about)
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == code


@pytest.mark.parametrize("folder", ["--help", "relative", "/a\nb", 5, None])
def test_a_folder_that_output_names_is_no_option(
    folder: object, printed: Printed, follow: Callable[..., LinesPlace]
) -> None:
    printed.say(frames.line_of({"f": "", "h": {"dir": folder, "id": "a"}}))
    place = follow(tail(printed), control=["echo", "{dir}"])
    until(place, lambda: place._about)
    with pytest.raises(RunError) as error:
        place.send(Order("stop"))
    assert code_of(error) == "WB-RUN-119"


# -- the mirror ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("limit", ["MIRROR_BYTES", "MIRROR_FILES"])
def test_a_mirror_that_is_full_ends_the_following(
    limit: str, job: Job, printed: Printed, follow: Callable[..., LinesPlace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(frames, limit, 1 if limit == "MIRROR_FILES" else 20 * RECORD.itemsize)
    job.begin()
    for rank in range(30):
        job.step(1, rank=rank)
    printed.pump()
    place = follow(tail(printed))
    until(place, lambda: place.over)
    assert "full" in place.problem
    assert folders.size_bytes(place.folder) < 40 * RECORD.itemsize
    assert place._process is None


def test_a_mirror_that_cannot_be_written_ends_the_following(
    job: Job, printed: Printed, follow: Callable[..., LinesPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Mirror, frame: dict[str, Any]) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Mirror, "apply", full)
    job.begin()
    printed.pump()
    place = follow(tail(printed))
    until(place, lambda: place.over)
    assert "No space" in place.problem


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
