"""Limits the output of a cell, so that it cannot fill the notebook.

The whole text is sent up to the limit. After that the newest lines are sent once a second, then the
last ones and how much was left out.

Progress bars are text, not widgets, because an engine has no notebook to draw widgets. `tqdm.auto`
and `tqdm.notebook` see a kernel and choose ipywidgets, whose changes go to the engine's own client;
so does rich's live display. Here `tqdm.notebook` contains text bars for every library that imports
it (Lightning, the Hugging Face libraries), and rich draws into one display that is replaced. They
appear in the rank's block, and stay as they end.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

MOST_CHARS = 4 << 20
"""The limits for one stream of one cell on one engine."""
TAIL_CHARS = 2_000
EVERY_S = 1.0


class Throttle:
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
        """Write the last lines, and how much was left out, if anything was."""
        self._let_through()
        if self.left_out:
            self._write(
                f"\n[about {_size(self.left_out)} of further output is not shown; "
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
    """Limit the standard output and error of this process, while a cell runs."""
    weirs = []
    for stream in (sys.stdout, sys.stderr):
        weir = Throttle(stream.write)
        stream.write = weir.write  # type: ignore[method-assign]
        weirs.append((stream, weir))
    try:
        yield
    finally:
        for stream, weir in weirs:
            del stream.write
            weir.close()


def install() -> None:
    """Draw progress bars as text from now on, also in libraries that are imported later."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, change in _CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as usual, and changes them after they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with our loader."""
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _CHANGES[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the module and changes it."""

    def __init__(self, own: Any, change: Callable[[Any], None]) -> None:
        self._own, self._change = own, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with its original loader."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load it, then change it."""
        self._own.exec_module(module)
        self._change(module)


def _text_in_tqdm(module: Any) -> None:
    std: Any = importlib.import_module("tqdm.std")

    class TextBar(std.tqdm):  # type: ignore[misc]
        """A bar of text that takes what a bar of widgets takes."""

        def __init__(self, *args: Any, display: bool = True, **settings: Any) -> None:
            super().__init__(*args, **settings)

        def display(self, *args: Any, **settings: Any) -> Any:
            """Draw it; what only widgets can show is left out."""
            known = {k: v for k, v in settings.items() if k in ("msg", "pos")}
            return super().display(*args, **known)

    TextBar.__name__ = TextBar.__qualname__ = "tqdm"
    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = lambda *args, **settings: TextBar(range(*args), **settings)


class _Place:
    """Replaces the `ipywidgets.Output` into which rich draws a live display."""

    active: _Place | None = None

    def __init__(self) -> None:
        self._id = f"rich-{uuid.uuid4().hex}"
        self._shown = False

    def __enter__(self) -> _Place:
        _Place.active = self
        return self

    def __exit__(self, *exc: object) -> None:
        _Place.active = None

    def clear_output(self, wait: bool = False) -> None:
        """Do nothing, because new content replaces the old content."""

    def close(self) -> None:
        """Do nothing: it stays as it is."""

    def show(self, thing: Any) -> None:
        """Display a picture of the moment in place of the one before."""
        display: Any = importlib.import_module("IPython.display").display
        display(thing, display_id=self._id, update=self._shown)
        self._shown = True


def _one_display_in_rich(module: Any) -> None:
    jupyter: Any = importlib.import_module("rich.jupyter")
    begin, end, plain = module.Live.start, module.Live.stop, jupyter.display

    def start(live: Any, *args: Any, **settings: Any) -> None:
        if live.console.is_jupyter and live.ipy_widget is None:
            live.ipy_widget = _Place()
        begin(live, *args, **settings)

    def stop(live: Any) -> None:
        if live.is_started and live.console.is_jupyter:
            live.refresh()  # rich leaves it as it was a moment ago
        end(live)

    def display(segments: Any, text: str) -> None:
        if not any(part.text for part in segments if not part.control):
            return  # only where the cursor is, which is nowhere
        if _Place.active is None:
            plain(segments, text)
        else:
            html = jupyter._render_segments(segments)
            _Place.active.show(jupyter.JupyterRenderable(html, text))

    module.Live.start, module.Live.stop, jupyter.display = start, stop, display


_CHANGES: dict[str, Callable[[Any], None]] = {
    "tqdm.notebook": _text_in_tqdm,
    "rich.live": _one_display_in_rich,
}
