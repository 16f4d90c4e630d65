"""What is picked in the panel, and the plans that come of it: those that a line would give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..faults import parse_fault
from ..line import CellLine

if TYPE_CHECKING:
    from ..plan import Plan
    from ..session.state import Session


@dataclass
class Choice:
    """What is picked.

    Attributes:
        recipe: Name of what is trained; empty: the notebook's last training cell.
        framework: `torch` or `tensorflow`; empty: the cluster's.
        picked: Options given for each picked strategy, in the order of picking.
        workers: Replicas; None: as many as there are engines.
        seeds: How many seeds each plan is run with; 1: the recipe's own.
        overrides: Of `epochs`, `steps`, `batch_size`, `seed`.
        faults: Faults that the runs begin with, as `--inject` takes them.
    """

    recipe: str = ""
    framework: str = ""
    picked: dict[str, dict[str, Any]] = field(default_factory=lambda: {"mirrored": {}})
    workers: int | None = None
    seeds: int = 1
    overrides: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[CellLine]:
        """Return a magic's line for each picked strategy."""
        faults = tuple(parse_fault(text) for text in self.faults)
        return [
            CellLine(
                strategies=(strategy,),
                framework=self.framework or None,
                workers=self.workers,
                options=dict(options),
                overrides=dict(self.overrides),
                seeds=self.seeds if self.seeds > 1 else None,
                faults=faults,
            )
            for strategy, options in self.picked.items()
        ]

    def plans(self, session: Session) -> list[Plan]:
        """Return the plans, validated as a line's would be.

        Raises:
            PlanError: Nothing is picked, or something does not fit.
            ClusterError: There is no cluster.
        """
        if not self.picked:
            raise PlanError("No strategy is picked.", next_step="pick one of the cards")
        recipe = session.recipe_named(self.recipe or None)
        return [plan for line in self.lines() for plan in session.plans(line, recipe)]
