"""Several plans, one run after the other: in the background, or in the cell that asked for them.

The row itself is `lineup.py`, who works it off `conductor.py`; here is what can be asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ClusterError
from ..plan import Plan
from .conductor import Conductor
from .lineup import Item
from .run import Run
from .sweep import Source, sweep

CLOSED = "the cluster was stopped"


class Queue(Conductor):
    """Runs plans on a cluster, one after the other.

    Plans that are added begin at once, on a thread of their own, when nothing else goes on on the
    cluster. All methods may be called from any thread and return at once, but `wait`.

    Args:
        keep_going: Whether the next plan begins after one has failed. The notebook's way is not
            to: the others are given up.
    """

    # -- what is asked for -------------------------------------------------------------------------

    def add(self, plans: Plan | Iterable[Plan]) -> list[Item]:
        """Put plans at the end and see to it that they run; return their items.

        Raises:
            ClusterError: The cluster was stopped.
        """
        with self._lock:
            if self._closed:
                raise ClusterError(
                    f"The queue takes no plans: {CLOSED}.", next_step="start another"
                )
            items = self._line.add([plans] if isinstance(plans, Plan) else plans)
            if items and self._worker is None:
                self._go()
        self._tell()
        return items

    def sweep(
        self,
        recipes: Source | Sequence[Source],
        strategies: str | Sequence[str],
        *,
        seeds: int | Sequence[int] = (),
        **settings: Any,
    ) -> list[Item]:
        """Add every recipe under every strategy with every seed; return their items.

        Args:
            seeds: How many, from 0, or which.
            settings: As `Cluster.run` takes them: `workers`, `options`, `epochs`, `name`, ...

        Raises:
            PlanError: One of them cannot be run; none was added.
        """
        return self.add(sweep(self._cluster, recipes, strategies, seeds=seeds, **settings))

    def remove(self, number: int) -> None:
        """Take out a plan that waits.

        Raises:
            PlanError: There is none of that number, or it does not wait.
        """
        with self._lock:
            self._line.remove(number)
        self._tell()

    def move(self, number: int, to: int) -> None:
        """Have a plan that waits begin as the `to`-th of those that wait, from 0.

        Raises:
            PlanError: There is none of that number, or it does not wait.
        """
        with self._lock:
            self._line.move(number, to)
        self._tell()

    def clear(self) -> None:
        """Take out all plans that wait; the one that runs goes on."""
        with self._lock:
            self._line.clear()
        self._tell()

    def stop(self) -> None:
        """End the present run at a step that its workers agree on; the next one begins then."""
        with self._lock:
            run = self._to_end()
        if run is not None:
            run.stop()

    def stop_all(self, why: str = "the queue was stopped") -> None:
        """End the present run, and let none of those that wait begin."""
        with self._lock:
            self._line.give_up(why)
            run = self._to_end()
        if run is not None:
            run.stop()
        self._tell()

    def close(self) -> None:
        """Take no more plans and let none begin; the cluster is being stopped."""
        with self._lock:
            self._closed = True
            self._line.give_up(CLOSED)
        self._tell()

    def wait(self, timeout: float | None = None) -> Queue:
        """Wait until nothing waits or runs.

        Raises:
            TimeoutError: That took longer than `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._idle.wait(0.1):  # short, so that an interrupt is noticed
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the queue is still at work after {timeout} s: {self!r}")
        return self

    def listen(self, listener: Callable[[Queue], object]) -> Callable[[], None]:
        """Call `listener(queue)` when anything has changed, on whatever thread; returns an undo."""
        with self._lock:
            self._listeners.append(listener)

        def undo() -> None:
            with self._lock, suppress(ValueError):
                self._listeners.remove(listener)

        return undo

    # -- what is known -----------------------------------------------------------------------------

    @property
    def items(self) -> list[Item]:
        """The plans of this batch, in their order; each with its state, run and error."""
        with self._lock:
            return list(self._line.items)

    @property
    def runs(self) -> list[Run]:
        """The runs of this batch that have begun."""
        return [item.run for item in self.items if item.run is not None]

    @property
    def current(self) -> Item | None:
        """The plan that runs."""
        with self._lock:
            return self._line.current

    @property
    def busy(self) -> bool:
        """Whether a plan waits or runs."""
        return not self._idle.is_set()

    @property
    def progress(self) -> float:
        """Share of the batch that is done, 0..1; each plan counts the same."""
        with self._lock:
            return self._line.progress

    @property
    def remaining_s(self) -> float | None:
        """Seconds that are left, None where that cannot be told yet."""
        with self._lock:
            return self._line.remaining.seconds

    def to_wire(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data; `rough` says how the remaining time was got."""
        with self._lock:
            left = self._line.remaining
            return {
                "items": [item.to_wire() for item in self._line.items],
                "busy": self.busy,
                "progress": round(self._line.progress, 4),
                "remaining_s": left.seconds,
                "rough": left.rough,
                "keep_going": self.keep_going,
            }

    def __repr__(self) -> str:
        lines = [f"  {item.number}: {item.name}, {item.state}" for item in self.items]
        return "\n".join([f"queue, {self.progress:.0%} done:", *lines]) if lines else "empty queue"


def queue(plans: Plan | Iterable[Plan] = (), *, keep_going: bool | None = None) -> Queue:
    """Return the queue of the notebook's cluster, after adding plans to it (`wb.queue`).

    Args:
        keep_going: Whether the next plan begins after one has failed; None leaves it as it is.

    Raises:
        ClusterError: The notebook has no cluster.
    """
    from .state import session

    return session.need_cluster().queue(plans, keep_going=keep_going)
