"""What the kernel's interrupt waits for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench.execution import stop
from workbench.shared.events import CLEAR_S, HEARD_S, KILL_S


class Clock:
    """Time that goes on only while something is waited for: it is over at `ends_s`."""

    def __init__(self, ends_s):
        self.now_s, self.ends_s, self.pressed = 0.0, ends_s, 0

    def monotonic(self):
        return self.now_s

    def is_set(self):
        return self.now_s >= self.ends_s

    def wait(self, limit_s):
        self.now_s += limit_s
        if self.pressed:
            self.pressed -= 1
            raise KeyboardInterrupt


@pytest.fixture
def waited(monkeypatch):
    def settled(ends_s, pressed=0):
        clock, again = Clock(ends_s), []
        clock.pressed = pressed
        monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=clock.monotonic))
        stop.settle(clock, lambda: again.append(clock.now_s))
        return clock, again

    return settled


def test_an_interrupt_waits_until_an_engine_that_nobody_hears_has_been_ended(waited):
    # It has left its cell as agreed, but its answer is lost: the controller is halted, say.
    clock, _ = waited(CLEAR_S + KILL_S + HEARD_S)
    assert clock.is_set()


def test_an_interrupt_comes_back_within_30_s_whatever_does_not_end(waited):
    clock, _ = waited(float("inf"))
    assert clock.now_s < 30


def test_each_further_interrupt_is_handed_on_and_the_wait_goes_on(waited):
    clock, again = waited(3.0, pressed=2)
    assert len(again) == 2
    assert clock.is_set()
