"""The number of fuzz examples: few and repeatable, or many with `WORKBENCH_FUZZ=long`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("WORKBENCH_FUZZ") == "long"


def tries(short: int) -> settings:
    """Return settings for about `short` examples; with WORKBENCH_FUZZ=long, 100 times more."""
    return settings(
        max_examples=100 * short if LONG else short,
        derandomize=not LONG,
        deadline=None,  # CPU time is measured where it matters; the clock is the machine's
        database=None,
        suppress_health_check=list(HealthCheck),
    )
