"""Strategies that keep more than a copy of the model on each worker."""

import pytest
from needs import need
from notebook_shell import WAIT_S
from recovering import STEPS, cell, difference

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("sharded", {}), ("central_storage", {}), ("model_split", {}), ("tensor_parallel", {})],
)
@pytest.mark.parametrize("on_failure", ["replace", "continue"])
def test_strategies_go_on_and_end_where_they_would_have(
    cluster, undisturbed, tmp_path, strategy, options, on_failure
):
    if strategy == "tensor_parallel" and on_failure == "continue":
        more = {"inject": ["kill=2@60"]}  # 16 columns over 3, then over 2
    else:
        more = {"inject": ["kill=1@60"]}
    run = cluster.run(
        cell(), strategy=strategy, options=options, checkpoint=str(tmp_path), checkpoint_every=25,
        on_failure=on_failure, **more,
    ).wait(WAIT_S)  # fmt: skip
    assert len(run.recoveries) == 1
    assert difference(run.weights(), undisturbed) <= 1e-10
    assert run.history.totals.steps == STEPS


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("local_sgd", {"every": 4}),
        ("local_sgd", {"every": 4, "outer": "nesterov"}),
        ("gossip", {}),
        ("parameter_server", {"sync": True}),
    ],
    ids=["local_sgd", "nesterov", "gossip", "synchronous"],
)
def test_a_replaced_worker_costs_the_steps_since_the_checkpoint(
    cluster, tmp_path, strategy, options
):
    whole = cluster.run(cell(), strategy=strategy, options=options).wait(WAIT_S)
    run = cluster.run(
        cell(), strategy=strategy, options=options, checkpoint=str(tmp_path), checkpoint_every=25,
        on_failure="replace", inject=["kill=1@60"],
    ).wait(WAIT_S)  # fmt: skip
    (done,) = run.recoveries
    assert done.step in (25, 50)
    ahead = options.get("every", 0)  # by so much others may be further, between two averages
    assert done.lost_steps <= 60 - done.step + ahead
    assert difference(run.weights(), whole.weights()) <= 1e-10
    assert run.history.totals.steps == STEPS
