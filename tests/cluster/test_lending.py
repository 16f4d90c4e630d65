"""A test that failed does not make those fail that share its cluster, nor its own repetition."""

import os
import signal

import lending
import pytest
from lending import lent
from notebook_shell import soon

pytestmark = [pytest.mark.cluster, pytest.mark.torch]

ENDLESS = "import time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def cluster():
    with lent(2) as cluster:
        yield cluster


def works(cluster):
    task = cluster.execute("pass")
    return soon(lambda: task.is_over) and task.failure() is None


def test_dead_engines_are_replaced(cluster):
    before = [engine.pid for engine in cluster.engines]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert soon(lambda: not cluster.ids)

    lending.mend()

    assert cluster.ids == [0, 1]
    assert works(cluster)


def test_what_still_goes_on_is_ended(cluster):
    task = cluster.execute(ENDLESS)

    lending.mend()

    assert task.is_over
    assert works(cluster)


def test_a_whole_cluster_keeps_its_engines(cluster):
    before = [engine.pid for engine in cluster.engines]

    lending.mend()

    assert [engine.pid for engine in cluster.engines] == before
