"""A value in one short line, whatever it is."""

from __future__ import annotations

import reprlib
from typing import Any

MAX_CHARS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = MAX_CHARS
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 8


def describe(value: Any) -> str:
    """Return a value's type, shape and beginning; never raises."""
    try:
        shape = getattr(value, "shape", None)
        text = " ".join(_short.repr(value).split())[:MAX_CHARS]
        if isinstance(shape, tuple):
            kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
            sizes = ", ".join(map(str, shape))
            text = f"{type(value).__name__} ({sizes}) {kind}: {text}"
        return text
    except Exception as error:
        return f"<{type(value).__name__}, its repr raised {type(error).__name__}>"
