"""Local SGD: workers train on their own for H steps, then average their parameters.

Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1; McMahan
et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (federated
averaging), AISTATS 2017, algorithm 1.

    round     step 1 .. step H on own shares            average               next round
    worker 0: w0 = w0 - lr g0(w0)  ...   w0 --+                     +--> w
    worker 1: w1 = w1 - lr g1(w1)  ...   w1 --+-- w = mean(w_r) ----+--> w
    worker 2: (sits out this round)           +                     +--> w

Communication falls to 1/H of that of `mirrored`; between averages the replicas drift apart, the
more so the less alike their data is. With H = 1 and an optimizer that is linear in the gradient
(SGD, with momentum) averaging parameters is averaging gradients: it equals one device. Optimizer
state is not averaged; each worker keeps its own.

Options of federated averaging: `fraction` of the workers is drawn for each round, and only these
train and are averaged; `skew=alpha` deals the data out by class (Dirichlet shards), so that the
workers' data differs, the more the smaller alpha.

Bytes sent: a ring all-reduce of parameters and floating-point buffers, 2 (n-1)/n of their size, at
averaging steps; nothing elsewhere. Workers wait at averaging steps alone: for the last of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.contract import NAN, Share
from ...engine.torch.data import skewed
from ...engine.training.shares import share_bounds
from ...errors import FitError
from .parts.guard import Guard
from .parts.parameter_averaging import ParameterAveraging

if TYPE_CHECKING:
    from ...engine.telemetry.recorder import StepResult


def naive_round(
    model: Any, loss_fn: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Take H steps alone, one on each of this worker's H shares, then average. Return the losses.

    `LocalSGD` averages all parameters in one message, lets workers sit rounds out, and deals the
    data out by class.
    """
    losses = []
    for x, y in batches:  # x (B/n, ...)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    return losses


class LocalSGD(ParameterAveraging):
    """Independent steps, averaged every `every` steps."""

    def begin(self, model: torch.nn.Module) -> None:
        """Make all replicas equal, which they are again after each average."""
        super().begin(model)
        self.guard = Guard(self.context, "copies")
        self.guard.add(model)

    def step(self, share: Share) -> StepResult:
        """Take a step alone, or sit the round out; average at its end."""
        if self.rank in self._chosen(self.done):
            return super().step(share)
        trainer = self._trainer
        trainer.sit_out()
        self.step_done(trainer.timer)
        return self.complete(trainer.measured(replace(share, samples=0), self.sent_bytes))

    def meets(self) -> bool:
        """Whether a round ends here."""
        return self.done % int(self.options["every"]) == 0

    def meet(self) -> float:
        """Average; who was last, and how long the others waited, shows in all ranks' rows."""
        size_bytes = 2 * (self.world_size - 1) / self.world_size * self.message.size_bytes
        self.context.faults.travel(round(size_bytes))
        self.mean()
        self.sent_bytes, self.equal = size_bytes, True
        return NAN

    def mean(self) -> None:
        """Replace every replica by the mean of those that took part in the latest round."""
        message, chosen = self.message, self._chosen(self.done - 1)
        message.fill()
        for flat in message.flats:
            if self.rank in chosen:
                flat.div_(len(chosen))
            else:
                flat.zero_()
            dist.all_reduce(flat)
        message.spread()

    def weight(self, share: Share) -> float:
        """Return the factor that makes the mean over those who take part one over samples."""
        chosen = self._chosen(self.done)
        bounds = [share_bounds(share.global_samples, r, self.world_size) for r in chosen]
        total = sum(stop - start for start, stop in bounds)
        return share.samples * len(chosen) / total if total else 0.0

    def _chosen(self, step: int) -> list[int]:
        """Return the workers that take part in the round of a step; the same on all workers."""
        count = max(1, round(self.options["fraction"] * self.world_size))
        if count == self.world_size:
            return list(range(count))
        rng = np.random.default_rng([self.seed, step // int(self.options["every"])])
        drawn = rng.choice(self.world_size, count, replace=False)
        return [int(rank) for rank in sorted(drawn)]

    def shard_source(self, source: Any) -> Any:
        """Give each worker a shard of its own, where `skew` asks for it."""
        if self.options["skew"] is None or self.world_size == 1:
            return source
        return skewed(source, self.world_size, self.options["skew"], self.seed)

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Average a user's own loop.

        Raises:
            FitError: `fraction` is below 1: the loop's own steps cannot be left out.
        """
        if self.options["fraction"] < 1:
            raise FitError(
                "Workers of an own loop cannot sit out a round.",
                seen=f"fraction={self.options['fraction']:g}",
                allowed="fraction=1 with wb.prepare",
                next_step="use wb.fit",
                code="WB-FIT-118",
            )
        return super().wrap_loop(model, optimizer, loader)
