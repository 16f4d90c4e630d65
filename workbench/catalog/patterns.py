"""Collectives as arrows: what the descriptions of several strategies share.

Each function takes the ids of the members in order and returns phases; with one member there is
nobody to talk to, and none. `unit` is the size of the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from .messages import Arrow, Kind, Layout, Node, Phase, Size

RING = (
    "Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, "
    "JPDC 69(2), 2009"
)
REDUCE = (
    "Chan, Heimlich, Purkayastha, van de Geijn, Collective Communication, Concurrency and "
    "Computation 19(13), 2007"
)
DOUBLING = (
    "Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, "
    "IJHPCA 19(1), 2005, section 4.5"
)
HIERARCHICAL = (
    "Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018 "
    "(arXiv:1807.11205)"
)

Ids = Sequence[str]


def workers(layout: Layout, holds: str) -> tuple[Node, ...]:
    """Return the workers."""
    return tuple(
        Node(name, "worker", f"worker {rank}", holds, rank) for rank, name in enumerate(layout.ids)
    )


def around(outer: Sequence[Node], inner: Sequence[Node]) -> tuple[Node, ...]:
    """Return some nodes with others in their middle, so that arrows to these are short."""
    half = (len(outer) + 1) // 2
    return (*outer[:half], *inner, *outer[half:])


def whole(unit: str) -> Size:
    """Return the size of the whole tensor."""
    return Size(1.0, unit, unit)


def part(unit: str, count: int, by: str = "N") -> Size:
    """Return the size of one of `count` parts, written `M/N`."""
    return Size(1.0 / count, unit, f"{unit}/{by}")


def _turn(members: Ids, kind: Kind, size: Size, times: int) -> tuple[Arrow, ...]:
    following = [*members[1:], *members[:1]]
    pairs = zip(members, following, strict=True)
    return tuple(Arrow(source, target, kind, size, times) for source, target in pairs)


def scatter_ring(members: Ids, kind: Kind, unit: str, title: str, text: str) -> tuple[Phase, ...]:
    """Return n-1 rounds on a ring, in each of which everybody hands on a chunk."""
    n = len(members)
    if n < 2:
        return ()
    arrows = _turn(members, kind, part(unit, n), n - 1)
    return (Phase(title, text, arrows=arrows, formula=f"{unit}/N, N-1 rounds"),)


def ring(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return a ring all-reduce: each sends 2 (N-1)/N of the tensor."""
    add = "Round after round each adds the chunk that arrives and hands on the next one: each then "
    return (
        *scatter_ring(members, kind, unit, "Reduce-scatter", f"{add}holds one chunk of the sum."),
        *scatter_ring(
            members, kind, unit, "All-gather", "The finished chunks travel around the ring."
        ),
    )


def ring_at_once(
    members: Ids, kind: Kind, unit: str, title: str, text: str, *, every: int = 1, by: str = "N"
) -> tuple[Phase, ...]:
    """Return a ring all-reduce drawn as one phase.

    Args:
        every: The phase ends every so many-th step.
        by: What the number of members is called in formulas.
    """
    n = len(members)
    if n < 2:
        return ()
    arrows = _turn(members, kind, part(unit, n, by), 2 * (n - 1))
    return (
        Phase(title, text, (), arrows, every, every - 1, f"{unit}/{by}, 2({by}-1) rounds"),
    )  # fmt: skip


