"""What the checks of labs 10 to 13 ask of answers on the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ...answers import Check

Floats = NDArray[np.float64]


def have(c: Check, *names: str) -> int:
    """End the check unless the engines have these names, and return how many engines."""
    found = c.ask(f"_labs_answer = [n for n in {names!r} if not callable(globals().get(n))]")
    missing = sorted({str(name) for one in found for name in one})
    c.need(
        not missing,
        f"The engines have no `{', '.join(missing)}`.",
        f"run the cells of the lab in order, then the cell of exercise {c.number}: it begins with "
        "%%distributed",
    )
    c.need_all_engines()
    return len(found)


def filled(c: Check, value: Any, name: str) -> Any:
    c.need(
        value is not None,
        f"`{name}` returned None.",
        f"write the body of `{name}` in the cell of exercise {c.number}, and return the result",
    )
    return value


def floats(c: Check, value: Any, name: str, shape: tuple[int, ...] | None = None) -> Floats:
    """Return what a function of the engines returned, as numbers of that shape."""
    filled(c, value, name)
    try:
        found = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        c.wrong(f"`{name}` gives values that are not numbers.", "return a tensor")
    if shape is not None:
        c.need(
            found.shape == shape,
            f"`{name}` gives the shape {found.shape}, but the shape must be {shape}.",
            "the result is a vector (1-D tensor) of the size that the text of the exercise gives"
            if shape
            else "the result is a single number",
        )
    c.need(bool(np.isfinite(found).all()), f"`{name}` gives numbers that are not finite.",
           "look for a division by zero, which can happen with a vector of zeros")  # fmt: skip
    return found
