"""Reduce to one: a single worker adds everything up and hands the sum out.

Source: Chan, Heimlich, Purkayastha, van de Geijn, Collective Communication: Theory, Practice, and
Experience, Concurrency and Computation 19(13), 2007: all-reduce as reduce, then broadcast.

    worker 1:  g1 ──┐                 ┌──▶ worker 1
    worker 2:  g2 ──┼─▶ worker 0: sum ┼──▶ worker 2
    worker 3:  g3 ──┘                 └──▶ worker 3

Sent: the tensor by every worker, n-1 times by worker 0, which is the bottleneck of large tensors.
Rounds: 2.
"""

from __future__ import annotations

import torch

from ....engine.marks import ALL_REDUCE, waits_in
from .links import Links


@waits_in(ALL_REDUCE)
def all_reduce(flat: torch.Tensor, links: Links) -> None:
    """Replace `flat`, shape (numbers,), by its sum over the workers."""
    reduce(flat, links)
    broadcast(flat, links)


@waits_in(ALL_REDUCE)
def reduce(flat: torch.Tensor, links: Links) -> None:
    """Add every worker's tensor to the one of rank 0."""
    if links.rank != 0:
        links.send(flat, 0).wait()
        return
    into = links.buffer(flat, flat.numel())
    for rank in range(1, links.size):
        flat += links.receive(into, rank)


@waits_in(ALL_REDUCE)
def broadcast(flat: torch.Tensor, links: Links) -> None:
    """Give every worker the tensor of rank 0."""
    if links.rank != 0:
        links.receive(flat, 0)
        return
    for sending in [links.send(flat, rank) for rank in range(1, links.size)]:
        sending.wait()
