"""Progress bars without widgets: those of an engine have no notebook that would draw them.

`tqdm.auto` and `tqdm.notebook` see a kernel and choose ipywidgets, whose changes go to the
engine's own client; so does rich's live display. Here `tqdm.notebook` holds bars of text, whoever
imports it (Lightning, the Hugging Face libraries), and rich draws into one display that is
replaced. They stand in the rank's block, and end as they end.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def install() -> None:
    """Draw bars so from now on, also of libraries that are imported later."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, change in _CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules as always, and changes them once they are loaded."""

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
        """Create it as its own loader does."""
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
    """Stands for the `ipywidgets.Output` that rich draws a live display into."""

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
        """Do nothing: what comes takes the place of what is there."""

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
