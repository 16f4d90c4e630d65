"""`workbench grade` on notebooks that are right, wrong, broken and hostile, with real engines.

All are graded once, two at a time, and every test looks at one of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from handed_in import BEGIN, GOOD, TORCH, cells, code, hand_in, write

from workbench.labs.grading.limits import Limits
from workbench.labs.grading.supervise import grade

pytestmark = [pytest.mark.torch, pytest.mark.cluster, pytest.mark.timeout(600)]

LIMITS = Limits(cell_s=6, total_s=240, memory_gb=2, processes=120, grace_s=9)
TAG = uuid.uuid4().hex
"""An argument of processes that try to outlive their notebook."""

PULL = "%pull square\ntotal = sum(square)\n"
SLEEP = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{TAG}']"
ESCAPE = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.execve(sys.executable, {SLEEP}, {{}})
    os._exit(0)
"""
FOOLED = """
total = 1
import builtins, math, sys
from workbench.labs import answers, asking
class Yes:
    passed = True
    def check(self, *a): return self
labs, wb = Yes(), None
builtins.print = builtins.float = lambda *a: 5
math.isclose = lambda *a, **k: True
answers.Check.expect = lambda *a, **k: True
answers.Check.need.__code__ = (lambda self, *a, **k: None).__code__
asking.check = lambda *a: Yes()
sys.modules["workbench.labs.asking"] = Yes()
"""
SECRETS = """
import os, sys
total = 5
try: input()
except Exception as error: seen = [type(error).__name__]
environ = open(f"/proc/{os.getppid()}/environ").read() if os.path.isdir("/proc") else ""
raise ValueError(f"{seen} {sys.stdin.fileno() if 0 else os.read(0, 9)} "
                 f"{'WORKBENCH_SECRET' in os.environ} {'WORKBENCH_SECRET' in environ}")
"""
BOMB = """
import os, time
for _ in range(300):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
"""


