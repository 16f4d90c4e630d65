"""Workers that are told to end say goodbye, and nobody waits for a timeout."""

import os
import signal

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, every_step_counts_once, pids

from workbench.errors import RunError
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 240
WARNED = {"event": "departed", "reason": "SIGTERM"}


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody leaves."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def paced(tmp_path):
    """A cell whose steps take long enough to be disturbed, until its file `hurry` is there."""
    return (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def pace(step, logs):\n"
        "    if step >= 20 and not (folder / 'hurry').exists():\n"
        "        time.sleep(0.05)\n"
    ) + cell(STEPS, ", callbacks=[pace]")


def warn(cluster, *engines):
    """Tell engines to end, as the system does."""
    for engine in engines:
        os.kill(pids(cluster)[engine], signal.SIGTERM)


def trains(run, step=22):
    assert soon(lambda: run.is_over or run.snapshot().step >= step), run


def exits(cluster):
    return {one.id: one.exit and one.exit.short for one in cluster.engines}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_does_not_go_on_stops_at_a_step_with_its_checkpoint(
    cluster, paced, tmp_path, rank
):
    run = cluster.run(
        paced, strategy="mirrored", on_failure="stop", checkpoint=str(tmp_path / "c"),
        checkpoint_every=1000,
    )  # fmt: skip
    trains(run)
    warn(cluster, rank)
    with pytest.raises(RunError, match=r"WB-RUN-165") as caught:
        run.wait(WAIT_S)
    assert "SIGTERM" in str(caught.value)
    steps = run.history.totals.steps
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [steps]
    assert 22 <= steps < STEPS
    assert soon(lambda: exits(cluster)[rank] == "SIGTERM"), exits(cluster)
    (event,) = run.events
    assert event.items() >= {**WARNED, "ranks": [rank], "step": steps}.items()


def test_the_run_goes_on_from_the_checkpoint_of_the_step_it_stopped_at(
    cluster, paced, undisturbed, tmp_path
):
    run = cluster.run(
        paced, strategy="mirrored", checkpoint=str(tmp_path / "c"), checkpoint_every=1000
    )
    trains(run)
    warn(cluster, 1)
    assert soon(lambda: run.is_over or run.recoveries), run
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.workers) == ((1,), 0, 3)
    assert done.step >= 22
    assert "SIGTERM" in done.how
    assert difference(run.weights(), undisturbed) <= EXACT
    every_step_counts_once(run, STEPS)
