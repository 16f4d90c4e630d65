"""Writes a plan back as the cell that asks for it: the magic's line, and below it the source.

The line holds only what differs from the defaults, always in the same order, so equal plans give
equal text:

    strategy  -n  --framework  -o ..  --epochs --steps --batch-size --seed
    and then the settings, in the order of `RunSettings`: --inject .. to --name

Every line is read again before it is handed out, so what it says is the plan or an error.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any

from . import checkpoints
from .errors import PlanError
from .line import parse_cell_line
from .plan import Plan
from .run_request import FLAGS, OVERRIDES, UNSAID, RunRequest, RunSettings

MAGIC = "%%distributed"
Part = tuple[str, object]
"""A flag and its value."""


def cell_of(plan: Plan, *, framework: str = "torch") -> str:
    """Return a notebook cell that asks for this plan.

    Args:
        plan: What the cell is to train. A recipe that is a function is defined and then called.
        framework: What cells of the notebook have where they name no framework; another one is
            written down.

    Returns:
        The text of the cell, `%%distributed ...` first.

    Raises:
        PlanError: It cannot be said in a cell: a name has a line break, or the function was given
            an argument that cannot be written down.
    """
    return f"{MAGIC} {line_of(plan, framework=framework)}\n{plan.recipe.cell}"


def line_of(plan: Plan, *, framework: str = "torch") -> str:
    """Return what stands behind `%%distributed` in that cell.

    Raises:
        PlanError: A value cannot stand on one line.
    """
    words = [plan.strategy]
    for flag, value in _parts(plan, framework):
        words += _words(flag, str(value))
    line = " ".join(words)
    if line.splitlines() != [line]:
        raise PlanError(
            "The plan cannot be written as a cell: a line has no place for a line break.",
            seen=next((word for word in words if word.splitlines() != [word]), line),
            next_step="choose a name without one",
            code="WB-PLAN-010",
        )
    _check_said(plan, parse_cell_line(line), framework)
    return line


def _parts(plan: Plan, framework: str) -> Iterator[Part]:
    """Yield what differs from the defaults, in order."""
    entry = plan.entry
    if entry.max_workers is None or plan.workers < entry.max_workers:
        yield "-n", plan.workers
    if plan.framework != framework:
        yield "--framework", plan.framework
    for option in entry.options:
        value = plan.options.get(option.name, option.default)
        if value != option.default or type(value) is not type(option.default):
            yield "-o", f"{option.name}={_option(value)}"
    for name in OVERRIDES:
        if name in plan.overrides:
            yield from FLAGS[name].words(plan.overrides[name])
    for name, value in plan.settings.items():
        if value != _implied(name, plan):
            yield from FLAGS[name].words(value)


def _implied(name: str, settings: RunSettings) -> object:
    """Return what a plan has where its line does not say it."""
    if name == "checkpoint_every":
        return checkpoints.EVERY if settings.checkpoint else 0
    if name == "on_failure":
        return "replace" if settings.checkpoint else "stop"
    return UNSAID[name]


def _option(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(flag: str, value: str) -> list[str]:
    """Return a flag and its value as they stand on the line."""
    if value.startswith("-") or not value:  # else it would be taken for a flag
        return [_quoted(f"{flag}={value}")]
    return [flag, _quoted(value)]


def _quoted(text: str) -> str:
    plain = "'" in text and not {'"', "\\"} & set(text)
    return f'"{text}"' if plain else shlex.quote(text)


def _check_said(plan: Plan, said: RunRequest, framework: str) -> None:
    """Raise PlanError where the line, read again, asks for something else."""
    entry = plan.entry
    read: dict[str, object] = {
        "strategy": said.strategies[0] if len(said.strategies) == 1 else said.strategies,
        "framework": said.framework or framework,
        "workers": said.workers or entry.max_workers,
        "options": entry.settings(dict(said.options)),
    }
    every = said.checkpoint_every if said.checkpoint else 0
    read["checkpoint_every"] = every or _implied("checkpoint_every", said)
    read["on_failure"] = said.on_failure or _implied("on_failure", said)
    for one in dataclasses.fields(plan):
        if one.name == "recipe":
            continue
        value = getattr(plan, one.name)
        got = read.get(one.name, getattr(said, one.name, None))
        if got != value:
            raise PlanError(
                f"The plan cannot be written as a cell: no line gives this {one.name}.",
                seen=value,
                allowed=f"the nearest is {got!r}",
                next_step="run it with cluster.run(...)",
                code="WB-PLAN-011",
            )
