"""How a process ended, in words."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from workbench.cluster import processes
from workbench.cluster.processes import Ending, EngineDiedError, Exit, Memory
from workbench.execution import outcome
from workbench.shared.members import Member
from workbench.shared.messages import CellOutcome

GB = 10**9


@pytest.mark.parametrize(
    ("end", "memory", "said"),
    [
        (Exit(1, None, 9, 3 * GB), Memory(16 * GB), "killed by SIGKILL (perhaps out of memory: it used 3.0 GB of memory)"),  # noqa: E501
        (Exit(1, None, 9, GB), Memory(16 * GB), "killed by SIGKILL (it used 1.0 GB of memory)"),
        (Exit(1, None, 9, GB), Memory(16 * GB, kills=1), "killed by SIGKILL (out of memory according to the system's counter `oom_kill`: it used 1.0 GB of memory)"),  # noqa: E501
        (Exit(1, None, 9, GB), Memory(16 * GB, 1, logged=True), "killed by SIGKILL (out of memory according to the system's log: it used 1.0 GB of memory)"),  # noqa: E501
        (Exit(1, None, 9), Memory(), "killed by SIGKILL"),
        (Exit(1, None, 6), Memory(), "killed by SIGABRT (native code called abort())"),
        (Exit(1, 3, None), Memory(), "exited with code 3 (the cell called os._exit, or a library ended the process)"),  # noqa: E501
        (Exit(1, 255, None), Memory(refused="a limit"), "exited with code 255 (a limit)"),
        (Exit(1, None, 6), Memory(refused="a limit"), "killed by SIGABRT (a limit)"),
        (Exit(1, None, 15), Memory(refused="a limit"), "killed by SIGTERM (sent by another process or by a user)"),  # noqa: E501
        (Exit(1, 0, None), Memory(refused="a limit"), "exited with code 0"),
        (Exit(1, 0, None), Memory(), "exited with code 0"),
        (Exit(1, None, None), Memory(), "for an unknown reason"),
        (Exit(1, None, 9, parent="the warm parent"), Memory(), "it ended together with the warm parent"),  # noqa: E501
        (Exit(1, None, 64), Memory(), "killed by SIGRTMAX"),
    ],
)  # fmt: skip
def test_an_end_in_words(end, memory, said):
    assert str(processes.ending(end, memory)) == said


def test_what_we_ended_ourselves_is_nobody_elses_doing():
    assert str(processes.ending(Exit(1, None, 9, GB), Memory(GB), "by Workbench: late")) == (
        "killed by SIGKILL (by Workbench: late)"
    )


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ("9:memory:/x\n8:pids:/docker/abc\n0::/\n", "pids/docker/abc"),
        ("8:pids:/docker/abc\n", "pids"),
        ("0::/kubepods/pod1\n", "kubepods"),
        ("0::/\n", "."),
    ],
)
def test_a_limit_on_processes_is_named_once_it_refused_one(tmp_path, monkeypatch, group, place):
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text(group)
    folder = root / place
    folder.mkdir(parents=True)
    (folder / "pids.max").write_text("60\n")
    (folder / "pids.events").write_text("max 3\n")
    find = processes._pids_limits
    monkeypatch.setattr(processes, "_pids_limits", lambda: find(groups, root))
    watch = processes.MemoryWatch()
    assert watch.seen(1, killed=False).refused == ""
    (folder / "pids.events").write_text("max 4\n")
    for _ in range(2):  # of both engines that die of it
        assert "60 processes" in watch.seen(1, killed=False).refused
    monkeypatch.setattr(processes, "REFUSED_S", 0.0)  # later deaths have causes of their own
    assert watch.seen(1, killed=False).refused == ""
    (folder / "pids.events").write_text("max 5\n")
    (folder / "pids.max").write_text("max\n")
    assert watch.seen(1, killed=False).refused == ""


CRASH = """2026-11-21 08:20:55.1 [IPEngine] Completed registration with id 1
loading
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007e (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/tmp/ipykernel_31297/2634483265.py", line 4 in <module>
  File "/env/IPython/core/interactiveshell.py", line 3823 in run_code

Extension modules: numpy
"""


def test_a_crash_is_told_from_the_users_side():
    assert processes.excerpt(CRASH).splitlines() == [
        "Fatal Python error: Segmentation fault",
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
        '  File "the cell", line 4 in <module>',
    ]


def test_without_a_crash_the_last_lines_are_told_and_no_noise():
    log = "2026-11-21 08:20:55.1 [IPEngine] Completed registration\n" + "\n".join("abcdefghijkl")
    assert processes.excerpt(log, lines=3).splitlines() == ["j", "k", "l"]
    assert processes.excerpt("2026-11-21 08:20:55.1 [IPEngine] Completed registration") == ""


@pytest.mark.parametrize(
    ("code", "seen"),
    [("import os; os.kill(os.getpid(), 9)", (None, 9)), ("raise SystemExit(3)", (3, None))],
)
def test_the_end_of_a_process_is_seen_and_left_to_who_waits_for_it(code, seen):
    process = subprocess.Popen([sys.executable, "-c", code])
    heard, ends = threading.Event(), []
    processes.watch(process.pid, lambda end: (ends.append(end), heard.set()))
    assert heard.wait(30)
    assert (ends[0].code, ends[0].signal) == seen
    assert process.wait() == (seen[0] if seen[1] is None else -seen[1])


def test_only_a_kill_asks_the_system():
    watch = processes.MemoryWatch()
    assert watch.seen(os.getpid(), killed=False).kills == 0
    assert watch.seen(os.getpid(), killed=True).total_bytes > 0


KILLED = Ending("SIGKILL")


def died(engine: int, how: Ending = KILLED, log: str = "") -> CellOutcome:
    return outcome.outcome_of_death(EngineDiedError(engine, 100 + engine, how, log))


def test_several_deaths_are_named_one_by_one():
    outcomes = {0: CellOutcome(status="error"), 1: died(1, log="no more memory"), 2: died(2)}
    text = outcome.death_words(1, outcomes, Member.of_ranks)
    first, above_log, log, second = text.splitlines()
    assert all(word in first for word in ("Rank 1", "pid 101", "SIGKILL"))
    assert above_log.startswith("  ")
    assert above_log.endswith(":")
    assert log == "    no more memory"
    assert "Rank 2 (engine 2)" in second
    assert "SIGKILL" not in second
    assert outcome.next_step(outcomes) == "%cluster restart 1 2"
    assert outcome.next_step({1: died(1), 2: died(2)}) == "%cluster restart"
    assert outcome.next_step({0: CellOutcome(status="ok")}) is None


def test_who_died_otherwise_than_the_first_is_said_how():
    outcomes = {1: died(1), 2: died(2, Ending(code=3))}
    text = outcome.death_words(1, outcomes, Member.of_ranks)
    assert text.endswith(f"Rank 2 (engine 2): {outcomes[2].how}")
    assert outcomes[2].how != outcomes[1].how


def test_an_engine_of_another_machine_is_named_with_its_host():
    how = Ending(what="host gone", hint="ssh xh2 has ended")
    error = EngineDiedError(2, 7, how, host="xh2")
    assert error.what == "Engine 2 on xh2 (pid 7) died: host gone (ssh xh2 has ended)."
    assert how.short == "host gone"  # what tables have room for


def test_many_deaths_do_not_fill_the_screen():
    outcomes = {i: died(i) for i in range(9)}
    text = outcome.death_words(0, outcomes, Member.of_ranks)
    assert "also gone: 4 more" in text


def test_signals_are_called_by_their_names():
    assert Exit(1, None, signal.SIGSEGV).text == "SIGSEGV"


@pytest.mark.parametrize(
    ("end", "short", "whole"),
    [
        (
            Ending("SIGKILL", hint="it (perhaps) lacked memory"),
            "SIGKILL",
            "killed by SIGKILL (it (perhaps) lacked memory)",
        ),
        (Ending(code=3, hint="os._exit"), "exited with code 3", "exited with code 3 (os._exit)"),
        (
            Ending(what="not reachable", since="the controller (pid 4) died"),
            "not reachable",
            "not reachable, because the controller (pid 4) died",
        ),
        (Ending(what="killed by (whom?)"), "killed by (whom?)", "killed by (whom?)"),
        (Ending(), "for an unknown reason", "for an unknown reason"),
        (processes.RESTARTED, "restarted", "restarted"),
    ],
)
def test_a_table_says_an_end_shortly_and_errors_say_all_of_it(end, short, whole):
    assert end.short == short
    assert str(end) == whole


def test_an_engine_that_was_replaced_is_no_reason_to_recover_and_its_words_are_no_matter():
    assert died(1, processes.RESTARTED).recoverable is False
    assert died(1, Ending(what="restarted", hint="by somebody else")).recoverable is True
