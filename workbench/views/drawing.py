"""Matplotlib's settings while a picture is drawn; they are global: one thread draws at a time."""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .letters import families, readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ONE = threading.Lock()
_NEEDED = (
    "matplotlib.style", "matplotlib.figure", "matplotlib.lines", "matplotlib.patches",
    "matplotlib.textpath", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
)  # fmt: skip


@contextmanager
def own_style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Draw with matplotlib's defaults and these settings; the user's are back afterwards.

    Two threads that change and restore them in turn would leave the wrong ones behind.
    """
    _import_whole()
    import matplotlib.style

    # What is left of letters that no font has (in SVG) is no matter of the user's.
    warnings.filterwarnings("ignore", "Glyph .* missing", module=r"workbench\.views")
    with _ONE, matplotlib.style.context(["default", {"font.family": families(), **settings}]):
        yield


def spell(figure: Figure) -> None:
    """Put words in the place of letters that no font of this machine has."""
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        assert isinstance(words, Text)
        if (said := words.get_text()) != (drawn := readable(said)):
            words.set_text(drawn)


@functools.cache
def _import_whole() -> None:
    """Import what pictures need on a thread of its own, which no interrupt strikes.

    An interrupt in the midst of an import leaves a module that can neither be used nor imported.
    """
    failed: list[BaseException] = []

    def load() -> None:
        try:
            for name in _NEEDED:
                importlib.import_module(name)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=load, name="workbench-import", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
