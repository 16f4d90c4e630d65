"""The algorithms of all-reduce, each in one function, as in a textbook.

`ring` sends the fewest bytes and `recursive_doubling` needs the fewest rounds; `reduce_to_one`
sends everything through one worker, and `hierarchical` sends little between hosts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ....engine.debugging.marks import ALL_REDUCE, waits_in

if TYPE_CHECKING:
    from .links import Links


def naive_all_reduce(flat: torch.Tensor) -> None:
    """Replace `flat`, shape (numbers,), by its sum: every worker gets every worker's tensor.

    Each worker sends its whole tensor n - 1 times, and all workers add up the same tensors. The
    algorithms below give the same sum with fewer bytes or on fewer links.
    """
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    flat.copy_(torch.stack(every).sum(dim=0))  # (n, numbers) -> (numbers,)


@waits_in(ALL_REDUCE)
def ring(flat: torch.Tensor, links: Links) -> None:
    """Ring all-reduce: as few bytes as possible, in many small rounds.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, Journal of Parallel and Distributed Computing 69(2), 2009.

    Each of the n workers divides its tensor into n chunks. In each round every worker sends one
    chunk to the next worker and receives one chunk from the previous worker. It adds the received
    chunk to its own chunk with the same index. After n-1 rounds each worker holds one chunk of the
    sum. In n-1 more rounds each finished chunk is sent around the ring.

        reduce-scatter, n = 3                          all-gather
        worker 0:  a0 ──▶ 1   c2+c0 ──▶ 1   B          B ──▶ 1    A ──▶ 1
        worker 1:  b1 ──▶ 2   a0+a1 ──▶ 2   C          C ──▶ 2    B ──▶ 2
        worker 2:  c2 ──▶ 0   b1+b2 ──▶ 0   A          A ──▶ 0    C ──▶ 0

    Each worker sends 2 (n-1)/n times the tensor's size. There are 2 (n-1) rounds.

    Args:
        flat: Shape (numbers,); becomes the sum over the workers.
    """
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


@waits_in(ALL_REDUCE)
def reduce_to_one(flat: torch.Tensor, links: Links) -> None:
    """Reduce to one: a single worker adds everything up and sends the sum to all.

    Source: Chan, Heimlich, Purkayastha, van de Geijn, Collective Communication: Theory, Practice,
    and Experience, Concurrency and Computation 19(13), 2007: all-reduce as reduce, then broadcast.

        worker 1:  g1 ──┐                 ┌──▶ worker 1
        worker 2:  g2 ──┼─▶ worker 0: sum ┼──▶ worker 2
        worker 3:  g3 ──┘                 └──▶ worker 3

    Every worker except worker 0 sends its tensor once. Worker 0 sends the sum n-1 times, and is the
    bottleneck for large tensors. There are 2 rounds.

    Args:
        flat: Shape (numbers,); becomes the sum over the workers.
    """
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


@waits_in(ALL_REDUCE)
def recursive_doubling(flat: torch.Tensor, links: Links) -> None:
    """Recursive doubling: as few rounds as possible, for small tensors.

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
    MPICH, IJHPCA 19(1), 2005, section 4.5.

    In round k, two workers are partners if their ranks, as binary numbers, differ only in bit k.
    The partners exchange their sums, and each partner adds the received sum to its own sum. If n is
    a power of two, every worker holds the sum after log2 n rounds.

        worker 0:  g0 ◀─▶ 1   g0+g1 ◀─▶ 2   g0+g1+g2+g3
        worker 1:  g1 ◀─▶ 0   g0+g1 ◀─▶ 3   g0+g1+g2+g3
        worker 2:  g2 ◀─▶ 3   g2+g3 ◀─▶ 0   g0+g1+g2+g3
        worker 3:  g3 ◀─▶ 2   g2+g3 ◀─▶ 1   g0+g1+g2+g3

    Let p be the largest power of two that is not above n. If n > p, each worker with a rank of p or
    more first sends its tensor to a worker with a rank below p. This worker adds the received
    tensor to its own tensor. At the end the worker with the lower rank sends the sum back. In each
    round, one partner computes a + b and the other partner computes b + a. These two sums have
    exactly the same bits. So all copies of the final sum have the same bits.

    Each worker with a rank below p sends the whole tensor log2(p) times, and once more if it sends
    the sum back to a worker with a higher rank. There are log2 p rounds, and two more if n > p.

    Args:
        flat: Shape (numbers,); becomes the sum over the workers.
    """
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


@waits_in(ALL_REDUCE)
def hierarchical(flat: torch.Tensor, links: Links) -> None:
    """Hierarchical all-reduce: add up within groups, then between their leaders.

    Source: Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018
    (arXiv:1807.11205), "hierarchical all-reduce".

    Links within a host are fast; links between hosts are slow. So, with several hosts, the workers
    of each host form a group. Each group adds up its tensors on one of its workers, the leader. The
    leaders run a ring all-reduce. Then each leader sends the sum to its group. With only one host,
    each group has about sqrt(n) workers with consecutive ranks, so that you can see how the
    algorithm works.

        worker 1 ──▶ worker 0 ──┐          ┌── worker 0 ──▶ worker 1
                                ├── ring ──┤
        worker 3 ──▶ worker 2 ──┘          └── worker 2 ──▶ worker 3

    Each of the m leaders sends 2 (m-1)/m times the tensor's size to other leaders, and the whole
    tensor to each member of its group. Each worker that is not a leader sends its tensor once.
    There are 2 + 2 (m-1) rounds.

    Args:
        flat: Shape (numbers,); becomes the sum over the workers.
    """
    groups = form_groups(links.size, links.hosts)
    mine = next(group for group in groups if links.rank in group)
    inside = links.among(mine)
    reduce(flat, inside)
    if inside.rank == 0:
        ring(flat, links.among([group[0] for group in groups]))
    broadcast(flat, inside)


def form_groups(workers: int, hosts: list[str]) -> list[list[int]]:
    """Return the ranks of each group, its leader first: by host, or blocks of about sqrt(n)."""
    names = list(dict.fromkeys(hosts))
    if len(names) > 1:
        return [[rank for rank in range(workers) if hosts[rank] == name] for name in names]
    size = math.ceil(math.sqrt(workers))
    return [list(range(i, min(i + size, workers))) for i in range(0, workers, size)]
