"""Workers that hold a copy of the model together: whole copies continue, the others wait.

    parts      0  1        a worker dies        0  1
    copy 0     w0 w1  ──>  w3 dies         ──>  w0 w1     go on
    copy 1     w2 w3                            w2        waits, and comes again with a fresh w3

Workers that hold the same part can replace each other, because these parts are equal between
steps. So two workers that remain after two deaths may form a copy and continue together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ..outcome import Recovery

if TYPE_CHECKING:
    from ..run import Run
    from .change import Change, Execution


class Copies:
    """The remaining engines that can continue; if each holds a copy, all can.

    Attributes:
        away: Engines that live, and wait until their part is needed.
        recent: Of those, who has what the others have: none has gone on yet without them.
    """

    def __init__(self, launch: Execution) -> None:
        plan = launch.plan
        self._run: Run = launch.run
        self._size = plan.entry.copy_workers(plan.options, plan.workers)
        self.away: list[int] = []
        self.recent: list[int] = []

    @property
    def are_split(self) -> bool:
        """Whether several workers hold a copy together."""
        return self._size > 1

    def whole(self, engines: Iterable[int], most: int | None = None) -> list[int]:
        """Return those that form whole copies: copy by copy, each in the order of its parts.

        Those that belonged together at first stay together.

        Args:
            most: How many engines they may be at most.
        """
        copies: dict[int, list[int]] = {}
        for engine in engines:
            copies.setdefault(self._run.members.index(engine) // self._size, []).append(engine)
        found = [sorted(copy, key=self._part) for copy in copies.values() if self._is_whole(copy)]
        loose = [one for copy in copies.values() if not self._is_whole(copy) for one in copy]
        parts = range(self._size)
        by_part = ([one for one in loose if self._part(one) == part] for part in parts)
        found += [list(copy) for copy in zip(*by_part, strict=False)]
        most = len(found) if most is None else most // self._size
        return [one for copy in found[:most] for one in copy]

    def _part(self, engine: int) -> int:
        return self._run.members.index(engine) % self._size

    def _is_whole(self, copy: Sequence[int]) -> bool:
        return len(copy) == self._size

    def suffice(self, left: Collection[int], past: Collection[int], keeper: int = -1) -> bool:
        """Whether a run can go on, or end, with these.

        Args:
            left: Who has what is trained up to now, and lives.
            past: Who has trained to the end.
            keeper: Whose weights are the run's, where each holds a copy.
        """
        if not self.are_split:
            return bool(left) or keeper in past
        return bool(self.whole({*left, *past}))

    def fill(
        self,
        members: Sequence[int],
        door: list[int],
        size: int,
        past: Collection[int],
        change: Change,
    ) -> tuple[list[int], list[int]]:
        """Return the workers that take part from now on, and those of them that join.

        Args:
            members: Who took part, and lives.
            door: Who waits to be let in; whoever is, is taken out.
            size: How many there are to be.
            past: Who has trained to the end.
        """
        if self.are_split and past:  # nobody needs the others' parts any more
            return list(members), []
        whole = self._set_aside([*members, *self.recent], change)
        lacking = max(0, size - len(whole) - len(past))
        chosen = self.whole([*door, *self.away], lacking)
        door[:] = [one for one in door if one not in chosen]
        self.away = [one for one in self.away if one not in chosen]
        change.fresh += chosen
        return self.whole(self._in_order([*whole, *chosen])), chosen

    def _set_aside(self, engines: Sequence[int], change: Change) -> list[int]:
        """Return those that form whole copies; the others wait from now on."""
        kept = self.whole(self._in_order(engines))
        for engine in self.recent:
            self.away.remove(engine)
            change.left.pop(engine)
        self.recent = []
        for engine in engines:
            if engine in kept:
                continue
            self.away.append(engine)
            if engine in change.fresh:
                change.fresh.remove(engine)
            else:
                self.recent.append(engine)
                change.left[engine] = "its pipeline waits for a new engine"
        return kept

    def recall(self, members: list[int], coming: Collection[int]) -> list[int]:
        """Return the members and the waiting workers; finished workers need no other part.

        Args:
            coming: Who has trained nothing yet.
        """
        back = [one for one in self.away if one not in coming]
        self.away = [one for one in self.away if one not in back]
        self.recent = []
        return self._in_order([*members, *back]) if back else members

    def _in_order(self, engines: Collection[int]) -> list[int]:
        return [one for one in self._run.members if one in engines]

    def release(self) -> list[int]:
        """Return the waiting workers; no part is needed any more."""
        released, self.away, self.recent = self.away, [], []
        return released

    def tell_of(self, engine: int, how: str, step: int, workers: int) -> None:
        """Report the death of a waiting worker, which no other worker has noticed.

        Args:
            how: It died, in words.
            step: The first one of the workers that there are.
        """
        self.drop(engine)
        self._run.recoveries.append(Recovery((engine,), how, step, 0, workers, 0.0, again=False))
        self._run.note(f"{how}; it took no part in training.", [engine])

    def drop(self, engine: int) -> None:
        """Remove an engine from those that wait."""
        for waiting in (self.away, self.recent):
            if engine in waiting:
                waiting.remove(engine)
