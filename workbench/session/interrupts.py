"""The kernel's interrupt ends what goes on on the engines, wherever in the kernel it strikes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ..errors import RunError
from ..escalation import SETTLE_S


class Ending(Protocol):
    """A run or a cell, as far as it can be ended."""

    over: threading.Event

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""

    def stop(self) -> None:
        """Have it end."""

    def interrupt(self) -> None:
        """Interrupt its engines."""


class Occupied(Protocol):
    """What may have something going on; a cluster."""

    @property
    def busy(self) -> Ending | None:
        """What goes on, or went on last."""


def settle(over: threading.Event, again: Callable[[], None]) -> None:
    """Wait for what was interrupted to end, without letting a second interrupt lose it."""
    end = time.monotonic() + SETTLE_S
    while not over.is_set() and time.monotonic() < end:
        try:
            over.wait(0.1)
        except KeyboardInterrupt:  # noqa: PERF203 - the wait is what costs
            again()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let an interrupt strike after the block: what is begun there must be known when it does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending(cluster: Occupied) -> Iterator[None]:
    """End the cell or run that was started in the block, if an interrupt leaves it unattended.

    Raises:
        RunError: It was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        busy = cluster.busy
        if busy is None or busy.is_over:
            raise
        busy.stop()
        settle(busy.over, busy.interrupt)
        raise RunError(
            "Interrupted: the cell was ended on all its engines.", code="WB-RUN-069"
        ) from None
