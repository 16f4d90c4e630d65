"""Workers of servers die: the others train on, nothing is done again, and fresh ones join them."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

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

    def make(before="", more=""):
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
            "        time.sleep(0.05)\n"
        )
        return source + before + cell(STEPS, f", callbacks=[pace] {more}")

    return make


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
