"""Finds the fastest all-reduce for a size, on this machine, with these workers.

Which algorithm wins depends on the size (rounds cost time, bytes cost time), on the number of
workers and on the machine. So it is measured: once per cluster for each number of workers and
power of two of bytes, by all workers together; rank 0 remembers. Each candidate is run in turn,
several rounds; what counts is the slowest worker's median.

The backend's own all-reduce runs while backward is still computing, which the measurement does not
see; another algorithm must beat it clearly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from . import ALGORITHMS, BACKEND, AllReduce
from .links import Links

LARGEST_BYTES = 8 << 20  # beyond this only bandwidth counts, and the order stays the same
LEAST_GAIN = 0.85  # of the backend's time: what another algorithm may take at most
ROUNDS = 5


@dataclass(frozen=True)
class Choice:
    """What was chosen for a size.

    Attributes:
        seconds: Time of one all-reduce by algorithm; empty where nothing was measured.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)

    def explain(self, size_bytes: int) -> str:
        """Return one sentence for the user."""
        rival = min(
            (name for name in self.seconds if name != self.name), key=self.seconds.__getitem__
        )
        own_ms, other_ms = self.seconds[self.name] * 1e3, self.seconds[rival] * 1e3
        return (
            f"Gradients ({size_bytes / 1e6:.3g} MB) are averaged by {self.name}: {own_ms:.2f} ms "
            f"here; {rival} takes {other_ms:.2f} ms."
        )


_known: dict[tuple[object, ...], Choice] = {}


def choose(flat: torch.Tensor, links: Links) -> Choice:
    """Return the fastest algorithm for tensors like `flat`; all workers call it together.

    Only gloo on CPUs is raced: NCCL picks its algorithm itself, and CUDA tensors would have to be
    staged for the others.
    """
    if links.size == 1 or flat.device.type != "cpu":
        return Choice(BACKEND)
    links.agree(flat)
    names = list(ALGORITHMS)
    size_bytes = min(flat.numel() * flat.element_size(), LARGEST_BYTES)
    key = (links.size, tuple(links.hosts), flat.dtype, size_bytes.bit_length())
    choice = _known.get(key)
    # An engine that was replaced has forgotten: what rank 0 knows counts.
    known = torch.tensor([-1 if choice is None else names.index(choice.name)])
    dist.broadcast(known, 0, group=links.group)
    if (index := int(known)) >= 0:
        same = choice is not None and choice.name == names[index]
        return choice if same and choice is not None else Choice(names[index])
    probe = torch.zeros(size_bytes // flat.element_size(), dtype=flat.dtype)
    links.agree(probe)
    _known[key] = choice = fastest(race(probe, links, names))
    return choice


def race(probe: torch.Tensor, links: Links, names: Sequence[str]) -> dict[str, float]:
    """Return the seconds one all-reduce of `probe` takes by algorithm, equal on all workers."""
    entrants = {name: AllReduce(name, links) for name in names}
    for entrant in entrants.values():  # connections are opened at first use
        entrant(probe)
    before = links.sent_bytes
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, entrant in entrants.items():
            began = time.perf_counter()
            entrant(probe)
            taken[name].append(time.perf_counter() - began)
    links.sent_bytes = before  # measuring belongs to no step
    medians = torch.tensor([sorted(taken[name])[ROUNDS // 2] for name in names])
    dist.all_reduce(medians, dist.ReduceOp.MAX, group=links.group)
    return dict(zip(names, medians.tolist(), strict=True))


def fastest(seconds: dict[str, float]) -> Choice:
    """Return the fastest, or the backend's own where nothing beats it clearly."""
    name = min(seconds, key=seconds.__getitem__)
    if seconds[name] > LEAST_GAIN * seconds[BACKEND]:
        name = BACKEND
    return Choice(name, seconds)
