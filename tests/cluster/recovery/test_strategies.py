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
