"""What is picked in the panel, and the plans that come of it: those that a line would give."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..cookbook import builtin
from ..cookbook.recipe import read_like
from ..errors import PlanError, unknown
from ..execution.allocator import default_framework
from ..notebook.recipes import recipes
from ..shared.faults import parse_fault
from ..shared.flags.several import Axis, check_runs, each_of
from ..shared.log_targets import parse_targets
from ..shared.run_request import OVERRIDES, RunRequest

if TYPE_CHECKING:
    from ..cookbook.recipe import Recipe
    from ..notebook.session import Session
    from ..shared.plan import Plan

MOST: dict[str, int] = {"workers": 256, "seeds": 10}
COUNTS = ("workers", "seeds", *OVERRIDES)
SEVERAL = ("workers", "batch_size")
"""Counts of which several can be typed, as on the line: `1,2,4`; each is a run."""
TEXTS = ("name", "checkpoint", "checkpoint_every", "on_failure", "log")
"""Flags of the line that the panel has a field for, beside the counts."""
ON_FAILURE = ("stop", "continue", "replace", "heal")


@dataclass(frozen=True)
class Wrong:
    """What somebody typed into a field that does not take it.

    Attributes:
        typed: As it was typed; it stays in the field.
        why: One line, shown at the field.
    """

    typed: str
    why: str


@dataclass
class Choice:
    """What is picked.

    What was typed wrongly is kept beside it (`wrong`), so that it stays on show, in every panel of
    the notebook, and so that nothing is run meanwhile. Collections are replaced, never changed: one
    thread draws while another one clicks.

    Attributes:
        recipe: Name of what is trained; empty: the notebook's last training cell, or the first
            built-in recipe where there is none.
        framework: `torch` or `tensorflow`; empty: the recipe's, or the cluster's.
        picks: Picked strategies of each framework, in the order of picking.
        options: Options given, by framework and strategy; also of strategies not picked now.
        parameters: Parameters given, by the name of the recipe.
        workers: Replicas, of several numbers the greatest; None: as many as there are engines.
        engines: What stands in the Engines field: started by Run where there is no cluster.
        seeds: How many seeds each plan is run with; 1: the recipe's own.
        overrides: Of `epochs`, `steps`, `batch_size`, `seed`.
        several: Of `SEVERAL`, where more than one value was typed.
        faults: Faults that the runs begin with, as `--inject` takes them.
        texts: What stands in the fields of `TEXTS`, where something does.
        wrong: By field: `workers`, `inject`, `torch.mirrored.bucket_mb`, `recipe.NAME.PARAMETER`.
    """

    recipe: str = ""
    framework: str = ""
    picks: dict[str, list[str]] = field(
        default_factory=lambda: {name: ["mirrored"] for name in catalog.FRAMEWORKS}
    )
    options: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    workers: int | None = None
    engines: int = 2
    seeds: int = 1
    overrides: dict[str, int] = field(default_factory=dict)
    several: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, Wrong] = field(default_factory=dict)

    # -- what it comes to --------------------------------------------------------------------------

    def framework_in(self, session: Session) -> str:
        """Return the framework that is trained with."""
        if self.framework:
            return self.framework
        if not self.recipe and session.recipe is not None and session.recipe.framework:
            return session.recipe.framework
        return session.cluster.framework if session.cluster is not None else default_framework()

    def recipe_in(self, session: Session) -> Recipe:
        """Return what is trained, with the parameters given.

        Raises:
            PlanError: There is no recipe of that name any more.
        """
        if not self.recipe and session.recipe is not None:
            found = session.recipe
        else:
            name = self.recipe or builtin.names()[0]
            found = recipes.find(name, self.framework_in(session))
        given = self.parameters.get(found.name, {})
        kept = {name: value for name, value in given.items() if name in found.parameters}
        return found.with_parameters(**kept) if kept else found

    def line(self, strategy: str, framework: str) -> RunRequest:
        """Return the magic's line of a strategy; several picked ones are kept apart by name."""
        several, texts = len(self.picks[framework]) > 1, self.texts
        name, folder = texts.get("name", ""), texts.get("checkpoint", "")
        overrides: dict[str, Any] = {**self.overrides}
        return RunRequest(
            name=f"{name}-{strategy}" if several and name else name,
            checkpoint=str(Path(folder) / strategy) if several and folder else folder,
            checkpoint_every=int(texts.get("checkpoint_every", 0)),
            on_failure=texts.get("on_failure", ""),
            log=parse_targets(texts.get("log", "").split()),
            strategies=(strategy,),
            framework=framework,
            workers=None if "workers" in self.several else self.workers,
            several=tuple(Axis(key, values) for key, values in self.several.items()),
            options=dict(self.options.get((framework, strategy), {})),
            **overrides,
            seeds=self.seeds if self.seeds > 1 else None,
            faults=tuple(parse_fault(text) for text in self.faults),
        )

    def lines(self, framework: str) -> list[RunRequest]:
        """Return a magic's line for each picked strategy, in the order of picking."""
        return [self.line(strategy, framework) for strategy in self.picks[framework]]

    def plans(self, session: Session) -> list[Plan]:
        """Return the plans, validated as a line's would be.

        Raises:
            PlanError: Nothing is picked, a field is wrong, or something does not fit.
            ClusterError: There is no cluster.
        """
        framework = self.framework_in(session)
        self.check(framework)
        recipe = self.recipe_in(session)
        check_written_for(recipe, framework)
        found = [plan for line in self.lines(framework) for plan in session.plans(line, recipe)]
        check_runs(len(found))
        return found

    def check(self, framework: str) -> None:
        """Raise PlanError where nothing is picked, or a field that matters is wrong."""
        if not self.picks[framework]:
            raise PlanError(
                "No strategy is selected.", next_step="select one of the cards", code="WB-PLAN-063"
            )
        for name, wrong in self.wrong.items():
            owner, _, rest = name.partition(".")
            strategy = rest.partition(".")[0]
            other = owner in self.picks and owner != framework
            if other or (owner == framework and strategy not in self.picks[framework]):
                continue
            if owner == "recipe" and strategy != (self.recipe or strategy):
                continue
            raise PlanError(
                f"{field_name(name)}: {wrong.why}", seen=wrong.typed, code="WB-PLAN-064"
            )

    # -- what is typed -----------------------------------------------------------------------------

    def toggle(self, framework: str, strategy: str) -> None:
        """Pick a strategy, or put it back.

        Raises:
            PlanError: The framework has no such strategy.
        """
        name, picked = catalog.lookup(strategy, framework).name, self.picks[framework]
        left = [one for one in picked if one != name]
        self.picks = {**self.picks, framework: left if name in picked else [*picked, name]}

    def set_count(self, name: str, typed: object) -> None:
        """Take what was typed for workers, seeds, epochs, steps, batch_size or seed.

        Raises:
            PlanError: There is no such field.
        """
        if name not in COUNTS:
            raise unknown("field", name, COUNTS)
        self._take(name, typed, lambda text: self._put_count(name, text))

    def _put_count(self, name: str, text: str) -> None:
        least, most = 0 if name == "seed" else 1, MOST.get(name)
        several = name in SEVERAL and "," in text
        parts = each_of(text, field_name(name)) if several else [text] if text else []
        values = [_whole(one, least=least, most=most, several=name in SEVERAL) for one in parts]
        value = max(values, default=None)
        self.several = {key: one for key, one in self.several.items() if key != name}
        if len(values) > 1:
            self.several = {**self.several, name: tuple(values)}
        if name == "workers":
            self.workers = value
        elif name == "seeds":
            self.seeds = value or 1
        else:
            left = {key: one for key, one in self.overrides.items() if key != name}
            self.overrides = {**left, name: values[0]} if len(values) == 1 else left

    def set_text(self, name: str, typed: object) -> None:
        """Take what was typed for a field of `TEXTS`; nothing: as it is.

        Raises:
            PlanError: There is no such field.
        """
        if name not in TEXTS:
            raise unknown("field", name, TEXTS)

        def put(text: str) -> None:
            if text and name == "checkpoint_every":
                _whole(text, least=1, most=None)
            elif text and name == "on_failure" and text not in ON_FAILURE:
                raise PlanError(
                    "This value is not valid.",
                    seen=text,
                    allowed=", ".join(ON_FAILURE),
                    code="WB-PLAN-065",
                )
            elif name == "log":
                parse_targets(text.split())
            left = {key: one for key, one in self.texts.items() if key != name}
            self.texts = {**left, name: text} if text else left

        self._take(name, typed, put)

    def set_faults(self, typed: object) -> None:
        """Take faults as `--inject` takes them, several with spaces or commas between."""

        def put(text: str) -> None:
            words = [word for word in re.split(r"[\s,]+", text) if word not in ("", "--inject")]
            self.faults = [parse_fault(word).text for word in words]

        self._take("inject", typed, put)

    def set_option(self, framework: str, strategy: str, option: str, typed: object) -> None:
        """Take what was typed for an option; nothing: its default.

        Raises:
            PlanError: There is no such strategy or option.
        """
        entry = catalog.lookup(strategy, framework)
        known, key = entry.option(option, catalog.CATALOG), (framework, entry.name)

        def put(text: str) -> None:
            value = known.parse(text) if text else known.default
            given = {**self.options.get(key, {}), option: value}
            if value == known.default:
                del given[option]
            self.options = {**self.options, key: given}

        self._take(f"{framework}.{entry.name}.{option}", typed, put)

    def set_parameter(self, recipe: Recipe, name: str, typed: object) -> None:
        """Take what was typed for a parameter of a recipe; nothing: its default.

        Args:
            recipe: As it was registered.

        Raises:
            PlanError: It has no such parameter.
        """
        if name not in recipe.parameters:
            raise unknown(f"parameter of {recipe.name}", name, recipe.parameters)
        default = recipe.parameters[name]

        def put(text: str) -> None:
            value = read_like(default, text) if text else default
            given = {**self.parameters.get(recipe.name, {}), name: value}
            if value == default:
                del given[name]
            self.parameters = {**self.parameters, recipe.name: given}

        self._take(f"recipe.{recipe.name}.{name}", typed, put)

    def _take(self, name: str, typed: object, put: Callable[[str], None]) -> None:
        text = "" if typed is None else str(typed).strip()[:400]
        wrong = {key: one for key, one in self.wrong.items() if key != name}
        try:
            put(text)
        except PlanError as error:
            wrong[name] = Wrong(text, short(error))
        self.wrong = wrong


