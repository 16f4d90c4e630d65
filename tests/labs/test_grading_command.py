"""The command `workbench grade`: its arguments, its exit statuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from handed_in import ESCAPE, GOOD, cells, code, hand_in, of_folder, tagged, write

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
        why, ["not JSON", "not UTF-8", "of no lab", "lab 77", "no such", "a folder"], strict=True
    ):
        assert expected in words
    assert done.stdout.startswith("Not graded")
    assert content["ungraded"] == 6


@pytest.mark.parametrize(
    ("given", "words"),
    [(["--limit", "0"], "--limit is out of range"), (["--total", "nan"], "--total is out"),
     (["--memory", "-1"], "--memory"), (["--jobs", "0"], "--jobs"),
     (["--json", "/nowhere/x.json"], "--json cannot be written"),
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
    assert problems == ["It is of lab 2; lab 1 is asked for."]


def test_a_lab_without_checks_is_no_lab(tmp_path):
    write(tmp_path / "lab.ipynb", [code("x = 1")])
    done = command(tmp_path / "a.ipynb", "--lab", tmp_path / "lab.ipynb")
    assert done.returncode == 2
    assert "no checks" in done.stderr


def test_a_lab_that_no_checks_belong_to_is_not_graded(tmp_path):
    lab = write(tmp_path / "lab.ipynb", [code("# YOUR CODE 77.1", exercise="77.1"),
                                         code("x", check="77.1")], lab=77)  # fmt: skip
    done = command(lab, "--lab", lab, "--json", "-")
    assert done.returncode == 2
    problem = json.loads(done.stdout)["notebooks"][0]["problems"][0]
    assert "did not start" in problem
    assert "There is no lab of that name" in problem


def test_what_the_time_does_not_reach_is_not_graded(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells())
    theirs = hand_in(tmp_path, "slow", e1_2="import time\ntime.sleep(600)")
    done = command(theirs, "--lab", lab, "--total", "15", "--limit", "100", "--json", "-")
    assert done.returncode == 2
    one = json.loads(done.stdout)["notebooks"][0]
    assert one["exercises"][-1]["state"] == "not graded"
    assert "15 s were over" in one["problems"][0]
    assert one["exercises"][-1]["error"].startswith("not reached")


def left_of(temp):
    return [*of_folder(temp), *tagged(), *temp.iterdir()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's adoption")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_the_command_is_ended_nothing_of_its_notebooks_lives_on(tmp_path, number):
    lab = write(tmp_path / "lab.ipynb", cells())
    began = tmp_path / "began"
    theirs = hand_in(tmp_path, "slow", e1_2=f"{ESCAPE}open({str(began)!r}, 'w').close()\n"
                     "time.sleep(600)")  # fmt: skip
    (temp := tmp_path / "t").mkdir()
    made = subprocess.Popen(
        [sys.executable, "-m", "workbench.cli", "grade", theirs, "--lab", lab, "--limit", "500"],
        env={**os.environ, "TMPDIR": str(temp)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _until(began.exists, 120)
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
