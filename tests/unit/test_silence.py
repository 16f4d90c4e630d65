"""Who counts as halted, and for how long others wait for it."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
from notebook_shell import soon

from workbench.execution.workers import silence
from workbench.execution.workers.silence import LEAST_S, MOST_S, Halted, patience_s


@pytest.mark.parametrize(
    ("steps_s", "expected_s"),
    [
        ([], MOST_S),
        ([math.nan], MOST_S),
        ([0.001] * 9, LEAST_S),
        ([0.2, 0.2, 9.0], 0.6),
        ([10.0], MOST_S),
    ],
)
def test_a_worker_may_be_halted_for_some_steps_time(
    steps_s: list[float], expected_s: float
) -> None:
    assert patience_s(steps_s) == pytest.approx(expected_s)


def workers(*pids: int) -> dict[int, SimpleNamespace]:
    return {engine: SimpleNamespace(pid=pid) for engine, pid in enumerate(pids)}


def test_time_counts_from_when_a_worker_was_first_found_halted() -> None:
    stopped = {1}
    halted = Halted(lambda engine: engine in stopped)
    assert halted.look(workers(10, 11, 12), 5.0) == {1: 0.0}
    assert halted.look(workers(10, 11, 12), 6.5) == {1: 1.5}
    assert halted.look(workers(10, 99, 12), 7.0) == {1: 0.0}  # another process in its place
    stopped.clear()
    assert halted.look(workers(10, 99, 12), 8.0) == {}
    stopped.add(1)
    assert halted.look(workers(10, 99, 12), 9.0) == {1: 0.0}


def test_where_all_are_halted_nobody_waits() -> None:
    halted = Halted(lambda engine: True)
    assert halted.look(workers(10, 11), 5.0) == {}
    assert halted.look(workers(10, 11), 50.0) == {}


def test_a_halted_worker_is_ended_once_and_not_while_the_run_is_held() -> None:
    over, ended, held = threading.Event(), [], threading.Event()
    looks: list[int] = []
    held.set()

    def is_held() -> bool:
        looks.append(1)
        return held.is_set()

    silence.watch(
        over,
        workers=lambda: workers(10, 11),
        halted=lambda engine: engine == 1,
        steps_s=lambda: [0.001],
        end=lambda engine, seconds: ended.append((engine, seconds >= LEAST_S)),
        held=is_held,
    )
    assert soon(lambda: len(looks) > LEAST_S / silence.LOOK_S + 3)
    assert ended == []
    held.clear()
    assert soon(lambda: bool(ended))
    seen = len(looks)
    assert soon(lambda: len(looks) > seen + 6)
    over.set()
    assert ended == [(1, True)]