def check_written_for(recipe: Recipe, framework: str) -> None:
    """Raise PlanError where a recipe is written for the other framework."""
    if recipe.framework not in ("", framework):
        raise PlanError(
            f"{recipe.name or recipe.origin} is written for {recipe.framework}.",
            seen=framework,
            next_step=f"choose {recipe.framework} above the cards, or another recipe",
            code="WB-PLAN-066",
        )


def short(error: PlanError) -> str:
    """Return an error as one line for the place where it was met."""
    said = error.what if error.seen is None else f"{error.what.rstrip('.')}: {error.seen}."
    return f"{said} Allowed: {error.allowed}." if error.allowed else said


def field_name(name: str) -> str:
    """Return what a field is called in messages."""
    words = name.split(".")
    if len(words) < 3:
        return name.replace("_", " ").capitalize()
    return f"{words[-1]} of {'.'.join(words[1:-1])}"


def _whole(text: str, *, least: int, most: int | None, several: bool = False) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text):
        value = int(text)
        if value >= least and (most is None or value <= most):
            return value
    limits = f"from {least} to {most}" if most is not None else f"{least} or more"
    more = "; or several: 1,2,4" if several else ""
    raise PlanError(
        "This value is not valid.",
        seen=text,
        allowed=f"a whole number, {limits}{more}",
        code="WB-PLAN-067",
    )
