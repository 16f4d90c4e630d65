"""Checks that need a driver, a GPU or a framework."""

from __future__ import annotations


def count() -> int:
    """Return how many GPUs this process may use."""
    return len(found())


def found() -> list[object]:
    """Return the GPUs that runs would choose from: the one place that asks for them."""
    from ..cluster import devices

    return list(devices.discover())
