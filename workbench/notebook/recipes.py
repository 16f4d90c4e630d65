"""`wb.recipe` and `wb.recipes`: trainings with a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

from ..cookbook import builtin
from ..cookbook.recipe import Recipe, recipe_of
from ..errors import PlanError, unknown
from ..execution import registry
from ..execution.allocator import notebook_framework
from ..views.table import Column, Table
from ..views.text import UNKNOWN

Function = TypeVar("Function", bound=Callable[..., Any])


class Recipes(Mapping[str, Recipe]):
    """All recipes by name: built-in recipes, and the cells and functions of the notebook.

    A name is searched among the functions first, then among the runs, then among the built-in
    recipes. The first recipe for the requested framework is used.
    """

    def __init__(self) -> None:
        self._functions: dict[str, tuple[Recipe, str]] = {}  # and who registered it
        self.cells_of: Callable[[], Mapping[str, Recipe]] = dict
        """Returns the cells that the notebook has trained, by the run's name."""

    def register(self, function: Callable[..., Any], name: str = "", summary: str = "") -> Recipe:
        """Keep a function as a recipe; if the function is defined again, it replaces the old one.

        Raises:
            PlanError: The function cannot be a recipe, or another function has the name.
        """
        made = recipe_of(function, name, summary)
        owner = f"{function.__module__}.{function.__qualname__}"
        known = self._functions.get(made.name)
        if known is not None and known[1] != owner:
            raise PlanError(
                "Another function is already registered under this name.",
                seen=made.name,
                allowed=f"another name, because {known[0].function}() already has this name",
                next_step="use @wb.recipe(name=...), or first call "
                f"wb.recipes.forget({made.name!r})",
                code="WB-PLAN-111",
            )
        self._functions[made.name] = (made, owner)
        return made

    def forget(self, name: str) -> None:
        """Remove a function's name.

        Raises:
            PlanError: No function is registered under this name.
        """
        if name not in self._functions:
            raise MissingRecipeError(name, list(self._functions))
        del self._functions[name]

    def find(self, name: str, framework: str = "") -> Recipe:
        """Return the recipe with this name.

        Args:
            name: Name of a function, of a run (its cell is the recipe), or of a built-in recipe.
            framework: The requested framework; by default the notebook's.

        Raises:
            PlanError: There is no such recipe; the error lists all recipes and suggests the nearest
                name.
        """
        found = [one for key, (one, _) in self._functions.items() if key == name]
        found += self._of_runs(name)
        if name in builtin.names():
            found.append(builtin.lookup(name, framework or notebook_framework()))
        if not found:
            raise MissingRecipeError(name, self.names())
        fitting = (one for one in found if not framework or one.framework in ("", framework))
        return next(fitting, found[0])

    def of(self, framework: str) -> dict[str, Recipe]:
        """Return the recipes that can be trained with a framework, by name."""
        found = {name: self.find(name, framework) for name in self}
        return {name: one for name, one in found.items() if one.framework in ("", framework)}

    def names(self) -> list[str]:
        """Return every name that `--recipe` takes, including older runs (`base@1`)."""
        return list(dict.fromkeys([*self, *registry.runs]))

    def __getitem__(self, name: str) -> Recipe:
        return self.find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*builtin.names(), *self._cells(), *self._functions]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def _cells(self) -> dict[str, Recipe]:
        """Return the cells of the notebook's runs, without recipes that have a name."""
        return {name: one for name, one in list(self.cells_of().items()) if not one.name}

    def _of_runs(self, name: str) -> list[Recipe]:
        """Return the recipe of a run, or the session's last cell with this name."""
        if name in registry.runs:
            plan = registry.runs[name].plan
            return [_shown(replace(plan.recipe, framework=plan.framework), name)]
        cell = self._cells().get(name)
        return [] if cell is None else [_shown(cell, name)]

    def table(self) -> Table:
        """Return one row per recipe: name, frameworks, origin, parameters, summary."""
        rows = [
            [name, _frameworks(one), one.origin, _parameters(one), one.summary]
            for name, one in self.items()
        ]
        columns = [
            Column("recipe", "left"), Column("framework", "left"),
            Column("from", "left"), Column("parameters", "left", 40),
            Column("what it is", "left", 50),
        ]  # fmt: skip
        return Table(
            columns,
            rows,
            notes=["To train a recipe: %distributed mirrored --recipe NAME -p PARAMETER=VALUE"],
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


class MissingRecipeError(KeyError, PlanError):
    """There is no recipe with this name."""

    def __init__(self, name: str, names: list[str]) -> None:
        error = unknown("recipe", name, names, "the name of a run, of a function or of a recipe")
        PlanError.__init__(
            self, error.what, code=error.code,
            seen=error.seen, allowed=error.allowed, next_step=error.next_step,
        )  # fmt: skip

    def __str__(self) -> str:
        return str(self.args[0])


recipes = Recipes()


@overload
def recipe(function: Function) -> Function: ...


@overload
def recipe(*, name: str = "", summary: str = "") -> Callable[[Function], Function]: ...


def recipe(function: Any = None, *, name: str = "", summary: str = "") -> Any:
    """Register a function of the notebook as a recipe: write `@wb.recipe` above its `def`.

    The engines run the source of the function, followed by a call of the function. Its arguments
    are the parameters of the recipe, so every argument needs a default. If you define the function
    again, the new definition replaces the old one.

    Args:
        function: The training function; every argument needs a default.
        name: The name for `--recipe`; by default the function's name.
        summary: One line for lists of recipes; by default the first line of the function's
            docstring.

    Returns:
        The function, which is unchanged and can still be called.

    Raises:
        PlanError: The object is not a function, its source cannot be read, it uses names of an
            enclosing function, an argument has no default, or another function already has the
            name.

    Example:
        >>> @wb.recipe
        ... def tiny(lr=0.1): ...
        >>> wb.recipes["tiny"].with_parameters(lr=0.01)
    """

    def register(one: Any) -> Any:
        recipes.register(one, name, summary)
        return one

    return register if function is None else register(function)


def _frameworks(one: Recipe) -> str:
    if one.origin == builtin.ORIGIN:
        return ", ".join(builtin.frameworks(one.name))
    return one.framework or UNKNOWN


def _parameters(one: Recipe) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in one.parameters.items())


def _shown(one: Recipe, name: str) -> Recipe:
    """Return a run's recipe as the mapping shows it."""
    if one.name or one.function:
        return one
    return replace(
        one, name=name, origin=f"cell {one.origin}" if one.origin.startswith("In[") else one.origin
    )
