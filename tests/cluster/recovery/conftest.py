"""A cluster of three, whole before each test, and what a run comes to in which nobody dies."""

import pytest
from lending import lent
from notebook_shell import WAIT_S, soon
from recovering import cell


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
