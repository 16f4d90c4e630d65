"""The recipes: the notebook's cells, its functions, and those of the package."""

from __future__ import annotations

from typing import Any

from ..cookbook import builtin
from ..cookbook.recipe import WORDS, Recipe, use_of
from ..errors import PlanError
from ..execution.allocator import notebook_framework
from ..notebook import jobs
from ..notebook.recipes import recipes
from ..shared.plan import Plan, cell_of
from . import strategies
from .choice import Choice, check_written_for, short
from .model import Part, Wire, action

KINDS = (("cell", "This notebook's cells"), ("function", "Functions"), ("built-in", "Built-in"))
SHOWN_CHARACTERS = 60_000


class RecipePart(Part):
    """A list of recipes, the code of the selected recipe, and its parameters."""

    name = "recipe"

    def wire(self) -> Wire:
        """The list by kind, and the selected recipe with its code."""
        session, choice = self.panel.session, self.panel.choice
        framework = choice.framework_in(session)
        listed = _listed(framework)
        try:
            picked: Recipe | None = choice.recipe_in(session)
            problem = ""
        except PlanError as error:
            picked, problem = None, error.what
        selected = _selected(picked, choice, listed)
        return {
            "groups": [
                {"title": title, "recipes": found}
                for kind, title in KINDS
                if (found := [_row(n, r, framework) for n, k, r in listed if k == kind])
            ],
            "selected": selected,
            "problem": problem or _misfit(picked, framework),
            "picked": None if picked is None else _whole(picked, self._registered(picked), choice),
        }

    @action()
    def pick(self, name: str) -> None:
        """Select this recipe, and its framework if it is written for the other one."""
        session, choice = self.panel.session, self.panel.choice
        found = recipes.find(name, choice.framework_in(session))
        choice.recipe = name
        if found.framework:
            choice.framework = found.framework

    @action()
    def parameter(self, name: str, value: object = None) -> None:
        """Set a parameter of the recipe, or reset it to its default."""
        picked = self.panel.choice.recipe_in(self.panel.session)
        self.panel.choice.set_parameter(self._registered(picked), name, value)

    @action()
    def cell(self) -> dict[str, Any]:
        """Return the cells for the current choices: one for each strategy."""
        session, choice = self.panel.session, self.panel.choice
        framework, recipe = choice.framework_in(session), choice.recipe_in(session)
        choice.check(framework)
        check_written_for(recipe, framework)
        place = strategies.place_of(session, choice)
        drafts = [strategies.draft(line, recipe, place) for line in choice.lines(framework)]
        return {"cells": [_cell(plan, choice) for plan in drafts]}

    @action(slow=True)
    def job(self) -> dict[str, Any]:
        """Write a job folder for each selected strategy and seed; return the written folders."""
        session, choice = self.panel.session, self.panel.choice
        framework, recipe = choice.framework_in(session), choice.recipe_in(session)
        choice.check(framework)
        check_written_for(recipe, framework)
        place = strategies.place_of(session, choice)
        lines = choice.lines(framework)
        drafts = [plan for line in lines for plan in strategies.drafts(line, recipe, place)]
        if choice.seeds > 1:
            drafts = [plan.with_seed(seed) for plan in drafts for seed in range(choice.seeds)]
        folders = [jobs.job(plan, f"job-{plan.name or plan.strategy}") for plan in drafts]
        return {"folders": [folder.name for folder in folders], "where": str(folders[0].parent)}

    @staticmethod
    def _registered(picked: Recipe) -> Recipe:
        """Return the selected recipe with its default parameters."""
        if not (picked.name and picked.parameters):
            return picked
        return recipes.find(picked.name, picked.framework)


def _cell(plan: Plan, choice: Choice) -> str:
    """Return a cell that trains a plan, with all chosen numbers of workers, batches and seeds."""
    text = cell_of(plan, framework=notebook_framework())
    first, _, rest = text.partition("\n")
    several = {name: ",".join(map(str, values)) for name, values in choice.several.items()}
    if "workers" in several:  # the plan has the greatest number; one device has no such flag
        first = first.replace(f" -n {plan.workers}", f" -n {several['workers']}", 1)
    if "batch_size" in several:
        first += f" --batch-size {several['batch_size']}"
    if choice.seeds > 1:
        first += f" --seeds {choice.seeds}"
    return f"{first}\n{rest}"


def _listed(framework: str) -> list[tuple[str, str, Recipe]]:
    """Return name, kind and recipe: newest cells first, each cell once; built-ins last."""
    cells: dict[str, tuple[str, str, Recipe]] = {}
    rest = []
    for name in list(recipes):
        one = recipes.find(name, framework)
        if one.origin in ("function", builtin.ORIGIN):
            rest.append((name, one.origin, one))
        else:
            cells.pop(one.digest, None)
            cells[one.digest] = (name, "cell", one)
    return [*reversed(cells.values()), *rest]


def _selected(picked: Recipe | None, choice: Choice, listed: list[tuple[str, str, Recipe]]) -> str:
    names = [name for name, _, _ in listed]
    if picked is None:
        return ""
    if choice.recipe in names:
        return choice.recipe
    if picked.name in names:
        return picked.name
    return next((name for name, _, one in listed if one.digest == picked.digest), "")


def _row(name: str, one: Recipe, framework: str) -> Wire:
    written = builtin.frameworks(name) if one.origin == builtin.ORIGIN else [one.framework]
    return {
        "name": name,
        "origin": one.origin.removeprefix("cell "),
        "summary": one.summary or _first_comment(one.source),
        "frameworks": [word for word in written if word],
        "fits": one.framework in ("", framework),
    }


def _whole(one: Recipe, registered: Recipe, choice: Choice) -> Wire:
    way = use_of(one.source).way
    return {
        "name": one.name or one.origin,
        "source": one.source.strip("\n")[:SHOWN_CHARACTERS],
        "first_line": one.first_line + len(one.source) - len(one.source.lstrip("\n")),
        "framework": one.framework,
        "way": WORDS[way] if way else "",
        "function": one.function or "",
        "parameters": [_parameter(one, registered, name, choice) for name in one.parameters],
    }


def _parameter(one: Recipe, registered: Recipe, name: str, choice: Choice) -> Wire:
    wrong = choice.wrong.get(f"recipe.{one.name}.{name}")
    value = one.parameters[name]
    kinds = {bool: "bool", int: "int", float: "float"}
    return {
        "name": name,
        "kind": kinds.get(type(value), "str"),
        "value": wrong.typed if wrong else _shown(value),
        "default": _shown(registered.parameters.get(name, value)),
        "given": bool(wrong) or name in choice.parameters.get(one.name, {}),
        "error": wrong.why if wrong else "",
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _misfit(picked: Recipe | None, framework: str) -> str:
    if picked is None:
        return ""
    try:
        check_written_for(picked, framework)
    except PlanError as error:
        return f"{error.what.rstrip('.')}: {error.next_step}."
    try:
        builtin.check(picked)
    except PlanError as error:
        return short(error)
    return ""


def _first_comment(source: str) -> str:
    for line in source.splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
        if line.strip() and not line.startswith(("import ", "from ")):
            break
    return ""
