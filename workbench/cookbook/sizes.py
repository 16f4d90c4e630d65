"""Sizes of a built-in recipe, checked before an engine is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import PlanError


def check_counts(recipe: str, parameters: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise PlanError if one of these parameters is not a whole number of at least 1."""
    for name in names:
        value = parameters[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(
                f"`{name}` of recipe {recipe} must be a whole number of at least 1.",
                seen=value,
                allowed="a whole number, at least 1",
                next_step=f"give a number with -p {name}=N",
                code="WB-PLAN-264",
            )


def check_rate(recipe: str, value: Any) -> None:
    """Raise PlanError if a learning rate is not a positive number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise PlanError(
            f"`lr` of recipe {recipe} must be a number above 0.",
            seen=value,
            allowed="a finite number above 0",
            next_step="for example -p lr=0.001",
            code="WB-PLAN-265",
        )
