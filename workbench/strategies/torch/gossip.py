"""Gossip SGD: no server and no all-reduce; each worker averages with its neighbours only.

Sources: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? (D-PSGD),
NIPS 2017, algorithm 1; Assran et al., Stochastic Gradient Push, ICML 2019, and Ying et al.,
Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021 (one-peer).

    ring: both neighbours, every step         one-peer exponential: hop 1, 2, 4, .. in turn

        0 --- 1                                step t     0 -> 1 -> 2 -> 3 -> 0      hop 1
        |     |   w_r = (w_r-1 + w_r           step t+1   0 -> 2 -> 0,  1 -> 3 -> 1  hop 2
        3 --- 2          + w_r+1) / 3                     w_r = (w_r + w_(r-hop)) / 2

Each worker takes a step on its own share, and then replaces its parameters by a weighted mean of
its own and its neighbours' parameters (mixing). In the matrix of the mixing weights, every row and
every column adds up to 1. So mixing does not change the mean of all replicas. The replicas are
close to each other, but not equal. On a ring, a change of one replica spreads by only one worker
per step in each direction. So with more workers, the differences between the replicas are larger.
On the exponential graph of 2^k workers, a change of one replica reaches all other replicas within k
steps.

A worker waits only for its neighbours. So on a ring, the delay of one worker reaches distant
workers only some steps later. Each message contains the time when its sender was ready. If all
workers are on one host, Workbench computes the sync wait from this time. The clocks of different
hosts cannot be compared, so with several hosts the sync wait is not measured. On a ring, a worker
sends its parameters and floating-point buffers to two neighbours in each step (with two workers, to
one neighbour). On the exponential graph, it sends them to one worker in each step.

When a worker dies, the other workers form a new graph, and each keeps its own replica. If the death
interrupts the mixing, the current step ends without mixing, and it counts as a complete step. No
worker waits for the dead worker, and the other workers lose nothing. Before its death, the dead
worker sent its parameters to neighbours after each step. So its earlier steps stay in the
neighbours' replicas. A new worker copies the replica of a worker that has taken the most steps. If
there are several such workers, the new worker chooses the one with the nearest rank.

The replica spread shows how different the replicas are. Before the mixing, each worker compares its
replica with the replicas of its neighbours. It logs the result as `spread`: the root mean square of
the differences between its own replica and each neighbour's replica.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.contract import NAN, Job
from ...engine.debugging.marks import MESSAGE, waits_in
from ...engine.torch import accelerator
from ...engine.torch.group import control_wire
from ...shared import events
from .parts.parameter_averaging import ParameterAveraging

clock = time.perf_counter
RECEIVE: Any = dist.irecv


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one step alone, then mix on the ring: x (B/n, ...).

    Return the loss of this worker's share.

    `Gossip` sends all parameters in one message, has a second graph, and measures the spread.
    """
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    rank, n = dist.get_rank(), dist.get_world_size()
    beside = {(rank - 1) % n, (rank + 1) % n}  # with two workers, each has only one neighbour
    for p in model.parameters():
        received = {other: torch.empty_like(p) for other in beside}
        messages = [dist.P2POp(dist.isend, p.data, other) for other in beside]
        messages += [dist.P2POp(dist.irecv, theirs, other) for other, theirs in received.items()]
        for message in dist.batch_isend_irecv(messages):
            message.wait()
        p.data = (p.data + sum(received.values())) / (1 + len(beside))
    return float(loss)


