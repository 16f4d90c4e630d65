"""What processes use: an engine with all below it; and what a reading costs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest
from fake_processes import Process, System

from workbench.cluster.vitals import Family, Processes


def test_a_family_is_an_engine_with_all_below_it_and_is_looked_up_once() -> None:
    system = System({1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 21: 20, 30: 1})
    family = Family(lambda: list(system.parents), system.parent_of)
    found = family.of({10, 20})
    assert {root: sorted(children) for root, children in found.items()} == {10: [11, 12], 20: [21]}
    system.asked.clear()
    family.of({10, 20})
    assert system.asked == []
    system.parents[22] = 21
    assert sorted(family.of({10, 20})[20]) == [21, 22]
    assert system.asked == [22]
    del system.parents[21], system.parents[22]
    assert family.of({10, 20})[20] == []


def test_an_engine_below_another_is_its_own() -> None:
    system = System({10: 1, 20: 10, 21: 20})
    found = Family(lambda: list(system.parents), system.parent_of).of({10, 20})
    assert found == {10: [], 20: [21]}


def test_cpu_is_a_share_of_the_time_between_samples_with_the_children() -> None:
    system = System({10: 1, 11: 10})
    processes = system.processes_read()
    first = processes.read({10: 5.0})[10]
    assert first is not None
    assert first.cpu_percent is None  # nothing to compare with
    system.now_s = 2.0
    system.processes[10].cpu_s, system.processes[11].cpu_s = 1.0, 2.5
    second = processes.read({10: 5.0})[10]
    assert second is not None
    assert second.cpu_percent == pytest.approx(175.0)
    assert sorted(second.pids) == [10, 11]


def test_what_a_child_did_before_it_was_seen_counts_only_if_it_is_newborn() -> None:
    system = System({10: 1})
    processes = system.processes_read()
    processes.read({10: 5.0})
    system.parents |= {11: 10, 12: 10}
    system.processes[11], system.processes[12] = Process(11), Process(12, began=time.time())
    system.processes[11].cpu_s, system.processes[12].cpu_s = 1000.0, 0.5
    system.now_s = 1.0
    reading = processes.read({10: 5.0})[10]
    assert reading is not None
    assert reading.cpu_percent == pytest.approx(50.0)


def test_another_process_with_the_same_pid_is_not_the_engine() -> None:
    system = System({10: 1})
    assert system.processes_read().read({10: 4000.0, 99: 0.0}) == {10: None, 99: None}


def test_memory_is_read_in_turn_and_follows_the_resident_set_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workbench.cluster.vitals.PSS_BUDGET_S", -1.0)  # one engine a sample
    system = System({10: 1, 20: 1})
    processes = system.processes_read()
    engines = {10: 5.0, 20: 5.0}
    first = processes.read(engines)
    assert [r and r.memory_bytes for r in first.values()] == [60, None]
    system.processes[10].rss += 7
    second = processes.read(engines)
    assert [r and r.memory_bytes for r in second.values()] == [67, 60]
    assert [p.full for p in system.processes.values()] == [1, 1]
    processes.read(engines)
    assert [p.full for p in system.processes.values()] == [2, 1]
    processes.read(engines, all_memory=True)
    assert [p.full for p in system.processes.values()] == [3, 2]


def test_a_system_without_pss_says_that_it_is_the_resident_set() -> None:
    system = System({10: 1})
    system.processes[10].pss = 0
    reading = system.processes_read().read({10: 5.0})[10]
    assert reading is not None
    assert (reading.memory_bytes, reading.memory_kind) == (100, "RSS")


def test_a_real_process_that_works_is_seen_to_work() -> None:
    code = "import sys\nprint(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            processes, began = Processes(), psutil.Process(busy.pid).create_time()
            processes.read({busy.pid: began})
            threading.Event().wait(0.3)
            reading = processes.read({busy.pid: began})[busy.pid]
        finally:
            busy.kill()
    assert reading is not None
    assert reading.cpu_percent is not None
    assert 5 < reading.cpu_percent < 150
    assert reading.memory_bytes is not None
    assert reading.memory_bytes > 1 << 20


def test_a_sample_costs_one_reading_a_process_and_a_budget_of_memory() -> None:
    system = System(dict.fromkeys(range(100, 164), 1))
    for process in system.processes.values():
        full = process.memory_full_info

        def slow(full=full):
            begins = time.thread_time()
            while time.thread_time() - begins < 0.002:
                pass
            return full()

        process.memory_full_info = slow  # type: ignore[method-assign]
    processes = system.processes_read()
    processes.read(dict.fromkeys(range(100, 164), 5.0))
    assert {process.read for process in system.processes.values()} == {1}
    assert 1 <= sum(process.full for process in system.processes.values()) <= 4
