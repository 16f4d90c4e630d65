"""Asynchronous data parallelism: servers hold parameters, each worker trains at its own speed.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Dean
et al., Large Scale Distributed Deep Networks, NIPS 2012 (Downpour SGD). Bounded staleness: Ho et
al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013.
Staleness-aware learning rate: Zhang et al., Staleness-aware Async-SGD, IJCAI 2016.

    worker 0:  pull w3 -> forward -> backward -> push g(w3) -> pull w5 -> ...
    worker 1:       pull w4 -> forward -> backward -> push g(w4) -> pull w6 -> ...
                       |                                 |
    server 0:  w3 --> w4 = w3 - lr g -> w5 = w4 - lr g(w3) -> w6 = w5 - lr g(w4)
    server 1:  the same for the other half of the tensors (divided by bytes)

Every push is a separate step. The server takes the step when the push arrives, and stores the
optimizer's state together with the parameters. By default, no worker waits for another worker. The
disadvantage is that the parameters change between a worker's pull and its push. The staleness is
the number of updates by other workers between this pull and this push. It is recorded for every
push. With n equally fast workers the mean staleness is n - 1. Each push uses 1/n of a batch. So n
workers take n steps for each batch; one device would take one step. Clipping is applied to the
gradient of each push.

    max_staleness=s       a worker that is more than s steps ahead of the slowest worker must wait
                          (SSP); with s=0 no worker begins a step until all workers have ended
                          the previous step, but there are still n separate steps
    staleness_aware_lr    the learning rate of a push is divided by the push's staleness, if the
                          staleness is above 1
    pull_every=k          a worker pulls new parameters only after every k steps; its own updates
                          since the last pull count as staleness too
    consistency=snapshot  all servers send the same version of their tensors. Server 0 gives each
                          push a number, and the other servers take the pushes in this order. While
                          a worker reads from server 0, server 0 gives no new numbers, so that the
                          other servers can send exactly the version that server 0 sends. With
                          `latest` each server sends its newest version
    replicas=2            two servers hold each part of the parameters, so that one of them can die
                          (`servers/copies.py`)
    sync=true             one step uses the gradients of all workers (bulk synchronous), as under
                          central_storage but with several servers; the result is the same as on one
                          device

If the staleness is unbounded, there is no sync wait. With `max_staleness`, the server delays its
answer to a worker that is too far ahead. The length of this delay is the sync wait. The delay ends
when a slower worker pushes. This slower worker is the cause of the wait, and the server's answer
contains its rank. With `sync=true`, the sync wait is measured as under `central_storage`.

If the gradient of an embedding table is sparse (`nn.Embedding(..., sparse=True)`), workers push
only the rows that have a gradient. Servers send back only the rows that have changed since their
last answer to this worker (`servers/rows.py`).

MXNet's KVStore with `dist_async` works like this strategy: workers call `push(key, gradient)` and
`pull(key)`, and the optimizer is on the servers. `dist_sync` works like `sync=true`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .central_storage import Rounds
from .servers.shard_server import Holder, Meta, Policy
from .servers.strategy import Served

if TYPE_CHECKING:
    from torch import Tensor

    from ...engine.contract import Share
    from ...engine.telemetry.recorder import StepResult
    from .servers.remote import Answer

clock = time.perf_counter


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one synchronous step on this worker's share: x (B/n, ...). Return the share's loss.

    Each worker is a server as well: worker r holds every n-th tensor, beginning with the r-th, and
    its `optimizer` holds only those. `ParameterServer` has separate processes as servers, divides
    the tensors by bytes, and takes each push as a separate step unless `sync` is set.
    """
    n = dist.get_world_size()
    model.zero_grad()
    loss = loss_fn(model(x), y)  # mean over the share
    loss.backward()
    for i, p in enumerate(model.parameters()):
        dist.reduce(p.grad, dst=i % n)  # push: the sum arrives only at tensor i's server
        p.grad /= n
    optimizer.step()
    for i, p in enumerate(model.parameters()):
        dist.broadcast(p.data, src=i % n)  # pull
    return float(loss)


