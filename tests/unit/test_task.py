"""A cell on several engines, with engines that are made up."""

import gc
import re
import signal
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from workbench.cluster.calls import Call
from workbench.cookbook.recipe import Recipe
from workbench.errors import ClusterError, RunError
from workbench.execution.outcome import outcome_error, outcome_notes, refusals, short_handed
from workbench.execution.run import Run
from workbench.execution.task import Task
from workbench.notebook import run_view
from workbench.notebook.run_view import CellView, tell
from workbench.shared.events import RunFinished, RunStarted
from workbench.shared.members import Member
from workbench.shared.messages import CellOutcome, Copy, Happened, OwnLoop
from workbench.shared.plan import make_plan

PEER = "[...]/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2996"


class FakeEngines:
    def __init__(self, dead=()):
        self.calls, self.outputs, self.interrupted, self.dead = {}, {}, [], dead

    def together(self):
        return nullcontext()

    def submit(self, engine, name, args, on_output):
        if engine in self.dead:
            raise ClusterError("That engine is not there.", code="WB-CLUSTER-000")
        self.calls[engine], self.outputs[engine] = Call(engine), on_output
        return self.calls[engine]

    def interrupt(self, ids):
        self.interrupted += list(ids)

    def signal(self, engine, sig):
        self.interrupted.append((engine, sig))

    def give_up(self, engine):
        self.calls[engine].finish(ClusterError("Engine died.", code="WB-CLUSTER-000"))


@pytest.fixture
def engines():
    return FakeEngines()


def start(engines, *ids, device="cpu"):
    over = []
    members = {engine: Member.of_ranks(rank, device=device) for rank, engine in enumerate(ids)}
    task = Task(engines, {i: {} for i in ids}, members, over.append)
    return task, over


def error(name, text):
    return {"status": "error", "ename": name, "evalue": text}


def shown(engines, engine, name, text):
    content = {"ename": name, "evalue": text, "traceback": [f"{name}: {text}"]}
    engines.outputs[engine](engine, "error", content)


def test_a_cell_is_over_when_every_engine_is_done(engines):
    task, over = start(engines, 0, 1)
    engines.calls[0].finish({"status": "ok"})
    assert not task.is_over
    assert task.unfinished() == [1]
    engines.calls[1].finish({"status": "ok"})
    assert task.is_over
    assert over == [task]
    assert task.failure() is None


def test_a_cell_that_trained_ends_after_its_last_rows(engines):
    task, over = start(engines, 0, 1)
    finished = Happened(run=1, event=RunFinished(rank=0, steps=6))
    ends = threading.Thread(
        target=lambda: [call.finish({"status": "ok", "trained": 6})
                        for call in engines.calls.values()]
    )  # fmt: skip
    task.heard(0, finished)
    ends.start()
    ends.join(0.3)
    assert not over
    task.heard(1, finished)
    ends.join(10)
    assert over == [task]


def test_rows_that_never_come_do_not_hold_up_the_end(engines, monkeypatch):
    monkeypatch.setattr("workbench.execution.task.ROWS_S", 0.05)
    task, over = start(engines, 0)
    engines.calls[0].finish({"status": "ok", "trained": 6})
    assert over == [task]


class Board:
    """Remembers the engines whose errors it was asked to show."""

    banner = ""

    def __init__(self):
        self.messages = []

    def message(self, engine, kind, content):
        self.messages.append(engine)


class Mender:
    """Says that the others continue without engine 1, however its cell ends."""

    def spares(self, engine, outcome):
        return CellOutcome(status="died", evalue="before") if engine == 1 else None


@pytest.mark.parametrize(("name", "printed"), [("KeyboardInterrupt", 0), ("ValueError", 1)])
def test_only_the_interrupt_of_an_engine_that_the_others_do_not_need_is_not_shown(
    engines, name, printed
):
    task, _ = start(engines, 0, 1)
    task.mender, task.board = Mender(), Board()
    engines.calls[0].finish({"status": "ok"})
    shown(engines, 1, name, "")
    engines.calls[1].finish({"status": "interrupted", "ename": name, "evalue": ""})
    assert task.failure() is None
    assert len(task.board.messages) == printed


def test_an_interrupt_by_the_user_is_shown(engines):
    task, _ = start(engines, 0, 1)
    task.mender, task.board = Mender(), Board()
    task.interrupted = True
    engines.calls[0].finish({"status": "ok"})
    shown(engines, 1, "KeyboardInterrupt", "")
    engines.calls[1].finish({"status": "interrupted", "ename": "KeyboardInterrupt", "evalue": ""})
    assert len(task.board.messages) == 1