def reduce_to_one(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return an all-reduce through the first member: it sends N-1 times the tensor."""
    root, *others = members
    if not others:
        return ()
    size = whole(unit)
    return (
        Phase("Reduce", "One adds up what all others send.",
              arrows=tuple(Arrow(one, root, kind, size) for one in others), formula=unit),
        Phase("Broadcast", "It hands the sum out.",
              arrows=tuple(Arrow(root, one, kind, size) for one in others),
              formula=f"{unit} to each"),
    )  # fmt: skip


def recursive_doubling(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return log2 N rounds in which partners exchange what they have."""
    n, size = len(members), whole(unit)
    p = 1 << (n.bit_length() - 1)
    beyond = [(members[rank], members[rank - p]) for rank in range(p, n)]
    phases = []
    if beyond:
        arrows = tuple(Arrow(a, b, kind, size) for a, b in beyond)
        text = "Who is beyond the largest power of two hands its tensor to a partner."
        phases.append(Phase("Fold", text, arrows=arrows, formula=unit))
    for k in range(p.bit_length() - 1):
        arrows = tuple(
            Arrow(members[rank], members[rank ^ (1 << k)], kind, size) for rank in range(p)
        )
        text = f"Partners {1 << k} apart exchange what they have and add it."
        phases.append(Phase(f"Exchange {k + 1}", text, arrows=arrows, formula=unit))
    if beyond:
        arrows = tuple(Arrow(b, a, kind, size) for a, b in beyond)
        phases.append(
            Phase("Unfold", "The partners hand the sum back.", arrows=arrows, formula=unit)
        )
    return tuple(phases)


def hierarchical(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return an all-reduce in groups of about sqrt(N), then between their leaders."""
    n, size = len(members), whole(unit)
    if n < 2:
        return ()
    width = math.ceil(math.sqrt(n))
    groups = [members[i : i + width] for i in range(0, n, width)]
    up = tuple(Arrow(one, g[0], kind, size) for g in groups for one in g[1:])
    down = tuple(Arrow(g[0], one, kind, size) for g in groups for one in g[1:])
    leaders = [group[0] for group in groups]
    within = "Within a group (a host, or a block of workers) everything is added up at the leader."
    text = "The leaders add up in a ring: 2(L-1) rounds of the L-th part."
    return (
        Phase("Reduce in groups", within, arrows=up, formula=unit),
        *ring_at_once(leaders, kind, unit, "Between leaders", text, by="L"),
        Phase("Broadcast in groups", "Each leader hands the sum out.", arrows=down,
              formula=f"{unit} to each"),
    )  # fmt: skip


ALL_REDUCE: dict[str, tuple[Callable[[Ids, Kind, str], tuple[Phase, ...]], str]] = {
    "backend": (ring, RING),
    "ring": (ring, RING),
    "nccl": (ring, RING),
    "hierarchical": (hierarchical, HIERARCHICAL),
    "reduce_to_one": (reduce_to_one, REDUCE),
    "recursive_doubling": (recursive_doubling, DOUBLING),
}
"""An all-reduce by the name its option has: its phases, and where it is described."""


def exchange_with_server(
    layout: Layout, servers: Ids, unit: str, kind: Kind, title: str, text: str, *, up: bool
) -> Phase:
    """Return every worker's messages to (`up`) or from all servers, who share the tensor."""
    if len(servers) == 1:
        sizes = [whole(unit)]
    else:  # tensors stay whole, so parts are not quite equal: each is an unknown of its own
        sizes = [Size(1.0, f"{unit}{index}", f"{unit}/S") for index in range(len(servers))]
    arrows = tuple(
        Arrow(worker, server, kind, size) if up else Arrow(server, worker, kind, size)
        for worker in layout.ids
        for server, size in zip(servers, sizes, strict=True)
    )
    return Phase(title, text, arrows=arrows, formula=f"{sizes[0].text} each")


def server_units(unit: str, servers: int) -> dict[str, str]:
    """Return what the unknowns of several servers mean; of one there are none."""
    if servers < 2:
        return {}
    parts = {f"{unit}{i}": f"bytes of the part that server {i} holds" for i in range(servers)}
    return {"S": "number of servers, whose parts are about equal", **parts}


def chain(
    stages: Sequence[str], microbatches: int, *, backward: bool, first: int = 0
) -> tuple[Arrow, ...]:
    """Return what stages hand on, or what comes back.

    Args:
        stages: Who holds each stage, in order; the same one may hold several.
        first: Number of the first stage, for the names of the unknowns.
    """
    links = []
    for stage, (source, target) in enumerate(itertools.pairwise(stages)):
        if source == target:
            continue
        unit = f"A{first + stage}"
        size = whole(unit) if microbatches == 1 else part(unit, microbatches, "m")
        order = len(stages) - 2 - stage if backward else stage
        ends = (target, source) if backward else (source, target)
        links.append(
            Arrow(*ends, "gradients" if backward else "activations", size, microbatches, order)
        )
    return tuple(links)


def handed_units(stages: int) -> dict[str, str]:
    """Return what the unknowns of a chain mean."""
    return {
        f"A{s}": f"bytes that stage {s} hands on for the whole batch" for s in range(stages - 1)
    }
