"""Workers that hold a copy of the model together: whole copies continue, the others wait.

    parts      0  1        a worker dies        0  1
    copy 0     w0 w1  ──>  w3 dies         ──>  w0 w1     continue
    copy 1     w2 w3                            w2        waits, and joins again with a new w3

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
    """The remaining engines that can continue. If each engine holds a copy, all can continue.

    Attributes:
        away: Engines that are alive and wait until their part is needed.
        recent: The waiting engines with the same weights as the members: the members have not
            continued without these engines yet.
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
        """Return the engines that form whole copies: copy by copy, in the order of the parts.

        Engines that formed a copy at the start stay together.

        Args:
            most: The largest number of engines to return.
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
        """Whether a run can continue, or end, with these engines.

        Args:
            left: Engines that are alive and have the current state of training.
            past: Engines that have trained to the end.
            keeper: The engine whose weights the run keeps, where each engine holds a copy.
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
        """Return the workers that take part from now on, and which of these workers join.

        Args:
            members: The workers that took part and are alive.
            door: The workers that wait to join; a worker that joins is removed from this list.
            size: The number of workers that the run should have.
            past: The workers that have trained to the end.
        """
        if self.are_split and past:  # no worker needs the others' parts any more
            return list(members), []
        whole = self._set_aside([*members, *self.recent], change)
        lacking = max(0, size - len(whole) - len(past))
        chosen = self.whole([*door, *self.away], lacking)
        door[:] = [one for one in door if one not in chosen]
        self.away = [one for one in self.away if one not in chosen]
        change.fresh += chosen
        return self.whole(self._in_order([*whole, *chosen])), chosen

    def _set_aside(self, engines: Sequence[int], change: Change) -> list[int]:
        """Return the engines that form whole copies; the other engines wait from now on."""
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
                change.left[engine] = (
                    "a worker of the same pipeline is missing, and the pipeline waits for a new "
                    "engine"
                )
        return kept

    def recall(self, members: list[int], coming: Collection[int]) -> list[int]:
        """Return the members and the waiting workers; finished workers need no other part.

        Args:
            coming: Engines that have not trained yet.
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
            how: How it died, in words.
            step: The first step of the present workers.
        """
        self.drop(engine)
        self._run.recoveries.append(Recovery((engine,), how, step, 0, workers, 0.0, again=False))
        self._run.note(f"{how}. This worker was waiting to join the training.", [engine])

    def drop(self, engine: int) -> None:
        """Remove an engine from the engines that wait."""
        for waiting in (self.away, self.recent):
            if engine in waiting:
                waiting.remove(engine)
