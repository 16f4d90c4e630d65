"""Progress bars of tqdm as text: widgets of an engine have no notebook that would draw them.

`tqdm.auto` and `tqdm.notebook` see a kernel and choose ipywidgets, whose changes go to the
engine's own client. Here `tqdm.notebook` holds bars of text, whoever imports it (Lightning, the
Hugging Face libraries): they are drawn in the rank's block, and end as they end.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "tqdm.notebook"


def install() -> None:
    """Have bars of text from now on, also where tqdm is imported later."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if NAME in sys.modules:
        _use_text(sys.modules[NAME])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds tqdm's notebook module as always, and changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with our loader."""
        if fullname != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the module and changes it."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create it as its own loader does."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load it, then put bars of text in it."""
        self._own.exec_module(module)
        _use_text(module)


def _use_text(module: Any) -> None:
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