def made(folder):
    """Write the notebooks; what is wrong with each stands in its answers."""
    untidy = cells(GOOD)
    untidy[2]["source"] = TORCH.replace("torch", "nothing")
    untidy[4:5] = [code("own = 1"), untidy[4]]
    for cell in [cell for cell in untidy if cell["source"] == BEGIN]:
        untidy.remove(cell)
    write(folder / "untidy.ipynb", list(reversed(untidy)))
    write(folder / "empty.ipynb", cells())
    hand_in(folder, "mishaps", e1_1="while True: pass", e1_2="total = = 3",
            e1_5="def crossing_s(n, c_s):\n    while True: pass")  # fmt: skip
    hand_in(folder, "loops", e1_1="square = torch.ones(3) @ torch.ones(2)",
            e1_2="while True: pass",
            e1_5="import sys\ndef crossing_s(n, c_s):\n    sys.exit(3)")  # fmt: skip
    hand_in(folder, "fooled", e1_1="square = 0", e1_2=FOOLED,
            e1_5="def crossing_s(n, c_s):\n    return 1")  # fmt: skip
    hand_in(folder, "ended", e1_2="import os\nos._exit(0)",
            e1_5="import os\ndef crossing_s(n, c_s):\n    os.kill(os.getpid(), 9)")  # fmt: skip
    hand_in(folder, "stuck", e1_2="import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "while True: pass")  # fmt: skip
    hand_in(folder, "memory", e1_2='big = []\nwhile True: big.append(b"x" * 100_000_000)')
    hand_in(folder, "bomb", e1_2=BOMB)
    hand_in(folder, "murder", e1_2=ESCAPE + "time.sleep(0.5)\nos.kill(os.getppid(), 9)\n"
            "time.sleep(60)")  # fmt: skip
    hand_in(folder, "files", e1_1=f"square = rank**2{ESCAPE}",
            e1_2=PULL + ESCAPE + "import os, shutil\nprint('x' * 3_000_000)\n"
            "os.chdir('/')\nshutil.rmtree(os.environ['HOME'])\n"
            "raise ValueError('y' * 10_000_000)")  # fmt: skip
    needs_all = "assert world_size == 3\n" + GOOD["1.3"].split("\n", 2)[2]
    hand_in(folder, "engine", e1_1="import os\nsquare = rank**2\nif rank == 1: os._exit(3)",
            e1_2=SECRETS, e1_3=needs_all)  # fmt: skip
    return sorted(folder.glob("*.ipynb"))


def tagged():
    """The living processes that were told to outlive their notebook."""
    return _living(lambda process: TAG in process.cmdline())


def of_folder(folder):
    """The living processes that were told to keep their files there."""
    return _living(lambda process: process.environ().get("TMPDIR", "").startswith(str(folder)))


def _living(is_meant):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if is_meant(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    folder, temp = tmp_path_factory.mktemp("handed_in"), tmp_path_factory.mktemp("t")
    write(folder / "lab.ipynb", cells())
    lab = (folder / "lab.ipynb").rename(folder / "lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temp))
        patch.setattr("tempfile.tempdir", str(temp))
        patch.setenv("WORKBENCH_SECRET", "token")
        began = time.perf_counter()
        found = grade(made(folder), notebooks=folder, canonical=lab, limits=LIMITS, jobs=2)
    return {
        "took_s": time.perf_counter() - began, "left": [*tagged(), *of_folder(temp)],
        "left_files": list(temp.iterdir()),
        **{os.path.basename(one.file).removesuffix(".ipynb"): one for one in found},
    }  # fmt: skip


def states(one):
    return [outcome.state for outcome in one.outcomes]


def outcome(one, number):
    return next(each for each in one.outcomes if each.exercise == number)


def test_a_right_notebook_is_right_though_its_steps_were_changed_and_its_order_too(graded):
    one = graded["untidy"]
    assert states(one) == ["right"] * 4
    assert (one.status, one.points, one.problems, one.restarts) == (0, 4, [], 0)
    assert "1 step changed (cell 3): run as handed out" in one.notes
    assert "1 step missing (cell 2): run as handed out" in one.notes
    assert outcome(one, "1.1").title == "The square of the rank"
    assert one.versions["torch"]


def test_an_empty_notebook_gets_hints(graded):
    one = graded["empty"]
    assert states(one) == ["untouched"] * 4
    assert one.status == 1
    assert all(finding["hint"] for each in one.outcomes for finding in each.findings)


def test_loops_on_the_engines_and_in_a_check_and_bad_syntax_do_not_lose_the_rest(graded):
    one = graded["mishaps"]
    assert states(one) == ["stopped", "wrong", "right", "wrong"]
    assert one.restarts == 0
    assert outcome(one, "1.1").error == "it took longer than 6 s and was interrupted"
    assert "SyntaxError" in outcome(one, "1.2").error
    assert "time limit" in outcome(one, "1.5").reason


def test_an_exception_on_the_engines_and_a_loop_in_the_notebook_are_named(graded):
    one = graded["loops"]
    assert states(one) == ["wrong", "stopped", "right", "wrong"]
    assert "RuntimeError" in outcome(one, "1.1").error
    assert "interrupted" in outcome(one, "1.2").error
    assert "SystemExit" in outcome(one, "1.5").reason


def test_a_check_is_not_fooled_by_names_that_a_cell_redefines(graded):
    one = graded["fooled"]
    assert states(one) == ["wrong", "wrong", "right", "wrong"]
    assert "builtins.print" in outcome(one, "1.2").put_back
    assert one.problems == []


def test_cells_that_end_the_process_are_left_out_and_the_rest_is_graded(graded):
    one = graded["ended"]
    assert states(one) == ["right", "stopped", "right", "stopped"]
    assert outcome(one, "1.2").error == "it ended the notebook's process (exit code 0)"
    assert "in its check" in outcome(one, "1.5").error
    assert "SIGKILL" in outcome(one, "1.5").error
    assert (one.restarts, one.status) == (1, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [("stuck", "heeded no interrupt"), ("memory", "GB of memory: 2 GB are allowed"),
     ("bomb", "processes: at most 120 are allowed"), ("murder", "status -9")],
)  # fmt: skip
def test_what_cannot_be_interrupted_is_ended_and_named_and_the_rest_graded(graded, name, words):
    one = graded[name]
    assert states(one) == ["right", "stopped", "right", "right"]
    assert words in outcome(one, "1.2").error
    assert one.restarts == 1


def test_removed_folders_endless_words_and_processes_that_leave_do_no_harm(graded):
    one = graded["files"]
    assert states(one) == ["right"] * 4
    assert len(outcome(one, "1.2").error) < 2100


def test_an_engine_that_a_cell_ended_is_there_for_the_exercises_after_it(graded):
    one = graded["engine"]
    assert states(one) == ["wrong", "right", "right", "right"]
    assert any("Exercise 1.1 ended engines" in words for words in one.problems)
    assert one.restarts == 1


def test_a_cell_sees_no_secret_and_no_input(graded):
    error = outcome(graded["engine"], "1.2").error
    assert error == "ValueError: ['StdinNotImplementedError'] b'' False False"


def test_nothing_is_left_when_all_are_graded(graded):
    assert graded["left"] == []
    assert graded["left_files"] == []


# -- the command -----------------------------------------------------------------------------------


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


def test_what_the_time_does_not_reach_is_not_graded(tmp_path):
    lab = write(tmp_path / "lab.ipynb", cells())
    theirs = hand_in(tmp_path, "slow", e1_2="import time\ntime.sleep(600)")
    done = command(theirs, "--lab", lab, "--total", "15", "--limit", "100", "--json", "-")
    assert done.returncode == 2
    one = json.loads(done.stdout)["notebooks"][0]
    assert one["exercises"][-1]["state"] == "not graded"
    assert "15 s were over" in one["problems"][0]
    assert one["exercises"][-1]["error"].startswith("not reached")


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
    _until(lambda: not of_folder(temp) and not tagged() and not list(temp.iterdir()), 60)


def _until(condition, timeout_s):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
