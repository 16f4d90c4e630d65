"""Displays a cell's output blocks, one per rank, and keeps them up to date."""

from __future__ import annotations

import sys
import uuid
from typing import Any, Protocol

from .live import Publish, in_notebook, notebook_publisher

Bundle = dict[str, Any]


class Board(Protocol):
    """What is drawn (`views.output.OutputBoard`)."""

    def render(self, final: bool) -> Bundle:
        """The blocks as a MIME bundle; the tail of long outputs unless `final`."""

    def take_republished(self) -> list[Bundle]:
        """Outputs that need displays of their own (widgets, scripts), each once."""

    @property
    def empty(self) -> bool:
        """Whether nothing has come yet."""


class Blocks:
    """One display that is replaced as output comes; plain text in a terminal.

    Args:
        publish: How bundles are shown; the notebook's display by default.
    """

    def __init__(self, publish: Publish | None = None) -> None:
        self._publish = publish or (notebook_publisher() if in_notebook() else None)
        self._display_id = f"workbench-cell-{uuid.uuid4().hex}"
        self._shown = False

    def update(self, board: Board, *, final: bool) -> None:
        """Show the board as it is now; in a terminal only the final one."""
        if board.empty:
            return
        if self._publish is None:
            if final:
                sys.stdout.write(board.render(final=True)["text/plain"] + "\n")
            return
        self._publish(board.render(final=final), self._display_id, self._shown)
        self._shown = True
        for bundle in board.take_republished():
            self._publish(bundle, f"workbench-rich-{uuid.uuid4().hex}", False)
