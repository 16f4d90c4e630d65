"""Whole pipelines go on, nothing is done again, and the broken one comes back whole."""

import random
import time

import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import HEALING_STEPS, cell, counts_once, difference, kill, pids

from workbench.errors import RunError
from workbench.execution.workers.healing import Healer
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = HEALING_STEPS
SPLIT = {"stages": 2, "split_at": "1"}
CLIPPED = ", clip_norm=0.5"
"""So an update needs a number that all stages have agreed on."""


@pytest.fixture(scope="module")
def cluster():
    with lent(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    run = cluster.run(cell(STEPS, CLIPPED), strategy="hybrid", options=SPLIT)
    return run.wait(WAIT_S).weights()


@pytest.fixture
def paced(paced):
    """Return a cell that clips, and whose steps take long enough to be disturbed."""
    return lambda before="", more=CLIPPED, **about: paced(before, more, **about)


@pytest.fixture
def heal(cluster, tmp_path):
    """Run a cell until so many workers came back, then to its end."""

    def run_it(source, *ranks, options=SPLIT, **more):
        run = cluster.run(source, strategy="hybrid", on_failure="heal", options=options, **more)

        def changed(event):
            told = (one["ranks"] for one in run.events if one["event"] == event)
            return sorted(rank for ranks in told for rank in ranks)

        whole = lambda: run.events and run.events[-1]["workers"] == 4  # noqa: E731
        came = lambda: changed("healed") == sorted(ranks) and whole()  # noqa: E731
        assert soon(lambda: run.is_over or came()), (run, run.events, run.history.story.notes)
        (tmp_path / "hurry").touch()
        run.wait(3 * WAIT_S)
        assert changed("healed") == sorted(ranks), run.history.story.notes
        return run

    return run_it


@pytest.mark.parametrize("rank", [0, 3])
def test_the_other_pipeline_goes_on_and_the_broken_one_comes_back(
    cluster, undisturbed, paced, heal, rank
):
    before = pids(cluster)
    run = heal(paced(), rank, inject=[f"kill={rank}@20"])
    assert difference(run.weights(), undisturbed) <= EXACT
    healed, left, joined = run.events
    pipeline = [0, 1] if rank == 0 else [2, 3]
    assert (healed["ranks"], healed["workers"]) == ([rank], 2)
    assert healed["step"] in (19, 20)  # its last messages may have gone with it
    assert left["ranks"] == [one for one in pipeline if one != rank]
    assert (joined["ranks"], joined["workers"]) == (pipeline, 4)
    assert 20 <= joined["step"] < STEPS
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.again) == ((rank,), 0, False)
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {rank}
    counts_once(run)
    rows = run.history.totals.rows
    assert {rows[i] for i in range(4) if i not in pipeline} == {STEPS}
    print(f"stood still for {healed['seconds']:.3f} and {joined['seconds']:.3f} s")


ADAM = ("torch.optim.SGD(p, 0.05, momentum=0.9)", "torch.optim.Adam(p, 0.01)")
WITH = ", eval_data=(x, y), eval_every=20"


def test_with_adam_evaluations_and_checkpoints(cluster, tmp_path, paced, heal):
    source = paced(more=WITH).replace(*ADAM)
    plain = cell(STEPS, WITH).replace(*ADAM)
    whole = cluster.run(plain, strategy="hybrid", options=SPLIT).wait(WAIT_S)
    run = heal(source, 1, inject=["kill=1@27"], checkpoint=str(tmp_path / "c"), checkpoint_every=25)
    assert difference(run.weights(), whole.weights()) <= EXACT
    assert [one["step"] for one in run.evals] == list(range(19, STEPS, 20))
    assert [one["loss"] for one in run.evals] == pytest.approx(
        [one["loss"] for one in whole.evals], abs=EXACT
    )
    counts_once(run)
    assert checkpoints.found(tmp_path / "c")[-1].step == STEPS


