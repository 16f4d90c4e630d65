"""A cell that prints without end does not fill the notebook: beyond a limit, samples travel.

The whole text up to the limit, then the newest lines once a second, then the last ones and how
much was left out.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

MOST_CHARS = 4 << 20
"""Of one stream of one cell on one engine."""
TAIL_CHARS = 2_000
EVERY_S = 1.0


class Weir:
    """Lets a stream's text through up to a limit, then samples of it.

    Args:
        write: Where the text goes.
    """

    def __init__(self, write: Any, most_chars: int = MOST_CHARS, clock: Any = time.monotonic):
        self._write, self._left, self._clock = write, most_chars, clock
        self._tail, self.left_out = "", 0
        self._due: float | None = None  # when the newest lines are let through; not while none are

    def write(self, text: str) -> int:
        """Take text in; return its length, as streams do."""
        if self._left > 0:
            self._left -= len(text)
            self._write(text)
            return len(text)
        now = self._clock()
        if self._due is None:
            self._due = now + EVERY_S
        self.left_out += len(text)
        self._tail = (self._tail + text)[-TAIL_CHARS:]
        if now >= self._due:
            self._let_through()
            self._due = now + EVERY_S
        return len(text)

    def close(self) -> None:
        """Let the last lines through, and say how much was left out, if anything was."""
        self._let_through()
        if self.left_out:
            self._write(
                f"\n[about {_size(self.left_out)} more were printed and left out; "
                "write long output to a file]\n"
            )

    def _let_through(self) -> None:
        tail, self._tail = self._tail, ""
        self.left_out -= len(tail)
        if tail:
            self._write(tail)


def _size(chars: int) -> str:
    """Return `3.2 MB`, or kB where that would be 0.0 MB."""
    return f"{chars / 1e6:,.1f} MB" if chars >= 5e4 else f"{chars / 1e3:,.1f} kB"


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Limit what standard output and error of this process let through, while a cell runs."""
    weirs = []
    for stream in (sys.stdout, sys.stderr):
        weir = Weir(stream.write)
        stream.write = weir.write  # type: ignore[method-assign]
        weirs.append((stream, weir))
    try:
        yield
    finally:
        for stream, weir in weirs:
            del stream.write
            weir.close()
