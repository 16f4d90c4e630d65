"""Who may use the engines: one cell or run at a time, begun by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .checks import BusyError
from .run import Run

if TYPE_CHECKING:
    from .keeping import Keeping
    from .pool import Pool
    from .task import Task

Method = TypeVar("Method", bound=Callable[..., Any])


def begins(method: Method) -> Method:
    """Have no other thread begin a cell or a run meanwhile: the queue has one of its own."""

    @wraps(method)
    def alone(self: Turns, *args: Any, **kwargs: Any) -> Any:
        with self._beginning:
            return method(self, *args, **kwargs)

    return cast("Method", alone)


class Turns:
    """What goes on on a cluster; `cluster.Cluster` is the rest of it."""

    keeping: Keeping
    _pool: Pool

    def __init__(self) -> None:
        self._busy: Run | Task | None = None
        self._beginning = threading.RLock()  # held while a cell or a run is begun

    @property
    def busy(self) -> Run | Task | None:
        """The run or the cell that goes on, or went on last."""
        return self._busy

    @property
    def is_busy(self) -> bool:
        """Whether a cell or a run is going on."""
        return self._busy is not None and not self._busy.is_over

    @property
    def last_task(self) -> Task | None:
        """The cell that runs, or ran last, be it a run's or not."""
        return self._busy.task if isinstance(self._busy, Run) else self._busy

    def _claim(self) -> None:
        """Raise BusyError where something goes on; see to it that dead engines are replaced."""
        self.keeping.touch()
        busy = self._busy
        if busy is None or busy.is_over:
            self._pool.replacer.wait()
            return
        what = f"run {busy.name!r}" if isinstance(busy, Run) else "a cell"
        raise BusyError(
            f"Another one is going on: {what}.",
            next_step="wait for it (run.wait()), or stop it (run.stop())"
            if isinstance(busy, Run)
            else "wait for it, or interrupt it",
        )
