"""A process that is told to end: what it says, when it ends, and what leaves it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from notebook_shell import soon

from workbench.engine.telemetry import departure
from workbench.engine.telemetry.departure import Departure, Notice


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def leaving(ends: list[str]) -> Departure:
    return Departure(end=lambda: ends.append("ended"))


def test_who_takes_part_says_so_once_and_ends_after_its_cell(
    leaving: Departure, ends: list[str]
) -> None:
    said: list[Notice] = []
    with leaving.taking_part(said.append):
        leaving.answered()
        leaving.signalled()
        leaving.hear(Notice("a file is there", 30.0, host=True))
        assert said == [Notice("SIGTERM")]
        assert ends == []
    assert leaving.is_due
    later: list[Callable[[], object]] = []
    leaving.leave(SimpleNamespace(call_later=lambda delay, callback: later.append(callback)))
    assert ends == []  # it answers first
    later[0]()
    assert ends == ["ended"]


def test_a_second_signal_ends_it_at_once_but_not_one_of_the_same_moment(
    leaving: Departure, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = [100.0]
    monkeypatch.setattr(departure, "clock", lambda: at[0])
    with leaving.taking_part(lambda notice: None):
        leaving.answered()
        leaving.signalled()
        at[0] += 0.5  # Slurm tells the agent, which tells its engines, and the engines as well
        leaving.signalled()
        assert ends == []
        at[0] += 0.6
        leaving.signalled()
        assert ends == ["ended"]


def test_a_signal_outside_of_a_run_is_none_of_its_affairs(
    leaving: Departure, ends: list[str]
) -> None:
    said: list[Notice] = []
    leaving.signalled()
    with leaving.taking_part(said.append):
        pass
    assert (said, ends, leaving.is_due) == ([], [], False)


def test_a_notice_before_a_run_is_said_when_it_begins(leaving: Departure) -> None:
    said: list[Notice] = []
    notice = Notice("a file is there", host=True)
    leaving.hear(notice)
    with leaving.taking_part(said.append):
        leaving.answered()
    assert said == [notice]


def test_who_gets_no_answer_ends_by_itself(
    leaving: Departure, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departure, "ANSWER_S", 0.01)
    with leaving.taking_part(lambda notice: None):
        leaving.signalled()
        assert soon(lambda: ends == ["ended"])


def test_what_is_not_answered_yet_is_not_due_to_end_twice(
    leaving: Departure, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departure, "ANSWER_S", 0.01)
    before = set(threading.enumerate())
    with leaving.taking_part(lambda notice: None):
        leaving.answered()  # the kernel was quicker than the timer
        leaving.signalled()
        assert soon(lambda: not set(threading.enumerate()) - before)
    assert ends == []


HANDLERS = """
import os, signal, sys, time
from workbench.engine.telemetry.departure import Departure
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("ours before"))
departure = Departure()
departure.install()
os.kill(os.getpid(), signal.SIGTERM)
assert heard == ["ours before"], heard
with departure.taking_part(lambda notice: None):
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["ours before"], heard
    signal.signal(signal.SIGTERM, lambda *_: heard.append("the user's"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ["ours before", "the user's"], heard
departure.leave_now()
time.sleep(60)
"""


def test_handlers_are_heeded_and_the_process_ends_as_one_that_was_told_to() -> None:
    """What was there before counts outside of runs; a user's own in them; the end is SIGTERM's."""
    done = subprocess.run([sys.executable, "-c", HANDLERS], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM


def test_who_ignores_the_signal_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Departure().install()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