@pytest.mark.parametrize("answer", [None, {"status": "ok", "new": 1}, {"status": "odd"}])
def test_an_outcome_that_cannot_be_read_is_an_error_and_the_cell_is_over(engines, answer):
    task, _ = start(engines, 0, 1)
    engines.calls[0].finish({"status": "ok"})
    engines.calls[1].finish(answer)
    assert task.is_over
    assert task.failure().code == "WB-RUN-066"
    assert "Rank 1 (engine 1)" in str(task.failure())
    assert "CellOutcome" in str(task.failure())


@pytest.mark.parametrize(
    ("device", "soon", "late"),
    [("cpu", "KILL_S", "KILL_ON_DEVICE_S"), ("cuda:0", "KILL_ON_DEVICE_S", "KILL_S")],
)
def test_a_cell_is_over_although_nobody_tells_of_the_end_of_an_engine_that_was_killed(
    engines, monkeypatch, device, soon, late
):
    monkeypatch.setattr(f"workbench.execution.task.{soon}", 0.05)
    monkeypatch.setattr(f"workbench.execution.task.{late}", 600.0)
    monkeypatch.setattr("workbench.execution.task.HEARD_S", 0.05)
    engines.engines = {0: SimpleNamespace(pid=4711)}
    task, over = start(engines, 0, 1, device=device)
    engines.calls[1].finish({"status": "ok"})
    task.interrupt()
    assert task.over.wait(20)
    assert (0, signal.SIGKILL) in engines.interrupted
    assert over == [task]
    assert "%cluster restart 0" in str(task.failure())


def test_the_reason_is_shown_and_what_followed_from_it_is_not(engines):
    task, _ = start(engines, 4, 7)
    shown(engines, 4, "RuntimeError", PEER)
    engines.calls[4].finish(error("RuntimeError", PEER))
    shown(engines, 7, "ValueError", "mine")
    engines.calls[7].finish(error("ValueError", "mine"))
    assert re.search(r"Rank 1 \(engine 7\).*ValueError: mine", str(task.failure()))
    assert "rank 0: Connection closed by peer" in str(task.failure())
    mine, with_it = task.board.text().splitlines()
    assert mine == "[rank 1] ValueError: mine"
    assert with_it in str(task.failure())
    assert "<details" in task.board.html()
    assert task.board.html().index("mine") < task.board.html().index("pair.cc")


def test_what_our_own_links_felt_is_no_reason_whatever_the_words(engines):
    task, _ = start(engines, 4, 7, 9)
    engines.calls[4].finish({**error("LinkError", "Fort ist er."), "felt": "he is gone"})
    engines.calls[9].finish(error("LinkError", "Da war er."))
    engines.calls[7].finish({**error("LinkError", "Fort ist er."), "felt": "he is gone"})
    assert re.search(r"Rank 2 \(engine 9\).*LinkError: Da", str(task.failure()))
    assert "ranks 0-1: he is gone" in str(task.failure())


def test_a_user_may_say_that_a_worker_has_left(engines):
    task, _ = start(engines, 4, 7)
    engines.calls[4].finish(error("ValueError", "worker 1 has left"))
    engines.calls[7].finish(error("RuntimeError", PEER))
    assert re.search(r"Rank 0 \(engine 4\).*ValueError: worker 1", str(task.failure()))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("DeadlineExceededError", "Collective has timed out"), "Rank 1 "),
        (("ValueError", "mine"), "Rank 0 (engine 0) "),
    ],
)
def test_who_is_ended_for_silence_is_the_reason_unless_another_failed(engines, words, reason):
    task, _ = start(engines, 0, 1)
    engines.calls[0].finish(error(*words))
    task._kill_rest()
    assert len(engines.interrupted) == 1
    engines.calls[1].finish(ClusterError("Engine 1 died: SIGKILL.", code="WB-CLUSTER-000"))
    assert str(task.failure()).startswith(reason)


def test_when_nobody_knows_the_reason_every_rank_is_heard(engines):
    task, _ = start(engines, 0, 1)
    for engine in (0, 1):
        shown(engines, engine, "RuntimeError", f"{PEER}{engine}")
        engines.calls[engine].finish(error("RuntimeError", f"{PEER}{engine}"))
    assert f"{PEER}0" in task.board.text()
    assert f"{PEER}1" in task.board.text()
    assert "Ranks 0-1" in str(task.failure())  # they differ in numbers alone


def test_equal_errors_are_one(engines):
    task, _ = start(engines, 0, 1, 2)
    for engine in (0, 1, 2):
        engines.calls[engine].finish(error("NameError", "name 'x' is not defined"))
    assert re.fullmatch(r"Ranks 0-2 .*NameError: name 'x' is not defined", task.failure().what)


