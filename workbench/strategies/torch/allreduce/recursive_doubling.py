"""Recursive doubling: as few rounds as possible, for small tensors.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH, IJHPCA 19(1), 2005, section 4.5.

In round k, workers whose ranks differ in bit k exchange what they have and add it. After log2 n
rounds everybody holds the sum.

    worker 0:  g0 ◀─▶ 1   g0+g1 ◀─▶ 2   g0+g1+g2+g3
    worker 1:  g1 ◀─▶ 0   g0+g1 ◀─▶ 3   g0+g1+g2+g3
    worker 2:  g2 ◀─▶ 3   g2+g3 ◀─▶ 0   g0+g1+g2+g3
    worker 3:  g3 ◀─▶ 2   g2+g3 ◀─▶ 1   g0+g1+g2+g3

Where n is no power of two, the workers beyond the largest one p hand their tensor to a partner
before, and are handed the sum after. Addition of two numbers commutes, so all copies of the sum are
equal to the last bit.

Sent by each of the p workers: log2(p) times the tensor. Rounds: log2 p, and two more where n > p.
"""

from __future__ import annotations

import torch

from ....engine.marks import ALL_REDUCE, waits_in
from .links import Links


@waits_in(ALL_REDUCE)
def all_reduce(flat: torch.Tensor, links: Links) -> None:
    """Replace `flat`, shape (numbers,), by its sum over the workers."""
    n, rank = links.size, links.rank
    p = 1 << (n.bit_length() - 1)  # the largest power of two that is not above n
    if rank >= p:
        links.send(flat, rank - p).wait()
        links.receive(flat, rank - p)
        return
    into = links.buffer(flat, flat.numel())
    if rank + p < n:
        flat += links.receive(into, rank + p)
    bit = 1
    while bit < p:
        partner = rank ^ bit
        flat += links.exchange(flat, partner, into, partner)
        bit <<= 1
    if rank + p < n:
        links.send(flat, rank + p).wait()
