"""Workers of servers die: the others train on, nothing is done again, and fresh ones join them."""

import random
import time

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import MODEL, cell, difference, kill

from workbench.execution.workers.healing import Healer
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")
import torch  # noqa: E402

EXACT = 1e-10
STEPS = 120
SYNC = [("central_storage", {}), ("parameter_server", {"sync": True, "servers": 2})]


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def paced(tmp_path):
    """Return a cell whose steps take long enough to be disturbed, until its file `hurry` is there.

    So all that is to happen happens in the run, however long this machine takes for it.
    """

    def make(before="", more="", pause_s=0.05):
        source = (
            "import os, pathlib, signal, time\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
            "def once(what):\n"
            "    flag = folder / f'{what}-{rank}'\n"
            "    there = flag.exists()\n"
            "    flag.touch()\n"
            "    return not there\n"
            "def die():\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "def pace(step, logs):\n"
            "    if step >= 20 and not (folder / 'hurry').exists():\n"
            f"        time.sleep({pause_s})\n"
        )
        return source + before + cell(STEPS, f", callbacks=[pace] {more}")

    return make


def loss_of(run):
    """Return the loss of what it has trained, over all its data."""
    scope = {}
    exec(MODEL, scope)
    model = scope["model"]
    model.load_state_dict({name: torch.from_numpy(w) for name, w in run.weights().items()})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator).double()
    y = torch.randint(0, 4, (96,), generator=generator)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(x), y))


def changed(run, event):
    return sorted(rank for one in run.events if one["event"] == event for rank in one["ranks"])


@pytest.fixture
def heal(cluster, tmp_path):
    """Run a cell until these ranks went and came, then to its end."""

    def run_it(source, strategy, options, *ranks, **more):
        run = cluster.run(source, strategy=strategy, options=options, on_failure="heal", **more)
        assert soon(lambda: run.is_over or changed(run, "joined") == sorted(ranks)), (
            run,
            run.events,
            run.history.story.notes,
        )
        (tmp_path / "hurry").touch()
        run.wait(3 * WAIT_S)
        assert changed(run, "healed") == changed(run, "joined") == sorted(ranks)
        return run

    return run_it


def counts_once(run):
    """Every step once; of the last before a death the row of who died may be missing."""
    run.history.finish()
    rank, step, samples = (run.history[name] for name in ("rank", "step", "samples"))
    assert len(set(zip(rank.tolist(), step.tolist(), strict=True))) == len(step)
    assert run.history.totals.steps == STEPS
    each = np.bincount(step, samples, minlength=STEPS)
    assert (each <= 24).all()
    fallen = [one["step"] for one in run.events if one["event"] == "healed"]
    whole = [at for at in range(STEPS) if not any(end - 50 <= at < end for end in fallen)]
    assert (each[whole] == 24).all()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("strategy", "options"), SYNC, ids=["central", "two servers"])
def test_a_dead_worker_is_done_without_and_another_joins(
    undisturbed, paced, heal, strategy, options, rank
):
    run = heal(paced(), strategy, options, rank, inject=[f"kill={rank}@20"])
    assert difference(run.weights(), undisturbed) <= EXACT
    healed, joined = run.events
    assert (healed["ranks"], healed["workers"]) == ([rank], 2)
    assert (joined["ranks"], joined["workers"]) == ([rank], 3)
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.again) == ((rank,), 0, False)
    counts_once(run)


BETWEEN_TWO_SERVERS = """
from workbench.engine.transport import worker
plain = getattr(worker.Link.push, 'plain', worker.Link.push)
pushes = 0
def dying(self, kind, *args):
    global pushes
    plain(self, kind, *args)
    pushes += kind == 'push'
    if rank == 1 and pushes == 61 and once('killed'):
        die()
dying.plain = plain
worker.Link.push = dying
"""


