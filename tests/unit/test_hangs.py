"""What is said of a hang, from where engines say they are; where this process says it is."""

import re
import sys
import threading
import time
from dataclasses import replace

import pytest

from workbench.engine.debugging import marks, stacks, stdin_bridge
from workbench.engine.debugging.stacks import Place, waiting_in
from workbench.execution.workers.hangs import diagnose, patience_s
from workbench.shared.members import Member
from workbench.shared.messages import AskStacks, AskWhere, StacksAnswer, Whereabouts, WhereAnswer

MEMBERS = {rank: Member.of_ranks(rank) for rank in range(4)} | {9: Member.helper("server s0")}


def waits_in(what="in all_reduce"):
    return Whereabouts(state="waits", at="cell line 9", inside="all_reduce", waits_in=what)


def busy(at="train.py:41 in load_batch", inside=""):
    return Whereabouts(state="busy", at=at, inside=inside)


def said(places, waited_s=12.0, ended=(), limit_s=5.0):
    waited = waited_s if isinstance(waited_s, dict) else dict.fromkeys(places, waited_s)
    return diagnose(places, waited, MEMBERS, ended, limit_s)


def test_who_waits_in_what_and_where_the_others_are():
    places = {0: waits_in(), 1: busy(), 2: waits_in(), 3: waits_in()}
    assert said(places) == (
        "ranks 0, 2-3 have waited 12 s in all_reduce; rank 1 is at train.py:41 in load_batch"
    )


def test_ranks_whose_device_waits_are_told_from_the_one_that_keeps_them():
    """Their main threads spin, and compute for all one can see."""
    on_device = waits_in("in the communication of step 7, on the device")
    places = {0: on_device, 1: busy(), 2: on_device}
    found = said(places)
    assert re.match("ranks 0, 2 .* 12 s .*step 7.*; rank 1 .*train.py:41 in load_batch", found)


def test_what_a_library_does_for_the_line_is_said_too():
    places = {0: waits_in(), 1: busy("cell line 7", "Linear.forward")}
    assert said(places).endswith("rank 1 is at cell line 7, in Linear.forward")


def test_a_rank_that_left_and_one_that_is_silent_are_named():
    assert said({0: waits_in()}, ended=[1]).endswith("; rank 1 is at the end of the cell")
    assert "rank 1 is silent" in said({0: waits_in(), 1: None})
    assert "server s0 is silent" in said({0: waits_in(marks.ANSWER.label), 9: None})


def test_ranks_that_wait_in_different_collectives_wait_for_each_other():
    text = said({0: waits_in(), 1: waits_in("in barrier")})
    assert "rank 0 has waited 12 s in all_reduce, rank 1 has waited 12 s in barrier" in text


@pytest.mark.parametrize(
    "places",
    [
        {0: busy(), 1: busy()},  # all compute
        {0: waits_in(), 1: waits_in()},  # a large message, for all one knows
        {0: waits_in(), 1: replace(busy(), state="paused")},  # by a debugger
        {0: waits_in(), 1: replace(busy(), state="held")},  # by Pause
        {0: busy(), 9: busy("")},
    ],
)
def test_what_is_no_hang(places):
    assert said(places) == ""


def test_who_is_a_worker_is_told_by_the_part_it_takes_and_not_by_its_name():
    members = {0: Member.of_ranks(0), 1: Member.helper("rank 1"), 2: Member.of_ranks(2, 3)}
    places = {0: waits_in(), 1: busy("of no matter"), 2: busy("either")}
    waited = dict.fromkeys(places, 15.0)
    assert "All workers" in diagnose(places, waited, members, (), 5.0)
    assert "All workers" in diagnose({0: waits_in()}, waited, members, (1, 2), 5.0)


def test_ranks_that_do_not_run_the_cell_are_named_at_once():
    said = diagnose({0: waits_in()}, {0: 6.0}, MEMBERS, (), 5.0, absent=[1, 2])
    assert "ranks 1-2" in said
    assert "%%rank" in said
    assert not diagnose({0: waits_in()}, {0: 4.0}, MEMBERS, (), 5.0, absent=[1, 2])


def test_short_waits_are_none_and_long_ones_alike_are_said():
    assert said({0: waits_in(), 1: busy()}, waited_s=4.9) == ""
    assert "not match" in said({0: waits_in(), 1: waits_in()}, waited_s=15.0)


def test_seconds_are_those_that_all_of_them_have_waited():
    places = {0: waits_in(), 1: busy(), 2: waits_in()}
    assert "ranks 0, 2 have waited 7 s" in said(places, waited_s={0: 7.4, 1: 0.0, 2: 30.0})


@pytest.mark.parametrize(("value", "seconds"), [("", 5), ("2.5", 2.5), ("0", 0), ("soon", 5)])
def test_patience_is_a_setting(monkeypatch, value, seconds):
    monkeypatch.setenv("WORKBENCH_HANG_S", value)
    assert patience_s() == seconds


# -- where a process says it is --------------------------------------------------------------------