def test_a_dead_engine_is_the_reason_whoever_complained_first(engines):
    task, _ = start(engines, 0, 1)
    engines.calls[0].finish(error("RuntimeError", "something else"))
    engines.calls[1].finish(ClusterError("Engine 1 (pid 5) died: SIGKILL.", code="WB-CLUSTER-000"))
    assert task.failure().code == "WB-RUN-066"
    assert "Rank 1" in str(task.failure())
    assert "%cluster restart 1" in str(task.failure())
    assert task.group_broken


def test_an_engine_that_is_dead_at_the_start_ends_the_cell():
    engines = FakeEngines(dead=(1,))
    task, _ = start(engines, 0, 1)
    engines.calls[0].finish(error("KeyboardInterrupt", ""))
    assert task.is_over
    assert task.failure().code == "WB-RUN-066"
    assert "Rank 1" in str(task.failure())


def test_an_interrupt_reaches_those_still_at_it_and_is_an_error(engines):
    task, _ = start(engines, 0, 1)
    engines.calls[0].finish({"status": "ok"})
    task.interrupt()
    assert engines.interrupted == [1]
    engines.calls[1].finish({"status": "interrupted", "ename": "KeyboardInterrupt", "evalue": ""})
    assert task.failure().code == "WB-RUN-067"


def test_a_failure_in_the_background_is_told_with_the_output(engines):
    task, _ = start(engines, 0, 1)
    shown(engines, 0, "RuntimeError", PEER)
    engines.calls[0].finish(error("RuntimeError", PEER))
    engines.calls[1].finish(ClusterError("Engine 1 (pid 5) died: SIGKILL.", code="WB-CLUSTER-000"))
    tell(task, task.failure())
    text = task.board.text()
    assert "Rank 1 is gone: Engine 1 (pid 5) died: SIGKILL." in text
    assert "%cluster restart 1" in text
    assert text.count("Also failed: rank 0") == 1
    assert "Rank 1 is gone" in task.board.html()


def test_a_run_that_trained_nothing_in_the_background_says_so(engines):
    task, _ = start(engines, 0)
    engines.calls[0].finish({"status": "ok"})
    tell(task, RunError("Nothing was distributed.", code="WB-RUN-000"))
    assert "[WB-RUN-000]" in task.board.text()


def test_what_a_rank_has_shown_in_the_background_is_not_told_again(engines):
    task, _ = start(engines, 0, 1)
    for engine in (0, 1):
        shown(engines, engine, "ValueError", "mine")
        engines.calls[engine].finish(error("ValueError", "mine"))
    tell(task, task.failure())
    assert task.board.text() == "[ranks 0-1] ValueError: mine"


def test_a_stopped_loop_is_no_error_and_shows_none(engines):
    task, _ = start(engines, 0)
    shown(engines, 0, "RunStopped", "")
    engines.calls[0].finish({"status": "stopped"})
    assert task.failure() is None
    assert task.board.empty


# -- verdicts --------------------------------------------------------------------------------------


def run_with(tmp_path, **overrides):
    from workbench.cookbook.recipe import Recipe
    from workbench.shared.plan import make_plan

    framework = overrides.pop("framework", "torch")
    plan = make_plan(Recipe("1"), "mirrored", framework=framework, workers=2, overrides=overrides)
    return Run(plan, number=1, name="r", engines=[0, 1], devices=["cpu"] * 2, folder=tmp_path)


OK = CellOutcome(status="ok", trained=3)


def test_a_cell_that_trained_is_no_error(tmp_path):
    assert outcome_error(run_with(tmp_path), {0: OK, 1: OK}) is None
    assert outcome_error(run_with(tmp_path, seed=1), {0: OK, 1: OK}) is None


def test_a_cell_that_trained_nothing_is_an_error(tmp_path):
    nothing = CellOutcome(status="ok")
    assert outcome_error(run_with(tmp_path), {0: nothing}).code == "WB-RUN-092"
    error = str(outcome_error(run_with(tmp_path, framework="tensorflow"), {0: nothing}))
    assert "strategy.run" in error
    assert "%%rank 0" in error
    stopped = CellOutcome(status="stopped")
    assert outcome_error(run_with(tmp_path), {0: stopped}) is None


