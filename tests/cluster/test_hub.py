"""Engines are struck off from ipyparallel's hub when they are gone, and only they."""

import pytest
from lending import lent
from notebook_shell import soon
from warm_support import stopped

from workbench.errors import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]


@pytest.fixture
def cluster():
    with lent(2) as cluster:
        yield cluster


def at_the_hub(hub):
    """What the hub itself has listed; asking it takes its turn after what was sent before."""
    answer = hub.client._send(hub.client._query_stream, "connection_request")
    assert answer.wait(30)
    return set(answer.result()["content"]["engines"])


def test_what_is_said_late_of_an_engine_does_not_strike_off_its_successor(cluster):
    hub = cluster.engine_set._ground.hub
    late = cluster.engines[0].uuid
    cluster.restart([0])
    assert cluster.engines[0].uuid != late

    hub.unlist(0, late)

    assert at_the_hub(hub) == {"0", "1"}
    hub.unlist(0, cluster.engines[0].uuid)
    assert at_the_hub(hub) == {"1"}
    assert soon(lambda: hub.client.ids == [1])


def test_room_is_made_when_the_hub_has_read_of_it_and_not_before(cluster, monkeypatch):
    ground = cluster.engine_set._ground
    monkeypatch.setattr("workbench.cluster.hub.ANSWER_S", 0.3)
    with (
        stopped(ground.hub.controller.pid),
        pytest.raises(ClusterError, match="WB-CLUSTER-012") as failure,
    ):
        ground.hub.make_room([0, 1])
    assert "%cluster stop" in str(failure.value)
    monkeypatch.undo()

    ground.hub.make_room([0, 1])

    assert at_the_hub(ground.hub) == set()


def test_engines_are_started_under_the_same_ids_again_and_again(cluster):
    for _ in range(5):
        assert sorted(cluster.restart()) == [0, 1]
        assert at_the_hub(cluster.engine_set._ground.hub) == {"0", "1"}


def test_the_hub_keeps_no_record_of_cells(cluster):
    for _ in range(3):
        assert cluster.execute("print('x')").over.wait(30)
    client = cluster.engine_set._ground.hub.client
    assert {
        one["completed"] for one in client.queue_status().values() if isinstance(one, dict)
    } == {0}
