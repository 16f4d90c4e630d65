"""The command `workbench grade`: its arguments, its exit statuses, and how it ends."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from handed_in import (
    ESCAPE,
    GOOD,
    book,
    cells,
    code,
    hand_in,
    of_folder,
    tagged,
    without_rights,
    write,
)  # fmt: skip

pytestmark = [pytest.mark.torch, pytest.mark.cluster]


def command(*given, **settings):
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", "grade", *map(str, given)],
        capture_output=True, text=True, check=False, timeout=300, **settings,
    )  # fmt: skip


def test_what_is_no_notebook_is_named_and_status_2_says_so(tmp_path):
    (tmp_path / "broken.ipynb").write_text("{")
    (tmp_path / "bytes.ipynb").write_bytes(b"\xff\xfe")
    write(tmp_path / "other.ipynb", [code("x = 1")], lab=None)
    write(tmp_path / "none.ipynb", cells(GOOD), lab=77)
    names = ["broken", "bytes", "other", "none", "missing"]
    paths = [tmp_path / f"{name}.ipynb" for name in names]
    done = command(*paths, tmp_path, "--json", tmp_path / "out.json")
    assert done.returncode == 2
    content = json.loads((tmp_path / "out.json").read_text())
    why = [one["problems"][0] for one in content["notebooks"]]
    for words, expected in zip(
        why, ["not JSON", "not UTF-8", "no lab", "lab 77", "no such", "a folder"], strict=True
    ):
        assert expected in words
    assert "solated" in done.stdout.splitlines()[0]
    assert "\nNot graded\n" in done.stdout
    assert content["ungraded"] == 6


@pytest.mark.parametrize(
    ("given", "words"),
    [(["--limit", "0"], "--limit is out of range"), (["--total", "nan"], "--total is out"),
     (["--memory", "-1"], "--memory"), (["--disk", "0"], "--disk"), (["--jobs", "0"], "--jobs"),
     (["--json", "/nowhere/x.json"], "WB-PLAN-023"),
     (["--lab", "/nowhere/lab.ipynb"], "no such file"), (["--limit", "x"], "invalid float")],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_status_2(tmp_path, given, words):
    done = command(tmp_path / "a.ipynb", *given)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_notebook_of_another_lab_is_not_graded_as_this_one(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells())
    theirs = write(tmp_path / "a.ipynb", [code("# YOUR CODE 2.1\nx = 1")], lab=2)
    done = command(theirs, "--lab", lab, "--json", "-")
    assert done.returncode == 2
    problems = json.loads(done.stdout)["notebooks"][0]["problems"]
    (problem,) = problems
    assert "lab 2" in problem
    assert "lab 1" in problem


def test_a_lab_without_checks_is_no_lab(tmp_path):
    write(tmp_path / "lab.ipynb", [code("x = 1")])
    done = command(tmp_path / "a.ipynb", "--lab", tmp_path / "lab.ipynb")
    assert done.returncode == 2
    assert "no checks" in done.stderr


def test_a_lab_with_its_solutions_is_not_graded_against(tmp_path):
    solved = book(cells(GOOD))
    solved["metadata"]["workbench"]["version"] = "solved"
    (tmp_path / "lab_1.ipynb").write_text(json.dumps(solved))
    done = command(write(tmp_path / "a.ipynb", []), "--lab", tmp_path / "lab_1.ipynb")
    assert done.returncode == 2
    assert "the solutions" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's full device")
def test_what_was_graded_is_in_the_file_though_nothing_can_be_printed(tmp_path):
    (tmp_path / "a.ipynb").write_text("{")
    out = tmp_path / "out.json"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "workbench.cli", "grade", tmp_path / "a.ipynb", "--json", out],
            stdout=full, stderr=full, check=False, timeout=300,
        )  # fmt: skip
    assert done.returncode != 0
    assert "not JSON" in json.loads(out.read_text())["notebooks"][0]["problems"][0]


def test_a_file_that_cannot_be_written_in_the_end_is_named_and_the_table_printed(tmp_path):
    (tmp_path / "a.ipynb").write_text("{")
    (tmp_path / "full").symlink_to("/dev/full")
    done = command(tmp_path / "a.ipynb", "--json", tmp_path / "full")
    assert done.returncode == 2
    assert "--json" in done.stderr
    assert "not JSON" in done.stdout


ANCESTORS = """
import os, re
def environment_above(pid):
    while pid > 1:
        pid = int(re.search(r"PPid:\\s*(\\d+)", open(f"/proc/{pid}/status").read())[1])
        try:
            yield open(f"/proc/{pid}/environ").read()
        except OSError:
            yield ""
