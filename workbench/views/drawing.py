"""Matplotlib's settings while a picture is drawn; they are global: one thread draws at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ONE = threading.Lock()


@contextmanager
def own_style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Draw with matplotlib's defaults and these settings; the user's are back afterwards.

    Two threads that change and restore them in turn would leave the wrong ones behind.
    """
    import matplotlib.style

    with _ONE, matplotlib.style.context(["default", dict(settings)]):
        yield
