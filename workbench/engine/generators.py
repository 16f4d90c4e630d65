"""The states of Python's and NumPy's random generators, in a form that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """Return where the generators stand."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, np.array(numbers, np.int64), gauss),
        "numpy": (name, np.asarray(keys, np.int64), place, has_gauss, cached),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Let the generators go on from there."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(n) for n in numbers), gauss))
    name, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.astype(np.uint32), place, has_gauss, cached))
