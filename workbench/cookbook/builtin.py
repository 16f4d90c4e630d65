"""The recipes that come with the package, each in a file of its own, for both frameworks."""

from __future__ import annotations

from types import ModuleType

from ..errors import unknown
from . import char_transformer, digits_cnn, digits_mlp
from .recipe import Recipe

_MODULES: dict[str, ModuleType] = {
    module.__name__.rpartition(".")[2]: module
    for module in (digits_mlp, digits_cnn, char_transformer)
}
ORIGIN = "built-in"


def names() -> list[str]:
    """Return the names of the built-in recipes, simplest first."""
    return list(_MODULES)


def frameworks(name: str) -> list[str]:
    """Return the frameworks that a built-in recipe is written for."""
    return list(_MODULES[name].SOURCES)


def lookup(name: str, framework: str = "torch") -> Recipe:
    """Return a built-in recipe as it is written for a framework.

    Raises:
        PlanError: There is none of that name, or not for that framework.
    """
    if name not in _MODULES:
        raise unknown("built-in recipe", name, _MODULES)
    module = _MODULES[name]
    sources: dict[str, str] = module.SOURCES
    if framework not in sources:
        raise unknown("framework", framework, sources)
    return Recipe(
        source=sources[framework],
        origin=ORIGIN,
        name=name,
        framework=framework,
        summary=str(module.SUMMARY),
    )
