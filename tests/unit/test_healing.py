"""Who takes part in a run that goes on with others: what the kernel makes of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
from history_rows import make_rows
from notebook_shell import soon

from workbench.errors import RunError
from workbench.execution.workers import healing, scaling
from workbench.execution.workers.healing import Healer
from workbench.history.store import RunHistory
from workbench.shared.events import Event, Regrouped, Standing
from workbench.shared.messages import CellOutcome

DIED = CellOutcome(status="died", how="killed by SIGKILL", recoverable=True)
WELL = CellOutcome(status="ok")


class Run:
    """As much of a run as is asked for."""

    def __init__(self, engines: range) -> None:
        self.engines = self.members = tuple(engines)
        self.number, self.state, self.task = 7, "running", None
        self.history = RunHistory(engines)
        self.recoveries: list[object] = []
        self.notes: list[str] = []
        self.agreeing: tuple[int, ...] = ()
        self.plan = SimpleNamespace(sync=True)

    def called(self, engine: int) -> str:
        return f"Rank {engine}"

    def note(self, text: str, deaths: object = ()) -> None:
        self.notes.append(text)

    def tell(self, event: Event) -> None:
        self.history.event(event)

    def agree_among(self, ranks: tuple[int, ...]) -> None:
        self.agreeing = ranks


def engine_of(number: int) -> SimpleNamespace:
    """Return an engine of this host that lives."""
    return SimpleNamespace(place="h", is_here=True, pid=number, state="alive")


class Launch:
    """As much of an execution."""

    def __init__(self, run: Run, together: int = 1) -> None:
        self.run, self.sent, self.interrupted = run, [], []
        self.together = together
        self.servers: tuple[int, ...] = ()
        self.held_twice: list[list[int]] = []
        self.dismissed = 0
        known = {i: engine_of(i) for i in run.engines}
        engines = SimpleNamespace(
            engines=known,
            router=SimpleNamespace(
                send=lambda engine, message: self.sent.append((engine, message))
            ),
            interrupt=self.interrupted.extend,
        )
        self.pool = SimpleNamespace(engines=engines, new_prefix=lambda what: what)
        entry = SimpleNamespace(
            dies_with="", replicated=True, copy_workers=lambda options, workers: self.together
        )
        self.plan = SimpleNamespace(entry=entry, options={}, workers=len(run.engines))

    def meets(self, prefix: str) -> None:
        pass

    def chains(self) -> list[list[int]]:
        return self.held_twice

    def dismiss_servers(self) -> None:
        self.dismissed += 1


@pytest.fixture
def made(monkeypatch):
    """Return a healer of three engines, its run, and what it asks of others."""
    return healing_of(monkeypatch, range(3))


@pytest.fixture
def piped(monkeypatch):
    """Return the same of two pipelines of two engines."""
    return healing_of(monkeypatch, range(4), together=2)


def healing_of(monkeypatch, engines: range, together: int = 1):
    run = Run(engines)
    launch = Launch(run, together)
    healer = Healer(launch)
    launch.replaced = []
    monkeypatch.setattr(
        Healer, "begin_replacing", lambda self, engine: launch.replaced.append(engine)
    )
    monkeypatch.setattr(healing, "lives", lambda pid: pid != launch.dead)
    launch.dead = -1
    run.task = SimpleNamespace(
        condemned=[], condemn=lambda engine: run.task.condemned.append(engine)
    )
    return healer, run, launch


def told(launch: Launch) -> dict[int, tuple[int, ...]]:
    """Return the newest members that each engine was told."""
    return {engine: message.places for engine, message in launch.sent if message.places}


def regrouped(healer: Healer, step: int) -> None:
    for engine in list(healer.members):
        healer.hear(
            engine, Regrouped(rank=engine, generation=healer.generation, step=step, seconds=0.1)
        )


def test_a_note_says_what_dies_with_a_worker_whose_replica_is_its_own(made) -> None:
    healer, run, launch = made
    launch.plan.entry.dies_with = "its own steps"
    healer.spares(1, DIED)
    regrouped(healer, 5)
    assert run.notes[-1].endswith(": its own steps.")


def joined(healer: Healer, engine: int, step: int) -> None:
    healer._coming[engine] = DIED
    healer.hear(engine, Standing(rank=engine, phase="ready"))
    regrouped(healer, step)


def test_a_death_is_done_without_and_another_joins(made) -> None:
    healer, run, launch = made
    assert healer.spares(1, DIED) is DIED
    assert told(launch) == {0: (0, 2), 2: (0, 2)}
    assert run.agreeing == (0, 2)
    assert launch.replaced == [1]
    regrouped(healer, 20)
    (done,) = run.recoveries
    assert (done.engines, done.step, done.lost_steps, done.workers) == ((1,), 20, 0, 2)
    joined(healer, 1, 30)
    assert told(launch) == dict.fromkeys(range(3), (0, 1, 2))
    assert [(one["event"], one["step"]) for one in run.history.story.changes] == [
        ("healed", 20), ("joined", 30),
    ]  # fmt: skip
    assert healer.spares(1, WELL) is None  # it is one like the others now


@pytest.mark.parametrize("state", ["starting", "recovering"])
def test_a_death_may_be_heard_before_the_news_that_training_has_begun(made, state) -> None:
    healer, run, launch = made
    run.state = state
    assert healer.spares(1, DIED) is DIED
    assert told(launch) == {0: (0, 2), 2: (0, 2)}
    regrouped(healer, 20)
    assert run.recoveries[0].engines == (1,)


def test_others_notice_a_death_before_it_is_told(made) -> None:
    healer, run, launch = made
    launch.dead = 2
    healer.hear(0, Standing(rank=0, phase="cut"))
    assert told(launch) == {0: (0, 1), 1: (0, 1)}
    healer.hear(1, Standing(rank=1, phase="cut"))  # of the same generation: nothing new
    regrouped(healer, 5)
    assert not run.recoveries  # how it died is yet to be told
    assert healer.spares(2, DIED) is DIED
    assert "SIGKILL" in run.recoveries[0].how
    assert launch.replaced == [2]


def test_members_whose_cells_have_ended_still_count_in_what_is_told_late(made) -> None:
    healer, run, launch = made
    launch.dead = 2
    healer.hear(0, Standing(rank=0, phase="cut"))
    regrouped(healer, 5)
    for engine in (0, 1):
        healer.spares(engine, WELL)
    assert healer.spares(2, DIED) is DIED
    assert [done.workers for done in run.recoveries] == [2]


def test_members_meet_anew_where_one_was_cut_off_from_the_living(made, monkeypatch) -> None:
    monkeypatch.setattr(healing, "CUT_S", 0.01)
    healer, _, launch = made
    healer.spares(1, DIED)
    regrouped(healer, 12)
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    assert healer.generation == 2
    healer.hear(1, Standing(rank=1, phase="ready", generation=2))  # it did not come to them
    assert soon(lambda: healer.generation == 3)
    assert launch.sent[-1][1].places == (0, 1, 2)
    assert launch.sent[-1][1].fresh == (1,)
    regrouped(healer, 20)
    healer.hear(0, Standing(rank=0, phase="cut", generation=2))  # of before
    assert not soon(lambda: healer.generation > 3, 0.2)


def test_who_was_cut_off_by_a_death_meets_the_others_once(made, monkeypatch) -> None:
    monkeypatch.setattr(healing, "CUT_S", 0.01)
    healer, _, launch = made
    launch.dead = 2
    healer.hear(0, Standing(rank=0, phase="cut"))
    regrouped(healer, 20)
    assert not soon(lambda: healer.generation > 1, 0.2)


def test_who_was_cut_off_from_the_living_waits(made) -> None:
    healer, _, launch = made
    healer.hear(0, Standing(rank=0, phase="cut"))
    assert launch.sent == []


def test_a_second_death_makes_another_generation(made) -> None:
    healer, run, launch = made
    healer.spares(1, DIED)
    healer.spares(0, DIED)
    assert told(launch)[2] == (2,)
    healer.hear(2, Regrouped(rank=2, generation=1, step=9))  # of one that has been overtaken
    assert not run.recoveries
    regrouped(healer, 10)
    assert run.recoveries[0].engines == (1, 0)


def test_the_last_one_and_those_who_only_came_cannot_go_on(made) -> None:
    healer, _, _ = made
    healer.spares(1, DIED)
    healer.spares(0, DIED)
    healer._coming[0] = DIED
    healer.hear(0, Standing(rank=0, phase="ready"))
    assert healer.spares(2, DIED) is None


def test_who_has_not_begun_to_train_cannot_be_regrouped(made) -> None:
    healer, run, _ = made
    healer.spares(1, DIED)
    healer.hear(0, Standing(rank=0, generation=1, phase="before"))
    assert run.task.condemned == [1]


def test_who_is_through_is_not_waited_for(made) -> None:
    healer, run, launch = made
    healer.spares(1, DIED)
    healer.hear(0, Standing(rank=0, generation=1, phase="past"))
    assert told(launch)[2] == (2,)
    assert launch.sent[-1][1].past == (0,)
    healer.hear(2, Standing(rank=2, generation=2, phase="past"))
    assert run.task.condemned == []
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    assert launch.interrupted == [1]  # nobody trains any more


def test_who_has_ended_its_cell_is_met_no_more(made) -> None:
    healer, _, launch = made
    healer.spares(0, WELL)
    healer.spares(1, DIED)  # as the others were about to end theirs
    assert launch.sent == [(2, launch.sent[0][1])]
    assert (launch.sent[0][1].places, launch.sent[0][1].past) == ((2,), (0,))


def test_who_ends_before_it_hears_that_it_is_waited_for_is_waited_for_no_more(made) -> None:
    healer, _, launch = made
    healer.spares(1, DIED)
    healer.spares(0, WELL)  # it answers nobody any more
    assert (launch.sent[-1][1].places, launch.sent[-1][1].past) == ((2,), (0,))


def test_who_cannot_go_on_without_the_dead_has_the_cell_fail_for_them(made) -> None:
    """They had agreed to be together to the end, which the kernel has not heard yet."""
    healer, run, _ = made
    healer.spares(1, DIED)
    healer.spares(0, CellOutcome(status="error", ename="LinkError", felt="Connection closed"))
    assert run.task.condemned == [1]


def test_without_who_keeps_the_weights_the_run_cannot_end(made) -> None:
    healer, run, _ = made
    healer.spares(0, DIED)
    for engine in (1, 2):
        healer.hear(engine, Standing(rank=engine, generation=healer.generation, phase="past"))
    assert run.task.condemned == [0]


def test_a_fresh_engine_that_fails_harms_nobody(made) -> None:
    healer, run, launch = made
    healer.spares(1, DIED)
    regrouped(healer, 5)
    healer._coming[1] = DIED
    failed = CellOutcome(status="error", ename="NameError", evalue="name 'x' is not defined")
    assert healer.spares(1, failed) is DIED
    assert "NameError" in run.notes[-1]
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    assert healer.spares(1, failed) is DIED  # in the middle of being let in
    assert told(launch)[0] == (0, 2)
    assert launch.replaced == [1]  # an error comes again; only a death is tried anew


def test_a_fresh_engine_that_dies_again_at_once_leaves_no_gap(made, monkeypatch) -> None:
    healer, run, _ = made
    settled: list[int] = []
    monkeypatch.setattr(run.history, "settle_before", settled.append)
    healer.spares(1, DIED)
    regrouped(healer, 12)
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    told = Regrouped(rank=1, generation=healer.generation, step=20, seconds=0.1)
    healer.hear(1, told)  # it takes steps with the others, who have not told yet
    healer.spares(1, DIED)
    assert healer.members == [0, 2]
    assert settled == [12]
    regrouped(healer, 24)
    assert settled == [12, 24]
    assert [(one["event"], one["step"]) for one in run.history.story.changes] == [("healed", 12)]


def test_a_fresh_engines_death_may_be_noticed_before_it_is_told(made) -> None:
    healer, run, launch = made
    healer.spares(1, DIED)
    regrouped(healer, 12)
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    launch.dead = 1
    healer.hear(0, Standing(rank=0, phase="cut", generation=healer.generation))
    assert healer.members == [0, 2]
    regrouped(healer, 24)
    assert healer.is_together
    healer.spares(1, DIED)
    assert launch.replaced == [1, 1]
    healer.spares(2, DIED)  # what comes later is told as ever
    regrouped(healer, 30)
    assert [(one["event"], one["step"]) for one in run.history.story.changes] == [
        ("healed", 12), ("healed", 30),
    ]  # fmt: skip


def test_steps_that_some_took_while_another_was_late_are_complete(made) -> None:
    """At their own pace the others go on from where it was expected, and it comes later."""
    healer, run, _ = made
    rows = make_rows(20, 3)
    healer.spares(1, DIED)
    regrouped(healer, 0)
    run.history.append(rows[:10, [0, 2]].reshape(-1))
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    told_of = Regrouped(rank=0, generation=healer.generation, step=10, seconds=0.1)
    healer.hear(0, told_of)
    run.history.append(rows[10:12, [0, 2]].reshape(-1))
    healer._announce()  # it was broken out of its coming
    regrouped(healer, 12)
    run.history.append(rows[12:].reshape(-1))
    assert run.history.totals.steps == 20


def test_an_error_of_the_cell_ends_it(made) -> None:
    healer, _, launch = made
    assert healer.spares(0, CellOutcome(status="error", ename="ValueError")) is None
    assert healer.spares(1, DIED) is None
    assert launch.sent == []


def test_nobody_is_let_in_to_a_run_that_stops(made) -> None:
    healer, run, launch = made
    healer.spares(1, DIED)
    regrouped(healer, 5)
    run.state = "stopping"
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, phase="ready"))
    assert launch.interrupted == [1]
    assert healer.spares(2, DIED) is None


# -- who leaves ------------------------------------------------------------------------------------


def all_train(healer: Healer, *engines: int) -> None:
    for engine in engines:
        healer.hear(engine, Standing(rank=engine, phase="in"))


def let_go(launch: Launch) -> list[int]:
    return [engine for engine, message in launch.sent if not message.places]


def test_who_is_to_leave_waits_until_the_others_are_together(made) -> None:
    healer, run, launch = made
    healer.dismiss([1], "too slow")
    assert launch.sent == []  # not all of them train yet
    all_train(healer, 0, 1, 2)
    assert told(launch) == dict.fromkeys(range(3), (0, 2))
    assert run.agreeing == (0, 2)
    regrouped(healer, 20)
    assert let_go(launch) == [1]
    (change,) = run.history.story.changes
    assert (change["event"], change["ranks"], change["step"]) == ("left", [1], 20)
    assert "too slow" in run.notes[-1]
    assert healer.spares(1, CellOutcome(status="stopped", trained=20)).status == "ok"
    assert healer.spares(0, WELL) is None


def test_who_is_to_leave_stays_where_all_others_die(made) -> None:
    healer, run, launch = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([0], "to make room")
    assert healer.spares(1, DIED) is DIED
    assert healer.spares(2, DIED) is DIED
    assert launch.sent[-1][1].places == (0,)
    regrouped(healer, 9)
    assert let_go(launch) == []
    assert [one["event"] for one in run.history.story.changes] == ["healed"]


def test_who_is_to_leave_stays_where_all_others_have_trained(made) -> None:
    healer, run, launch = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([0], "to make room")
    for engine in (1, 2):
        healer.hear(engine, Standing(rank=engine, generation=healer.generation, phase="past"))
    assert launch.sent[-1][1].places == (0,)
    assert launch.sent[-1][1].past == (1, 2)
    regrouped(healer, 240)
    assert run.history.story.changes == []


def test_who_dies_while_it_leaves_is_not_missed(made) -> None:
    healer, run, launch = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([1], "to make room")
    assert healer.spares(1, DIED) is DIED
    regrouped(healer, 20)
    assert launch.replaced == []
    assert [one["event"] for one in run.history.story.changes] == ["left"]


def test_the_run_can_end_when_who_kept_the_weights_has_left(made) -> None:
    healer, run, _ = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([0], "to make room")
    regrouped(healer, 20)
    healer.spares(0, WELL)
    healer.hear(1, Standing(rank=1, phase="past"))
    assert healer.spares(2, DIED) is DIED
    assert run.task.condemned == []


def test_not_all_can_leave(made) -> None:
    healer, run, _ = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([0], "to make room")
    with pytest.raises(RunError, match="WB-RUN-141"):
        healer.dismiss([1, 2], "to make room")
    for chosen in ([7], []):
        with pytest.raises(RunError, match="WB-RUN-152"):
            healer.dismiss(chosen, "to make room")
    run.state = "finished"
    with pytest.raises(RunError, match="WB-RUN-143"):
        healer.dismiss([1], "to make room")


def test_who_left_can_come_again(made) -> None:
    healer, run, launch = made
    all_train(healer, 0, 1, 2)
    healer.dismiss([1], "to make room")
    regrouped(healer, 20)
    with pytest.raises(RunError, match="WB-RUN-142"):
        healer.admit([0])
    healer.spares(1, WELL)
    healer.admit([1])
    assert launch.replaced == [1]
    joined(healer, 1, 30)
    assert [one["event"] for one in run.history.story.changes] == ["left", "joined"]


WELL = CellOutcome(status="ok", trained=9)


def test_servers_are_dismissed_once_no_worker_can_come(made):
    healer, _, launch = made
    launch.servers = (3,)
    healer.spares(1, DIED)
    regrouped(healer, 5)
    for engine in (0, 2):
        assert not launch.dismissed
        healer.hear(engine, Standing(rank=engine, generation=healer.generation, phase="past"))
        assert healer.spares(engine, WELL) is None
    assert launch.dismissed


def test_a_server_that_another_one_can_stand_in_for_leaves_the_healing_as_it_is(made):
    healer, _, launch = made
    launch.servers, launch.held_twice = (3, 4), [[3, 4]]
    assert healer.spares(3, DIED) is None  # the task sees to it
    assert healer.spares(1, DIED) is DIED
    assert healer.members == [0, 2]


def test_without_its_only_server_nobody_goes_on(made):
    healer, _, launch = made
    launch.servers = (3,)
    assert healer.spares(3, DIED) is None
    assert healer.spares(1, DIED) is None


def test_who_comes_is_named_to_those_who_hand_over(made):
    healer, _, launch = made
    healer.spares(1, DIED)
    regrouped(healer, 5)
    healer._coming[1] = DIED
    healer.hear(1, Standing(rank=1, generation=0, phase="ready"))
    assert launch.sent[-1][1].fresh == (1,)


def test_at_their_own_pace_rows_of_all_workers_stand_alone(made):
    healer, run, _ = made
    run.plan.sync = False
    healer.spares(1, DIED)
    regrouped(healer, 5)
    assert "new engine" in run.notes[-1]
    assert "no step" not in run.notes[-1]


def test_engines_that_are_dead_when_the_run_ends_are_left_to_the_next_cell(made):
    healer, run, launch = made
    known = launch.pool.engines.engines
    known[1].state = known[2].state = "dead"
    healer._awaited.update({0, 2})  # 0 lives again: a new engine was started, and runs the cell
    run.task.is_over, run.task.unfinished = True, list
    healer._replace(1)  # its replacement began before the run's end, but comes too late
    assert sorted(healer.settle()) == [1, 2]
    known.clear()  # the cluster has been stopped
    assert healer.settle() == []


# -- more and fewer --------------------------------------------------------------------------------


@pytest.fixture
def scaled(made):
    """Return a healer of three engines that all train, its run, and what it asks of others."""
    healer, run, launch = made

    def recruit(count: int) -> list[int]:
        fresh = [len(run.members) + at for at in range(count)]
        run.engines = run.members = (*run.members, *fresh)
        run.history.grow(fresh)
        known = launch.pool.engines.engines
        known |= {one: engine_of(one) for one in fresh}
        return fresh

    def begin(engine: int) -> None:
        launch.replaced.append(engine)
        healer._awaited.add(engine)

    launch.recruit, healer.begin_replacing = recruit, begin
    all_train(healer, 0, 1, 2)
    return healer, run, launch


def at_the_door(healer: Healer, engine: int) -> None:
    healer._coming[engine] = DIED
    healer.hear(engine, Standing(rank=engine, phase="ready"))


def test_more_workers_are_recruited_and_come(scaled) -> None:
    healer, run, launch = scaled
    healer.scale(5)
    assert launch.replaced == [3, 4]
    assert healer.target == 5
    with pytest.raises(RunError, match="WB-RUN-145"):
        healer.scale(4)
    for engine in (3, 4):
        at_the_door(healer, engine)
    regrouped(healer, 30)
    assert healer.members == [0, 1, 2, 3, 4]
    assert healer.target is None
    assert run.history.phases == [(0, (0, 1, 2)), (30, (0, 1, 2, 3, 4))]


def test_the_number_asked_for_is_known_while_engines_are_still_being_started(scaled) -> None:
    healer, _, launch = scaled
    recruit, seen = launch.recruit, []

    def slowly(count: int) -> list[int]:
        seen.append(healer.target)
        return recruit(count)

    launch.recruit = slowly
    healer.scale(4)
    assert seen == [4]
    assert healer.target == 4


def test_more_workers_than_memory_holds_are_refused_before_one_is_started(
    scaled, monkeypatch
) -> None:
    healer, _, launch = scaled
    size = psutil.Process().memory_full_info().uss
    for one in launch.pool.engines.engines.values():
        one.pid = os.getpid()
    monkeypatch.setattr(scaling, "memory", lambda: (size // 2, size))
    with pytest.raises(RunError, match="WB-RUN-151"):
        healer.scale(4)
    assert launch.replaced == []
    assert healer.target is None
    monkeypatch.setattr(scaling, "memory", lambda: (8 * size, 8 * size))
    healer.scale(4)
    assert launch.replaced == [3]


def test_fewer_workers_are_those_of_the_lowest_ranks(scaled) -> None:
    healer, _, launch = scaled
    healer.scale(1)
    assert told(launch) == dict.fromkeys(range(3), (0,))
    assert healer.target == 1
    regrouped(healer, 30)
    assert healer.target is None
    for engine in (1, 2):
        healer.spares(engine, WELL)
    healer.scale(2)
    assert launch.replaced == [1]  # who was there before comes before anybody else


def test_who_is_still_being_started_need_not_come(scaled) -> None:
    healer, _, launch = scaled
    healer.spares(2, DIED)
    regrouped(healer, 20)
    healer._coming[2] = DIED
    healer.scale(2)
    assert healer.members == [0, 1]
    assert launch.interrupted == [2]
    healer.spares(2, CellOutcome(status="interrupted"))
    assert healer.target is None
    assert healer.failed == []


def test_a_spare_takes_part_in_the_step_that_a_death_breaks_off(scaled) -> None:
    healer, run, launch = scaled
    (spare,) = launch.recruit(1)
    healer.begin_replacing(spare)
    at_the_door(healer, spare)
    assert healer.members == [0, 1, 2]
    assert healer.waiting == (spare,)
    healer.spares(1, DIED)
    assert launch.sent[-1][1].places == (0, 2, 3)
    regrouped(healer, 20)
    assert [(one["event"], one["step"]) for one in run.history.story.changes] == [
        ("healed", 20), ("joined", 20),
    ]  # fmt: skip
    at_the_door(healer, 1)
    assert healer.waiting == (1,)  # the next spare
    healer.scale(4)
    assert launch.sent[-1][1].places == (0, 1, 2, 3)


def test_who_does_not_come_is_told_of(scaled) -> None:
    healer, _, _ = scaled
    healer.scale(4)
    healer._coming[3] = DIED
    healer.spares(3, CellOutcome(status="error", ename="NameError", evalue="no x"))
    assert healer.target is None
    assert "NameError" in healer.failed[0]


def test_a_training_that_cannot_go_on_with_others_says_why(scaled) -> None:
    healer, _, _ = scaled
    healer.hear(0, Standing(rank=0, phase="apart", why="its data is a stream"))
    with pytest.raises(RunError, match="a stream"):
        healer.scale(4)
    with pytest.raises(RunError, match="a stream"):
        healer.dismiss([1], "to make room")


# -- several hold a copy together ------------------------------------------------------------------


def test_a_whole_pipeline_goes_on_and_the_rest_of_the_other_waits(piped) -> None:
    healer, run, launch = piped
    healer.spares(3, DIED)
    assert told(launch) == dict.fromkeys((0, 1, 2), (0, 1))
    regrouped(healer, 12)
    assert launch.replaced == [3]
    joined(healer, 3, 20)
    assert launch.sent[-1][1].places == (0, 1, 2, 3)
    assert launch.sent[-1][1].fresh == (2, 3)
    changes = [(one["event"], one["ranks"], one["workers"]) for one in run.history.story.changes]
    assert changes == [("healed", [3], 2), ("left", [2], 2), ("joined", [2, 3], 4)]


def test_who_is_left_of_two_pipelines_forms_one(piped) -> None:
    healer, _, launch = piped
    healer.spares(0, DIED)
    healer.spares(3, DIED)  # nobody has gone on since
    assert healer.members == [2, 1]
    assert launch.sent[-1][1].places == (2, 1)
    assert launch.sent[-1][1].fresh == ()
    regrouped(healer, 12)
    joined(healer, 0, 20)
    assert healer.members == [2, 1]  # one alone makes no pipeline
    joined(healer, 3, 20)
    assert healer.members == [0, 1, 2, 3]
    assert set(launch.sent[-1][1].fresh) == {0, 3}


def test_who_waits_has_nothing_once_the_others_have_gone_on(piped) -> None:
    healer, run, _ = piped
    healer.spares(0, DIED)
    regrouped(healer, 12)
    assert healer.spares(3, DIED) is None  # rank 1 has a stage of step 12 at most
    assert healer.hear(2, Standing(rank=2, phase="cut", generation=healer.generation)) is None
    assert run.recoveries[0].engines == (0,)


def test_who_dies_while_it_waits_is_replaced(piped) -> None:
    healer, run, launch = piped
    healer.spares(0, DIED)
    regrouped(healer, 12)
    assert healer.spares(1, DIED) is DIED
    assert "rank 1" in run.notes[-1].lower()
    assert [done.engines for done in run.recoveries] == [(0,), (1,)]
    assert launch.replaced == [0, 1]
    joined(healer, 1, 20)
    assert healer.members == [2, 3]
    joined(healer, 0, 20)
    assert healer.members == [0, 1, 2, 3]


def test_a_fresh_worker_that_dies_again_leaves_its_pipeline_waiting(piped) -> None:
    healer, _, launch = piped
    healer.spares(0, DIED)
    regrouped(healer, 12)
    healer._coming[0] = DIED
    healer.hear(0, Standing(rank=0, phase="ready"))
    assert healer.members == [0, 1, 2, 3]
    healer.spares(0, DIED)
    assert healer.members == [2, 3]
    assert launch.sent[-1][1].fresh == ()
    regrouped(healer, 20)
    joined(healer, 0, 30)
    assert healer.members == [0, 1, 2, 3]
    assert set(launch.sent[-1][1].fresh) == {0, 1}


def test_who_waits_is_let_go_when_the_others_have_trained(piped) -> None:
    healer, _, launch = piped
    healer.spares(0, DIED)
    regrouped(healer, 12)
    healer.spares(2, WELL)
    assert let_go(launch) == []
    healer.spares(3, WELL)
    assert let_go(launch) == [1]
    assert healer.spares(1, CellOutcome(status="stopped")) == CellOutcome(status="ok")


def test_once_one_has_trained_to_the_end_nobodys_part_is_needed(piped) -> None:
    healer, _, launch = piped
    healer.spares(3, DIED)
    healer.hear(0, Standing(rank=0, phase="past", generation=1))
    assert healer.members == [1, 2]  # whom the others would have left behind
    assert launch.sent[-1][1].past == (0,)


def test_who_waits_is_needed_where_one_has_ended_before_the_others_met(piped) -> None:
    healer, run, launch = piped
    healer.spares(3, DIED)
    healer.spares(0, WELL)
    assert healer.members == [1, 2]
    assert launch.sent[-1][1].past == (0,)
    regrouped(healer, 12)
    assert [one["event"] for one in run.history.story.changes] == ["healed"]  # nobody left


def test_without_any_holder_of_a_part_the_run_cannot_end(piped) -> None:
    healer, _, _ = piped
    healer.spares(3, DIED)
    healer.hear(0, Standing(rank=0, phase="past", generation=1))
    assert healer.spares(1, DIED) is None  # of its stage's weights nothing would be left
