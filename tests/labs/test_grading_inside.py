"""In the kernel: what students' cells redefine is put back before a check is asked."""

from __future__ import annotations

import builtins
import math
import os
import sys

import numpy as np
import pytest

from workbench.labs import answers, asking, report
from workbench.labs.grading.inside import Guard, Inside, cut


@pytest.fixture
def guard():
    made = Guard()
    yield made
    made.restore()


def test_nothing_is_put_back_where_nothing_was_changed(guard):
    assert guard.restore() == []


def test_builtins_and_the_functions_of_other_modules_are_put_back(guard):
    real = (builtins.print, builtins.isinstance, math.isclose, np.allclose)
    builtins.print = builtins.isinstance = math.isclose = np.allclose = lambda *a, **k: True
    del builtins.repr
    changed = guard.restore()
    assert (builtins.print, builtins.isinstance, math.isclose, np.allclose) == real
    assert repr(1) == "1"
    assert set(changed) == {
        "builtins.print", "builtins.isinstance", "builtins.repr", "math.isclose", "numpy.allclose",
    }  # fmt: skip


def test_methods_properties_and_code_of_the_checks_are_put_back(guard):
    passed, need = report.Report.passed, answers.Check.need.__code__
    report.Report.passed = True
    answers.Check.need.__code__ = (lambda self, *a, **k: None).__code__
    answers.Check.__getattribute__ = lambda self, name: print
    answers.Check.value.__defaults__ = (1,)
    assert len(guard.restore()) == 4
    assert report.Report.passed is passed
    assert answers.Check.need.__code__ is need
    assert "__getattribute__" not in vars(answers.Check)
    assert answers.Check.value.__defaults__ is None


def test_modules_in_the_place_of_ours_are_put_back(guard):
    sys.modules["workbench.labs.asking"] = math
    asking.find = None
    assert len(guard.restore()) == 2
    assert sys.modules["workbench.labs.asking"] is asking
    assert asking.find is not None


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Inside(1, {})
    yield made
    made._guard.restore()


def crossing(n, c_s):
    return c_s * n / (n - 1)


def test_a_check_is_the_real_one_whatever_the_notebook_calls_labs(inside):
    inside._names.update(labs=None, crossing_s=lambda n, c_s: 1.0)
    answers.Check.wrong = lambda *a: None
    math.isclose = lambda *a, **k: True
    inside.mend()
    found = inside.check("1.5")["report"]
    assert found["passed"] is False
    inside._names["crossing_s"] = crossing
    assert inside.check("1.5")["report"]["passed"] is True


def test_modules_that_the_lab_imported_keep_their_names(inside):
    inside._names.update(np=np, mine=3)
    inside.after_step()
    inside._names.update(np=3, mine=4)
    assert inside.mend()["put_back"] == ["np"]
    assert inside._names == {"np": np, "mine": 4}


def test_the_folder_and_the_streams_are_there_again(inside, tmp_path):
    real = sys.stdout
    os.chdir("/")
    sys.stdout = None
    assert inside.mend()["put_back"] == ["sys.stdout"]
    assert sys.stdout is real
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_an_answer_raises_is_a_finding(inside, error):
    def crossing_s(n, c_s):
        raise error

    inside._names["crossing_s"] = crossing_s
    found = inside.check("1.5")["report"]
    assert found["passed"] is False
    assert found["findings"][0]["right"] is False


def test_findings_are_of_bounded_length(inside):
    inside._names["total"] = "x" * 10**6
    found = inside.check("1.2")["report"]
    assert sum(len(one["words"]) for one in found["findings"]) <= 2000
    assert len(cut("x" * 10**6)) == 2000


def test_an_error_that_has_no_words_is_cut_too():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    assert cut(Mute()) == ""
