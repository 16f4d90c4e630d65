"""Who is halted is ended after a moment; who is stopped otherwise, or gone, is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from workbench.execution.workers import halts


class Engines:
    """Engines of which some are halted."""

    def __init__(self, **pids: int) -> None:
        self.engines = {
            int(name[1:]): SimpleNamespace(pid=pid, is_here=pid > 0, state="busy")
            for name, pid in pids.items()
        }
        self.signals: list[tuple[int, int]] = []

    def signal(self, engine: int, number: int) -> None:
        self.signals.append((engine, number))


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    pids: set[int] = set()
    monkeypatch.setattr(halts, "is_halted", lambda pid: pid in pids)
    return pids


def looked(engines: Engines, times: int, seen: dict[int, int] | None = None):
    told: list[int] = []
    seen = seen or {}
    for _ in range(times):
        seen = halts.look(engines, [0, 1], seen, lambda engine, seconds: told.append(engine))
    return told, seen


def test_who_is_halted_for_long_is_told_once_and_ended(halted: set[int]) -> None:
    engines = Engines(e0=10, e1=11)
    halted.add(11)
    told, seen = looked(engines, halts.LOOKS - 1)
    assert (told, engines.signals) == ([], [])
    told, _ = looked(engines, 3, seen)
    assert told == [1]
    assert engines.signals == [(1, signal.SIGKILL)]


def test_who_goes_on_in_between_is_looked_at_anew(halted: set[int]) -> None:
    engines = Engines(e0=10, e1=11)
    halted.add(10)
    _, seen = looked(engines, halts.LOOKS - 1)
    halted.clear()
    _, seen = looked(engines, 1, seen)
    halted.add(10)
    looked(engines, halts.LOOKS - 1, seen)
    assert engines.signals == []


def test_processes_of_other_machines_and_dead_ones_are_no_business_of_ours(halted: set[int]):
    engines = Engines(e0=-1, e1=11)
    engines.engines[1].state = "dead"
    halted |= {-1, 11}
    looked(engines, 2 * halts.LOOKS)
    assert engines.signals == []


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP there")
def test_the_system_says_who_is_halted() -> None:
    one = psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not halts.is_halted(one.pid)
        one.send_signal(signal.SIGSTOP)
        while one.status() != psutil.STATUS_STOPPED:
            pass
        assert halts.is_halted(one.pid)
    finally:
        one.kill()
        one.wait()
        one.stdin.close()
    assert not halts.is_halted(one.pid)