seen = list(environment_above(os.getpid()))
raise ValueError(f"{len(seen) > 2} {any('WORKBENCH_SECRET' in each for each in seen)}")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc")
def test_no_process_above_a_cell_shows_it_a_secret_of_the_command(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells(numbers=["1.2"]))
    theirs = write(tmp_path / "a.ipynb", cells({"1.2": f"# YOUR CODE 1.2\n{ANCESTORS}"}, ["1.2"]))
    env = {**os.environ, "WORKBENCH_SECRET": "token"}
    done = command(theirs, "--lab", lab, "--json", "-", env=env, preexec_fn=without_rights)
    (one,) = json.loads(done.stdout)["notebooks"][0]["exercises"]
    assert one["error"] == "ValueError: True False"


def test_a_lab_that_no_checks_belong_to_is_not_graded(tmp_path):
    lab = write(tmp_path / "lab.ipynb", [code("# YOUR CODE 77.1", exercise="77.1"),
                                         code("x", check="77.1")], lab=77)  # fmt: skip
    done = command(lab, "--lab", lab, "--json", "-")
    assert done.returncode == 2
    problem = json.loads(done.stdout)["notebooks"][0]["problems"][0]
    assert "not start" in problem
    assert "seen:    77" in problem.replace("'", "")


def test_what_the_time_does_not_reach_is_not_graded(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells())
    theirs = hand_in(tmp_path, "slow", e1_5="import time\ntime.sleep(600)")  # the last exercise
    done = command(theirs, "--lab", lab, "--total", "15", "--limit", "100", "--json", "-")
    assert done.returncode == 2
    one = json.loads(done.stdout)["notebooks"][0]
    assert one["exercises"][-1]["state"] == "not graded"
    assert "15 s" in one["problems"][0]
    assert one["exercises"][-1]["error"].startswith("not reached")


def left_of(temp):
    return [*of_folder(temp), *tagged(), *temp.iterdir()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's adoption")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_the_command_is_ended_nothing_of_its_notebooks_lives_on(tmp_path, number):
    lab = write(tmp_path / "lab.ipynb", cells())
    theirs = hand_in(tmp_path, "slow", e1_2=f"{ESCAPE}time.sleep(600)")
    (temp := tmp_path / "t").mkdir()
    made = subprocess.Popen(
        [sys.executable, "-m", "workbench.cli", "grade", theirs, "--lab", lab, "--limit", "500"],
        env={**os.environ, "TMPDIR": str(temp)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _until(tagged, 120)
        assert of_folder(temp)
        made.send_signal(number)
        made.wait(60)
    finally:
        made.kill()
        made.wait()
    assert made.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
    _until(lambda: not left_of(temp), 60)


def _until(condition, timeout_s):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_folder_is_graded_into_a_gradebook_with_feedback(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells())
    for student, answers in (("ada", {}), ("bob", {"e1_2": "total = 4"})):
        folder = tmp_path / "submitted" / student / "lab_1"
        folder.mkdir(parents=True)
        hand_in(folder, "lab_1", **answers)
    (tmp_path / "class.csv").write_text("id,last_name\nada,Lovelace\nbob,Ross\ncy,Young\n")
    given = ("--lab", lab, "--csv", "grades.csv", "--roster", "class.csv", "--feedback", "back")
    done = command("submitted", *given, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    with (tmp_path / "grades.csv").open(newline="") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    assert {name: row["score"] for name, row in rows.items()} == {
        "ada": "4.0", "bob": "3.0", "cy": "0.0"
    }  # fmt: skip
    assert {row["max_score"] for row in rows.values()} == {"4.0"}
    assert rows["bob"]["remarks"] == "1.2 wrong"
    text = (tmp_path / "back/bob/lab_1/lab_1.ipynb").read_text()
    assert "Exercise 1.2: 0 of 1" in text
    assert "Exercise 1.3: 1 of 1" in text


def test_a_gradebook_that_cannot_be_written_is_refused_before_anything_is_graded(tmp_path):
    done = command(tmp_path / "a.ipynb", "--csv", tmp_path)
    assert done.returncode == 2
    assert "WB-PLAN-340" in done.stderr
