"""A followed run, wherever it is, is told whole, once and in bounds; what is hostile is refused."""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from followed import WITHIN_S, Job, code_of, content, same, try_again_soon, until

from workbench.errors import PlanError, RunError
from workbench.history import folders
from workbench.jobs import control, frames, places
from workbench.jobs.control import Order
from workbench.jobs.places import FolderPlace, LinesPlace, SshPlace, open_place
from workbench.shared.record import RECORD


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_soon(monkeypatch)


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


def test_a_folder_that_is_not_there_is_told_with_those_that_are(job: Job) -> None:
    job.begin()
    (job.folder.parent / "other").mkdir()
    mistyped = f"{job.folder}x"
    told = places.nowhere(mistyped, ["train", "train@1"])
    assert told.code == "WB-RUN-112"
    assert mistyped in told.seen
    allowed = str(told.allowed)
    assert all(one in allowed for one in (str(job.folder.parent), job.folder.name, "train@1"))
    assert "other" not in allowed
    assert job.folder.name in str(told.next_step)
    with pytest.raises(RunError) as error:
        open_place(mistyped)
    assert job.folder.name in str(error.value.allowed)


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