class Gossip(ParameterAveraging):
    """Averages with neighbours on a graph."""

    _acknowledged: Any = None

    def begin(self, model: torch.nn.Module) -> None:
        """Make all replicas equal, and allocate room for two neighbours' replicas."""
        super().begin(model)
        self._received = [[torch.empty_like(flat) for flat in self.message.flats] for _ in range(2)]
        self._same_clock = len(set(self.context.spec.hosts)) <= 1

    def prepare(self, job: Job) -> None:
        """Begin with rank 0's model everywhere."""
        super().prepare(job)
        if not self._same_clock:
            why = "the workers are on different hosts, whose clocks cannot be compared"
            self.context.emit(events.Unmeasured(columns=dict.fromkeys(("sync_wait_s",), why)))

    def meets(self, done: int) -> bool:
        """Neighbours meet after every step."""
        return True

    def meet(self) -> float:
        """Exchange replicas with the neighbours and mix; return the time spent waiting for them."""
        to, sources = neighbours(self.options["graph"], self.rank, self.world_size, self.done - 1)
        self.message.fill()
        accelerator.of(self.device).synchronize_stream()
        ready_s = clock()
        self.sent_bytes = float(len(to) * self.message.size_bytes)
        self.context.faults.travel(int(self.sent_bytes))
        others_s = self._exchange(to, sources, ready_s)
        if self.done % int(self.options["spread_every"]) == 0:
            self._log_spread(len(sources))
        for flat, *received in zip(
            self.message.flats, *self._received[: len(sources)], strict=True
        ):
            for other in received:
                flat.add_(other)
            flat.div_(len(sources) + 1)
        self.message.spread()
        return max(0.0, max(others_s) - ready_s) if self._same_clock else NAN

    @waits_in(MESSAGE)
    def _exchange(self, to: list[int], sources: list[int], ready_s: float) -> list[float]:
        """Send the replica, receive the neighbours'; return when each of them was ready.

        All messages between two workers are one operation. NCCL starts operations in the order in
        which they are given, so if two workers both began by receiving, both would wait forever.
        """
        wire = control_wire(None, self.device)
        own = torch.tensor([ready_s], dtype=torch.float64, device=wire)
        theirs = [torch.empty_like(own) for _ in sources]
        stamps, parts = [], []
        for place, rank in enumerate(sources):
            stamps.append(dist.P2POp(dist.irecv, theirs[place], rank))
            flats = enumerate(self._received[place], 1)
            parts += [dist.P2POp(dist.irecv, part, rank, tag=tag) for tag, part in flats]
        for rank in to:
            stamps.append(dist.P2POp(dist.isend, own, rank))
            flats = enumerate(self.message.flats, 1)
            parts += [dist.P2POp(dist.isend, part, rank, tag=tag) for tag, part in flats]
        works = dist.batch_isend_irecv(stamps) + dist.batch_isend_irecv(parts)
        if self.context.membership.trains:
            arrives = [one.op is RECEIVE for one in stamps + parts]
            for each in (work for work, one in zip(works, arrives, strict=True) if one):
                each.wait()
            self._acknowledge(to, sources)
            works = [work for work, one in zip(works, arrives, strict=True) if not one]
        for each in works:
            each.wait()
        return [float(stamp) for stamp in theirs]

    def _acknowledge(self, to: list[int], sources: list[int]) -> None:
        """Wait until everything this worker sent has arrived.

        Gloo's wait for a receive can be interrupted (`membership.Membership`), but its wait for a
        send cannot. So workers only wait for a send after the message has arrived.
        """
        ours, theirs = torch.zeros(1), [torch.zeros(1) for _ in to]
        sent = [dist.isend(ours, rank) for rank in sources]
        arrive = [dist.irecv(one, rank) for one, rank in zip(theirs, to, strict=True)]
        for each in arrive:
            if each is not None:
                each.wait()
        self._acknowledged = [ours, sent]  # kept until the next step: no worker waits for them

    def _log_spread(self, count: int) -> None:
        """Log how far this replica is from the replicas it mixed with."""
        squares = numbers = 0.0
        for place in range(count):
            for flat, other in zip(self.message.flats, self._received[place], strict=True):
                squares += float((flat - other).square().sum())
                numbers += flat.numel()
        context = self.context
        spread = math.sqrt(squares / max(numbers, 1.0))
        context.emit(events.Logged(rank=self.rank, step=context.step, values={"spread": spread}))


def neighbours(graph: str, rank: int, workers: int, step: int) -> tuple[list[int], list[int]]:
    """Return the workers to which a worker sends in a step, and those that it receives from.

    In every step each worker sends as many messages as it receives, and all workers receive equally
    many. So equal weights keep the mean of the replicas.
    """
    if graph == "ring":
        both = sorted({(rank - 1) % workers, (rank + 1) % workers} - {rank})
        return both, both
    hop = 1 << step % max(1, math.ceil(math.log2(workers)))
    return [(rank + hop) % workers], [(rank - hop) % workers]
