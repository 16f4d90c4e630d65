"""Ring all-reduce: as few bytes as possible, in many small rounds.

Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations,
Journal of Parallel and Distributed Computing 69(2), 2009.

Each worker cuts its tensor in n chunks. Round after round, everybody sends a chunk to the next
worker and adds the one that comes from the previous worker: after n-1 rounds each worker holds one
chunk of the sum. In n-1 more rounds the finished chunks travel around.

    reduce-scatter, n = 3                          all-gather
    worker 0:  a0 ──▶ 1   c2+c0 ──▶ 1   B          B ──▶ 1    A ──▶ 1
    worker 1:  b1 ──▶ 2   a0+a1 ──▶ 2   C          C ──▶ 2    B ──▶ 2
    worker 2:  c2 ──▶ 0   b1+b2 ──▶ 0   A          A ──▶ 0    C ──▶ 0

Sent by each worker: 2 (n-1)/n of the tensor. Rounds: 2 (n-1).
"""

from __future__ import annotations

import torch

from ....engine.marks import ALL_REDUCE, waits_in
from .links import Links


@waits_in(ALL_REDUCE)
def all_reduce(flat: torch.Tensor, links: Links) -> None:
    """Replace `flat`, shape (numbers,), by its sum over the workers."""
    n, rank = links.size, links.rank
    chunks = list(flat.tensor_split(n))
    following, previous = (rank + 1) % n, (rank - 1) % n
    for k in range(n - 1):
        out, mine = chunks[(rank - k) % n], chunks[(rank - k - 1) % n]
        into = links.buffer(flat, mine.numel())
        mine += links.exchange(out, following, into, previous)
    for k in range(n - 1):
        out, into = chunks[(rank + 1 - k) % n], chunks[(rank - k) % n]
        links.exchange(out, following, into, previous)
