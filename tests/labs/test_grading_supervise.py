"""What happens to one notebook, or around it, does not lose the others; here without kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict

import pytest
from handed_in import cells, write

from workbench.labs.grading import supervise
from workbench.labs.grading.isolation import NOTHING
from workbench.labs.grading.processes import Limits
from workbench.labs.grading.results import Graded, Outcome
from workbench.labs.grading.supervise import grade

LIMITS = Limits(total_s=60, restarts=2)


@pytest.fixture
def three(tmp_path):
    """Files that are no notebooks, so a runner is done with each at once."""
    paths = [tmp_path / f"{name}.ipynb" for name in "abc"]
    for path in paths:
        path.write_text("{")
    return paths


def problems(found):
    return [one.problems[0] for one in found]


def failing_once(real, error, at=1):
    """Call the real one, but for one call."""
    calls, lock = [], threading.Lock()

    def call(*given, **named):
        with lock:
            calls.append(given)
            count = len(calls)
        if count == at:
            raise error
        return real(*given, **named)

    return call


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [(tempfile, "mkdtemp", OSError(28, "No space left on device")),
     (supervise._Runners, "_start", BlockingIOError(11, "Resource temporarily unavailable")),
     (supervise, "_talk", RuntimeError("can't start new thread"))],
)  # fmt: skip
def test_what_fails_around_one_notebook_is_its_problem_alone(
    three, tmp_path, monkeypatch, where, name, error
):
    monkeypatch.setattr(where, name, failing_once(getattr(where, name), error))
    found = grade(three, notebooks=tmp_path, limits=LIMITS, isolation=NOTHING)
    assert problems(found)[0].endswith(f"{type(error).__name__}: {error}")
    assert ["not JSON" in words for words in problems(found)] == [False, True, True]
    assert [one.file for one in found] == [str(path) for path in three]


def test_a_folder_that_cannot_be_removed_loses_nothing(three, tmp_path, monkeypatch):
    failing = failing_once(supervise.remove, RecursionError("too deep"))
    monkeypatch.setattr(supervise, "remove", failing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = grade(three, notebooks=tmp_path, limits=LIMITS)
    assert ["not JSON" in words for words in problems(found)] == [True] * 3


def test_somebody_who_cannot_be_told_does_not_stop_the_grading(three, tmp_path):
    def done(graded):
        raise BrokenPipeError(32, "Broken pipe")

    found = grade(three, notebooks=tmp_path, limits=LIMITS, done=done)
    assert ["not JSON" in words for words in problems(found)] == [True] * 3


def test_a_runner_imports_nothing_from_the_folder_that_cells_write_to(tmp_path):
    (folder := tmp_path / "own").mkdir()
    for name in ("json", "psutil", "usercustomize"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    runners = supervise._Runners(tmp_path, None, LIMITS)
    given = {
        "notebooks": str(tmp_path), "canonical": None, "limits": asdict(LIMITS),
        "parent": os.getpid(), "path": str(tmp_path / "none.ipynb"), "folder": str(folder),
        "earlier": None, "until": time.monotonic() + 60,
            "isolation": asdict(NOTHING),
    }  # fmt: skip
    last, why = runners._hear(runners._start(folder), given)
    assert last is not None, why
    assert last["running"] == "over"
    assert not (tmp_path / "ran").exists()


# -- runners that end before they are done

KNOWN = Graded("a.ipynb", 1, [Outcome("1.1"), Outcome("1.2")]).to_wire()
SAY = f"""
import json, sys
given = json.loads(sys.stdin.readline())
def say(running, *states, **more):
    print(json.dumps(dict(graded(states), running=running, **more)), flush=True)
def graded(states):
    found = given["earlier"] or json.loads({json.dumps(KNOWN)!r})
    for one, state in zip(found["exercises"], states):
        one["state"] = state
    return found
def earlier():
    return [one["state"] for one in given["earlier"]["exercises"]]
"""


@pytest.fixture
def runners(tmp_path, monkeypatch):
    """Have scripts run in place of runners; return what came out and the folders they had."""
    path = write(tmp_path / "a.ipynb", cells())

    def run(*scripts):
        waiting, folders = list(scripts), []

        def start(self, folder):
            folders.append(folder)
            made = subprocess.Popen(
                [sys.executable, "-c", SAY + waiting.pop(0)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            self._living[made.pid] = made
            return made

        monkeypatch.setattr(supervise._Runners, "_start", start)
        (found,) = grade([path], notebooks=tmp_path, limits=LIMITS)
        assert not any(folder.exists() for folder in folders)
        assert len(set(folders)) == len(scripts)
        return found

    return run


def states(graded):
    return [one.state for one in graded.outcomes]


OVER = "say('over', *[s if s != 'not graded' else 'right' for s in earlier()])"


def test_a_cell_that_ends_its_runner_is_left_out_and_the_next_goes_on(runners):
    found = runners("say('1.1', 'not graded', 'not graded'); sys.exit(3)", OVER)
    assert states(found) == ["stopped", "right"]
    assert "status 3" in found.outcomes[0].error


def test_a_runner_that_ends_in_nobodys_cell_is_followed_by_another(runners):
    found = runners("say('', 'right', 'not graded'); raise OSError('no space')", OVER)
    assert states(found) == ["right", "right"]


def test_a_cell_that_was_right_and_ends_a_later_runner_is_left_out(runners):
    found = runners("say('1.1', 'right', 'not graded'); sys.exit(3)", OVER)
    assert states(found) == ["stopped", "right"]


def test_what_is_known_is_kept_when_the_next_runner_says_nothing(runners):
    found = runners("say('1.1', 'not graded', 'not graded'); sys.exit(3)", "sys.exit(4)", OVER)
    assert states(found) == ["stopped", "right"]


def test_runners_are_not_started_anew_for_ever(runners):
    found = runners(*["say('', 'right', 'not graded'); sys.exit(5)"] * 3)
    assert states(found) == ["right", "not graded"]
    assert "status 5" in found.problems[-1]
    assert found.outcomes[1].reason.startswith("not reached: ")
    assert found.status == 2


def test_a_runner_that_says_what_no_runner_says_is_not_believed(runners):
    forged = """
say('1.1', 'not graded', 'not graded')
say('over', 'best', 'right')
print('[' * 100_000)
say('over', 'right', 'right', seconds='x')
say('over', 'right', 'right', problems=3)
"""
    found = runners(forged, OVER)
    assert states(found) == ["stopped", "right"]
