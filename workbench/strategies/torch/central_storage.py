"""Central storage: parameters and optimizer are on one server; workers only compute gradients.

Source: Abadi et al., TensorFlow: A System for Large-Scale Machine Learning, OSDI 2016, section 4.4
(synchronous replication); TensorFlow's CentralStorageStrategy does the same within one process.

    worker 0:  w -> share 0 -> forward -> backward -> g0 --+                         +-> w'
    worker 1:  w -> share 1 -> forward -> backward -> g1 --+                         +-> w'
    worker 2:  w -> share 2 -> forward -> backward -> g2 --+                         +-> w'
                                                           |                         |
    server:                             g = g0 + g1 + g2 <-+  clip, optimizer: w' ---+

The loss of worker r is multiplied by samples_r / samples (the size of its share, divided by the
size of the batch). So the sum of the gradients is the gradient of the whole batch, even if shares
are unequal. The server always adds the gradients in the order of the ranks, so on the same CPUs two
runs with the same seed end with the same weights, bit for bit. Clipping needs the sum of the
gradients, so the server clips the sum and then takes the optimizer's step. The optimizer's state
exists only once. The learning rate, the momentum and the other settings come from the user's
optimizer and scheduler on worker 0.

In each step a worker sends the whole gradient and receives all parameters. For embedding tables
with sparse gradients it sends and receives only the needed rows (`servers/rows.py`). All these
bytes pass through the server's host, which limits the speed of this strategy.

The sync wait of worker r is the time from when its gradient is ready until all gradients are ready.
The transfer contains the time of the messages in both directions, and the time of the server's work
(sum, clip, step). The clocks of different hosts differ. So if there are several hosts, the server
measures the wait: the time from the arrival of worker r's push to the arrival of the last push.

With `replicas=2` a second server holds a copy of the parameters and the optimizer's state. The
first server sends the sum of the gradients to the second server before it answers a worker. If the
first server dies, the second server takes over (`servers/copies.py`).

In MXNet's KVStore every worker calls `push(key, gradient)`, then `pull(key)`, and the store runs
the optimizer. `central_storage` works in the same way, with one server. MXNet's `dist_sync` with
several servers works like `parameter_server` with `sync=true`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .servers.shard_server import Holder, Meta, Policy
from .servers.strategy import Served

if TYPE_CHECKING:
    from torch import Tensor

    from ...engine.telemetry.recorder import StepResult
    from .servers.remote import Answer

clock = time.perf_counter


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one step on this worker's share of the batch: x (B/n, ...). Return the share's loss.

    Worker 0 is the server as well; only its optimizer has state. `CentralStorage` uses a separate
    process as server, links that are faster than a process group, and shares of unequal size.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    model.zero_grad()
    loss = loss_fn(model(x), y)  # mean over the share
    loss.backward()
    for p in model.parameters():
        pushed = [torch.empty_like(p) for _ in range(n)] if rank == 0 else None
        dist.gather(p.grad, pushed, dst=0)
        if pushed is not None:
            p.grad = torch.stack(pushed).sum(dim=0) / n  # (n, ...) -> the shape of p
    if rank == 0:
        optimizer.step()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    return float(loss)


class Rounds(Policy):
    """One step per round; a round has one gradient from every worker."""

    def __init__(self, holder: Holder, options: Any) -> None:
        super().__init__(holder, options)
        self._ranks = sorted(holder.training)
        self._flats: dict[int, list[Tensor]] = {}
        self._arrived: dict[int, Meta] = {}
        self._came_s: dict[int, float] = {}  # when, on this server's clock
        self._added = 0

    def pushed(self, rank: int, meta: Meta) -> None:
        """Add the gradients in the order of ranks; step when all have arrived."""
        self._arrived[rank], self._came_s[rank] = meta, clock()
        while self._added < len(self._ranks) and self._ranks[self._added] in self._arrived:
            self._add(self._ranks[self._added])
            self._added += 1
        if self._added == len(self._ranks):
            self._all_in()
        else:
            self._check_complete()

    def _flat(self, rank: int) -> list[Tensor]:
        """Return a worker's push; its mailbox can already contain a later push."""
        if rank not in self._flats:
            self._flats[rank] = self.holder.flats(rank)
        return self._flats[rank]

    @property
    def _sum(self) -> list[Tensor]:
        """The first worker's mailbox becomes the sum."""
        return self._flat(self._ranks[0])

    def _add(self, rank: int) -> None:
        if rank != self._ranks[0]:
            for total, part in zip(self._sum, self._flat(rank), strict=True):
                total.add_(part)

    def _all_in(self) -> None:
        holder = self.holder
        holder.add_rows(self._ranks)
        gradients = holder.gradients[self._ranks[0]]
        if holder.clip_norm is None and not holder.agrees:
            self._step()
        elif holder.servers == 1:
            assert holder.clip_norm is not None, "internal error: nothing clips"
            norm = holder.norm(self._present(gradients))
            self.scaled(min(1.0, holder.clip_norm / (norm + 1e-6)))
        elif (factor := self._arrived[self._ranks[0]].get("factor")) is not None:
            self.scaled(float(factor))  # rank 0 knew it before this server took over
        else:  # every server knows its part of the norm; rank 0 adds them up
            norm = 0.0 if holder.clip_norm is None else holder.norm(self._present(gradients))
            holder.send(self._ranks[0], "norm", norm=norm, clip_norm=holder.clip_norm)

    def scaled(self, factor: float) -> None:
        """Scale the sum by the factor, then step."""
        self._shorten(factor)
        self._step()

    def _shorten(self, factor: float) -> None:
        self.holder.factor = factor
        if factor != 1.0:
            for total in self._sum:
                total.mul_(factor)
            self.holder.scale_rows(self._ranks[0], factor)

    @property
    def prepared(self) -> bool:
        """Whether all pushes have arrived for a step that all servers will take."""
        return self._added == len(self._ranks)

    def commit(self, factor: float) -> None:
        """Take this step, because the worker that coordinated it has left."""
        self._shorten(factor)
        self._take()

    def _take(self) -> None:
        holder, first = self.holder, self._ranks[0]
        holder.update(holder.gradients[first], first, of=self._ranks, absent=self._absent)
        self._arrived.clear()
        self._added = 0

    def _step(self) -> None:
        holder = self.holder
        self._take()
        last = max(self._ranks, key=self._came_s.__getitem__)
        for rank in self._ranks:
            waited_s = self._came_s[last] - self._came_s[rank]
            blamed = last if waited_s > 0 else -1
            holder.send_parameters(rank, staleness=0, blocked_s=waited_s, blamed=blamed)

    @property
    def _absent(self) -> frozenset[int]:
        """Parameters that took no part in any worker's loss."""
        absent = [frozenset(meta.get("absent", ())) for meta in self._arrived.values()]
        return frozenset.intersection(*absent)

    def _present(self, gradients: Any) -> list[Any]:
        absent, pieces = self._absent, self.holder.shard.pieces
        return [g for piece, g in zip(pieces, gradients, strict=True) if piece.index not in absent]

    def left(self, rank: int) -> None:
        """Do not wait for a round that can no longer become complete."""
        self._check_complete()

    def _check_complete(self) -> None:
        missing = set(self._ranks) - self.holder.training - set(self._arrived)
        if self._arrived and missing:
            left = f"worker {min(missing)} has left"
            self.holder.fail(f"{left}, so the other workers cannot complete their step", left)


class CentralStorage(Served):
    """Parameters and optimizer on one server; the gradients of all workers make one step."""

    def make_policy(self, holder: Holder) -> Policy:
        """Return a policy of one step per round."""
        return Rounds(holder, self.options)

    def settle(self, result: StepResult, answer: Answer) -> None:
        """Add nothing: a round has no staleness."""
