"""The cell of an exercise that never ends is interrupted, and named; other cells are left alone."""

from __future__ import annotations

import os
import signal

import pytest
from notebook_shell import Notebook

from workbench.labs import limit

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
    assert "exercise 3.2 took longer than 0.2 s" in cell.text
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
