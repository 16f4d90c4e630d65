"""Clusters that are lent: new each time, whole after a failed test, kept where that is possible."""

import os
import signal

import lending
import psutil
import pytest
from lending import lent
from notebook_shell import soon

from workbench.cluster.engines import NOBODY, Engines, Listeners
from workbench.session.cluster import Cluster

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


@pytest.fixture
def engines():
    engines = Engines(NOBODY)
    yield engines
    engines.stop()


def test_engines_that_were_reset_are_as_new(engines):
    heard = []
    engines.listen(
        Listeners(
            message=lambda engine, message: heard.append(message),
            death=heard.append,
            helper=heard.append,
        )
    )
    engines.on_change = lambda: heard.append("started")
    assert engines.start(2) == [0, 1]
    assert soon(lambda: engines.router.connected == {0, 1})
    before, store = engines.about(), engines.store()
    pids = [info.pid for info in engines.engines.values()]
    heard.clear()

    engines.reset("torch")

    assert heard == []
    assert engines.ids == []
    assert soon(lambda: not any(map(psutil.pid_exists, pids)))
    assert engines.reusable
    assert engines.about()["store_pid"] == 0
    assert engines.start(1) == [0]
    assert heard == []
    after = engines.about()
    assert after["controller"] == before["controller"]
    assert after["parents"] == before["parents"]
    assert engines.store() != store


def test_engines_that_have_ended_cannot_be_reused(engines):
    engines.start(1)
    assert engines.reusable

    engines.stop()

    assert not engines.reusable


def test_engines_that_lost_their_controller_or_are_kept_cannot_be_reused(engines):
    engines.start(1)
    os.kill(engines.about()["controller"]["pid"], signal.SIGKILL)
    assert soon(lambda: not engines.reusable)

    kept = Engines(NOBODY)
    kept.keep(60.0)
    try:
        kept.start(1)
        assert not kept.reusable
    finally:
        kept.stop()


def test_a_cluster_hands_back_what_the_next_one_stands_on():
    cluster = Cluster(2)
    task = cluster.execute("here = 1")
    assert soon(lambda: task.is_over)

    engines = cluster.hand_back()

    assert engines is not None
    with Cluster(1, engines=engines) as after:
        assert after.ids == [0]
        assert not after.is_busy
        task = after.execute("assert 'here' not in dir()")
        assert soon(lambda: task.is_over)
        assert task.failure() is None


def test_a_cluster_whose_controller_died_hands_nothing_back(engines):
    cluster = Cluster(1, engines=engines)
    os.kill(engines.about()["controller"]["pid"], signal.SIGKILL)
    assert soon(lambda: not engines.reusable)

    assert cluster.hand_back() is None
    assert not os.path.exists(engines.folder())