@pytest.mark.parametrize(
    ("loop", "code"),
    [
        (("wb.prepare", 3, 0), "WB-RUN-096"),
        (("wb.prepare", 0, 3), "WB-RUN-095"),
        (("", 0, 3), "WB-RUN-091"),
        (("", 0, 0), "WB-RUN-092"),
    ],
)
def test_a_loop_that_recorded_nothing_says_what_was_missing(tmp_path, loop, code):
    by, backwards, updates = loop
    told = OwnLoop(by=by, backwards=backwards, updates=updates)
    error = outcome_error(run_with(tmp_path), {0: CellOutcome(status="ok", loop=told)})
    assert error.code == code


def test_ignored_overrides_are_an_error_unless_somebody_read_them(tmp_path):
    run = run_with(tmp_path, epochs=3, batch_size=64)
    assert "--batch-size, --epochs" in str(outcome_error(run, {0: OK, 1: OK}))
    assert outcome_error(run, {0: OK, 1: replace(OK, options_read=True)}) is None


def test_a_rank_that_ended_with_another_model_is_named():
    def ended(digest: int, rank: int, like: int = 0) -> CellOutcome:
        return CellOutcome(status="ok", copies=Copy(digest=digest, rank=rank, like=like))

    assert outcome_notes({0: ended(5, 0), 1: ended(5, 1)}) == []
    assert outcome_notes({0: ended(5, 0), 1: ended(6, 1, like=1)}) == []  # rounded otherwise
    (note,) = outcome_notes({4: ended(5, 0), 5: ended(7, 1), 6: ended(5, 2)})
    assert "differ" in note
    assert "rank 1 " in note


def test_reassigned_names_are_told_once():
    assert outcome_notes({0: OK, 1: OK}) == []
    once, twice = (replace(OK, reassigned=names) for names in (("rank",), ("rank", "device")))
    (note,) = outcome_notes({0: once, 1: twice})
    assert "`device`, `rank`" in note


def test_lost_workers_are_told_until_they_are_back():
    assert short_handed([], 2) == ""
    assert re.search("Engine 1 .* 1 of 2 workers.*%cluster restart 1 ", short_handed([1], 1))
    assert short_handed([0, 3], 2) == (
        "Engines 0, 3 are dead, so 2 of 4 workers remain; %cluster restart 0 3 starts them again."
    )


def test_a_row_in_which_a_strategy_refused_ends_in_its_name_and_reason():
    def ran(strategy, error=None):
        return SimpleNamespace(plan=SimpleNamespace(strategy=strategy), error=error)

    refused = RunError("Ranks 0-1 failed", code="WB-RUN-000")
    words = "It does not support step_fn.\n  next: ..."
    refused.outcome = CellOutcome(status="error", ename="FitError", evalue=words)
    assert refusals([ran("mirrored"), ran("sharded")]) is None
    error = refusals([ran("model_split", refused), ran("mirrored")])
    assert re.search(r"\b1 of 2\b", error.what)
    assert error.seen == "model_split: It does not support step_fn."


def named_threads() -> set[threading.Thread]:
    """Return the threads of Workbench, without timers: earlier tests may have left some."""
    return {one for one in threading.enumerate() if one.name.startswith("workbench")}


@pytest.mark.parametrize("lasts", [False, True])
def test_a_view_says_when_its_cell_lasts_and_a_short_one_begins_no_thread(
    engines, monkeypatch, lasts
):
    monkeypatch.setattr(run_view, "FIRST_S", 0.02 if lasts else 30.0)
    task, _ = start(engines, 0)
    told, threads = threading.Event(), named_threads()
    task.when_long = told.set
    ends = threading.Timer(0.2, engines.calls[0].finish, ({"status": "ok"},))
    ends.start()
    CellView(task).wait()
    ends.join()
    assert told.is_set() == lasts
    assert named_threads() <= threads


def test_a_run_that_is_over_keeps_nothing_of_its_cluster(tmp_path):
    class Router:
        def send(self, engine, message):
            sent.append(engine)

    sent, router = [], Router()
    run = Run(
        make_plan(Recipe("wb.fit()"), "mirrored", workers=2), number=1, name="base",
        engines=[0, 1], devices=["cpu", "cpu"], folder=tmp_path,
    )  # fmt: skip
    run.open_board(router.send, [0, 1])
    gone = weakref.ref(router)
    del router
    run.inject("slow=1:5ms")
    assert sent == [0, 1]
    run.finish(None)
    gc.collect()
    assert gone() is None


def test_the_start_of_a_rank_on_another_machine_names_it(engines):
    members = {3: Member("worker", 0, 0), 4: Member("worker", 1, 1, host="xh1")}
    task = Task(engines, {3: {}, 4: {}}, members, lambda task: None)
    started = Happened(run=1, event=RunStarted(rank=1))
    assert task.heard(4, started).event.host == "xh1"
    assert task.heard(3, started) is started
