"""Imports that must not be cut short: half a `torch._dynamo` cannot be imported again.

The first step of an optimizer imports it, which takes seconds in an engine that was not forked from
a warm parent. A rank that is still at it when another one fails would be interrupted there, and
every later optimizer of that engine would fail with it. So a run imports it at its start, all
ranks before they meet, with interrupts held back until it is done.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

OPTIMIZERS_NEED = "torch._dynamo"


def import_for_optimizers() -> None:
    """Import what the first optimizer step would."""
    if OPTIMIZERS_NEED not in sys.modules:
        with interrupts_held_back():
            importlib.import_module(OPTIMIZERS_NEED)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let SIGINT take effect only at the end of the block; in other threads there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])
