"""The messages in a step of a strategy, as data: sender, receiver, content, time and size.

A `Diagram` is nodes (workers, servers, devices), and phases in the order of time. A phase has
computation, messages, or both; its arrows start together unless `order` says otherwise. Sizes are
formulas with a few unknowns (`M`, the bytes of the model's gradients). So the sizes are valid for
every model and can be compared with a run's measurements.

Each strategy's description is a small function that its catalog entry names (`messages`). These
functions are in `step_messages.py`. Collectives that several strategies use are functions here.
Each takes the ids of the members in order and returns phases; one member alone has no phase. `unit`
is the size of the whole tensor. Nothing here draws.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import PlanError

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
    """Return some nodes with other nodes in the middle, so that arrows to the middle are short."""
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
    """Return n-1 rounds on a ring; in each round, every member sends a chunk to the next."""
    n = len(members)
    if n < 2:
        return ()
    arrows = _turn(members, kind, part(unit, n), n - 1)
    return (Phase(title, text, arrows=arrows, formula=f"{unit}/N, N-1 rounds"),)


def ring(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return a ring all-reduce: each member sends 2 (N-1)/N of the tensor."""
    add = (
        "Each worker divides its tensor into N chunks. In each round, it sends one chunk to the "
        "next worker and receives one chunk from the previous worker. It adds the received chunk "
        "to its own chunk with the same index. At the end, each worker has one finished chunk of "
        "the sum over all workers."
    )
    gather = (
        "Each worker has one finished chunk of the sum. The workers pass these chunks around the "
        "ring, until every worker has all chunks of the sum."
    )
    return (
        *scatter_ring(members, kind, unit, "Reduce-scatter", add),
        *scatter_ring(members, kind, unit, "All-gather", gather),
    )


def ring_at_once(
    members: Ids, kind: Kind, unit: str, title: str, text: str, *, every: int = 1, by: str = "N",
    turn: int | None = None, fragments: int = 1,
) -> tuple[Phase, ...]:  # fmt: skip
    """Return a ring all-reduce drawn as one phase.

    Args:
        every: The phase takes place at the end of every `every`-th step.
        by: The symbol for the number of members in formulas.
        turn: In which of these steps, 1 to `every`; by default the last.
        fragments: Into how many parts the tensor is divided; this phase sends one part.
    """
    n = len(members)
    if n < 2:
        return ()
    size = part(unit, n * fragments, by if fragments == 1 else f"(F {by})")
    arrows = _turn(members, kind, size, 2 * (n - 1))
    offset = (every if turn is None else turn) - 1
    return (
        Phase(title, text, (), arrows, every, offset, f"{size.text}, 2({by}-1) rounds"),
    )  # fmt: skip


