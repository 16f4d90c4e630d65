"""What a step of every strategy sends, as data: who sends what to whom, when, and how much.

A `Diagram` is nodes (workers, servers, devices), and phases in the order of time. A phase is work,
messages, or both; its arrows leave together unless `order` says otherwise. Sizes are formulas over
a few unknowns (`M`, the bytes of the model's gradients), so they hold for every model, and can be
compared with what a run has measured.

Each strategy's description is a small function that its entry of the catalog names (`messages`);
collectives that several share are in `patterns.py`. Nothing here draws.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import PlanError

Kind = Literal["gradients", "weights", "activations", "average", "work"]
NodeKind = Literal["worker", "server", "coordinator", "device", "store"]

KINDS: dict[str, str] = {
    "gradients": "gradients",
    "weights": "weights",
    "activations": "activations",
    "average": "parameters to be averaged",
    "work": "work to do",
}
"""What travels, in the words of legends."""

MOST_WORKERS = 64


@dataclass(frozen=True)
class Size:
    """The size of one message.

    Attributes:
        factor: Times `unit` it is.
        unit: The unknown it depends on, a key of `Diagram.units`.
        text: The formula as people write it: `M/N`.
    """

    factor: float
    unit: str
    text: str


@dataclass(frozen=True)
class Node:
    """Somebody who takes part.

    Attributes:
        id: `w0`, `s0`, `c`: short, unique.
        rank: The worker's rank; None for whoever has none.
        holds: What it keeps between steps, in words.
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
        order: When within the phase the first one leaves: 0 with the phase.
    """

    source: str
    target: str
    kind: Kind
    size: Size
    times: int = 1
    order: int = 0

    @property
    def factor(self) -> float:
        """How many times its unit this arrow sends in all."""
        return self.size.factor * self.times


@dataclass(frozen=True)
class Phase:
    """A part of the step.

    Attributes:
        busy: Ids of the nodes that compute.
        every: The phase takes place in every so many-th step.
        offset: Which of them: steps whose number, counted from 0, leaves this rest.
        formula: What each sender sends, in words; empty where nothing is sent.
    """

    title: str
    text: str
    busy: tuple[str, ...] = ()
    arrows: tuple[Arrow, ...] = ()
    every: int = 1
    offset: int = 0
    formula: str = ""

    def happens(self, step: int) -> bool:
        """Whether it is part of a step, counted from 0."""
        return step % self.every == self.offset


@dataclass(frozen=True)
class Layout:
    """What a strategy's description is made for; options are whole."""

    workers: int
    servers: int
    options: Mapping[str, Any]

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the workers by rank."""
        return tuple(f"w{rank}" for rank in range(self.workers))


@dataclass(frozen=True)
class Parts:
    """What a strategy's own function says; see `Diagram`."""

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
        together: Whether workers take the step together; else each goes through the phases alone.
        source: Where the bytes are derived.
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
        """Return the node of that id."""
        return next(node for node in self.nodes if node.id == name)

    def of_rank(self, rank: int) -> Node:
        """Return the worker of that rank."""
        return next(node for node in self.nodes if node.rank == rank)

    def sent_bytes(self, name: str, units: Mapping[str, float], step: int) -> float:
        """Return what a node sends in a step, by the formulas.

        Args:
            name: The node's id.
            units: Bytes of each unknown; one that is missing counts as not known.
            step: Counted from 0: some phases are not part of every step.

        Returns:
            Bytes; NaN where an unknown that matters is missing.
        """
        return float(
            sum(
                arrow.factor * units.get(arrow.size.unit, float("nan"))
                for phase in self.phases
                if phase.happens(step)
                for arrow in phase.arrows
                if arrow.source == name and arrow.factor
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
        workers: How many; a strategy with a lower limit takes fewer.
        options: As `-o` takes them; the others are at their defaults.

    Raises:
        PlanError: The strategy or an option is unknown, or the options do not fit the workers.
    """
    from . import lookup  # the package is whole by now

    entry = lookup(strategy, framework)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise PlanError(
            "workers is a whole number.", seen=workers, allowed="1 or more", code="WB-PLAN-008"
        )
    if workers > MOST_WORKERS:
        raise PlanError(
            "A picture of so many workers cannot be read.", seen=f"workers={workers}",
            allowed=f"1 to {MOST_WORKERS}", next_step="the pattern is the same with 8",
            code="WB-PLAN-009",
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
