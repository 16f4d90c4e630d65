"""Engines whose death a run survives."""

import re
from contextlib import nullcontext

import pytest

from workbench.cluster.calls import Call
from workbench.errors import ClusterError
from workbench.execution.task import Task
from workbench.shared.members import Member


class Engines:
    """Engines that do nothing but remember who was asked."""

    def __init__(self):
        self.calls = {}
        self.interrupted = []

    def together(self):
        return nullcontext()

    def submit(self, engine, name, args, on_output):
        self.calls[engine] = Call(engine)
        return self.calls[engine]

    def interrupt(self, ids):
        self.interrupted += ids

    def signal(self, engine, sig):
        raise AssertionError("nobody has to be killed here")


@pytest.fixture
def lost():
    return []


@pytest.fixture
def task(lost):
    """Engine 0 runs the cell, 1 and 2 are workers, 3 is a server."""
    helpers = {1: "worker 0", 2: "worker 1", 3: "server s0"}
    members = {engine: Member.helper(part) for engine, part in helpers.items()}
    members = {0: Member.of_ranks(0, 1, "cpu"), **members}
    return Task(
        Engines(), {engine: {} for engine in range(4)}, members, spare=[1, 2],
        on_loss=lambda *said: lost.append(said),
    )  # fmt: skip


def dies(task, engine):
    task.engines.calls[engine].finish(ClusterError(f"Engine {engine} died.", code="WB-CLUSTER-000"))


def ends(task, *engines):
    for engine in engines:
        task.engines.calls[engine].finish({"status": "ok"})


def test_one_of_several_may_die(task, lost):
    dies(task, 2)
    ends(task, 0, 1, 3)
    assert task.is_over
    assert task.failure() is None
    ((said, engines),) = lost
    assert engines == [2]
    assert re.match("Worker 1 .*: Engine 2 died.", said)


def test_the_last_one_may_not(task, lost):
    dies(task, 2)
    dies(task, 1)
    assert len(lost) == 1
    ends(task, 0, 3)
    assert task.failure().code == "WB-RUN-066"
    assert "Worker 0" in str(task.failure())


def test_a_server_may_not(task, lost):
    dies(task, 3)
    ends(task, 0, 1, 2)
    assert not lost
    assert task.failure().code == "WB-RUN-066"
    assert "Server s0" in str(task.failure())


def chained(going=lambda: True, lost=None):
    """Engine 0 and 1 are workers, 2 to 5 are servers on a ring, each with a copy of the one before.

    Of a server's part another server holds a copy, so that neighbours must not both die.
    """
    members = {engine: Member.of_ranks(engine, 1, "cpu") for engine in (0, 1)}
    members |= {engine: Member.helper(f"server s{engine - 2}") for engine in range(2, 6)}
    chains = [(2, 3), (3, 4), (4, 5), (5, 2)]
    return Task(
        Engines(), {engine: {} for engine in range(6)}, members, chains=chains, going=going,
        on_loss=lambda *said: None if lost is None else lost.append(said),
    )  # fmt: skip


def test_of_each_two_servers_that_hold_the_same_one_may_die(lost):
    task = chained(lost=lost)
    dies(task, 2)
    dies(task, 4)
    assert task.lost == 0  # no worker
    ends(task, 0, 1, 3, 5)
    assert task.is_over
    assert task.failure() is None
    assert [engines for _, engines in lost] == [[2], [4]]


def test_of_two_servers_that_hold_the_same_both_may_not(lost):
    task = chained(lost=lost)
    dies(task, 5)
    dies(task, 2)
    ends(task, 0, 1, 3, 4)
    assert len(lost) == 1
    told = str(task.failure())
    assert told.startswith("Server s0 is gone")
    assert "also gone: Server s3" in told


def test_no_server_may_die_before_all_have_met(lost):
    task = chained(going=lambda: False, lost=lost)
    dies(task, 3)
    ends(task, 0, 1, 2, 4, 5)
    assert not lost
    assert task.failure().code == "WB-RUN-066"
    assert "Server s1" in str(task.failure())