BETWEEN = """
import torch
from workbench.strategies.torch.hybrid import Hybrid
def wait_for(*flags):
    while not all((folder / flag).exists() for flag in flags):
        time.sleep(0.005)
plain = getattr(Hybrid.{method}, 'plain', Hybrid.{method})
calls = 0
def watched(self, *args, **given):
    global calls
    calls += 1
    if calls == 61 and BEFORE:
        die()
    result = plain(self, *args, **given)
    if calls == 61 and AFTER:
        raise RuntimeError('gloo: Connection closed by peer')
    if calls == 61 and SEEN:
        (folder / f'seen-{rank}').touch()
    return result
watched.plain = plain
Hybrid.{method} = watched
"""
UNDO = "\nHybrid.{method} = plain\n"


def between(paced, method, before, after, seen):
    """Return a cell in which something happens in the 61st call of a method of the strategy."""
    source = BETWEEN.replace("{method}", method)
    conditions = {"BEFORE": before, "AFTER": after, "SEEN": seen}
    for name, condition in conditions.items():
        source = source.replace(name, condition)
    return paced(source) + UNDO.replace("{method}", method)


def test_a_step_that_one_worker_has_taken_is_taken_by_all(undisturbed, paced, heal):
    """Ranks 0 and 2 take it, rank 1 is cut off when it could, rank 3 dies before it does."""
    dying = "rank == 3 and once('killed') and (wait_for('seen-0', 'seen-2') or True)"
    source = between(paced, "apply", dying, "False", "rank in (0, 2)")
    cut = (
        "waits = getattr(Hybrid._await_all, 'plain', Hybrid._await_all)\n"
        "met = 0\n"
        "def cutting(self, **given):\n"
        "    global met\n"
        "    met += 1\n"
        "    waits(self, **given)\n"
        "    if met == 61 and rank == 1 and once('cut'):\n"
        "        raise RuntimeError('gloo: Connection closed by peer')\n"
        "cutting.plain = waits\n"
        "Hybrid._await_all = cutting\n"
    )
    source = source.replace("def wait_for", cut + "def wait_for") + "Hybrid._await_all = waits\n"
    run = heal(source, 3)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 61  # the step of ranks 0 and 2 stands
    counts_once(run)


def test_where_one_stage_has_its_sum_and_the_other_has_not_nobody_takes_the_step(
    undisturbed, paced, heal
):
    """Rank 3 dies before it adds up with rank 1, after ranks 0 and 2 have their sum."""
    dying = "rank == 3 and once('killed') and (wait_for('seen-0', 'seen-2') or True)"
    source = between(paced, "gradients_done", dying, "False", "rank in (0, 2)")
    run = heal(source, 3)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 60
    counts_once(run)


