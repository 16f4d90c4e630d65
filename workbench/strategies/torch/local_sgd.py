"""Local SGD: workers train on their own for H steps, then average their parameters.

Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1; McMahan
et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (federated
averaging), AISTATS 2017, algorithm 1; Douillard et al., DiLoCo: Distributed Low-Communication
Training of Language Models, 2023 (arXiv:2311.08105), algorithm 1, and for fragments Douillard et
al., Streaming DiLoCo with overlapping communication, 2025 (arXiv:2501.18512).

    round     step 1 .. step H on own shares            average               next round
    worker 0: w0 = w0 - lr g0(w0)  ...   w0 --+                     +--> w
    worker 1: w1 = w1 - lr g1(w1)  ...   w1 --+-- w = mean(w_r) ----+--> w
    worker 2: (not chosen for this round)     +                     +--> w

With H steps in a round (`every=H`), workers send 1/H of the bytes that they send under `mirrored`.
Between two averages the replicas become different from each other. The difference is larger if the
workers' data differs more. With H = 1, averaging parameters is the same as averaging gradients if
the optimizer is linear in the gradient (SGD, with or without momentum). So the result is the
same as on one device under three conditions: H = 1, the optimizer is linear in the gradient, and
all other options have their defaults. Optimizer state is not averaged: each worker keeps its own
optimizer state.

With DiLoCo (`outer=nesterov`), a round ends with an outer step. Let b be the parameters at the
start of the round. The outer gradient d is b minus the mean of the replicas at the end of the
round. The outer optimizer is SGD with Nesterov momentum. Each worker keeps b and the momentum m,
and takes the same outer step. The inner optimizer is the optimizer of your cell. The DiLoCo paper
uses AdamW as the inner optimizer.

    round t    b --- H steps of worker r --> w_r       d = b - mean(w_r)      m = mu m + d
    round t+1  b - lr (d + mu m), on all workers       lr: outer_lr           mu: outer_momentum

With `outer_lr=1` and `outer_momentum=0` the outer step gives the mean of the replicas. If several
rounds change the parameters in the same direction, the momentum makes the outer step larger. A run
with only one worker takes outer steps too. Floating-point buffers and frozen parameters are only
averaged: they take no outer step. An evaluation during a round uses the mean of the replicas. The
final weights of a run are also the mean of the replicas.

With fragments (`fragments=F`), the parameters are divided into F parts of equal length. Each part
is averaged every H steps, and different parts are averaged at different steps. The total number of
bytes is the same as without fragments, but each average sends only 1/F of the parameters.

    H = 6, F = 3     step   1   2   3   4   5   6   7   8   9  10  11  12
                     averaged   A       B       C       A       B       C

Two options come from federated averaging. `fraction` is the fraction of the workers that are chosen
at random for each round: only these workers train, and only their parameters are averaged.
`skew=alpha` divides the samples of each class unevenly among the workers (Dirichlet distribution),
so that the workers have different data. With a smaller alpha, the workers' data differs more.

When a worker dies, each of the other workers continues from its own replica. A worker can die while
the workers average their replicas. If some workers have already completed this averaging, they give
the mean and the outer optimizer's state to the other workers. If no worker has completed it, the
remaining workers undo the last step. They divide the batch of this step among themselves, take the
step again, and then average again. So with `every=1` and SGD without momentum nothing is lost. In
other cases the run loses the state of the dead worker's optimizer. It also loses at most the steps
that the dead worker took since the workers last averaged their parameters. A new worker copies the
replica of another worker. This replica contains the steps that the other worker has taken since the
workers last averaged their parameters. So in the next average these steps count twice.

With a ring all-reduce, a worker sends 2 (n-1)/n times the size of the parameters and floating-point
buffers in each step in which the workers average. With fragments, it sends 2 (n-1)/n times the size
of the current fragment. In the other steps it sends nothing. Workers wait for the slowest worker
only in steps in which they average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...catalog import schedules
from ...engine.contract import NAN, Share
from ...engine.torch.data import skewed
from ...engine.torch.group import verify
from ...engine.training.shares import share_bounds
from ...errors import FitError
from .parts.guard import Guard
from .parts.parameter_averaging import ParameterAveraging
from .parts.replica import BeforeStep, bytes_of, on_host

if TYPE_CHECKING:
    from ...engine.telemetry.recorder import StepResult
    from .parts.guard import Message


def naive_round(
    model: Any, loss_fn: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Take H steps alone, one on each of this worker's H shares, then average. Return the losses.

    `LocalSGD` averages all parameters together, can use only some of the workers in a round,
    and distributes the data by class.
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


def naive_diloco_round(
    model: Any, loss_fn: Any, optimizer: Any, outer: Any, batches: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Take a round, then use its mean as the gradient of an outer step. Return the losses.

    `outer` is torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True). `LocalSGD`
    keeps the rounds' starting points, and can average parts of the parameters one after another.
    """
    began = [p.detach().clone() for p in model.parameters()]
    losses = naive_round(model, loss_fn, optimizer, batches)
    for p, w in zip(model.parameters(), began, strict=True):
        p.grad = w - p.data  # the outer gradient points from the workers' mean back to the start
        p.data = w
    outer.step()
    return losses


