"""What a server does with pushes, without workers: nobody reads half an update, bounds hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from workbench import catalog  # noqa: E402
from workbench.engine.transport.connection import Message  # noqa: E402  # noqa: E402
from workbench.strategies.torch import central_storage  # noqa: E402
from workbench.strategies.torch.parameter_server import Asynchronous  # noqa: E402
from workbench.strategies.torch.servers.shard_server import Holder  # noqa: E402  # noqa: E402
from workbench.strategies.torch.servers.shards import (  # noqa: E402  # noqa: E402
    divide,
    hyper_of,
    importable,
    plain,
)

pytestmark = pytest.mark.torch


class Hub:
    """Links whose workers share the server's memory; what they are told is kept."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str, dict[str, Any]]] = []

    def board(self, size_bytes: int) -> Any:
        return np.zeros(size_bytes, np.uint8)

    def mailbox(
        self, rank: int, size_bytes: int, *, shared: bool, most_bytes: int | None = None
    ) -> Any:
        return np.zeros(size_bytes, np.uint8)

    def hand_over(self, rank: int) -> None:
        pass

    def shares(self, rank: int) -> bool:
        return True

    def reply(self, rank: int, kind: str, meta: Any = None, *, board: bool = False) -> None:
        self.told.append((rank, kind, dict(meta or {})))

    def heard(self) -> list[tuple[int, str, dict[str, Any]]]:
        told, self.told = self.told, []
        return [one for one in told if one[1] != "opened"]


class Server:
    """A holder of one number, stepped by SGD with a learning rate of 1, for two workers."""

    def __init__(self, policy: Any = Asynchronous, **options: Any) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], 1.0)
        (shard,) = divide([parameter], 1)
        about = {
            "optimizer": importable(type(optimizer)), "defaults": plain(optimizer.defaults),
            "hyper": hyper_of(optimizer), "groups": [[0]], "clip_norm": None,
            "shard": shard.to_wire(), "shared": True,
        }  # fmt: skip
        settings = catalog.lookup("parameter_server", "torch").settings(options)
        self.hub: Any = Hub()
        self.holder = Holder(
            self.hub, {0: about, 1: about}, 1, lambda holder: policy(holder, settings)
        )
        self.hyper = about["hyper"]
        self.holder.handle(0, Message("init"))
        self.hub.heard()

    @property
    def value(self) -> float:
        return float(self.holder.parameters[0].detach())

    def push(self, rank: int) -> list[tuple[int, str, dict[str, Any]]]:
        self.holder.gradients[rank][0].fill_(-1.0)
        self.holder.handle(rank, Message("push", {"hyper": self.hyper, "pull": True}))
        return self.hub.heard()

    def release(self, rank: int) -> list[tuple[int, str, dict[str, Any]]]:
        self.holder.handle(rank, Message("release"))
        return self.hub.heard()

    def let_all_read(self) -> None:
        for rank in (0, 1):
            self.release(rank)


@pytest.fixture
def server() -> Server:
    server = Server()
    server.let_all_read()
    return server


def test_a_push_changes_nothing_while_another_worker_reads(server: Server) -> None:
    assert [rank for rank, *_ in server.push(0)] == [0]
    assert server.value == 1.0
    assert server.push(1) == []  # worker 0 reads what it was answered
    assert server.value == 1.0
    assert [rank for rank, *_ in server.release(0)] == [1]
    assert server.value == 2.0


def test_a_queued_push_of_a_worker_that_died_is_dropped_and_the_others_go_on(
    server: Server,
) -> None:
    server.push(0)
    assert server.push(1) == []  # worker 0 reads what it was answered
    server.holder.handle(1, Message("gone"))
    assert server.release(0) == []
    assert server.value == 1.0
    assert [rank for rank, *_ in server.push(0)] == [0]
    assert server.value == 2.0


def test_staleness_counts_the_updates_between_a_pull_and_the_pushs_turn(server: Server) -> None:
    staleness = []
    for rank in (0, 0, 1, 0):
        ((_, _, told),) = server.push(rank)
        staleness.append(told["staleness"])
        server.release(rank)
    assert staleness == [0, 0, 2, 1]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_worker_is_as_many_steps_ahead_as_the_bound_says_and_no_more(bound: int) -> None:
    server = Server(max_staleness=bound)
    server.let_all_read()
    for _ in range(bound):
        assert [rank for rank, *_ in server.push(0)] == [0]
        server.release(0)
    assert server.push(0) == []  # taken, but not answered: the worker cannot go on
    assert server.value == bound + 1
    answered = server.push(1)
    assert {rank for rank, *_ in answered} == {0, 1}
    assert [told["blamed"] for rank, _, told in answered if rank == 0] == [1]


def test_a_round_is_waited_for_by_those_whose_push_came_before_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [7.0]
    monkeypatch.setattr(central_storage, "clock", lambda: now_s[0])
    server = Server(central_storage.Rounds)
    for first, last in ((0, 1), (1, 0)):
        assert server.push(first) == []
        now_s[0] += 0.2  # the last one's link is slow: nobody else's is
        told = {rank: about for rank, _, about in server.push(last)}
        assert told[first]["blocked_s"] == pytest.approx(0.2)
        assert told[first]["blamed"] == last
        assert (told[last]["blocked_s"], told[last]["blamed"]) == (0.0, -1)
