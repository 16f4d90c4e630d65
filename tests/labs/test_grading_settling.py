"""A lab is run until every exercise is settled; kernels here are made up and do as told."""

from __future__ import annotations

import time

import pytest
from handed_in import GOOD, STUBS, cells, write

from workbench.labs.grading import runner
from workbench.labs.grading.link import Gone, Reply
from workbench.labs.grading.processes import Limits
from workbench.labs.grading.reading import merge, read
from workbench.labs.grading.results import Graded, Outcome
from workbench.labs.grading.runner import Grading

LIMITS = Limits(cell_s=5, total_s=100)
YES, NO = ({"report": {"passed": passed, "findings": []}} for passed in (True, False))


class Kernels:
    """Stands in for `Link`: each kernel runs a cell by its number in `cells`, or well."""

    def __init__(self):
        self.cells, self.checks, self.made = {}, {}, []

    def __call__(self, folder, lab, mark, limits, deadline, isolation):
        assert folder.is_dir()
        assert not list(folder.parent.glob("left*")), "what a kernel left is there for the next"
        self.made.append(Kernel(self, folder))
        return self.made[-1]


class Kernel:
    def __init__(self, kernels, folder):
        self._kernels, self.folder, self.engines, self.ran = kernels, folder, 3, []
        self.removed = False

    def begin(self):
        return {}

    def end(self):
        (self.folder.parent / "left").mkdir(parents=True, exist_ok=True)

    def run(self, source, limit_s):
        self.ran.append(source)
        for number, told in self._kernels.cells.items():
            if f"# YOUR CODE {number}\n" in source and source != STUBS[number]:
                return told(self) or Reply(seconds=1.0)
        return Reply(seconds=1.0)

    def ask(self, do, *, wait_s=0, **what):
        return Reply(answer={"engines": self.engines, "removed": self.removed})

    def remember(self, runs):
        pass

    def check(self, number, limit_s):
        told = self._kernels.checks.get(number, lambda kernel: Reply(answer=YES))(self)
        answer = {"engines": self.engines, **told.answer}
        return Reply(told.error, told.interrupted, 0.5, answer)


@pytest.fixture
def kernels(monkeypatch):
    made = Kernels()
    monkeypatch.setattr(runner, "KernelLink", made)
    return made


@pytest.fixture
def run(tmp_path, kernels):
    def settle(answers=GOOD, *, total_s=100.0):
        lab = read(write(tmp_path / "lab.ipynb", cells()))
        merged = merge(lab, read(write(tmp_path / "theirs.ipynb", cells(answers))))
        graded = Graded("a.ipynb", 1, [Outcome(number) for number in merged.exercises])
        folder = tmp_path / "own"
        until = time.monotonic() + total_s
        Grading(merged, graded, folder, LIMITS, until, lambda graded, running: None).run()
        return graded

    return settle


def states(graded):
    return [one.state for one in graded.outcomes]


def gone(kernel):
    raise Gone("it ended the notebook's process")


def test_folders_that_a_cell_has_made_in_advance_are_in_no_kernels_way(run, kernels):
    def block(kernel):
        for name in map(str, range(9)):
            (kernel.folder.parent / name).mkdir(exist_ok=True)
        gone(kernel)

    kernels.cells = {"1.1": block, "1.3": block}
    graded = run()
    assert states(graded) == ["stopped", "right", "stopped", "right"]
    assert (graded.restarts, graded.problems) == (2, [])
    assert len({kernel.folder for kernel in kernels.made}) == 3


def test_a_folder_that_a_cell_has_removed_is_made_anew(run, kernels):
    def remove(kernel):
        runner.remove(kernel.folder.parent)
        gone(kernel)

    kernels.cells = {"1.2": remove}
    assert states(run()) == ["right", "stopped", "right", "right"]