class LocalSGD(ParameterAveraging):
    """Independent steps; parameters are averaged every `every` steps.

    Attributes:
        fragments: The parts averaged together: slices of the message's flat tensors.
        outer: Takes the outer steps; None if a round ends in the mean.
    """

    outer: OuterStep | None = None
    _before: BeforeStep | None = None
    _agreed_on: list[Tensor] | None = None  # the result of the latest average, and its fragment
    _agreed_place = 0

    def begin(self, model: torch.nn.Module) -> None:
        """Make all replicas equal; they are equal again after each average of all parameters."""
        super().begin(model)
        count = int(self.options["fragments"])
        self.fragments = [
            [flat[slice(*share_bounds(flat.numel(), place, count))] for flat in self.message.flats]
            for place in range(count)
        ]
        turns = schedules.turns(self.options)
        self._turns = {turn % turns[-1]: place for place, turn in enumerate(turns)}
        if self.options["outer"] == "nesterov":
            lr, momentum = float(self.options["outer_lr"]), float(self.options["outer_momentum"])
            self.outer = OuterStep(model, self.message, count, lr=lr, momentum=momentum)
        if not self.context.membership.waits:
            self._compare(model)

    def _compare(self, model: torch.nn.Module) -> None:
        if len(self.fragments) == 1:
            self.guard = Guard(self.context, "copies" if self.outer is None else "updates")
            self.guard.add(model)

    def step(self, share: Share) -> StepResult:
        """Take a step alone, or sit out the round; average at the round's end."""
        if self.context.membership.trains and self.world_size > 1 and self.meets(self.done + 1):
            if self._before is None:
                kept = () if self.outer is None else self.outer.kept
                self._before = BeforeStep(self._trainer, kept)
            self._before.take()
        if self.rank in self._chosen(self.done, self.world_size):
            return super().step(share)
        trainer = self._trainer
        trainer.sit_out()
        self.step_done(trainer.timer)
        return self.complete(trainer.measured(replace(share, samples=0), self.sent_bytes))

    def meets(self, done: int) -> bool:
        """Whether a round ends here, or a fragment is averaged."""
        return done % int(self.options["every"]) in self._turns

    def meet(self) -> float:
        """Average; all ranks' rows show which worker was last and how long the others waited."""
        place = self._turn
        fragment = self.fragments[place]
        size_bytes = 2 * (self.world_size - 1) / self.world_size * sum(f.nbytes for f in fragment)
        self.context.faults.travel(round(size_bytes))
        self.message.fill()
        self._average(fragment)
        self._step_on(place)
        self.message.spread()
        self.sent_bytes, self.equal = size_bytes, len(self.fragments) == 1
        return NAN

    def meet_nobody(self) -> None:
        """Take the outer step of a single worker, whose parameters are the mean."""
        if self.outer is not None:
            self.message.fill()
            self._step_on(self._turn)
            self.message.spread()

    @property
    def _turn(self) -> int:
        return self._turns[self.done % int(self.options["every"])]

    def _step_on(self, place: int) -> None:
        if self.outer is not None:
            verify()  # an incomplete sum must not get into the kept state
            self.outer.step(place)

    def mean(self) -> None:
        """Replace every replica by the mean of those that took part in the latest round."""
        self.message.fill()
        self._average(self.message.flats)
        self.message.spread()

    def _average(self, flats: Iterable[Tensor]) -> None:
        chosen = self._chosen(self.done - 1, self.world_size)
        for flat in flats:
            if self.rank in chosen:
                flat.div_(len(chosen))
            else:
                flat.zero_()
            dist.all_reduce(flat)

    def weight(self, share: Share) -> float:
        """Return the factor that makes the mean over the round's workers a mean over samples."""
        chosen = self._chosen(self.done, self.workers)
        bounds = [share_bounds(share.global_samples, r, self.workers) for r in chosen]
        total = sum(stop - start for start, stop in bounds)
        return share.samples * len(chosen) / total if total else 0.0

    def _chosen(self, step: int, workers: int) -> list[int]:
        """Return the workers that take part in the round of a step; the same on all workers."""
        count = max(1, round(self.options["fraction"] * workers))
        if count == workers:
            return list(range(count))
        rng = np.random.default_rng([self.seed, step // int(self.options["every"])])
        drawn = rng.choice(workers, count, replace=False)
        return [int(rank) for rank in sorted(drawn)]

    # -- with others -------------------------------------------------------------------------------

    def bound(self) -> str:
        """Return why the set of workers must not change: each round draws from all workers."""
        return (
            ""
            if self.options["fraction"] == 1
            else "with `fraction` below 1, Workbench chooses the workers of each round at random "
            "from all workers of the run. This choice needs the same set of workers during the "
            "whole run"
        )

    def have_met(self) -> None:
        """Keep the latest average for workers that may have failed to complete it."""
        self.met += 1
        if self.context.membership.trains:
            self._agreed_on = [flat.clone() for flat in self.fragments[self._turn]]
            self._agreed_place = self._turn

    def completes_alone(self) -> bool:
        """Whether a step counts if its average failed: it does not."""
        return False

    def undo(self) -> None:
        """Restore the state before the step whose average failed."""
        if self._breaks:
            assert self._before is not None, "internal error: no copy of the state"
            self._before.put_back()
            self._breaks = False
            self.done -= 1

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Continue with this worker's replica.

        From now on compare only the parameters that become equal.
        """
        super().enter_group(agreed)
        self._compare(self._trainer.model)

    def handed_over(self) -> dict[str, Any]:
        """Return this replica, the latest average, and the outer optimizer's state."""
        state = {**super().handed_over(), "agreed": self._agreed_on, "place": self._agreed_place}
        return state if self.outer is None else {**state, "outer": self.outer.state()}

    def take_over(self, state: dict[str, Any], *, comes: bool) -> bool:
        """Begin with another worker's replica, or complete the average that failed here."""
        broke = self._breaks and state["met"] > self.met
        if broke:
            self.message.fill()
            for mine, mean in zip(self.fragments[state["place"]], state["agreed"], strict=True):
                mine.copy_(mean)
            self.message.spread()
            self.equal, self.met, self._breaks = len(self.fragments) == 1, self.met + 1, False
        else:
            super().take_over(state, comes=comes)
        if comes or broke:
            self._agreed_on, self._agreed_place = state["agreed"], int(state["place"])
            if self.outer is not None:
                self.outer.load(state["outer"])
        return broke

    def shard_source(self, source: Any) -> Any:
        """Give each worker its own shard of the data if `skew` asks for it."""
        if self.options["skew"] is None or self.world_size == 1:
            return source
        return skewed(source, self.world_size, self.options["skew"], self.seed)

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Average a user's own loop.

        Raises:
            FitError: `fraction` is below 1, but a user's own loop cannot leave steps out.
        """
        if self.options["fraction"] < 1:
            raise FitError(
                "In your own loop `fraction` must be 1, because Workbench cannot make a worker "
                "skip the steps of a round.",
                seen=f"fraction={self.options['fraction']:g}",
                allowed="fraction=1 with wb.prepare",
                next_step="use wb.fit, or remove -o fraction",
                code="WB-FIT-118",
            )
        return super().wrap_loop(model, optimizer, loader)

    def state(self) -> dict[str, Any]:
        """Return this replica and the state of the outer steps, which is equal on all workers."""
        state = super().state()
        return state if self.outer is None else {**state, "outer": self.outer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned, in the same way on all workers."""
        super().load_state(state)
        if self.outer is not None:
            self.outer.load(state.get("outer"))

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients, optimizer and outer optimizer."""
        return super().memory_bytes() + (0 if self.outer is None else self.outer.size_bytes)

    def close(self) -> None:
        """Release the user's loop."""
        super().close()
        self.outer = self._before = None


class _Piece(NamedTuple):
    """A fragment's part of one parameter: `mean` is a part of the message, all are flat."""

    parameter: Tensor
    mean: Tensor
    began: Tensor
    momentum: Tensor


class OuterStep:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the workers' mean movement.

    The order of operations is that of torch.optim.SGD, so the result has the same bits.

    Args:
        message: Holds the mean when a step begins, and the step's result afterwards.
        fragments: The number of parts in which the message is averaged.

    Attributes:
        kept: The rounds' starting points and the momenta; `size_bytes` in total.
    """

    def __init__(
        self, model: torch.nn.Module, message: Message, fragments: int, *, lr: float,
        momentum: float,
    ) -> None:  # fmt: skip
        self._lr, self._momentum = lr, momentum
        self._parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
        began = {name: p.detach().reshape(-1).clone() for name, p in self._parameters.items()}
        self._began = began
        self._momenta = {name: torch.zeros_like(flat) for name, flat in began.items()}
        self.kept = [*began.values(), *self._momenta.values()]
        self.size_bytes = bytes_of(self.kept)
        self._pieces = [list(self._cut(message, place, fragments)) for place in range(fragments)]

    def _cut(self, message: Message, place: int, fragments: int) -> Iterator[_Piece]:
        """Yield a fragment's part of each parameter; parameters come first in the message."""
        flats = {flat.dtype: flat for flat in message.flats}
        begin: Counter[torch.dtype] = Counter()
        for name, parameter in self._parameters.items():
            flat, at = flats[parameter.dtype], begin[parameter.dtype]
            begin[parameter.dtype] += parameter.numel()
            first, stop = share_bounds(flat.numel(), place, fragments)
            first, stop = max(first, at), min(stop, at + parameter.numel())
            if first < stop:
                own = slice(first - at, stop - at)
                began, momentum = self._began[name][own], self._momenta[name][own]
                yield _Piece(parameter, flat[first:stop], began, momentum)

    def step(self, place: int) -> None:
        """Replace a fragment's mean by the outer step's result; the next round begins there."""
        trained = [piece for piece in self._pieces[place] if piece.parameter.requires_grad]
        for piece in self._pieces[place]:
            if not piece.parameter.requires_grad:
                piece.began.copy_(piece.mean)
        if not trained:
            return
        _, means, began, momenta = map(list, zip(*trained, strict=True))
        ahead = torch._foreach_sub(began, means)  # d: uphill, as gradients are
        torch._foreach_mul_(momenta, self._momentum)
        torch._foreach_add_(momenta, ahead)
        torch._foreach_add_(ahead, momenta, alpha=self._momentum)
        torch._foreach_add_(began, ahead, alpha=-self._lr)
        torch._foreach_copy_(means, began)

    def state(self) -> dict[str, Any]:
        """Return copies of the starting points and momenta, by parameter, on the CPU."""
        return {"began": self._named(self._began), "momentum": self._named(self._momenta)}

    def _named(self, flats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return on_host({n: flats[n].view(p.shape) for n, p in self._parameters.items()})

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from what `state` returned; None: begin with the model as it is."""
        for name, parameter in self._parameters.items():
            began = parameter.detach() if state is None else state["began"][name]
            self._began[name].copy_(began.reshape(-1))
            if state is None:
                self._momenta[name].zero_()
            else:
                self._momenta[name].copy_(state["momentum"][name].reshape(-1))
