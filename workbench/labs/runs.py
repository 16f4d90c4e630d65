"""A run as a check sees it: facts, taken once, that no later cell can change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError


@dataclass(frozen=True)
class PlanFacts:
    """What a run was asked to be."""

    strategy: str
    workers: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """A run's key figures, as `RunSummary` names them."""

    workers: int
    samples_per_s: float
    sent_step_bytes: float
    memory_bytes: tuple[float, ...]
    servers: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class RunFacts:
    """One run: what `session.run.Run` tells of it, as far as checks ask.

    Attributes:
        engines: The processes that trained it, numbered.
        history: Columns of its rows, by name.
    """

    name: str
    state: str
    plan: PlanFacts
    engines: Sequence[int]
    history: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    began: float = float("nan")
    _figures: Figures | None = None
    _weights: Mapping[str, NDArray[Any]] | None = None

    @classmethod
    def of(cls, name: str, wire: Any) -> RunFacts:
        """Return what `side.facts` says of a run."""
        options = {str(key): value for key, value in dict(wire["options"]).items()}
        plan = PlanFacts(str(wire["strategy"]), int(wire["workers"]), options)
        columns = {str(key): np.asarray(one) for key, one in dict(wire.get("history", {})).items()}
        weights = wire.get("weights")
        figures = wire.get("figures")
        return cls(
            name, str(wire["state"]), plan, range(int(wire["engines"])), columns,
            float(wire["began"]),
            None if figures is None else _figures(figures),
            None if weights is None else {str(k): np.asarray(v) for k, v in weights.items()},
        )  # fmt: skip

    def summarise(self) -> Figures:
        """The run's key figures.

        Raises:
            RunError: It has not finished.
        """
        if self._figures is None:
            raise RunError(f"Run {self.name} has no figures.", seen=self.state, code="WB-RUN-050")
        return self._figures

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """The final weights by parameter name.

        Raises:
            RunError: It left none.
        """
        if self._weights is None:
            raise RunError(f"Run {self.name} has no weights.", seen=self.state, code="WB-RUN-051")
        return self._weights


def _figures(wire: Any) -> Figures:
    return Figures(
        int(wire["workers"]),
        float(wire["samples_per_s"]),
        float(wire["sent_step_bytes"]),
        tuple(float(one) for one in wire["memory_bytes"] or ()),
        tuple({str(k): v for k, v in one.items()} for one in wire["servers"] or ()),
    )
