"""What an engine does with SIGINT: it ends a cell, and spares what clears away after it."""

import os
import signal

import pytest
from notebook_shell import soon

from workbench.engine import interrupt
from workbench.engine.interrupt import InterruptWatch


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)  # handled before the call returns: this is the main thread


@pytest.fixture
def broken():
    return []


@pytest.fixture
def watch(broken, monkeypatch):
    monkeypatch.setattr(interrupt, "BREAK_OUT_S", 0.0)
    watch = InterruptWatch(broken.append)
    yield watch
    watch.close()


def test_in_a_cell_it_raises(watch):
    with watch.armed(), pytest.raises(KeyboardInterrupt):
        interrupted()


@pytest.mark.parametrize("whole", [True, False])
def test_while_a_cell_that_was_told_to_end_is_cleared_away_it_does_not(watch, whole):
    with watch.armed():
        watch.begin_clearing(whole)
        interrupted()


def test_whoever_clears_away_for_long_is_stuck_and_it_raises(watch, monkeypatch):
    monkeypatch.setattr(interrupt, "CLEARING_S", 0.0)
    with watch.armed():
        watch.begin_clearing(whole=True)
        with pytest.raises(KeyboardInterrupt):
            interrupted()


def test_the_next_cell_is_interrupted_as_ever(watch):
    with watch.armed():
        watch.begin_clearing(whole=True)
    with watch.armed(), pytest.raises(KeyboardInterrupt):
        interrupted()


@pytest.mark.parametrize(("whole", "breaks"), [(True, []), (False, [False, True])])
def test_collectives_are_broken_only_where_not_all_get_through(watch, broken, whole, breaks):
    with watch.armed():
        watch.begin_clearing(whole)
        interrupted()
        assert soon(lambda: broken == [False, True], 0.5 if whole else 30) == bool(breaks)
    assert broken == breaks