def reduce_to_one(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return an all-reduce through the first member, which sends the tensor N-1 times."""
    root, *others = members
    if not others:
        return ()
    size = whole(unit)
    return (
        Phase("Reduce", "One worker receives the tensors of all other workers and adds them up.",
              arrows=tuple(Arrow(one, root, kind, size) for one in others), formula=unit),
        Phase("Broadcast", "This worker sends the sum to all other workers.",
              arrows=tuple(Arrow(root, one, kind, size) for one in others),
              formula=f"{unit} to each"),
    )  # fmt: skip


def recursive_doubling(members: Ids, kind: Kind, unit: str) -> tuple[Phase, ...]:
    """Return log2 N rounds in which partners exchange their sums."""
    n, size = len(members), whole(unit)
    p = 1 << (n.bit_length() - 1)
    beyond = [(members[rank], members[rank - p]) for rank in range(p, n)]
    phases = []
    if beyond:
        arrows = tuple(Arrow(a, b, kind, size) for a, b in beyond)
        text = f"Each worker with rank {p} or higher sends its tensor to a worker of lower rank."
        phases.append(Phase("Fold", text, arrows=arrows, formula=unit))
    for k in range(p.bit_length() - 1):
        arrows = tuple(
            Arrow(members[rank], members[rank ^ (1 << k)], kind, size) for rank in range(p)
        )
        who = f"The workers with ranks below {p}" if beyond else "The workers"
        text = (
            f"{who} form pairs. The ranks of a pair differ by {1 << k}. The two workers of a pair "
            "exchange their tensors and add them up."
        )
        phases.append(Phase(f"Exchange {k + 1}", text, arrows=arrows, formula=unit))
    if beyond:
        arrows = tuple(Arrow(b, a, kind, size) for a, b in beyond)
        phases.append(
            Phase(
                "Unfold",
                f"Each worker with rank {p} or higher sent its tensor to another worker. This "
                "other worker now sends the sum back.",
                arrows=arrows,
                formula=unit,
            )
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
    within = (
        "With several hosts, the workers of each host form a group. With only one host, each group "
        "has a few workers with consecutive ranks. One worker of each group, the leader, adds up "
        "the tensors of its group."
    )
    text = (
        "The leaders form a ring and add up the sums of all groups. For L leaders, this takes "
        "2(L-1) rounds. In each round, each leader sends 1/L of a tensor."
    )
    return (
        Phase("Reduce in groups", within, arrows=up, formula=unit),
        *ring_at_once(leaders, kind, unit, "Between leaders", text, by="L"),
        Phase("Broadcast in groups", "Each leader sends the sum to its group.", arrows=down,
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
"""An all-reduce algorithm of the option `allreduce`: its phases, and its source."""


def exchange_with_server(
    layout: Layout, servers: Ids, unit: str, kind: Kind, title: str, text: str, *, up: bool
) -> Phase:
    """Return every worker's messages to (`up`) or from all servers.

    The servers divide the tensor.
    """
    if len(servers) == 1:
        sizes = [whole(unit)]
    else:  # tensors are not cut, so the parts differ in size: each part has its own unknown
        sizes = [Size(1.0, f"{unit}{index}", f"{unit}/S") for index in range(len(servers))]
    arrows = tuple(
        Arrow(worker, server, kind, size) if up else Arrow(server, worker, kind, size)
        for worker in layout.ids
        for server, size in zip(servers, sizes, strict=True)
    )
    return Phase(title, text, arrows=arrows, formula=f"{sizes[0].text} each")


def copies(
    layout: Layout, chains: Sequence[Sequence[int]], unit: str, *, together: bool
) -> tuple[Phase, ...]:
    """Return the messages from servers to the servers with copies of their parts.

    None without copies.

    Args:
        chains: For each part, the servers that hold it.
        together: Whether one sum is sent on for all workers; otherwise each worker's push is sent
            on.
    """
    one = len(chains) == 1
    arrows = tuple(
        Arrow(
            f"s{source}", f"s{target}", "gradients",
            whole(unit) if one else Size(1.0, f"{unit}{part}", f"{unit}/S"), counted_with=worker,
        )
        for worker in layout.ids[: 1 if together else None]
        for part, chain in enumerate(chains)
        for source, target in itertools.pairwise(chain)
    )  # fmt: skip
    if not arrows:
        return ()
    what = "the sum of all gradients" if together else "each push"
    text = (
        "A second server holds a copy of the first server's parameters. Before the first server "
        f"answers the workers, it sends {what} to the second server."
        if one
        else "Each server also holds a copy of another server's parameters. Before a server "
        f"answers the workers, it sends {what} to the server with the copy of its own parameters."
    )
    return (Phase("Copy", text, arrows=arrows, formula=unit if one else f"{unit}/S each"),)


def server_units(unit: str, servers: int) -> dict[str, str]:
    """Return the meaning of the unknowns of several servers; one server has none."""
    if servers < 2:
        return {}
    parts = {f"{unit}{i}": f"bytes of the parameters on server {i}" for i in range(servers)}
    return {"S": "number of servers; each server holds about the same number of bytes", **parts}


def chain(
    stages: Sequence[str], microbatches: int, *, backward: bool, first: int = 0
) -> tuple[Arrow, ...]:
    """Return the messages between stages, forward or back.

    Args:
        stages: The holder of each stage, in order; one node can hold several stages.
        first: The number of the first stage, for the names of the unknowns.
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
    """Return the meaning of the unknowns of a chain of stages."""
    return {
        f"A{s}": f"bytes that stage {s} sends to the next stage for a whole batch"
        for s in range(stages - 1)
    }


Kind = Literal["gradients", "weights", "activations", "average", "work"]
NodeKind = Literal["worker", "server", "coordinator", "device", "store"]

KINDS: dict[str, str] = {
    "gradients": "gradients",
    "weights": "weights",
    "activations": "activations",
    "average": "parameters to be averaged",
    "work": "work to do",
}
"""What an arrow carries, in the words of the legend."""

MOST_WORKERS = 64


@dataclass(frozen=True)
class Size:
    """The size of one message.

    Attributes:
        factor: The size is `factor` times `unit`.
        unit: The unknown in the formula, a key of `Diagram.units`.
        text: The formula as people write it: `M/N`.
    """

    factor: float
    unit: str
    text: str


@dataclass(frozen=True)
class Node:
    """A participant: a worker, a server or a device.

    Attributes:
        id: `w0`, `s0`, `c`: short, unique.
        rank: The worker's rank; None for other nodes.
        holds: What the node keeps between steps, in words.
    """

    id: str
    kind: NodeKind
    label: str
    holds: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class Arrow:
    """Messages from one node to another.

    Attributes:
        size: Of each message.
        times: How many such messages follow each other within the phase.
        order: The start of the first message within the phase; 0: when the phase starts.
        counted_with: Id of the worker that counts these bytes, if it is not `source`.
    """

    source: str
    target: str
    kind: Kind
    size: Size
    times: int = 1
    order: int = 0
    counted_with: str = ""

    @property
    def payer(self) -> str:
        """Id of the node whose `sent_bytes` counts these messages."""
        return self.counted_with or self.source

    @property
    def factor(self) -> float:
        """The total size of this arrow's messages, as a multiple of the unit."""
        return self.size.factor * self.times


@dataclass(frozen=True)
class Phase:
    """A part of the step.

    Attributes:
        busy: Ids of the nodes that compute.
        every: The phase takes place in every `every`-th step.
        offset: In which of these steps: the step's number, counted from 0, modulo `every`.
        formula: What each sender sends, in words; empty if nothing is sent.
    """

    title: str
    text: str
    busy: tuple[str, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    every: int = 1
    offset: int = 0
    formula: str = ""

    def happens(self, step: int) -> bool:
        """Whether the phase is part of this step; steps count from 0."""
        return step % self.every == self.offset


@dataclass(frozen=True)
class Layout:
    """The workers and options for which a diagram is made; every option has a value."""

    workers: int
    servers: int
    options: Mapping[str, Any]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the workers by rank."""
        return tuple(f"w{rank}" for rank in range(self.workers))


@dataclass(frozen=True)
class Parts:
    """What a strategy's `messages` function returns; see `Diagram`."""

    nodes: tuple[Node, ...]
    phases: tuple[Phase, ...]
    units: Mapping[str, str]
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagram:
    """Who sends what to whom in one step.

    Attributes:
        nodes: From left to right as they are drawn.
        phases: In the order of time.
        units: What the unknowns of the formulas mean.
        together: Whether workers take the step together; otherwise each goes through the phases
            alone.
        source: The publication that derives the bytes.
    """

    strategy: str
    framework: str
    term: str
    workers: int
    together: bool
    nodes: tuple[Node, ...]
    phases: tuple[Phase, ...]
    units: Mapping[str, str]
    source: str
    notes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        """Return the node with this id.

        Raises:
            PlanError: The diagram has no such node.
        """
        found = next((node for node in self.nodes if node.id == name), None)
        if found is None:
            raise PlanError(
                "The diagram has no node with this id.",
                seen=name,
                allowed=", ".join(node.id for node in self.nodes),
                code="WB-PLAN-342",
            )
        return found

    def of_rank(self, rank: int) -> Node:
        """Return the worker with this rank."""
        return next(node for node in self.nodes if node.rank == rank)

    def sent_bytes(self, name: str, units: Mapping[str, float], step: int) -> float:
        """Return the bytes of a node's messages in a step, computed from the formulas.

        Args:
            name: The node's id.
            units: Bytes of each unknown; a missing unknown counts as not known.
            step: Counted from 0: some phases are not part of every step.

        Returns:
            Bytes; NaN if a needed unknown is missing.

        Raises:
            PlanError: The diagram has no such node.
        """
        self.node(name)
        return float(
            sum(
                arrow.factor * units.get(arrow.size.unit, float("nan"))
                for phase in self.phases
                if phase.happens(step)
                for arrow in phase.arrows
                if arrow.payer == name and arrow.factor
            )
        )

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data that a browser can animate arrow by arrow."""
        return {
            "strategy": self.strategy, "framework": self.framework, "term": self.term,
            "workers": self.workers, "together": self.together, "source": self.source,
            "notes": list(self.notes), "units": dict(self.units), "options": dict(self.options),
            "nodes": [dict(vars(node)) for node in self.nodes],
            "phases": [
                {
                    **vars(phase),
                    "busy": list(phase.busy),
                    "arrows": [{**vars(a), "size": dict(vars(a.size))} for a in phase.arrows],
                }
                for phase in self.phases
            ],
        }  # fmt: skip


def messages(
    strategy: str,
    workers: int = 4,
    options: Mapping[str, Any] | None = None,
    *,
    framework: str = "torch",
) -> Diagram:
    """Return who sends what to whom in one step of a strategy.

    Args:
        strategy: A name or alias of the catalog.
        workers: How many workers; a strategy with a lower limit uses fewer.
        options: Options as in `-o`; all others have their defaults.

    Raises:
        PlanError: The strategy or an option is unknown, or the options do not fit the workers.
    """
    from . import lookup  # imported here, because the package is complete only now

    entry = lookup(strategy, framework)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise PlanError(
            "The argument `workers` must be a whole number, 1 or more.",
            seen=workers,
            allowed="1 or more",
            code="WB-PLAN-008",
        )
    if workers > MOST_WORKERS:
        raise PlanError(
            "A diagram with so many workers is not readable.", seen=f"workers={workers}",
            allowed=f"1 to {MOST_WORKERS} workers",
            next_step="use fewer workers, for example workers=8", code="WB-PLAN-009",
        )  # fmt: skip
    settings = entry.settings(dict(options or {}))
    count = min(workers, entry.max_workers or workers)
    module, _, name = entry.messages.partition(":")
    layout = Layout(count, entry.server_count(settings), settings)
    parts: Parts = getattr(importlib.import_module(module), name)(layout)
    return Diagram(
        entry.name, entry.framework, entry.term, count, entry.is_sync(settings),
        parts.nodes, parts.phases, parts.units, parts.source, parts.notes, settings,
    )  # fmt: skip
