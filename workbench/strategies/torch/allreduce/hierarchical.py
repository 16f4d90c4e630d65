"""Hierarchical all-reduce: add up within groups, then between their leaders.

Source: Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018
(arXiv:1807.11205), "hierarchical all-reduce".

Links within a host are fast, links between hosts are slow: each group adds up at its leader, the
leaders run a ring, each leader hands the sum out. A group is a host; where there is one host only,
it is a block of about sqrt(n) workers, so that the traffic can be seen.

    worker 1 ──▶ worker 0 ──┐          ┌── worker 0 ──▶ worker 1
                            ├── ring ──┤
    worker 3 ──▶ worker 2 ──┘          └── worker 2 ──▶ worker 3

Sent, by m leaders: 2 (m-1)/m of the tensor between groups, and the tensor to each member; by the
others: the tensor. Rounds: 2 + 2 (m-1).
"""

from __future__ import annotations

import math

import torch

from ....engine.marks import ALL_REDUCE, waits_in
from . import ring
from .links import Links
from .reduce_to_one import broadcast, reduce


@waits_in(ALL_REDUCE)
def all_reduce(flat: torch.Tensor, links: Links) -> None:
    """Replace `flat`, shape (numbers,), by its sum over the workers."""
    groups = form_groups(links.size, links.hosts)
    mine = next(group for group in groups if links.rank in group)
    inside = links.among(mine)
    reduce(flat, inside)
    if inside.rank == 0:
        ring.all_reduce(flat, links.among([group[0] for group in groups]))
    broadcast(flat, inside)


def form_groups(workers: int, hosts: list[str]) -> list[list[int]]:
    """Return the ranks of each group, its leader first: by host, or blocks of about sqrt(n)."""
    names = list(dict.fromkeys(hosts))
    if len(names) > 1:
        return [[rank for rank in range(workers) if hosts[rank] == name] for name in names]
    size = math.ceil(math.sqrt(workers))
    return [list(range(i, min(i + size, workers))) for i in range(0, workers, size)]