class Asynchronous(Policy):
    """Each push is a step; a worker that is too far ahead waits for its answer."""

    holds = True

    def __init__(self, holder: Holder, options: Any) -> None:
        super().__init__(holder, options)
        self._bound: int | None = options["max_staleness"]
        self._aware: bool = options["staleness_aware_lr"]
        self._sequenced = options["consistency"] == "snapshot" and holder.servers > 1
        self._steps = dict.fromkeys(holder.training, 0)  # of each worker that still trains
        self._pulled = dict.fromkeys(holder.training, 0)  # version that it computes on
        self._queue: deque[tuple[int, Meta]] = deque()
        self._held_back: dict[int, tuple[float, int, Meta]] = {}
        self._asked: dict[int, int] = {}
        self._told: dict[int, int] = {}  # on a copy: the staleness of the last counted push

    def pushed(self, rank: int, meta: Meta) -> None:
        """Queue the push; it is taken when no worker is reading the parameters."""
        self._queue.append((rank, meta))
        self._go_on()

    def released(self) -> None:
        """Allow the parameters to change again."""
        self._go_on()

    def left(self, rank: int) -> None:
        """Stop waiting for a worker that has left, and for its messages."""
        del self._steps[rank]
        # It died while a worker read. All servers take a push that server 0 has counted.
        self._queue = deque(
            (by, meta) for by, meta in self._queue if by != rank or "ticket" in meta
        )
        self._held_back.pop(rank, None)
        self._asked.pop(rank, None)
        self._answer_held_back(rank)
        self._go_on()

    def joined(self, rank: int) -> None:
        """With a bound, begin at the slowest worker's step: no worker waits for the dead one."""
        self._steps[rank] = min(self._steps.values(), default=0)
        self._pulled[rank] = self.holder.version

    def followed(self, rank: int, meta: Meta) -> None:
        """Count the push in this copy too, so that bounds hold when it takes over."""
        if rank in self._steps:
            self._steps[rank] += 1
        self._told[rank] = int(meta["staleness"])

    def repeated(self, rank: int, meta: Meta) -> None:
        """Answer a push that is already counted, unless its worker is too far ahead."""
        self._held_back[rank] = (clock(), self._told.get(rank, 0), meta)
        self._answer_held_back(rank)

    def asked(self, rank: int, meta: Meta) -> None:
        """Send the parameters: now, or when they reach the requested version."""
        if "at" in meta:
            self._asked[rank] = int(meta["at"])
            self._answer_asked()
        else:
            self._send(rank)

    def _go_on(self) -> None:
        while not self.holder.reading and (push := self._next()) is not None:
            self._take(*push)
            self._answer_held_back(push[0])
            self._answer_asked()

    def _next(self) -> tuple[int, Meta] | None:
        """Take the next push out of the queue."""
        for at, (rank, meta) in enumerate(self._queue):
            if meta.get("ticket", self.holder.version) == self.holder.version:
                del self._queue[at]
                return rank, meta
        return None

    def _take(self, rank: int, meta: Meta) -> None:
        holder = self.holder
        pulled = meta.get("pulled")  # a copy does not know the pulls from the server before it
        staleness = holder.version - (self._pulled[rank] if pulled is None else int(pulled))
        holder.update(
            holder.gradients[rank],
            rank,
            absent=frozenset(meta.get("absent", ())),
            lr_factor=1 / max(1, staleness) if self._aware else 1.0,
            staleness=staleness,
        )
        if rank in self._steps:
            self._steps[rank] += 1
        if "ticket" in meta:  # server 0 has already checked this push
            holder.send(rank, "ack")
            return
        if self._sequenced:
            holder.send(rank, "ticket", ticket=holder.version - 1)
        self._held_back[rank] = (clock(), staleness, meta)

    def _answer_held_back(self, by: int) -> None:
        """Answer every worker that is no longer too far ahead, now that `by` has advanced."""
        slowest = min(self._steps.values(), default=0)
        for rank in list(self._held_back):
            ahead = self._steps[rank] - slowest
            if self._bound is not None and ahead > self._bound:
                continue
            since_s, staleness, meta = self._held_back.pop(rank)
            held_s = 0.0 if rank == by or self._bound is None else clock() - since_s
            blamed = by if held_s else -1
            told = {"staleness": staleness, "blocked_s": held_s, "blamed": blamed}
            if meta["pull"]:
                self._send(rank, **told)
            else:
                self.holder.send(rank, "ack", **told)

    def _answer_asked(self) -> None:
        for rank, version in list(self._asked.items()):
            if version == self.holder.version:
                del self._asked[rank]
                self._send(rank)

    def _send(self, rank: int, **told: Any) -> None:
        self._pulled[rank] = self.holder.version
        self.holder.send_parameters(rank, keep=self._sequenced, **told)


class ParameterServer(Served):
    """Each push is a separate step; each worker trains at its own pace."""

    def make_policy(self, holder: Holder) -> Policy:
        """Return a policy of one step per push, or per round."""
        kind = Rounds if self.context.sync else Asynchronous
        return kind(holder, self.options)

    @property
    def shard(self) -> tuple[int, int]:
        """Keep each worker's share of each batch, even if workers leave or join."""
        if self.context.sync:
            return super().shard
        return self.context.membership.place, self.world_size

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Let rank 0 evaluate everything: asynchronous workers cannot share an evaluation."""
        return self.shard if self.context.sync else (0, 1)

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics with the newest parameters; nothing on the other ranks."""
        if self.context.sync:
            return super().evaluate(shares)
        if self.rank != 0:
            return {}
        assert self.remote is not None, "prepare comes first"
        self.remote.pull()
        return self._trainer.evaluate(shares)

    def settle(self, result: StepResult, answer: Answer) -> None:
        """Record a push's staleness, and how long its answer was delayed."""
        if not self.context.sync:
            result.staleness = answer.staleness
            result.wait_s, result.waited_for = answer.blocked_s, answer.blamed
