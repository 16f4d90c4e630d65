"""How the workers of a synchronous run agree on the step after which they stop or pause.

Pure: answers in, the common step out.
"""

from __future__ import annotations

from ..messages import Purpose


class Agreement:
    """Collects each rank's position; ranks begin no further step meanwhile (`engine.gate`).

    Nobody can have begun a step beyond the furthest position, and who is behind is let through up
    to it, so that is the common step.
    """

    def __init__(self, purpose: Purpose, ranks: int) -> None:
        self.purpose = purpose
        self._waiting = set(range(ranks))
        self._highest = -1

    def answer(self, rank: int, step: int) -> int | None:
        """Take one rank's position; return the common step once the last one has answered."""
        if rank not in self._waiting:
            return None
        self._waiting.remove(rank)
        self._highest = max(self._highest, step)
        return None if self._waiting else self._highest

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that have not answered."""
        return frozenset(self._waiting)
