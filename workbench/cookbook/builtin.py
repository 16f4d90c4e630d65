"""The recipes that come with the package, each for both frameworks, by name.

All but the recipes of the digits are functions: `-p` sets the arguments of the function.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import unknown
from . import digits, fraud, recommender, tissue, transformer
from .recipe import Recipe


class _Written(NamedTuple):
    """A recipe: its summary, its source for each framework, and a check of its parameters.

    Attributes:
        check: Raises PlanError if parameters do not fit. None: the recipe is not a function and has
            no parameters.
    """

    summary: str
    sources: dict[str, str]
    check: Callable[[Mapping[str, Any]], None] | None = None


_RECIPES = {
    "digits_mlp": _Written(
        "Classifies handwritten digits (8 x 8) with three fully connected layers. Takes one or "
        "two seconds.",
        {"torch": digits.MLP_TORCH, "tensorflow": digits.MLP_TENSORFLOW},
    ),
    "digits_cnn": _Written(
        "Classifies handwritten digits (8 x 8) with two convolutions and two fully connected "
        "layers. Takes a few seconds.",
        {"torch": digits.CNN_TORCH, "tensorflow": digits.CNN_TENSORFLOW},
    ),
    "char_transformer": _Written(
        "Predicts the next character in the source code of Python's standard library, with a "
        "transformer. You choose the transformer's size. Takes less than a minute with the "
        "default parameters.",
        {"torch": transformer.TORCH, "tensorflow": transformer.TENSORFLOW},
        transformer.check,
    ),
    "recommender": _Written(
        "Predicts how users rate items, with two embedding tables. You choose their size. "
        "Takes a few seconds with the default parameters.",
        {"torch": recommender.TORCH, "tensorflow": recommender.TENSORFLOW},
        recommender.check,
    ),
    "tissue_cnn": _Written(
        "Classifies simulated microscope images of tissue (3 x 96 x 96) as healthy or abnormal, "
        "with a residual network. You choose its width. Takes less than a minute with the default "
        "parameters.",
        {"torch": tissue.TORCH, "tensorflow": tissue.TENSORFLOW},
        tissue.check,
    ),
    "fraud_mlp": _Written(
        "Classifies simulated card payments (2 % are fraud) with three fully connected layers. "
        "Takes a few seconds with the default parameters.",
        {"torch": fraud.TORCH, "tensorflow": fraud.TENSORFLOW},
        fraud.check,
    ),
}
ORIGIN = "built-in"


def names() -> list[str]:
    """Return the names of the built-in recipes, simplest first."""
    return list(_RECIPES)


def frameworks(name: str) -> list[str]:
    """Return the frameworks that a built-in recipe is written for."""
    return list(_RECIPES[name].sources)


def lookup(name: str, framework: str = "torch") -> Recipe:
    """Return a built-in recipe as it is written for a framework.

    Raises:
        PlanError: There is no recipe with this name, or none for this framework.
    """
    if name not in _RECIPES:
        raise unknown("built-in recipe", name, _RECIPES)
    written = _RECIPES[name]
    sources = written.sources
    if framework not in sources:
        raise unknown("framework", framework, sources)
    return Recipe(
        source=sources[framework],
        origin=ORIGIN,
        function=name if written.check else None,
        parameters=_defaults(sources[framework], name) if written.check else {},
        name=name,
        framework=framework,
        summary=written.summary,
    )


def check(recipe: Recipe) -> None:
    """Raise PlanError if a built-in recipe's parameters do not fit each other or its data."""
    written = _RECIPES.get(recipe.name) if recipe.origin == ORIGIN and recipe.function else None
    if written is not None and written.check is not None:
        written.check(recipe.parameters)


def _defaults(source: str, name: str) -> dict[str, Any]:
    """Return a function's arguments, which all have a default, without running its source."""
    (made,) = (
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )  # fmt: skip
    given = zip(made.args.args, made.args.defaults, strict=True)
    return {argument.arg: ast.literal_eval(default) for argument, default in given}
