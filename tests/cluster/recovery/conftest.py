"""A cluster of three, whole before each test, and what a run comes to in which nobody dies."""

import functools

import pytest
from lending import lent
from notebook_shell import WAIT_S, soon
from recovering import cell, healing_cell


@pytest.fixture(scope="module")
def cluster():
    with lent(3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def whole(cluster):
    """Give each test three living engines."""
    if dead := [e.id for e in cluster.engines if e.state == "dead"]:
        cluster.restart(dead)
    yield
    busy = cluster.busy
    if busy is not None and not busy.is_over:
        busy.stop() if hasattr(busy, "stop") else busy.interrupt()
        assert soon(lambda: busy.is_over)


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    return cluster.run(cell(), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def paced(tmp_path):
    """Return a cell whose steps take long enough to be disturbed (`healing_cell`)."""
    return functools.partial(healing_cell, tmp_path)


@pytest.fixture
def heal(cluster, tmp_path):
    """Run a cell until these ranks went and came, then to its end."""

    def run_it(source, *ranks, strategy="mirrored", **more):
        run = cluster.run(source, strategy=strategy, on_failure="heal", **more)
        changed = lambda event: sorted(  # noqa: E731
            rank for one in run.events if one["event"] == event for rank in one["ranks"]
        )
        assert soon(lambda: run.is_over or changed("joined") == sorted(ranks)), (
            run,
            run.events,
            run.history.story.notes,
        )
        (tmp_path / "hurry").touch()
        run.wait(3 * WAIT_S)
        assert changed("healed") == changed("joined") == sorted(ranks), run.history.story.notes
        assert run.events[-1]["workers"] == 3
        return run

    return run_it
