"""Replicas that differ stay what they are: who is left goes on, and a fresh engine joins."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S
from recovering import HEALING_STEPS, cell, counts_once, difference

from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
MOST = 0.05 * np.log(4)
"""What deaths may change the final loss by: a twentieth of what it was before training."""
EVERY = 6
VARIANTS = {
    "local_sgd": ("local_sgd", {"every": EVERY}),
    "nesterov": ("local_sgd", {"every": EVERY, "outer": "nesterov"}),
    "fragments": ("local_sgd", {"every": EVERY, "outer": "nesterov", "fragments": 3}),
    "ring": ("gossip", {}),
    "exponential": ("gossip", {"graph": "exponential"}),
}
EXACTLY = {
    "mean": ("mirrored", {}),
    "nesterov": ("local_sgd", {"every": 1, "outer": "nesterov"}),
}
"""What undisturbed runs are held against that average after each step."""
MET_AT_ONCE = {"mean": {"every": 1}, "nesterov": {"every": 1, "outer": "nesterov"}}
EVALUATED = ", eval_data=(x, y), eval_every=40"


def plain(source):
    """SGD without momentum: with an average after each step it is what one device does."""
    return source.replace(", momentum=0.9", "")


@pytest.fixture(scope="module")
def exact(cluster):
    """Return the weights after all steps when nobody dies; each is trained once."""
    known = {}

    def weights(variant):
        if variant not in known:
            strategy, options = EXACTLY[variant]
            run = cluster.run(plain(cell(HEALING_STEPS)), strategy=strategy, options=options)
            known[variant] = run.wait(WAIT_S).weights()
        return known[variant]

    return weights


@pytest.fixture(scope="module")
def losses(cluster):
    """Return the final loss of a variant when nobody dies; each is trained once."""
    known = {}

    def final(variant):
        if variant not in known:
            strategy, options = VARIANTS[variant]
            source = cell(HEALING_STEPS, EVALUATED)
            run = cluster.run(source, strategy=strategy, options=options).wait(WAIT_S)
            known[variant] = run.evals[-1]["loss"]
        return known[variant]

    return final


def died_with(run, rank, every):
    """Return how many steps of a dead worker no average has taken in: the others had none since."""
    rank_of, step = run.history["rank"], run.history["step"]
    (healed,) = [one for one in run.events if one["event"] == "healed" and rank in one["ranks"]]
    joined = next(one["step"] for one in run.events if one["event"] == "joined")
    met = healed["step"] // every * every
    return int(((rank_of == rank) & (step >= met) & (step < joined)).sum())


@pytest.mark.parametrize(
    ("rank", "variant"), [(0, "mean"), (1, "nesterov"), (2, "mean")], ids=["0", "1", "2"]
)
def test_averaged_after_each_step_nothing_is_lost(exact, paced, heal, rank, variant):
    run = heal(
        plain(paced()), rank, strategy="local_sgd", options=MET_AT_ONCE[variant],
        inject=[f"kill={rank}@40"],
    )  # fmt: skip
    assert difference(run.weights(), exact(variant)) <= EXACT
    counts_once(run)


def test_two_at_once_and_down_to_one(exact, paced, heal):
    run = heal(
        plain(paced()), 0, 2, strategy="local_sgd", options=MET_AT_ONCE["nesterov"],
        inject=["kill=0@30", "kill=2@30"],
    )  # fmt: skip
    assert difference(run.weights(), exact("nesterov")) <= EXACT
    counts_once(run)


IN_AVERAGE = """
import torch
import torch.distributed as dist
plain_reduce = getattr(dist.all_reduce, 'plain', dist.all_reduce)
means = 0
def dying(tensor, *args, **more):
    global means
    means += tensor.numel() == 212 and len(args) == 0
    at_it = tensor.numel() == 212 and means == AT
    if at_it and rank == 1 and 'before' in DIES and once('killed'):
        die()
    result = plain_reduce(tensor, *args, **more)
    if at_it and rank == 1 and 'after' in DIES and once('killed'):
        die()
    if at_it and rank in FAIL and once('failed'):
        raise RuntimeError('gloo: Connection closed by peer')
    return result
dying.plain = plain_reduce
dist.all_reduce = dying
"""


def in_average(paced, at, dies, *fail, more=""):
    """Return a cell in whose average number `at` rank 1 dies, and others may be broken out."""
    before = IN_AVERAGE.replace("AT", str(at)).replace("DIES", repr(dies))
    return paced(before.replace("FAIL", repr(fail)), more) + "\ndist.all_reduce = plain_reduce\n"


@pytest.mark.parametrize("variant", EXACTLY)
@pytest.mark.parametrize(
    ("dies", "fail", "step"),
    [("before", (), 40), ("after", (2,), 41), ("after", (0, 2), 40)],
    ids=["nobody has the mean", "one has the mean", "all let go of it"],
)
def test_a_death_in_the_middle_of_an_average(exact, paced, heal, dies, fail, step, variant):
    source = plain(in_average(paced, 41, dies, *fail))
    run = heal(source, 1, strategy="local_sgd", options=MET_AT_ONCE[variant])
    assert difference(run.weights(), exact(variant)) <= EXACT
    assert run.events[0]["step"] == step
    counts_once(run)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_near_that_of_an_undisturbed_run(losses, paced, heal, variant):
    strategy, options = VARIANTS[variant]
    run = heal(
        paced(more=EVALUATED), 0, 2, strategy=strategy, options=options,
        inject=["kill=0@39", "kill=2@52"],
    )  # fmt: skip
    assert abs(run.evals[-1]["loss"] - losses(variant)) <= MOST
    assert [one["step"] for one in run.evals] == list(range(39, HEALING_STEPS, 40))
    counts_once(run)
    every = options.get("every", 1)
    assert all(died_with(run, rank, every) <= every for rank in (0, 2))


@pytest.mark.parametrize("variant", ["local_sgd", "fragments"])
def test_a_mean_that_one_worker_has_is_taken_over(losses, paced, heal, variant):
    strategy, options = VARIANTS[variant]
    sizes = {"local_sgd": 212, "fragments": 71}
    source = in_average(paced, 8, "after", 2, more=EVALUATED)
    source = source.replace("212", str(sizes[variant]))
    run = heal(source, 1, strategy=strategy, options=options)
    assert abs(run.evals[-1]["loss"] - losses(variant)) <= MOST
    counts_once(run)


def test_checkpoints_are_written_by_those_that_are_there(tmp_path, paced, heal):
    run = heal(
        paced(), 1, strategy="local_sgd", options={"every": EVERY}, inject=["kill=1@27"],
        checkpoint=str(tmp_path / "c"), checkpoint_every=25,
    )  # fmt: skip
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [225, HEALING_STEPS]
    counts_once(run)
    assert np.isfinite(run.weights()["0.weight"]).all()
