"""Whole pipelines go on, nothing is done again, and the broken one comes back whole."""

import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import HEALING_STEPS, cell, counts_once, difference, kill

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = HEALING_STEPS
SPLIT = {"stages": 2, "split_at": "1"}


@pytest.fixture(scope="module")
def cluster():
    with lent(4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    return cluster.run(cell(STEPS), strategy="hybrid", options=SPLIT).wait(WAIT_S).weights()


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
    run = heal(paced(), rank, inject=[f"kill={rank}@20"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)
