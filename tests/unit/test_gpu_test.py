"""The runner of `--gpu-test`: a stage that hangs, crashes or talks nonsense costs itself only."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import psutil
import pytest

from workbench.doctor import gpus
from workbench.doctor.gpus import Asked, Stage

BAD = """
import os, subprocess, sys, time
from workbench.doctor.children import main

def good(child):
    child.say("ok", "good.one", "one", "done", answer=42)

def waits_for_ever():
    time.sleep(600)

def hangs(child):
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    child.say("ok", "hangs.one", "the first half", f"pid {left.pid}", pid=left.pid)
    child.on_late = lambda: print("SHORTLY BEFORE THE END", flush=True)
    waits_for_ever()

def crashes(child):
    child.say("ok", "crashes.one", "the first half", "done")
    os.abort()

def raises(child):
    raise ValueError("no such thing")

def garbage(child):
    child.say("ok", "garbage.one", "one", "done")
    with open(sys.argv[2], "a") as file:
        file.write("\\x00 this is no line\\n")

def silent(child):
    pass

def fails(child):
    child.say("fail", "fails.one", "one", "wrong")
    with child.trying("fails.two", "two"):
        raise RuntimeError("on purpose")
    child.say("ok", "fails.three", "three", "goes on")

NAMES = good, hangs, crashes, raises, garbage, silent, fails
if __name__ == "__main__":
    main({one.__name__: one for one in NAMES})
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bad_stages.py").write_text(BAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "report"

    def run(*names: str, limit_s: float = 20, total_s: float = 600, **asked):
        stages = [Stage(name, name, limit_s, needs=(), module="bad_stages") for name in names]
        told: list[str] = []
        report = gpus.run(Asked(out, "cpu", 0, total_s=total_s, **asked), told.append, stages)
        return report, {line.id: line for line in report.lines}, told

    run.out = out
    return run


def test_a_stage_that_hangs_loses_nothing_it_has_said_and_leaves_no_process(run) -> None:
    report, found, told = run("hangs", "good", limit_s=5)
    assert found["hangs.one"].status == "ok"
    whole = found["stage.hangs"]
    assert whole.status == "fail"
    assert "hangs: " in whole.found
    assert "the first half" in whole.found
    assert "waits_for_ever" in whole.next_step  # the stack of its threads
    assert "SHORTLY BEFORE THE END" in (run.out / "stages/hangs.log").read_text()
    left = found["hangs.one"].figures["pid"]
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert found["stage.good"].status == "ok"
    assert report.exit_status == 1
    assert any("hangs" in line for line in told)


def test_what_crashes_raises_or_talks_nonsense_costs_its_own_stage(run) -> None:
    report, found, _ = run("crashes", "raises", "garbage", "silent", "fails", "good")
    assert "crashed (signal 6)" in found["stage.crashes"].found
    assert found["crashes.one"].status == "ok"
    assert "no such thing" in found["stage.raises"].found
    assert (found["stage.garbage"].status, found["garbage.one"].status) == ("fail", "ok")
    assert found["stage.silent"].status == "unknown"
    assert found["fails.two"].found == "RuntimeError: on purpose"
    assert found["fails.three"].status == "ok"
    assert found["stage.fails"].found.startswith("1 of 3")
    assert found["good.one"].figures == {"answer": 42}
    assert report.failed


def test_the_report_lies_in_its_folder_and_in_one_file(run) -> None:
    report, _, _ = run("good")
    said = json.loads((run.out / "report.json").read_text())
    assert said["kind"] == "gpu-test"
    assert not said["failed"]
    assert "one: done" in (run.out / "report.txt").read_text()
    with zipfile.ZipFile(run.out.with_suffix(".zip")) as packed:
        assert {"report.json", "report.txt", "stages/good.log"} <= set(packed.namelist())
    assert report.exit_status == 0


def test_no_stage_begins_when_the_time_is_over(run) -> None:
    _, found, _ = run("good", total_s=1)
    assert found["stage.good"].status == "unknown"
    assert "1 s" in found["stage.good"].found


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpus, "missing", lambda modules: ["ipyparallel"])
    stages = [Stage("strategies", "strategies", 20)]
    report = gpus.run(Asked(tmp_path / "r", "cpu", 0), lambda text: None, stages)
    (line,) = report.lines
    assert (line.status, line.found) == ("unknown", "not installed: ipyparallel")
    assert line.next_step == "pip install ipyparallel"


def test_all_stages_together_stay_within_ten_minutes_of_work() -> None:
    names = [stage.name for stage in gpus.STAGES]
    assert len(names) == len(set(names))
    assert sum(stage.limit_s for stage in gpus.STAGES if not stage.quick) < gpus.TOTAL_S
    assert sum(stage.quick_s for stage in gpus.STAGES if stage.quick) <= 240