def place(module, name):
    """Return a frame of a function in a module of somebody else's, wherever its file is."""
    names = {"__name__": module, "sys": sys}
    exec(f"def {name}(): return sys._getframe()", names)
    return Place("/anywhere/else.py", 1, name, names[name]())


def test_a_thread_that_stands_still_is_told_from_one_that_computes():
    leave = threading.Event()

    def compute():
        while not leave.is_set():
            sum(range(1000))

    still = threading.Thread(target=leave.wait, args=(60,))
    busy = threading.Thread(target=compute)
    for thread in (still, busy):
        thread.start()
    try:
        assert stacks.is_idle(still) is True
        assert stacks.is_idle(busy) is False
    finally:
        leave.set()
        still.join()
        busy.join()


@pytest.mark.parametrize("idle", [True, False])
def test_a_collective_counts_as_a_wait_while_its_thread_stands_still(monkeypatch, idle):
    monkeypatch.setattr(stacks, "is_idle", lambda thread: idle)
    inner = [
        place("torch.distributed.distributed_c10d", "_wait_for_key"),
        place("torch.distributed.distributed_c10d", "barrier"),
        place("torch.distributed.c10d_logger", "wrapper"),
    ]
    found = waiting_in(inner, None)
    assert (found.label if found else None) == ("in barrier" if idle else None)
    inner = [place("torch.autograd.graph", "_engine_run_backward")]
    found = waiting_in(inner, None)
    assert (found.label if found else None) == ("in backward (all_reduce)" if idle else None)


@pytest.mark.parametrize(
    ("module", "name", "label"),
    [
        ("torch.distributed.pipelining.schedules", "step", "in recv"),
        ("torch.distributed._functional_collectives", "wait_tensor", "in wait_tensor"),
        ("torch.nn.parallel.distributed", "forward", "in forward"),
        ("torch.autograd.graph", "another", None),
        ("torch.distributed_of_mine", "barrier", None),
        ("my.torch.distributed", "barrier", None),
    ],
)
def test_frames_of_torch_are_known_by_their_module(monkeypatch, module, name, label):
    monkeypatch.setattr(stacks, "is_idle", lambda thread: True)
    found = waiting_in([place(module, name)], None)
    assert (found.label if found else None) == label


@pytest.mark.parametrize("idle", [True, False])
def test_tensorflow_waits_while_its_whole_process_stands_still(monkeypatch, idle):
    monkeypatch.setattr(stacks, "process_is_idle", lambda: idle)
    found = waiting_in([place("tensorflow.python.eager.execute", "quick_execute")], None)
    assert (found.label if found else None) == (marks.STEP.label if idle else None)


def test_a_process_that_runs_no_cell_is_idle_and_its_stacks_are_told_all_the_same():
    assert stacks.where().state == "idle"
    ready, leave = threading.Event(), threading.Event()

    def named_function():
        ready.set()
        leave.wait(60)

    thread = threading.Thread(target=named_function, name="beside")
    thread.start()
    ready.wait(60)
    try:
        text = stacks.dump()
    finally:
        leave.set()
        thread.join()
    assert text.startswith("main thread")
    assert "thread beside" in text
    assert "> " in text
    assert "named_function" in text


def test_an_answer_never_fails(monkeypatch):
    monkeypatch.setattr(stacks, "_main_thread", lambda: 1 / 0)
    assert stacks.answer(AskWhere(ask=7), 3) == WhereAnswer(engine=3, ask=7, state="busy")
    told = stacks.answer(AskStacks(ask=8), 3)
    assert (told.ask, told.state, told.text[:17]) == (8, "busy", "ZeroDivisionError")


def test_somebody_at_a_debugger_is_paused(monkeypatch):
    monkeypatch.setattr(stdin_bridge, "paused_by_user", lambda: "cell line 3")
    monkeypatch.setattr(stacks, "_main_thread", lambda: [Place(__file__, 3, "step")])
    assert stacks.where().state == "paused"
    assert stacks.where().at.endswith("test_hangs.py:3 in step")


def test_a_question_is_answered_by_those_who_hear_it_in_time():
    from workbench.cluster.router import Questions

    sent = []
    questions = Questions(lambda engine, message: sent.append((engine, message)))

    def answer_one():
        while len(sent) < 2:
            time.sleep(0.001)
        number = sent[0][1].ask
        questions.heard(WhereAnswer(engine=0, ask=number, state="busy"))
        questions.heard(WhereAnswer(engine=5, ask=number, state="busy"))  # was not asked
        questions.heard(WhereAnswer(engine=1, ask=number + 7, state="busy"))  # nobody asks that
        questions.heard(StacksAnswer(engine=1, ask=number, state="busy"))  # nobody asks for stacks

    thread = threading.Thread(target=answer_one)
    thread.start()
    assert set(questions.ask(AskWhere, [0, 1], 0.5)) == {0}
    thread.join()
    assert questions.ask(AskWhere, [], 5.0) == {}
