"""Who is left trains on, nothing is done again, and a fresh engine joins them."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import STEPS, cell, difference, every_step_counts_once, going, pids

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
SLOW = ", callbacks=[lambda step, logs: __import__('time').sleep(0.02)]"


def heal(cluster, source, **more):
    return cluster.run(source, strategy="mirrored", on_failure="heal", **more)


def gap_s(run):
    """The longest time from the end of a survivor's step to the beginning of its next."""
    history = run.history
    rank0 = np.flatnonzero(history["rank"] == history["rank"].min())
    start, step_s = history["start_s"][rank0], history["step_s"][rank0]
    return float((start[1:] - start[:-1] - step_s[:-1]).max())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_dead_worker_is_done_without_and_another_joins(cluster, undisturbed, rank):
    before = pids(cluster)
    run = heal(cluster, cell(steps=STEPS, more=SLOW), inject=[f"kill={rank}@20"]).wait(WAIT_S)
    print(run.events, run.recoveries, run.history.story.notes)
    assert difference(run.weights(), undisturbed) <= EXACT
    healed, joined = run.events
    assert (healed["event"], healed["ranks"], healed["step"]) == ("healed", [rank], 20)
    assert (joined["event"], joined["ranks"], joined["workers"]) == ("joined", [rank], 3)
    assert 20 < joined["step"] < STEPS
    (done,) = run.recoveries
    assert (done.engines, done.step, done.lost_steps, done.workers) == ((rank,), 20, 0, 2)
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {rank}
    every_step_counts_once(run)
    print("pause", healed["seconds"], joined["seconds"])
