"""In the kernel: what students' cells redefine is put back before a check is asked."""

from __future__ import annotations

import builtins
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from workbench.labs import answers, asking
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
    passed, need = answers.Report.passed, answers.Check.need.__code__
    answers.Report.passed = True
    answers.Check.need.__code__ = (lambda self, *a, **k: None).__code__
    answers.Check.__getattribute__ = lambda self, name: print
    answers.Check.value.__defaults__ = (1,)
    assert len(guard.restore()) == 4
    assert answers.Report.passed is passed
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
    made = Inside({})
    yield made
    made._guard.restore()


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


def test_places_that_a_cell_removed_are_there_again_and_said(inside, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    inside._places.append(str(tmp_path / "home"))
    assert inside.mend()["removed"] is False
    (tmp_path / "home").rmdir()
    assert inside.mend()["removed"] is True
    assert (tmp_path / "home").is_dir()


def test_an_engine_is_counted_by_its_process_though_nobody_has_noticed_its_death(monkeypatch):
    from types import SimpleNamespace

    from workbench.labs.grading import inside as grading_inside
    from workbench.notebook.session import session

    ended = subprocess.Popen([sys.executable, "-c", ""])
    assert ended.stdin is None
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays, as a zombie
    engines = [SimpleNamespace(id=0, pid=os.getpid()), SimpleNamespace(id=1, pid=ended.pid)]
    cluster = SimpleNamespace(worker_ids=[0, 1], engines=engines)
    monkeypatch.setattr(session, "cluster", cluster)
    assert grading_inside._engines() == 1
    ended.wait()


def test_an_error_that_has_no_words_is_cut_too():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    assert cut(Mute()) == ""
    assert len(cut("x" * 10**6)) == 2000
