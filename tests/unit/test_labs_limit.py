"""The cell of an exercise that never ends is interrupted, and named; other cells are left alone."""

from __future__ import annotations

import os
import signal

import pytest
from notebook_shell import Notebook

from workbench.errors import RunError
from workbench.labs import asking, limit
from workbench.shared.messages import CellOutcome

ENDLESS = "# YOUR CODE 3.2\nwhile True:\n    pass"


@pytest.fixture
def book():
    book = Notebook()
    yield book
    limit.install(book.shell, None)


def test_the_cell_is_named_by_its_marker():
    assert limit.exercise_of("%%distributed\n#  YOUR CODE  2.10 here\nx = 1") == "2.10"
    assert limit.exercise_of("# your code") is None


def test_an_endless_cell_is_interrupted_and_named(book):
    limit.install(book.shell, 0.2)
    cell = book.run(ENDLESS)
    assert isinstance(cell.error, KeyboardInterrupt)
    assert "exercise 3.2 took" in cell.text
    assert book.ok("x = 1").error is None


def test_other_cells_may_take_longer(book):
    limit.install(book.shell, 0.05)
    cell = book.ok("import time; began = time.monotonic()\nwhile time.monotonic() < began + 0.2: 0")
    assert "took longer" not in cell.text


def test_a_limit_in_place_of_another_strikes_once(book):
    limit.install(book.shell, 0.1)
    limit.install(book.shell, 0.3)
    cell = book.run(ENDLESS)
    assert cell.text.count("took longer") == 1
    assert "0.3 s" in cell.text


def test_without_a_limit_nothing_watches(book):
    limit.install(book.shell, 0.05)
    limit.install(book.shell, None)
    source = "# YOUR CODE 1.1\nimport time; began = time.monotonic()\n"
    assert book.ok(source + "while time.monotonic() < began + 0.2: 0").error is None


def test_a_limit_that_strikes_while_the_block_is_tidied_up_hits_nobody(monkeypatch):
    handler = signal.getsignal(signal.SIGALRM)
    plain = signal.setitimer

    def late(which, first_s, again_s=0.0):
        if signal.getsignal(signal.SIGALRM) is not handler:  # the limit's is still there
            os.kill(os.getpid(), signal.SIGALRM)
        return plain(which, first_s, again_s)

    with limit.at_most(60):
        monkeypatch.setattr(signal, "setitimer", late)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGALRM) is handler
    assert plain(signal.ITIMER_REAL, 0)[0] == 0


SHARE = "# YOUR CODE 1.5\ndef crossing_s(n, c_s):\n    return c_s * n / (n - 1)"


@pytest.fixture
def watched(book):
    limit.install(book.shell, 60)
    yield book
    for name in ("crossing_s", "reduce_to_one"):
        book.namespace.pop(name, None)
    asking.forget(1)
    asking.forget(2)


def test_after_a_syntax_error_the_older_function_is_not_looked_at(watched):
    watched.ok(SHARE)
    assert asking.check("1.5").passed
    watched.run(SHARE + " +")
    report = asking.check("1.5")
    assert not report.passed
    assert "SyntaxError" in repr(report)
    watched.ok(SHARE)
    assert asking.check("1.5").passed


def test_a_syntax_error_that_engines_would_meet_is_known_too(watched):
    error = RunError("SyntaxError: '(' was never closed", code="WB-RUN-000")
    error.outcome = CellOutcome(status="error", ename="SyntaxError")

    def distributed(line, cell):
        raise error

    watched.shell.register_magic_function(distributed, "cell", "distributed")
    watched.run("%%distributed\n# YOUR CODE 2.1\ndef reduce_to_one(x, mail:\n    pass")
    assert "SyntaxError" in repr(asking.check("2.1"))


def test_an_exercise_of_the_engines_that_ran_in_the_notebook_is_told_so(watched):
    watched.ok("# YOUR CODE 2.1\ndef reduce_to_one(x, mail):\n    pass")
    report = repr(asking.check("2.1"))
    assert "last run in the notebook" in report
    assert "%%distributed" in report


def test_an_exercise_of_the_notebook_that_ran_on_the_engines_is_told_so(watched):
    watched.shell.register_magic_function(lambda line, cell: None, "cell", "distributed")
    watched.ok(SHARE)
    watched.ok("%%distributed\n" + SHARE)
    assert "last run on the engines" in repr(asking.check("1.5"))
    watched.ok("%%distributed --local\n" + SHARE)
    assert asking.check("1.5").passed


def test_a_wrong_answer_whose_cell_failed_on_its_way_is_told_so(watched):
    watched.ok("# YOUR CODE 1.5\ndef crossing_s(n, c_s):\n    return c_s")
    watched.run("# YOUR CODE 1.5\nunknown\n" + SHARE)
    report = repr(asking.check("1.5"))
    assert "NameError" in report