def test_without_a_place_for_a_kernel_the_process_ends_so_that_another_can_go_on(run, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner.tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space left"):
        run()


def test_what_came_out_of_a_cell_in_a_kernel_that_was_given_up_is_forgotten(run, kernels):
    def end_an_engine(kernel):
        kernel.engines = 2

    def hang_without_it(kernel):
        hangs = kernel.engines < 3
        return Reply(interrupted=hangs, seconds=5.0 if hangs else 1.0)

    def pass_with_it(kernel):
        return Reply(answer=YES if kernel.engines == 3 else NO)

    kernels.cells = {"1.1": end_an_engine, "1.2": hang_without_it}
    kernels.checks = {"1.2": pass_with_it}
    graded = run()
    assert states(graded) == ["right"] * 4
    one = graded.outcomes[1]
    assert (one.error, one.seconds) == ("", 1.5)
    assert any("Exercise 1.1 ended engines" in words for words in graded.problems)


USED = GOOD | {"1.1": f"{GOOD['1.1']}\ndef twice(x):\n    return 2 * x\nend()"}
DEFINED = "%%distributed\ndef twice(x):\n    return 2 * x"


def test_functions_of_a_cell_that_ended_its_kernel_stay_for_later_exercises(run, kernels):
    kernels.cells = {"1.1": gone}
    graded = run(USED)
    assert states(graded) == ["stopped", "right", "right", "right"]
    assert [DEFINED in kernel.ran for kernel in kernels.made] == [False, True]


def test_functions_that_end_the_kernel_too_are_left_out_and_nobody_else_is_blamed(run, kernels):
    def end_if_called(kernel):
        return gone(kernel) if DEFINED in kernel.ran else Reply(answer=YES)

    kernels.cells = {"1.1": gone}
    kernels.checks = {"1.3": end_if_called}
    graded = run(USED)
    assert states(graded) == ["stopped", "right", "right", "right"]
    assert [DEFINED in kernel.ran for kernel in kernels.made] == [False, True, False]
    assert graded.restarts == 2


def test_a_cell_that_removed_files_is_left_out_when_a_later_check_fails(run, kernels):
    def remove(kernel):
        kernel.removed = True

    kernels.cells = {"1.1": remove}
    kernels.checks = {"1.3": lambda kernel: Reply(answer=NO if kernel.removed else YES)}
    graded = run()
    assert states(graded) == ["right"] * 4
    assert any("removed files" in words for words in graded.problems)


def test_what_no_answer_needs_is_named_for_the_teacher(run):
    graded = run({**GOOD, "1.2": GOOD["1.2"] + "\nimport sys; sys._getframe(1)"})
    assert [one.look_at for one in graded.outcomes] == [[], ["frames"], [], []]


def test_when_the_time_is_over_in_the_last_cell_its_exercise_is_not_graded(run, kernels):
    def sleep(kernel):
        time.sleep(1.2)
        return Reply(interrupted=True)

    kernels.cells = {"1.5": sleep}
    graded = run(total_s=1.0)
    assert states(graded) == ["right", "right", "right", "not graded"]
    assert graded.outcomes[-1].error.startswith("not reached: ")
    assert graded.status == 2


def test_an_interrupted_cell_is_stopped_whatever_its_check_says(run, kernels):
    kernels.cells = {"1.2": lambda kernel: Reply(interrupted=True)}
    graded = run()
    assert states(graded) == ["right", "stopped", "right", "right"]
    assert graded.outcomes[1].reason.count("5 s") == 1


@pytest.mark.parametrize("report", [YES, NO])
def test_an_interrupted_check_is_stopped(run, kernels, report):
    kernels.checks = {"1.5": lambda kernel: Reply(interrupted=True, answer=report)}
    graded = run()
    assert states(graded) == ["right", "right", "right", "stopped"]
    words = "in its check, the code took longer than 5 s and was interrupted"
    assert graded.outcomes[-1].reason == words
    assert graded.status == 1


def test_an_untouched_exercise_is_never_right(run):
    graded = run({"1.1": GOOD["1.1"]})
    assert states(graded) == ["right", "untouched", "untouched", "untouched"]
    assert graded.points == 1
    assert graded.outcomes[1].reason.endswith("not changed")
