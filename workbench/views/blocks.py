"""Displays a cell's output blocks, one per rank, and keeps them up to date."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from IPython.display import display

from .places import WidgetBundle
from .table import SHOWS, Table

Bundle = dict[str, Any]
Publish = Callable[[Bundle, str, bool], None]
"""`publish(bundle, display_id, update)`: show a MIME bundle, or replace the bundle with this id."""


def show(thing: Any) -> None:
    """Display an object below the running cell; the output's metadata names a table's content."""
    about = thing.about if isinstance(thing, Table) else ""
    metadata = {SHOWS: about} if about else None
    display(thing, metadata=metadata)  # type: ignore[no-untyped-call,unused-ignore]


def show_bundle(bundle: Bundle) -> None:
    """Display a MIME bundle below the running cell."""
    display(bundle, raw=True)  # type: ignore[no-untyped-call,unused-ignore]


class ProgressLine:
    """One line below the cell about the current work; the result replaces the line."""

    def __init__(self) -> None:
        self._publish = notebook_publisher() if in_notebook() else None
        self._display_id = f"workbench-progress-{uuid.uuid4().hex}"
        self._shown = False

    def __call__(self, text: object) -> None:
        """Show the current work: a text, or an object with a text."""
        if self._publish is not None:
            self._publish({"text/plain": f"{text} ..."}, self._display_id, self._shown)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text} ...")
            sys.stderr.flush()
        else:
            return
        self._shown = True

    def done(self, thing: Any = None) -> None:
        """Clear the line; show `thing`, an object with a MIME bundle, in its place."""
        if self._shown and self._publish is not None:
            bundle = {"text/plain": ""} if thing is None else dict(thing._repr_mimebundle_())
            self._publish(bundle, self._display_id, True)
            return
        if self._shown:
            sys.stderr.write("\r\x1b[K")
        if thing is not None:
            show(thing)


def _captured() -> bool:
    """Whether `%%capture` takes the cell's output; a kernel's streams are not files."""
    return isinstance(sys.stdout, io.StringIO)


class Board(Protocol):
    """The content to draw (`views.output.OutputBoard`)."""

    def render(self, final: bool) -> Bundle:
        """The blocks as a MIME bundle; the tail of long outputs unless `final`."""

    def take_republished(self) -> list[Bundle]:
        """Outputs that need separate displays (widgets, scripts), each only once."""

    @property
    def banner(self) -> str:
        """The current reason for a delay of the cell; empty if there is none."""

    @property
    def empty(self) -> bool:
        """Whether there is no output yet."""

    @property
    def only_text(self) -> bool:
        """Whether plain text can show all of the output."""


class Blocks:
    """One display that is updated with each output; plain text in a terminal.

    Args:
        publish: The function that shows bundles; by default the notebook's display.
    """

    def __init__(self, publish: Publish | None = None) -> None:
        self._publish = publish or (notebook_publisher() if in_notebook() else None)
        self._captured = self._publish is not None and publish is None and _captured()
        self._display_id = f"workbench-cell-{uuid.uuid4().hex}"
        self._shown = False

    def update(self, board: Board, *, final: bool) -> None:
        """Show the current board; a terminal shows only the final board."""
        if self._captured and not final and board.only_text:
            return
        if board.empty and not (self._publish is not None and (board.banner or self._shown)):
            return
        if self._publish is None or (self._captured and board.only_text):
            if final and not self._shown:
                sys.stdout.write(board.render(final=True)["text/plain"] + "\n")
                self._shown = True
            return
        self._publish(board.render(final=final), self._display_id, self._shown)
        self._shown = True
        for bundle in board.take_republished():
            self._publish(bundle, f"workbench-rich-{uuid.uuid4().hex}", False)


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    return getattr(_shell(), "kernel", None) is not None


def notebook_publisher() -> Publish:
    """Return a function that displays in the running cell, from any thread.

    A kernel assigns output to the message that the thread last handled. A timer thread has no
    message, and after a click output would belong to the button's message. So the cell's message is
    kept.
    """
    publisher: Any = _shell().display_pub
    parent = getattr(publisher, "parent_header", None)
    cell = contextvars.copy_context()

    def publish(bundle: Bundle, display_id: str, update: bool) -> None:
        metadata = bundle.metadata if isinstance(bundle, WidgetBundle) else {}
        show = functools.partial(
            publisher.publish, bundle, metadata, transient={"display_id": display_id}, update=update
        )
        if not hasattr(publisher, "set_thread_parent"):
            # ipykernel 7.1 to 7.3, the newest for Python 3.10, keep the message in the context.
            # Two threads cannot be in one context, so each call has a copy.
            cell.copy().run(show)
            return
        with output_of(publisher, parent):
            show()

    return publish


@contextlib.contextmanager
def output_of(publisher: Any, parent: Any) -> Iterator[None]:
    """Set the parent message of outputs, for this thread and this block only."""
    if not parent or not hasattr(publisher, "set_thread_parent"):  # ipykernel 6: one for all
        yield
        return
    token = publisher.set_thread_parent(parent)
    try:
        yield
    finally:
        publisher.reset_thread_parent(token)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
