"""What messages cost: the prediction's clocks against workers that send one message at a time."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from predicted_runs import draw_own

from workbench import catalog
from workbench.prediction.exchange import SERVED_S, Cost, Exchange
from workbench.prediction.probe import Setting

A, B, M = 0.004, 2e-8, 1e6
Order = tuple[str, int, float]


def setting(name: str, workers: int, **options: Any) -> Setting:
    entry = catalog.lookup(name, "torch")
    return Setting(entry, entry.settings(options), workers)


def cost(draws: int = 1, *, held: bool = True) -> Cost:
    one = np.ones(draws)
    return Cost.plain(A * one, B * one, held=held)


def period(one: Setting, own_s: np.ndarray, *, held: bool = True) -> float:
    """Return the mean step of workers whose own work is (steps, workers)."""
    return float(Exchange(one, M).period(own_s[:, :, None], cost(held=held))[0])


def ring(rank: int, n: int) -> Iterator[Order]:
    for _ in range(2 * (n - 1)):
        yield "send", (rank + 1) % n, M / n
        yield "receive", (rank - 1) % n, 0.0


def reduce_to_one(rank: int, n: int) -> Iterator[Order]:
    if rank:
        yield "send", 0, M
        yield "receive", 0, 0.0
        return
    for other in range(1, n):
        yield "receive", other, 0.0
    for other in range(1, n):
        yield "send", other, M


def recursive_doubling(rank: int, n: int) -> Iterator[Order]:
    p = 1 << (n.bit_length() - 1)
    if rank >= p:
        yield "send", rank - p, M
        yield "receive", rank - p, 0.0
        return
    if rank + p < n:
        yield "receive", rank + p, 0.0
    bit = 1
    while bit < p:
        yield "send", rank ^ bit, M
        yield "receive", rank ^ bit, 0.0
        bit <<= 1
    if rank + p < n:
        yield "send", rank + p, M


def hierarchical(rank: int, n: int) -> Iterator[Order]:
    width = math.ceil(math.sqrt(n))
    leader = rank // width * width
    group = range(leader, min(leader + width, n))
    leaders = list(range(0, n, width))
    if rank != leader:
        yield "send", leader, M
        yield "receive", leader, 0.0
        return
    for other in group[1:]:
        yield "receive", other, 0.0
    place, count = leaders.index(rank), len(leaders)
    for _ in range(2 * (count - 1)):
        yield "send", leaders[(place + 1) % count], M / count
        yield "receive", leaders[(place - 1) % count], 0.0
    for other in group[1:]:
        yield "send", other, M


def simulated(program: Any, own_s: np.ndarray) -> float:
    """Return the mean step of workers that hold back what they send, message by message."""
    steps, n = own_s.shape
    clocks = [0.0] * n
    letters: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    for step in range(steps):
        left = {rank: deque(program(rank, n)) for rank in range(n)}
        for rank in range(n):
            clocks[rank] += own_s[step, rank]
        while any(left.values()):
            for rank, orders in left.items():
                while orders:
                    what, other, size = orders[0]
                    if what == "send":
                        clocks[rank] += A + B * size
                        letters[rank, other].append(clocks[rank])
                    elif letters[other, rank]:
                        clocks[rank] = max(clocks[rank], letters[other, rank].popleft())
                    else:
                        break
                    orders.popleft()
    return float(np.mean(clocks)) / steps


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("program", [ring, reduce_to_one, recursive_doubling, hierarchical])
def test_clocks_are_those_of_workers_that_send_one_message_at_a_time(
    program: Any, workers: int
) -> None:
    own = draw_own(np.random.default_rng(workers), 30, workers)
    found = period(setting("mirrored", workers, allreduce=program.__name__), own)
    assert found == pytest.approx(simulated(program, own), rel=0.02)


def test_central_storage_waits_for_the_last_push_then_everybody_pulls() -> None:
    own = draw_own(np.random.default_rng(0), 200, 8)
    # The server takes what eight workers send one after the other.
    truth = own.max(axis=1).mean() + 2 * (A + B * M) + 8 * SERVED_S
    assert period(setting("central_storage", 8), own) == pytest.approx(truth, rel=1e-6)


def test_a_servers_port_is_where_workers_queue() -> None:
    own = np.full((20, 8), 0.01)
    found = period(setting("central_storage", 8), own, held=False)
    # Eight gradients come in one after the other, eight copies of the parameters go out.
    assert found == pytest.approx(0.01 + 2 * 8 * B * M, rel=0.3)
    two = period(setting("parameter_server", 8, sync=True, servers=2), own, held=False)
    assert two < 0.7 * found


def test_local_workers_meet_at_the_end_of_a_round_alone() -> None:
    own = draw_own(np.random.default_rng(1), 400, 8)
    rounds = own.reshape(100, 4, 8).sum(axis=1).max(axis=1).mean() / 4
    truth = rounds + (A + 2 * 7 / 8 * M * B) / 4
    assert period(setting("local_sgd", 8, every=4), own) == pytest.approx(truth, rel=1e-6)


def test_fragments_meet_in_turn() -> None:
    own = draw_own(np.random.default_rng(1), 400, 8)
    # Each of two fragments has a turn in every fourth step: half as much, twice as often.
    rounds = own.reshape(200, 2, 8).sum(axis=1).max(axis=1).mean() / 2
    truth = rounds + (A + 2 * 7 / 8 * M / 2 * B) / 2
    for outer in ("average", "nesterov"):
        asked = setting("local_sgd", 8, every=4, fragments=2, outer=outer)
        assert period(asked, own) == pytest.approx(truth, rel=1e-6)


def test_a_delay_travels_along_a_ring_of_neighbours() -> None:
    own = draw_own(np.random.default_rng(2), 60, 6)
    clocks = np.zeros(6)
    for step in own:
        ready = clocks + step + A + 2 * B * M
        clocks = np.max([ready, np.roll(ready, 1), np.roll(ready, -1)], axis=0)
    found = period(setting("gossip", 6, graph="ring"), own)
    assert found == pytest.approx(clocks.mean() / 60, rel=1e-6)
    assert found < period(setting("central_storage", 6), own)


def test_workers_at_their_own_pace_queue_at_the_server_as_simulated() -> None:
    """Mean value analysis against a server that takes one push after the other."""
    rng = np.random.default_rng(3)
    n, steps, port_s = 12, 3000, B * M
    own = rng.exponential(0.1, (steps, n))
    events = [(float(own[0, w]), w, 0) for w in range(n)]
    heapq.heapify(events)
    into = out = ends = 0.0
    taken = 0
    while taken < steps * n // 2:
        now, worker, step = heapq.heappop(events)
        into = max(into, now) + port_s
        out = max(out, into) + port_s
        ends, taken = max(ends, out), taken + 1
        again = out + 2 * A + float(own[(step + 1) % steps, worker])
        heapq.heappush(events, (again, worker, step + 1))
    truth = ends / taken * n
    found = period(setting("parameter_server", n), own[:200], held=False)
    assert found == pytest.approx(truth, rel=0.12)


def test_a_bound_on_staleness_holds_the_fast_ones_back() -> None:
    rng = np.random.default_rng(4)
    own = rng.exponential(0.1, (400, 8))
    free = period(setting("parameter_server", 8), own)
    loose = period(setting("parameter_server", 8, max_staleness=8), own)
    tight = period(setting("parameter_server", 8, max_staleness=0), own)
    assert free <= loose * 1.05
    assert loose < 0.8 * tight
    assert tight == pytest.approx(own.max(axis=1).mean() + 2 * (A + B * M), rel=0.02)


def test_buckets_hide_what_travels_while_backward_runs() -> None:
    own = np.full((10, 4), 0.3)
    small = period(setting("mirrored", 4, allreduce="backend", bucket_mb=0.1), own, held=False)
    one = period(setting("mirrored", 4, allreduce="backend", bucket_mb=25), own, held=False)
    whole = 6 * (A + B * M / 4)
    assert one == pytest.approx(0.3 + whole, rel=1e-6)
    assert small > 0.3
    few = period(setting("mirrored", 4, allreduce="backend", bucket_mb=0.25), own, held=False)
    assert few < one
    assert few == pytest.approx(0.3 + 6 * (A + B * M / 16), rel=0.05)


def test_workers_of_one_host_do_not_take_the_link() -> None:
    one = np.ones(1)
    near = Cost(A * one, B * one, 0 * one, 0 * one, A * one / 100, B * one / 100)
    own = np.full((4, 4), 0.1)
    entry = catalog.lookup("mirrored", "torch")
    options = entry.settings({"allreduce": "ring"})
    apart, together = (
        float(Exchange(Setting(entry, options, 4, hosts), M).period(own[:, :, None], near)[0])
        for hosts in (1, 4)
    )
    assert together - 0.1 < 0.02 * (apart - 0.1)


def test_a_hierarchical_all_reduce_has_a_group_for_each_host() -> None:
    """Two hosts of eight: between them two leaders exchange halves, all else stays near."""
    one = np.ones(1)
    link = Cost(A * one, B * one, 0 * one, 0 * one, 0 * one, 0 * one)
    own = np.full((4, 16), 0.1)
    entry = catalog.lookup("mirrored", "torch")
    took = {}
    for name in ("ring", "hierarchical"):
        options = entry.settings({"allreduce": name})
        exchange = Exchange(Setting(entry, options, 16, 8), M)
        took[name] = float(exchange.period(own[:, :, None], link)[0]) - 0.1
    assert took["hierarchical"] == pytest.approx(2 * (A + B * M / 2), rel=1e-6)
    assert took["ring"] == pytest.approx(2 * 15 * (A + B * M / 16), rel=1e-6)
