"""What stands below a followed job's dashboard: what its ranks printed, bounded, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import RunError
from workbench.history import disk
from workbench.jobs.followed import FollowedJob, follow
from workbench.notebook import jobs
from workbench.notebook.jobs import OUTPUT_BYTES, JobView, Printed
from workbench.shared.plan import make_plan


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is published below the cell, the latest last."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "workbench.views.blocks.notebook_publisher",
        lambda: lambda bundle, display_id, update: found.append(bundle),
    )
    monkeypatch.setattr("workbench.views.blocks.in_notebook", lambda: True)
    return found


def run_in(folder: Path, **about: Any) -> SimpleNamespace:
    return SimpleNamespace(
        engines=(0, 1), error=None, output_of=lambda rank: folder / f"log-rank{rank}.txt", **about
    )


def test_what_is_printed_is_text_whatever_it_looks_like(tmp_path: Path, shown: list[Any]) -> None:
    (tmp_path / "log-rank1.txt").write_text("<script>alert(1)</script>\n")
    Printed(run_in(tmp_path)).update(final=True)  # type: ignore[arg-type]
    assert "<script>" not in shown[-1]["text/html"]
    assert "&lt;script&gt;" in shown[-1]["text/html"]


def test_of_a_long_output_the_end_is_kept_and_its_file_is_named(
    tmp_path: Path, shown: list[Any]
) -> None:
    log = tmp_path / "log-rank0.txt"
    printed = Printed(run_in(tmp_path))  # type: ignore[arg-type]
    with log.open("a") as file:
        for number in range(8):
            file.write("\n".join([f"part {number}"] * (OUTPUT_BYTES // 14)) + "\n")
            file.flush()
            printed.update(final=True)
    text = shown[-1]["text/plain"]
    assert "part 7" in text
    assert "part 0" not in text
    assert str(log) in text
    assert len(text) < 4 * OUTPUT_BYTES


def test_a_letter_that_comes_in_two_halves_is_whole(tmp_path: Path, shown: list[Any]) -> None:
    log = tmp_path / "log-rank0.txt"
    printed = Printed(run_in(tmp_path))  # type: ignore[arg-type]
    for half in (b"a\xc3", b"\xa4b\n"):
        with log.open("ab") as file:
            file.write(half)
        printed.update(final=True)
    assert "aäb" in shown[-1]["text/plain"]


def test_why_a_job_failed_is_said_below(tmp_path: Path, shown: list[Any]) -> None:
    run = run_in(tmp_path)
    run.error = RunError("Rank 1 failed: no luck", code="WB-RUN-102")
    Printed(run).update(final=True)  # type: ignore[arg-type]
    assert "no luck" in shown[-1]["text/html"]


def job_run(folder: Path, host: str = "elsewhere", **about: Any) -> FollowedJob:
    """Follow a run that has no steps yet, as the folder of a job has it."""
    plan = make_plan(Recipe("print(1)"), "mirrored", workers=2)
    meta = {
        "name": "walk", "number": 1, "plan": plan.to_wire(), "ranks": [0, 1], "state": "running",
        "began": 1.0, "joined": True, "data_parallel": True, "job": {"host": host}, **about,
    }  # fmt: skip
    disk.write_meta(folder, meta)
    return follow(folder)


@pytest.fixture
def followed(tmp_path: Path) -> Any:
    runs: list[FollowedJob] = []

    def make(**about: Any) -> FollowedJob:
        runs.append(job_run(tmp_path / "walk", **about))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
    for thread in threading.enumerate():
        if thread.name == "workbench-job":
            thread.join(10)


def test_a_dashboard_says_where_its_job_goes_on_and_names_that_host(followed: Any) -> None:
    run = followed()
    snapshot = run.snapshot()
    assert snapshot.place == "walk @ elsewhere"
    assert {worker.host for worker in snapshot.workers} <= {"elsewhere"}


def test_a_run_that_is_followed_twice_is_one_run(followed: Any) -> None:
    first = followed()
    assert followed() is first
    first.close()
    second = followed(state="finished")
    assert second is not first
    second.over.wait(10)
    assert followed(state="finished") is second
    assert followed(began=2.0) is not second


def test_a_picture_of_a_failed_job_begins_with_the_reason(followed: Any) -> None:
    run = followed(state="failed", error="Rank 1 failed: no luck [WB-RUN-066]\n  next: more luck")
    run.over.wait(10)
    assert run.snapshot().banner == "Rank 1 failed: no luck [WB-RUN-066]"


def test_a_dashboard_is_not_drawn_where_nothing_is_new(
    followed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, drawn = followed(), []
    view = JobView(run, "off")
    view._pump.end()
    monkeypatch.setattr(view, "_shown", drawn.append)
    now = time.monotonic()
    for late_s in (0.0, 1.0, 1.1):
        monkeypatch.setattr(jobs.time, "monotonic", lambda late_s=late_s: now + late_s)
        view._draw()
    assert drawn == ["update"]
    run.heard += 1
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now + 2.0)
    view._draw()
    assert drawn == ["update", "update"]


def test_jobs_are_the_list_also_where_the_package_was_loaded_first() -> None:
    code = (
        "import workbench.jobs.places, workbench as wb\n"
        "import workbench.notebook.jobs\n"
        "import workbench.jobs.frames as frames\n"
        "print(type(wb.jobs).__name__, wb.jobs.places.__name__, frames.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Jobs", "workbench.jobs.places", "workbench.jobs.frames"]
