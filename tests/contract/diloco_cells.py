"""The same training twice: by `local_sgd`, and by a plain loop over N replicas in one process.

The cells' source travels, so each imports what it uses.
"""

from __future__ import annotations

import itertools
from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1

BATCH, BATCHES = 25, 4
"""Shares of two workers and of three differ by a sample."""


def task(optimizer="SGD", frozen=False):
    """Return the network, what makes its optimizer, and the data, in float64."""
    import torch

    torch.manual_seed(3)
    x = torch.randn(BATCH * BATCHES, 8, dtype=torch.float64)
    y = torch.randint(0, 4, (BATCH * BATCHES,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers).double()
    if frozen:
        model[0].weight.requires_grad_(False)

    def make(parameters):
        if optimizer == "SGD":
            return torch.optim.SGD(parameters, 0.2, momentum=0.9)
        if optimizer == "plain":
            return torch.optim.SGD(parameters, 0.2)
        return torch.optim.AdamW(parameters, 1e-2)

    return model, make, (x, y)


def fitted(steps, optimizer="SGD", frozen=False):
    """Train by wb.fit, batch after batch; evaluate in between, which must change nothing."""
    import diloco_cells
    import torch

    from workbench.engine.training.fit import fit

    model, make, data = diloco_cells.task(optimizer, frozen)
    result = fit(
        model, data, loss=torch.nn.CrossEntropyLoss(), optimizer=make, shuffle=False,
        batch_size=diloco_cells.BATCH, steps=steps, eval_data=data, eval_every=2,
    )  # fmt: skip
    return result.evals[-1]["loss"]


def looped(epochs, freeze_after=None):
    """Train by a loop of one's own; from step `freeze_after` on the first layer is frozen.

    Returns how far the first layer went after that.
    """
    import diloco_cells
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.user_loops import prepare

    model, make, data = diloco_cells.task()
    loss_fn, optimizer = torch.nn.CrossEntropyLoss(), make(model.parameters())
    loader = DataLoader(TensorDataset(*data), diloco_cells.BATCH)
    model, optimizer, loader = prepare(model, optimizer, loader)
    done, then = 0, None
    for _ in range(epochs):
        for x, y in loader:
            if done == freeze_after:
                model[0].requires_grad_(False)
                then = model[0].weight.detach().clone()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            done += 1
    return None if then is None else float((model[0].weight - then).abs().max())


def normed(steps):
    """Train with BatchNorm; return this worker's running mean before each step."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(48, 4, dtype=torch.float64) + 2, torch.randint(0, 3, (48,))
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(norm, torch.nn.Linear(4, 3)).double()
    seen = []

    def step_fn(module, batch):
        seen.append(norm.running_mean.tolist())
        return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])

    fit(
        model, (x, y), step_fn=step_fn, optimizer=lambda p: torch.optim.SGD(p, 0.1),
        batch_size=16, steps=steps, shuffle=False,
    )  # fmt: skip
    return seen


# -- by hand ---------------------------------------------------------------------------------------


class Plain:
    """N replicas in one process, and DiLoCo's outer step as torch.optim.SGD takes it.

    Args:
        turns: After which step of a round, 1 to `every`, each fragment meets.
        momentum: Of the outer step; None: a round ends in the mean.
    """

    def __init__(self, workers, every, turns, lr=0.7, momentum=0.9, **about):
        import torch

        model, self.make, self.data = task(**about)
        self.every, self.turns = every, turns
        whole = _vector(model)
        ends = [len(whole) * k // len(turns) for k in range(len(turns) + 1)]
        self.spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.began = [torch.nn.Parameter(whole[span].clone()) for span in self.spans]
        self.outers = [
            None if momentum is None else
            torch.optim.SGD([part], lr, momentum=momentum, nesterov=momentum > 0)
            for part in self.began
        ]  # fmt: skip
        self.losses, self.step = [], 0
        self._be(model, workers)

    def _be(self, model, workers):
        import copy

        self.models = [copy.deepcopy(model) for _ in range(workers)]
        self.inner = [
            self.make([p for p in one.parameters() if p.requires_grad]) for one in self.models
        ]

    def train(self, steps, chosen=None):
        """Take steps; of the workers only those of `chosen(step)` take part, if it is given."""
        x, y = self.data
        for _ in range(steps):
            first = self.step % BATCHES * BATCH
            batch = x[first : first + BATCH], y[first : first + BATCH]
            self._step(*batch, sorted(chosen(self.step)) if chosen else range(len(self.models)))
        return self

    def _step(self, x, y, taking):
        import torch

        n, total, samples, loss_sum = len(self.models), 0, {}, 0.0
        for r in taking:
            samples[r] = slice(r * BATCH // n, (r + 1) * BATCH // n)
            total += samples[r].stop - samples[r].start
        for r, own in samples.items():
            count = own.stop - own.start
            self.inner[r].zero_grad()
            loss = torch.nn.functional.cross_entropy(self.models[r](x[own]), y[own])
            (loss * (count * len(samples) / total)).backward()
            self.inner[r].step()
            loss_sum += loss.item() * count
        self.losses.append(loss_sum / total)
        self.step += 1
        for place, turn in enumerate(self.turns):
            if self.step % self.every == turn % self.every:
                self._meet(place, list(samples))

    def _meet(self, place, taking):
        import torch

        vectors, span = [_vector(model) for model in self.models], self.spans[place]
        mean = torch.stack([vectors[r][span] for r in taking]).mean(0)
        if self.outers[place] is not None:
            self.began[place].grad = self.began[place].detach() - mean
            self.outers[place].step()
            mean = self.began[place].detach()
        for model, vector in zip(self.models, vectors, strict=True):
            vector[span] = mean
            _become(model, vector)

    def mean(self):
        """Return the mean of the replicas: parameters by name."""
        import copy

        import torch

        model = copy.deepcopy(self.models[0])
        _become(model, torch.stack([_vector(one) for one in self.models]).mean(0))
        return model

    def weights(self):
        return {name: p.detach().numpy() for name, p in self.mean().named_parameters()}

    def go_on_with(self, workers):
        """Let another number of workers begin with the mean of the replicas."""
        self._be(self.mean(), workers)
        return self


def _vector(model):
    import torch

    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _become(model, vector):
    import torch

    torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())
