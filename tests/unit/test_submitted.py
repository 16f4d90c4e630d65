"""`wb.jobs`: what is kept of a job, what is asked, and how it is shown."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.clients import ONE, small_job

from workbench.errors import ClusterError, PlanError
from workbench.jobs import submitted
from workbench.jobs.platforms import PLATFORMS, JobState, Ticket
from workbench.jobs.submitted import Jobs, MissingJobError, Submitted, jobs_root


class Fake:
    """A platform whose answers are set by the test."""

    name, envelope = "fake", ""
    states: dict[str, JobState]
    asked: list[str]
    log = "Traceback\n<b>no data</b>"
    refuses = ""

    def check(self, folder: Path, resources: Any) -> None:
        if Fake.refuses:
            raise ClusterError(Fake.refuses)

    def submit(self, folder: Path, resources: Any) -> Ticket:
        return Ticket("fake", f"id-{len(Fake.states)}", str(folder), 5.0)

    def state(self, ticket: Ticket) -> JobState:
        Fake.asked.append(ticket.id)
        if ticket.id not in Fake.states:
            raise ClusterError("fake does not answer.", seen="fake -j\nconnection refused")
        return Fake.states[ticket.id]

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        return "\n".join(Fake.log.splitlines()[-last:])

    def cancel(self, ticket: Ticket) -> None:
        Fake.states[ticket.id] = JobState("unknown", "fake knows no such job", gone=True)

    def place(self, ticket: Ticket) -> str:
        return f"fake://{ticket.id}"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    """Have the platform, and look at it each time."""
    monkeypatch.setitem(PLATFORMS, "fake", Fake)
    monkeypatch.setattr(submitted, "LOOK_S", 0.0)
    Fake.states, Fake.asked, Fake.refuses = {}, [], ""
    return Fake


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Hand out the folder of the jobs' files."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    return folder


def jobs_of(kept: Path) -> Jobs:
    """What a notebook that is opened finds."""
    return Jobs(lambda: kept)


def ticket(number: int = 1) -> Ticket:
    return Ticket("fake", f"id-{number}", "/shared/job", 5.0, {"runs_before": "0"})


# -- what is kept ----------------------------------------------------------------------------------


def test_a_job_is_found_by_name_id_and_place_also_by_a_notebook_opened_later(kept: Path) -> None:
    first = jobs_of(kept)
    made = [first.add(ticket(k), name) for k, name in enumerate(["train", "other", "train"])]
    for jobs in (first, jobs_of(kept)):
        assert list(jobs) == ["train@1", "other", "train"]
        assert [jobs[name].id for name in jobs] == ["id-0", "id-1", "id-2"]
        assert jobs["id-0"] is jobs["train@1"] is jobs[0]
        assert jobs[-1] is jobs.latest is jobs["train"]
        assert jobs["train"].ticket == ticket(2)
        assert "other" in jobs
        assert "third" not in jobs
    assert first["train"] is made[2]
    assert Fake.asked == []


def test_files_are_the_users_alone(kept: Path) -> None:
    before = os.umask(0)
    try:
        jobs_of(kept).add(ticket(), "train")
    finally:
        os.umask(before)
    (path,) = kept.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_jobs_lie_beside_the_runs_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    assert jobs_root() == tmp_path / "home/jobs"
    assert stat.S_IMODE(jobs_root().stat().st_mode) == 0o700


def test_damaged_files_are_left_out_with_a_note(kept: Path) -> None:
    jobs_of(kept).add(ticket(), "train")
    (good,) = kept.glob("*.json")
    wire = json.loads(good.read_text())
    damaged = [
        "", "{", "[]", "null", "[" * 40000, '"x"', "\ud800".encode("utf-8", "surrogatepass"),
        json.dumps({**wire, "format": "workbench-submitted/9"}),
        json.dumps({**wire, "ticket": {**wire["ticket"], "platform": "rm"}}),
        json.dumps({**wire, "ticket": {**wire["ticket"], "id": "--all"}}),
        json.dumps({**wire, "last": {"word": 1}}),
        json.dumps({**wire, "ticket": None}),
    ]  # fmt: skip
    for number, text in enumerate(damaged):
        data = text if isinstance(text, bytes) else text.encode()
        (kept / f"{number}.json").write_bytes(data)
    jobs = jobs_of(kept)
    assert list(jobs) == ["train"]
    assert len(jobs.notes) == len(damaged)
    assert all("damaged" in note for note in jobs.notes)
    Fake.states["id-1"] = JobState("running", "RUNNING")
    assert "damaged" in repr(jobs)


def test_the_newest_are_kept_and_jobs_of_others_come_and_go(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitted, "KEEP", 3)
    jobs, others = jobs_of(kept), jobs_of(kept)
    for number in range(5):
        (jobs if number % 2 else others).add(ticket(number), f"job{number}")
    for one in (jobs, others):
        assert list(one) == ["job2", "job3", "job4"]
    jobs.remove("job3")
    assert list(others) == ["job2", "job4"]
    assert len(list(kept.iterdir())) == 2


def test_a_job_that_cannot_be_kept_is_there_until_the_kernel_ends(tmp_path: Path) -> None:
    jobs = Jobs(lambda: tmp_path / "not" / "there")
    job = jobs.add(ticket(), "train")
    assert jobs["train"] is job
    assert len(jobs.notes) == 1
    assert str(tmp_path / "not") in jobs.notes[0]
    Fake.states["id-1"] = JobState("finished", "COMPLETED")
    assert job.state == "finished"
    jobs.remove("train")
    assert len(jobs) == 0


def test_there_is_no_such_job(kept: Path) -> None:
    jobs = jobs_of(kept)
    with pytest.raises(MissingJobError) as told:
        jobs["train"]
    assert told.value.code == "WB-PLAN-245"
    jobs.add(ticket(), "train")
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'train'"):
        jobs["trian"]
    with pytest.raises(KeyError) as asked:
        jobs[3]
    assert "-1" in str(asked.value)


# -- submitting ------------------------------------------------------------------------------------


def test_a_folder_is_checked_submitted_and_kept_under_its_name(kept: Path, tmp_path: Path) -> None:
    folder = small_job(tmp_path / "folder", name="digits")
    before = sorted(folder.iterdir())
    jobs = jobs_of(kept)
    job = jobs.submit(folder, "fake", ONE)
    assert (job.name, job.id, job.platform, job.folder) == ("digits", "id-0", "fake", folder)
    assert jobs["digits"] is job
    assert sorted(folder.iterdir()) == before
    Fake.refuses = "no such partition"
    with pytest.raises(ClusterError):
        jobs.submit(folder, "fake", ONE)
    assert len(jobs) == 1


def test_following_calls_what_it_was_given_with_the_job(kept: Path) -> None:
    jobs = jobs_of(kept)
    job = jobs.add(ticket(), "train")
    with pytest.raises(PlanError) as told:
        job.follow()
    assert told.value.code == "WB-PLAN-244"
    jobs.follower = lambda job: f"run of {job.place}"
    assert job.follow() == "run of fake://id-1"


# -- how it is -------------------------------------------------------------------------------------


def test_a_platform_is_asked_once_a_second_and_not_of_what_is_over(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitted, "LOOK_S", 1000.0)
    job = jobs_of(kept).add(ticket(), "train")
    Fake.states["id-1"] = JobState("pending", "PENDING (Resources)")
    assert (job.state, job.reason) == ("pending", "PENDING (Resources)")
    assert job.state == "pending"
    assert Fake.asked == ["id-1"]
    monkeypatch.setattr(submitted, "LOOK_S", 0.0)
    Fake.states["id-1"] = JobState("finished", "COMPLETED")
    assert job.state == "finished"
    Fake.asked.clear()
    later = jobs_of(kept)["train"]
    assert (job.state, later.state, later.reason) == ("finished", "finished", "COMPLETED")
    assert Fake.asked == []


def test_a_platform_that_does_not_answer_leaves_a_job_unknown_until_it_does(kept: Path) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    assert job.state == "unknown"
    assert job.reason == "fake does not answer. connection refused"
    assert "unknown" in repr(job)
    Fake.states["id-1"] = JobState("running", "RUNNING", 7.0)
    assert job.state == "running"


def test_a_job_that_was_cancelled_and_is_gone_was_cancelled(kept: Path) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    Fake.states["id-1"] = JobState("running", "RUNNING", 7.0)
    job.cancel()
    assert (job.state, job.last.began_s) == ("cancelled", 7.0)
    assert job.wait(5) is job
    assert "was cancelled" in repr(jobs_of(kept)["train"])
    job.cancel()


def test_waiting_ends_with_the_job_or_with_its_time(kept: Path) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    Fake.states["id-1"] = JobState("running", "RUNNING")
    with pytest.raises(TimeoutError, match="still running"):
        job.wait(0.01)
    Fake.states["id-1"] = JobState("finished", "COMPLETED")
    assert job.wait() is job


def test_a_job_that_died_before_its_first_step_is_told_as_such_with_its_last_lines(
    kept: Path,
) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    Fake.states["id-1"] = JobState("failed", "FAILED (NonZeroExitCode)", stepped=False)
    with pytest.raises(ClusterError) as told:
        job.wait(5)
    assert told.value.code == "WB-CLUSTER-094"
    for text in (str(told.value), repr(job)):
        assert "first step" in text
        assert "FAILED (NonZeroExitCode)" in text
        assert "no data" in text
    bundle = job._repr_mimebundle_()
    assert "&lt;b&gt;no data&lt;/b&gt;" in bundle["text/html"]
    assert "first step" in bundle["text/html"]
    again = jobs_of(kept)["train"]
    assert "first step" in repr(again)


def test_a_job_that_is_gone_is_waited_for_no_longer(kept: Path) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    Fake.states["id-1"] = JobState("unknown", "Slurm no longer knows job 1", gone=True)
    with pytest.raises(ClusterError, match="WB-CLUSTER-094"):
        job.wait(5)
    assert jobs_of(kept)["train"].last.reason.startswith("not asked")


def test_logs_are_shown_as_lines(kept: Path) -> None:
    job = jobs_of(kept).add(ticket(), "train")
    assert repr(job.logs()) == job.logs() == Fake.log
    assert job.logs(1) == "<b>no data</b>"


# -- all of them -----------------------------------------------------------------------------------


def test_the_table_has_all_jobs_and_asks_for_those_that_may_have_changed(kept: Path) -> None:
    jobs = jobs_of(kept)
    assert "no jobs" in repr(jobs)
    for number, state in enumerate(("finished", "running", "pending")):
        Fake.states[f"id-{number}"] = JobState(state, state.upper())  # type: ignore[arg-type]
        jobs.add(ticket(number), f"job{number}").look()
    Fake.asked.clear()
    table = jobs.table()
    assert [row[:5] for row in table.rows] == [
        ["job0", "fake", "id-0", "finished", "FINISHED"],
        ["job1", "fake", "id-1", "running", "RUNNING"],
        ["job2", "fake", "id-2", "pending", "PENDING"],
    ]
    assert Fake.asked == ["id-2", "id-1"]
    assert "job1" in jobs._repr_mimebundle_()["text/html"]


def test_a_platform_that_does_not_answer_is_asked_once_for_a_table(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(kept)
    for number in range(5):
        jobs.add(ticket(number), f"job{number}")
    assert len(jobs.table().rows) == 5
    assert Fake.asked == ["id-4"]
    Fake.states |= {f"id-{number}": JobState("running", "RUNNING") for number in range(5)}
    monkeypatch.setattr(submitted, "MOST_ASKED", 2)
    Fake.asked.clear()
    assert len(jobs.table().rows) == 5
    assert Fake.asked == ["id-4", "id-3"]


def test_what_a_platform_says_is_shown_as_text(kept: Path) -> None:
    jobs = jobs_of(kept)
    job = jobs.add(ticket(), "<i>")
    Fake.states["id-1"] = JobState("pending", "<script>alert(1)</script>")
    for shown in (job, jobs):
        assert "<script>" not in shown._repr_mimebundle_()["text/html"]
        assert "<i>" not in shown._repr_mimebundle_()["text/html"]
    assert isinstance(job, Submitted)
