"""`workbench grade` on notebooks that are right, wrong, broken and hostile, with real engines.

All are graded once, two at a time, and every test looks at one of them.
"""

from __future__ import annotations

import os

import pytest
from handed_in import BEGIN, ESCAPE, GOOD, TORCH, cells, code, hand_in, of_folder, tagged, write

from workbench.labs.grading.isolation import find_out
from workbench.labs.grading.processes import Limits
from workbench.labs.grading.supervise import grade

pytestmark = [pytest.mark.torch, pytest.mark.cluster, pytest.mark.timeout(600)]

LIMITS = Limits(cell_s=6, total_s=240, memory_gb=2, disk_gb=0.1, processes=120, grace_s=9)
PULL = "%pull square\ntotal = sum(square)\n"
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
try: environ = open(f"/proc/{os.getppid()}/environ").read()
except OSError: environ = ""
raise ValueError(f"{seen} {sys.stdin.fileno() if 0 else os.read(0, 9)} "
                 f"{'WORKBENCH_SECRET' in os.environ} {'WORKBENCH_SECRET' in environ}")
"""
BOMB = """
import os, time
for _ in range(300):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
time.sleep(60)
"""
FILL = """
import os, time
for i in range(300):
    with open(f"file{i}", "wb") as file:
        file.write(os.urandom(10_000_000))
    time.sleep(0.1)
time.sleep(60)
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
    hand_in(folder, "ended", e1_2="import os, contextlib\nfor i in range(9):\n"
            "    with contextlib.suppress(OSError): os.makedirs(f'../../{i}')\nos._exit(0)",
            e1_5="import os\ndef crossing_s(n, c_s):\n    os.kill(os.getpid(), 9)")  # fmt: skip
    hand_in(folder, "stuck", e1_2="import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "while True: pass")  # fmt: skip
    hand_in(folder, "memory", e1_2="import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            'big = []\nwhile True: big.append(b"x" * 100_000_000)')  # fmt: skip
    hand_in(folder, "bomb", e1_2=BOMB)
    hand_in(folder, "disk", e1_2=FILL)
    hand_in(folder, "murder", e1_2=ESCAPE + "import shutil\ntime.sleep(0.5)\n"
            "shutil.rmtree('../..', ignore_errors=True)\nos.kill(os.getppid(), 9)\n"
            "time.sleep(60)")  # fmt: skip
    hand_in(folder, "files", e1_1=f"square = rank**2{ESCAPE}",
            e1_2=PULL + ESCAPE + "import os, shutil\nprint('x' * 3_000_000)\n"
            "os.chdir('/')\nshutil.rmtree(os.environ['HOME'])\n"
            "raise ValueError('y' * 10_000_000)")  # fmt: skip
    needs_all = "assert world_size == 3\n" + GOOD["1.3"].split("\n", 2)[2]
    hand_in(folder, "engine", e1_1="import os\nsquare = rank**2\nif rank == 1: os._exit(3)",
            e1_2=SECRETS, e1_3=needs_all)  # fmt: skip
    return sorted(folder.glob("*.ipynb"))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    folder, temp = tmp_path_factory.mktemp("handed_in"), tmp_path_factory.mktemp("t")
    write(folder / "lab.ipynb", cells())
    lab = (folder / "lab.ipynb").rename(folder / "lab")
    temp.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temp))
        patch.setattr("tempfile.tempdir", str(temp))
        patch.setenv("WORKBENCH_SECRET", "token")
        found = grade(made(folder), notebooks=folder, canonical=lab, limits=LIMITS, jobs=2)
    return {
        "left": [*tagged(), *of_folder(temp)], "left_files": list(temp.iterdir()),
        "mode": temp.stat().st_mode & 0o7777,
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
    assert [n for n in one.notes if n.startswith("1 cell ") and "changed (cell 3 " in n]
    assert [n for n in one.notes if n.startswith("1 cell ") and "missing (cell 2 " in n]
    assert outcome(one, "1.1").title == "The square of the rank"
    assert one.versions["torch"]


def test_an_empty_notebook_gets_hints(graded):
    one = graded["empty"]
    assert states(one) == ["untouched"] * 4
    assert one.status == 1
    assert all(each.findings for each in one.outcomes)
    assert all(finding["hint"] for each in one.outcomes for finding in each.findings)


def test_loops_on_the_engines_and_in_a_check_and_bad_syntax_do_not_lose_the_rest(graded):
    one = graded["mishaps"]
    assert states(one) == ["stopped", "wrong", "right", "stopped"]
    assert one.restarts == 0
    assert outcome(one, "1.1").error.count("6 s") == 1
    assert "SyntaxError" in outcome(one, "1.2").error
    assert "check" in outcome(one, "1.5").reason
    assert "6 s" in outcome(one, "1.5").reason
    assert "time limit" in outcome(one, "1.5").findings[0]["words"]


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
    assert outcome(one, "1.2").error.endswith("(exit code 0)")
    assert "its check" in outcome(one, "1.5").error
    assert "SIGKILL" in outcome(one, "1.5").error
    assert (one.restarts, one.status) == (1, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [("stuck", "within 6 s"), ("memory", "GB of memory: 2 GB are allowed"),
     ("bomb", "processes: at most 120 are allowed"),
     ("disk", "more than 0.1 GB")],
)  # fmt: skip
def test_what_cannot_be_interrupted_is_ended_and_named_and_the_rest_graded(graded, name, words):
    one = graded[name]
    assert states(one) == ["right", "stopped", "right", "right"]
    assert words in outcome(one, "1.2").error
    assert one.restarts == 1


def test_a_cell_cannot_end_the_process_that_grades_it_or_costs_only_itself(graded):
    one = graded["murder"]
    if find_out().how:
        assert states(one) == ["right", "stopped", "right", "right"]
        assert outcome(one, "1.2").error.count("6 s") == 1
    else:
        assert states(one) == ["right", "stopped", "right", "right"]
        assert "status -9" in outcome(one, "1.2").error


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
    assert graded["mode"] == 0o755
