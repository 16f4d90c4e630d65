"""Which steps of a run are profiled: `10:15` are the five from step 10 on. Pure, for both sides."""

from __future__ import annotations

import re

from .errors import PlanError

Window = tuple[int, int]
"""First step, and the step before which the profile ends."""


def parse_window(text: str) -> Window:
    """Read `10:15`.

    Raises:
        PlanError: It is no range of steps.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*:\s*(\d{1,12})\s*", text, re.ASCII)
    if match is None:
        raise PlanError(
            "--profile names steps, first and end.",
            seen=text,
            allowed="START:STOP, steps counted from 0, STOP not included: 10:15 are five steps",
            code="WB-PLAN-152",
        )
    start, stop = int(match[1]), int(match[2])
    if start >= stop:
        raise PlanError(
            "--profile ends before it begins.",
            seen=text,
            allowed=f"{stop}:{max(start, stop + 1)}",
            code="WB-PLAN-153",
        )
    return start, stop


def check_window(window: Window | None, steps: int | None) -> None:
    """Raise PlanError where a run of so many steps ends before the window does."""
    if window is None or steps is None or window[1] <= steps:
        return
    last = max(0, steps - 5)
    raise PlanError(
        "--profile asks for steps that the run does not have.",
        seen=f"{window[0]}:{window[1]} of {steps} steps",
        allowed=f"0 to {steps}",
        next_step=f"--profile {last}:{steps}, or more --steps",
        code="WB-PLAN-154",
    )
