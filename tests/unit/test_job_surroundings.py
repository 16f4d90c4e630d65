"""Which process of a job this is, and how processes meet."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from workbench.engine.meeting import ANSWER_S, KEY, Alone, AtFirstAddress, Surroundings, meeting_of
from workbench.errors import ClusterError, PlanError

RANK = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_torchruns_environment_is_read():
    found = Surroundings.found({**RANK, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (found.rank, found.world_size, found.store) == (1, 3, ("10.0.0.1", 29500))
    assert (found.attempt, found.has_agent) == (2, False)
    assert Surroundings.found({**RANK, "TORCHELASTIC_USE_AGENT_STORE": "True"}).has_agent
    assert Surroundings.found({}) == Surroundings()


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "x"}, {"RANK": "3"}, {"RANK": "-1"}, {"MASTER_PORT": ""}, {"WORLD_SIZE": None}],
)
def test_half_of_torchruns_environment_is_refused(wrong):
    environ = {key: value for key, value in {**RANK, **wrong}.items() if value is not None}
    with pytest.raises(PlanError) as told:
        Surroundings.found(environ)
    assert told.value.code == "WB-PLAN-190"


def config(kind, index, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tf_config_orders_the_chief_then_workers_then_servers():
    cluster = {"ps": ["d:4"], "worker": ["b:2", "c:3"], "chief": ["a:1"]}
    found = Surroundings.found(config("ps", 0, **cluster))
    assert (found.rank, found.addresses) == (3, ("a:1", "b:2", "c:3", "d:4"))
    assert Surroundings.found(config("worker", 1, **cluster)).rank == 2


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": {}}', config("worker", 4, worker=["a:1"])["TF_CONFIG"]]
)
def test_a_tf_config_that_is_not_whole_is_refused(text):
    with pytest.raises(PlanError) as told:
        Surroundings.found({"TF_CONFIG": text})
    assert told.value.code == "WB-PLAN-191"


@pytest.mark.parametrize("key", ["", "short"])
def test_processes_of_tf_config_need_a_long_key(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    with pytest.raises(PlanError) as told:
        meeting_of(Surroundings(0, 2, addresses=("a:1", "b:2")))
    assert told.value.code == "WB-PLAN-192"


def test_a_short_key_is_refused_and_one_process_meets_nobody(monkeypatch):
    assert isinstance(meeting_of(Surroundings()), Alone)
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(PlanError):
        meeting_of(Surroundings())


@pytest.fixture
def place():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def connected(place):
    """Connect as soon as somebody listens."""
    host, _, port = place.rpartition(":")
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), 1)
        threading.Event().wait(0.02)
    raise AssertionError("nobody listens")


def test_strangers_who_say_nothing_hold_up_nobody(place):
    where = [Surroundings(rank, 2, addresses=(place, "b:1")) for rank in range(2)]
    first, second = (AtFirstAddress(one, b"k" * 32) for one in where)
    silent: list[socket.socket] = []

    def come():
        silent.extend(connected(place) for _ in range(3))
        assert second.ask({"rank": 1}) == {"part": 1}

    coming = threading.Thread(target=come)
    coming.start()
    began = time.monotonic()
    assert first.gather({"rank": 0}) == [{"rank": 0}, {"rank": 1}]
    assert time.monotonic() - began < ANSWER_S  # what a single one may take
    first.hand_out([{"part": 0}, {"part": 1}])
    coming.join()
    for one in silent:
        one.settimeout(ANSWER_S)
        assert one.recv(1) == b""
        one.close()


def test_processes_meet_at_the_first_address_and_strangers_are_not_heard(place):
    where = [Surroundings(rank, 3, addresses=(place, "b:1", "c:1")) for rank in range(3)]
    key = b"k" * 32
    answers: dict[int, dict] = {}

    def ask(rank):
        answers[rank] = AtFirstAddress(where[rank], key).ask({"rank": rank})

    def disturb():
        stranger = AtFirstAddress(where[1], b"another key of them")
        for said in (b"GET / HTTP/1.0\r\n\n", stranger._packed({"rank": 1})):
            with connected(place) as connection:
                connection.sendall(said)
                assert connection.recv(10) == b""

    first = AtFirstAddress(where[0], key)
    others = [threading.Thread(target=disturb)]
    others += [threading.Thread(target=ask, args=(rank,)) for rank in (2, 1)]
    for one in others:
        one.start()
    assert first.gather({"rank": 0}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    first.hand_out([{"part": rank} for rank in range(3)])
    for one in others:
        one.join()
    assert answers == {1: {"part": 1}, 2: {"part": 2}}


def test_who_does_not_come_is_named(place, monkeypatch):
    monkeypatch.setattr("workbench.engine.meeting.MEET_S", 0.2)
    first = AtFirstAddress(Surroundings(0, 2, addresses=(place, "b:1")), b"k" * 32)
    with pytest.raises(ClusterError) as told:
        first.gather({"rank": 0})
    assert "[1]" in str(told.value)
    alone = AtFirstAddress(Surroundings(1, 2, addresses=(place, "b:1")), b"k" * 32)
    with pytest.raises(ClusterError):
        alone.ask({"rank": 1})


AGENT = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def agents_store():
    """The store of a torchrun's agent, as host and port."""
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as agent:
        yield "127.0.0.1", int(agent.stdout.readline())
        agent.communicate()


@pytest.mark.torch
def test_a_store_that_knows_an_earlier_attempt_tells_nobody_of_it(agents_store, monkeypatch):
    """Torchrun's agents count attempts each for itself; a host that joined anew begins at 0."""
    monkeypatch.setattr("workbench.engine.meeting.MEET_S", 15.0)

    def part(rank, attempt=0):
        return meeting_of(Surroundings(rank, 2, agents_store, has_agent=True, attempt=attempt))

    def wait_for_word(second):
        for _ in range(500):
            meeting = second._ours.get("meeting").decode()
            if second._ours.check([f"{meeting}/1"]):
                return
            threading.Event().wait(0.02)
        raise AssertionError("nothing was said")

    def meet(attempt, *, early):
        """Meet; rank 1 may be there first, when the store tells of the earlier attempt alone."""
        answers: list[dict] = []
        second = part(1)
        coming = threading.Thread(
            target=lambda: answers.append(second.ask({"says": attempt})), daemon=True
        )
        if early:
            coming.start()
            wait_for_word(second)
        first = part(0, attempt)
        if not early:
            coming.start()
        assert first.gather({"says": "rank 0"}) == [{"says": "rank 0"}, {"says": attempt}]
        first.hand_out([{}, {"part": attempt}])
        coming.join(10)
        return answers

    assert meet(0, early=False) == [{"part": 0}]
    assert meet(1, early=True) == [{"part": 1}]
    assert meet(2, early=False) == [{"part": 2}]
