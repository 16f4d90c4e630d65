"""Engines are struck off from ipyparallel's hub when they are gone, and only they."""

import pytest
from lending import lent
from notebook_shell import soon

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
    hub = cluster._engines._ground.hub
    late = cluster.engines[0].uuid
    cluster.restart([0])
    assert cluster.engines[0].uuid != late

    hub.unlist(0, late)

    assert at_the_hub(hub) == {"0", "1"}
    hub.unlist(0, cluster.engines[0].uuid)
    assert at_the_hub(hub) == {"1"}
    assert soon(lambda: hub.client.ids == [1])


def test_room_is_made_before_the_next_engine_asks_for_it(cluster):
    hub = cluster._engines._ground.hub
    stream, sent = hub.client._query_stream, []
    send = stream.send_multipart
    stream.send_multipart = lambda *args, **kwargs: (sent.append(1), send(*args, **kwargs))[1]
    try:
        hub.make_room([0, 1])
    finally:
        stream.send_multipart = send

    assert len(sent) == 3  # two are struck off, and one is answered
    assert at_the_hub(hub) == set()


def test_engines_are_started_under_the_same_ids_again_and_again(cluster):
    for _ in range(5):
        assert sorted(cluster.restart()) == [0, 1]
        assert at_the_hub(cluster._engines._ground.hub) == {"0", "1"}
