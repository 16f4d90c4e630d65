"""How a run is shown while it trains: a widget, SVG frames, a line of text, or not at all."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from ...errors import PlanError, unknown
from .. import places, text
from ..blocks import Bundle, Publish, in_notebook, notebook_publisher, output_of
from .figure import placeholder_bundle, run_bundle
from .frames import Dashboard, OnCommand
from .svg import run_svg

if TYPE_CHECKING:
    from ...history.snapshot import Snapshot

Kind = Literal["auto", "widget", "svg", "text", "off"]
KINDS: tuple[Kind, ...] = ("auto", "widget", "svg", "text", "off")


class LiveView(Protocol):
    """A view of one run; `update` and `end` may be called from another thread than `begin`."""

    def begin(self, snapshot: Snapshot) -> None:
        """Show the run for the first time, in the cell that is running now."""

    def update(self, snapshot: Snapshot) -> None:
        """Show the run's present state."""

    def end(self, snapshot: Snapshot) -> None:
        """Show the output that stays in the notebook."""


class WidgetView:
    """The live dashboard; at the end a picture and text replace it, which need no kernel."""

    def __init__(
        self,
        title: str,
        on_command: OnCommand,
        publish: Publish | None = None,
        *,
        brief: bool = False,
    ) -> None:
        self._title, self._on_command = title, on_command
        self._publish, self._brief = publish, brief
        self._display_id = _new_id()
        self._dashboard: Dashboard | None = None

    def begin(self, snapshot: Snapshot) -> None:
        """Display the widget; the text and the tiny picture are for front ends without it."""
        self._publish = self._publish or notebook_publisher()
        self._dashboard = Dashboard(self._title, self._on_command)
        words = text.report(snapshot)
        bundle = places.WidgetBundle(self._dashboard, **placeholder_bundle(words))
        bundle["text/plain"] = words
        self._publish(bundle, self._display_id, False)
        self._dashboard.update(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Send the changes to the browser."""
        if self._dashboard is not None:
            self._dashboard.update(snapshot)

    def end(self, snapshot: Snapshot) -> None:
        """Send the last frame, then replace the widget by the picture.

        A saved widget shows as an error without a kernel, so the bundle has no widget in it.
        """
        if self._dashboard is None or self._publish is None:
            return
        self._dashboard.update(snapshot)
        self._publish(_final_bundle(snapshot, self._brief), self._display_id, True)
        self._dashboard.finish()
        self._dashboard = None


class SvgView:
    """Whole SVG frames through one display; for front ends that load no widgets."""

    def __init__(self, publish: Publish | None = None, *, brief: bool = False) -> None:
        self._publish, self._brief = publish, brief
        self._display_id = _new_id()

    def begin(self, snapshot: Snapshot) -> None:
        """Display the first frame."""
        self._publish = self._publish or notebook_publisher()
        self._publish(_svg_bundle(snapshot), self._display_id, False)

    def update(self, snapshot: Snapshot) -> None:
        """Replace the frame."""
        if self._publish is not None:
            self._publish(_svg_bundle(snapshot), self._display_id, True)

    def end(self, snapshot: Snapshot) -> None:
        """Replace the frame by the final picture."""
        if self._publish is not None:
            self._publish(_final_bundle(snapshot, self._brief), self._display_id, True)


class TextView:
    """One line that each update overwrites, as with tqdm; in a notebook below the run's cell."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._writer = text.LineWriter(stream)
        self._stream = stream
        self._cell: Any = None

    def begin(self, snapshot: Snapshot) -> None:
        """Write the first line."""
        self._cell = getattr(self._stream or sys.stdout, "parent_header", None)
        self._writer.write(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Overwrite the line."""
        with output_of(self._stream or sys.stdout, self._cell):
            self._writer.write(snapshot)

    def end(self, snapshot: Snapshot) -> None:
        """Write the last line and the report."""
        with output_of(self._stream or sys.stdout, self._cell):
            self._writer.close(snapshot)


class NoView:
    """Shows nothing."""

    def begin(self, snapshot: Snapshot) -> None:
        """Show nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Show nothing."""

    def end(self, snapshot: Snapshot) -> None:
        """Show nothing."""


def make_view(kind: str, on_command: OnCommand, title: str, *, brief: bool = False) -> LiveView:
    """Return the view for a `--plot` value.

    Args:
        kind: One of KINDS; `auto` is the widget in a notebook and text elsewhere. If a service
            cannot load widgets (`views.places`), `auto` is `svg`.
        on_command: See `Dashboard`.
        title: The run's name.
        brief: Whether a line stays instead of a picture, because the run is one of many.

    Raises:
        PlanError: The view does not exist, or it needs a notebook and there is none.
    """
    if kind not in KINDS:
        raise unknown("view for --plot", kind, KINDS)
    chosen = kind
    if kind == "auto":
        place = places.here()
        chosen = (place.plot if place else "widget") if in_notebook() else "text"
    if chosen in ("widget", "svg") and not in_notebook():
        raise PlanError(
            f"--plot {chosen} needs a notebook.",
            seen=kind,
            allowed="outside a notebook: auto, text or off",
            next_step="use --plot text",
            code="WB-PLAN-150",
        )
    if chosen == "widget":
        return WidgetView(title, on_command, brief=brief)
    if chosen == "svg":
        return SvgView(brief=brief)
    return TextView() if chosen == "text" else NoView()


def _final_bundle(snapshot: Snapshot, brief: bool = False) -> Bundle:
    """Return the output that stays; empty if there is nothing to draw except an error below."""
    if text.nothing_done(snapshot):
        return {"text/plain": ""}
    return {"text/plain": text.progress_line(snapshot)} if brief else run_bundle(snapshot)


def _svg_bundle(snapshot: Snapshot) -> Bundle:
    return {"image/svg+xml": run_svg(snapshot), "text/plain": text.report(snapshot)}


def _new_id() -> str:
    return f"workbench-{uuid.uuid4().hex}"
