"""A run is followed through lines that a command prints: whole, once and in bounds."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from followed import Job, code_of, content, same, try_again_soon, until

from workbench.errors import RunError
from workbench.history import disk, folders
from workbench.jobs import control, frames, places
from workbench.jobs.control import Order
from workbench.jobs.frames import LineWriter, Mirror
from workbench.jobs.places import LinesPlace, open_place
from workbench.shared.record import RECORD


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "job")


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    try_again_soon(monkeypatch)


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
    until(place, lambda: place.problem.endswith("missing"))
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
    assert "mirror" in place.problem
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
