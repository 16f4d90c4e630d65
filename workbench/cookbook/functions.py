"""Functions as recipes: what may be one, and what its parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import PlanError
from .recipe import Recipe, framework_of, is_plain

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NEXT = "@wb.recipe goes on top of: def name(lr=0.1): ..."


def recipe_of(function: Callable[..., Any], name: str = "", summary: str = "") -> Recipe:
    """Return a function as a recipe; its arguments, which all have defaults, are its parameters.

    Args:
        name: By default the function's own.
        summary: By default the first line of its docstring.

    Raises:
        PlanError: It is no function, its source cannot be read or uses names of an enclosing
            function, or an argument has no default.
    """
    if not inspect.isfunction(function):
        raise PlanError(
            "A recipe is a function.",
            seen=type(function).__name__,
            next_step=NEXT,
            code="WB-PLAN-028",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise PlanError(
            "A recipe is a plain function: it trains when it is called.",
            seen=f"{function.__name__}, which is async or yields",
            next_step=NEXT,
            code="WB-PLAN-029",
        )
    made = Recipe.from_function(function)
    called = check_name(name or function.__name__)
    lines = (summary or inspect.getdoc(function) or "").strip().splitlines()
    return replace(
        made,
        parameters=_parameters(function),
        name=called,
        origin="function",
        framework=framework_of(made.source),
        summary=lines[0].strip() if lines else "",
    )


def check_name(name: object) -> str:
    """Return a recipe's name as it can stand on a line, or raise PlanError."""
    text = name if isinstance(name, str) else ""
    if not text.strip() or text != text.strip() or not text.isprintable() or text[0] in "-#%":
        raise PlanError(
            "That is no name for a recipe.",
            seen=name,
            allowed="text of one line that does not begin with -, # or %",
            code="WB-PLAN-030",
        )
    return text


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    found, bare = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _REST:
            continue
        if parameter.default is inspect.Parameter.empty:
            bare.append(parameter.name)
        elif parameter.kind in _BY_NAME and is_plain(parameter.default):
            found[parameter.name] = parameter.default
    if bare:
        raise PlanError(
            "A recipe is run by its name alone, so every argument needs a default.",
            seen=", ".join(bare),
            allowed=f"def {function.__name__}({bare[0]}=...)",
            next_step="give it a default, or cluster.run(function, args=(...), strategy=...)",
            code="WB-PLAN-031",
        )
    return found