def test_what_two_deaths_leave_of_two_pipelines_goes_on_as_one(undisturbed, paced, heal):
    run = heal(paced(), 0, 3, inject=["kill=0@30", "kill=3@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_who_waits_for_a_fresh_worker_dies_too(cluster, undisturbed, paced, heal, monkeypatch):
    start, begun = Healer._start, []

    def killing(self, engine):
        if not begun:
            begun.append(engine)
            kill(cluster, 0)
            assert soon(lambda: 0 not in cluster.ids)
        start(self, engine)

    monkeypatch.setattr(Healer, "_start", killing)
    run = heal(paced(), 1, inject=["kill=1@30"])
    assert run.events[-1]["ranks"] == [0, 1]
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_nobody_is_left_with_a_stage(cluster, paced):
    run = cluster.run(
        paced(), strategy="hybrid", on_failure="heal", options=SPLIT,
        inject=["kill=0@30", "kill=2@30"],
    )  # fmt: skip
    with pytest.raises(RunError, match="WB-RUN-138"):
        run.wait(WAIT_S)


def test_nobody_is_left_with_a_stage_and_a_checkpoint_is_there(
    cluster, undisturbed, tmp_path, paced
):
    (tmp_path / "hurry").touch()
    run = cluster.run(
        paced(), strategy="hybrid", on_failure="heal", options=SPLIT,
        checkpoint=str(tmp_path / "c"), checkpoint_every=25, inject=["kill=0@130", "kill=2@130"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.recoveries[-1].again
    counts_once(run)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_in_the_last_step_leaves_whole_weights(cluster, undisturbed, tmp_path, paced, rank):
    (tmp_path / "hurry").touch()
    run = cluster.run(
        paced(), strategy="hybrid", on_failure="heal", options=SPLIT,
        inject=[f"kill={rank}@{STEPS - 1}"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


IN_FINISH = """
from workbench.strategies.torch.hybrid import Hybrid
def wait_for(flag):
    while not (folder / flag).exists():
        time.sleep(0.005)
waits = getattr(Hybrid._await_all, 'plain', Hybrid._await_all)
def cutting(self, **given):
    waits(self, **given)
    if not given and rank:  # at the end, where rank 0 is through
        wait_for('through')
        if rank == 3 and once('killed'):
            die()
        if once('cut'):
            raise RuntimeError('gloo: Connection closed by peer')
cutting.plain = waits
Hybrid._await_all = cutting
"""
AFTER = """
if rank == 0:
    (folder / 'through').touch()
Hybrid._await_all = waits
"""


def test_once_one_is_through_the_others_end_without_a_whole_pipeline(
    cluster, undisturbed, tmp_path, paced
):
    (tmp_path / "hurry").touch()
    run = cluster.run(
        paced(IN_FINISH) + AFTER, strategy="hybrid", on_failure="heal", options=SPLIT
    ).wait(WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


DEEP = """
import torch
from torch import nn
torch.manual_seed(0)
def build():
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()
model = BUILD
"""
TIED = """
import torch
from torch import nn
torch.manual_seed(0)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8)
        self.out = nn.Linear(8, 4)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.out.weight = self.first.weight
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.out(self.last(self.act(self.first(x)))), y)
model = Tied().double()
"""
STEP_FN = ("loss=nn.CrossEntropyLoss()", "step_fn=lambda m, batch: m(*batch)")


@pytest.mark.parametrize(
    ("model", "options", "change"),
    [
        (DEEP.replace("BUILD", "build()"), {"stages": 2, "schedule": "interleaved"}, ()),
        (DEEP.replace("BUILD", "build"), {"stages": 2, "microbatches": 3}, ()),
        (TIED, {"stages": 2}, STEP_FN),
    ],
    ids=["interleaved", "built in parts", "the loss within, a weight in two stages"],
)
def test_whatever_a_pipeline_is_made_of(cluster, paced, heal, model, options, change):
    plain, source = cell(STEPS, CLIPPED, model=model), paced(model=model)
    if change:
        plain, source = plain.replace(*change), source.replace(*change)
    whole = cluster.run(plain, strategy="hybrid", options=options).wait(WAIT_S)
    run = heal(source, 3, options=options, inject=["kill=3@20"])
    assert difference(run.weights(), whole.weights()) <= EXACT
    counts_once(run)


def test_deaths_at_random_moments(cluster, undisturbed, tmp_path, paced):
    """Whoever it is and wherever it was: in a stage, in a sum, while others are let in."""
    draw = random.Random(5)
    run = cluster.run(
        paced(more=f"{CLIPPED}, eval_data=(x, y), eval_every=5"), strategy="hybrid",
        on_failure="heal", options=SPLIT,
    )  # fmt: skip
    assert soon(lambda: run.is_over or run.history.snapshot().step >= 20)
    for deaths in range(1, 7):
        time.sleep(draw.uniform(0, 0.15))  # some moment
        kill(cluster, draw.randrange(4))
        assert soon(
            lambda deaths=deaths: (
                run.is_over or (len(run.recoveries) == deaths and run.events[-1]["workers"] == 4)
            )
        ), (run, run.events, run.history.story.notes)
    (tmp_path / "hurry").touch()
    run.wait(3 * WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert not any(done.again for done in run.recoveries)
    assert [one["step"] for one in run.evals] == list(range(4, STEPS, 5))
    counts_once(run)