def test_a_death_between_the_pushes_to_two_servers(undisturbed, paced, heal):
    """One server has the whole step, the other never will: neither takes it."""
    source = paced(BETWEEN_TWO_SERVERS) + "\nworker.Link.push = plain\n"
    run = heal(source, *SYNC[1], 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 30
    counts_once(run)


BEFORE_THE_ANSWER = """
from workbench.engine.transport import worker
plain = getattr(worker.Link.receive, 'plain', worker.Link.receive)
answers = 0
def dying(self):
    global answers
    answers += 1
    if rank == 1 and answers == 60 and once('killed'):
        import select
        select.select([self._sock], [], [])  # the server has taken the step
        die()
    return plain(self)
dying.plain = plain
worker.Link.receive = dying
"""


def test_a_death_between_push_and_answer(undisturbed, paced, heal):
    source = paced(BEFORE_THE_ANSWER) + "\nworker.Link.receive = plain\n"
    run = heal(source, *SYNC[0], 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


COMMITTED_ON_ONE = """
from workbench.engine.transport import worker
plain = getattr(worker.Link.complete, 'plain', worker.Link.complete)
told = 0
def dying(self, *args):
    global told
    plain(self, *args)
    told += 1
    if rank == 0 and told == 61 and once('killed'):
        die()
dying.plain = plain
worker.Link.complete = dying
"""


def test_a_death_of_who_tells_two_servers_to_step(undisturbed, paced, heal):
    """One server has taken the step, so the other one takes it too."""
    source = paced(COMMITTED_ON_ONE) + "\nworker.Link.complete = plain\n"
    run = heal(source, *SYNC[1], 0)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 31  # that step stands
    counts_once(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_at_their_own_pace_nobody_waits_and_a_fresh_engine_does_the_rest(
    cluster, paced, heal, rank
):
    more = ", eval_data=(x, y), eval_every=20"
    run = heal(
        paced(more=more, pause_s=0.2),
        "parameter_server",
        {},
        rank,
        inject=[f"kill={rank}@30"],
    )
    run.history.finish()
    healed, joined = run.events
    assert joined["workers"] == 3
    assert joined["step"] >= healed["step"]
    rows = list(zip(run.history["rank"].tolist(), run.history["step"].tolist(), strict=True))
    assert len(set(rows)) == len(rows)
    steps = {r: {step for one, step in rows if one == r} for r in range(3)}
    for other in {0, 1, 2} - {rank}:
        assert steps[other] == set(range(STEPS))
    missing = set(range(STEPS)) - steps[rank]
    assert missing <= set(range(20, 30))  # rows that it had not sent yet; their pushes count
    assert {one["step"] for one in run.evals} >= set(range(59, STEPS, 20))
    whole = cluster.run(cell(STEPS), strategy="parameter_server").wait(WAIT_S)
    first = float(run.history["loss"][0])
    assert first - loss_of(run) >= 0.8 * (first - loss_of(whole))


def test_two_deaths_at_once_and_down_to_one(undisturbed, paced, heal):
    run = heal(paced(), *SYNC[0], 0, 2, inject=["kill=0@30", "kill=2@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_a_second_death_while_a_fresh_engine_starts(cluster, undisturbed, paced, heal, monkeypatch):
    start, begun = Healer._start, []

    def killing(self, engine):
        if not begun:
            begun.append(engine)
            kill(cluster, 2)
            assert soon(lambda: 2 not in cluster.ids)
        start(self, engine)

    monkeypatch.setattr(Healer, "_start", killing)
    run = heal(paced(), *SYNC[0], 1, 2, inject=["kill=1@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


IN_HANDOVER = """
from workbench.engine.transport import handover
plain = getattr(handover.Donor.give, 'plain', handover.Donor.give)
def dying(self, *args):
    if rank == 0 and once('killed'):
        die()
    return plain(self, *args)
dying.plain = plain
handover.Donor.give = dying
"""


@pytest.mark.parametrize("strategy", ["central_storage", "parameter_server"])
def test_who_hands_over_dies(undisturbed, paced, heal, strategy):
    source = paced(IN_HANDOVER, pause_s=0.2) + "\nhandover.Donor.give = plain\n"
    run = heal(source, strategy, {}, 0, 2, inject=["kill=2@30"])
    if strategy == "central_storage":
        assert difference(run.weights(), undisturbed) <= EXACT
        counts_once(run)


@pytest.mark.parametrize("server", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [SYNC[0], SYNC[1], ("parameter_server", {})],
    ids=["central", "two servers", "at their own pace"],
)
def test_a_worker_and_a_server_of_two_that_hold_the_same(
    cluster, undisturbed, paced, tmp_path, strategy, options, server
):
    """Before the fresh worker has come, so that it finds the copy in the server's place."""
    run = cluster.run(
        paced(pause_s=0.2), strategy=strategy, options={**options, "replicas": 2},
        on_failure="heal",
    )  # fmt: skip
    assert soon(lambda: run.is_over or run.history.snapshot().step >= 20)
    kill(cluster, 1, [i for i in cluster.ids if i not in cluster.worker_ids][server])
    assert soon(lambda: run.is_over or changed(run, "joined") == [1]), (
        run, run.events, run.history.story.notes,
    )  # fmt: skip
    (tmp_path / "hurry").touch()
    run.wait(3 * WAIT_S)
    assert changed(run, "healed") == changed(run, "joined") == [1], run.history.story.notes
    assert not any(done.again for done in run.recoveries)
    if strategy == "central_storage" or options:
        assert difference(run.weights(), undisturbed) <= EXACT
        counts_once(run)


def test_with_evaluations_and_checkpoints(undisturbed, tmp_path, paced, heal):
    run = heal(
        paced(more=", eval_data=(x, y), eval_every=20"), *SYNC[0], 1, inject=["kill=1@27"],
        checkpoint=str(tmp_path / "c"), checkpoint_every=25,
    )  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert [one["step"] for one in run.evals] == list(range(19, STEPS, 20))
    counts_once(run)
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [100, STEPS]


@pytest.mark.parametrize(("strategy", "options"), SYNC, ids=["central", "two servers"])
def test_deaths_at_random_moments(cluster, undisturbed, tmp_path, paced, strategy, options):
    """Whoever it is and wherever it was: at a server, in an evaluation, while one is let in."""
    draw = random.Random(11)
    run = cluster.run(
        paced(more=", eval_data=(x, y), eval_every=5", pause_s=0.2), strategy=strategy,
        options=options, on_failure="heal",
    )  # fmt: skip
    assert soon(lambda: run.is_over or run.history.snapshot().step >= 20)

    def is_whole(deaths):
        whole = not run.events or run.events[-1]["workers"] == 3
        return run.is_over or (len(run.recoveries) >= deaths and whole)

    for deaths in range(3):
        assert soon(lambda deaths=deaths: is_whole(deaths)), (run, run.events)
        time.sleep(draw.uniform(0, 0.25))  # some moment
        if not run.is_over:
            kill(cluster, draw.randrange(3))
    assert soon(lambda: is_whole(3)), (run, run.events, run.history.story.notes)
    (tmp_path / "hurry").touch()
    run.wait(3 * WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert not any(done.again for done in run.recoveries)
    assert [one["step"] for one in run.evals] == list(range(4, STEPS, 5))
    counts_once(run)
