"""Workers leave a run and come to it while it trains; what is trained does not change."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 240


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody comes or goes."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def begun(cluster, tmp_path):
    """Begin a run whose steps take their time until `hurry` is called; return it when it trains."""
    source = (
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def pace(step, logs):\n"
        "    if step >= 20 and not (folder / 'hurry').exists():\n"
        "        time.sleep(0.05)\n"
    ) + cell(STEPS, ", callbacks=[pace]")

    def begin(**more):
        more = {"strategy": "mirrored", "on_failure": "heal"} | more
        run = cluster.run(source, **more)
        assert soon(lambda: run.is_over or run.history.totals.steps >= 20)
        return run

    return begin


@pytest.fixture
def ended(tmp_path, undisturbed):
    """Have a run train to its end; nothing in it may differ from one that nobody disturbed."""

    def end(run):
        (tmp_path / "hurry").touch()
        run.wait(WAIT_S)
        assert run.state == "finished"
        assert difference(run.weights(), undisturbed) <= EXACT
        history = run.history
        history.finish()
        rank, step = history["rank"].tolist(), history["step"].tolist()
        assert len(set(zip(rank, step, strict=True))) == len(step)
        assert history.totals.steps == STEPS
        samples = np.bincount(history["step"], history["samples"], minlength=STEPS)
        assert (samples == 24).all()
        return run

    return end


def changes(run):
    return [(one["event"], one["ranks"], one["workers"]) for one in run.events]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_leaves_and_comes_again(cluster, begun, ended, rank):
    run = begun()
    healer = run.task.mender
    healer.dismiss([rank], "to make room")
    assert soon(lambda: len(run.events) == 1), run.history.story.notes
    healer.admit([rank])
    assert soon(lambda: len(run.events) == 2), run.history.story.notes
    ended(run)
    assert changes(run) == [("departed", [rank], 2), ("joined", [rank], 3)]
    assert run.recoveries == []
