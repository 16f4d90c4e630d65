"""The choices in the panel, and their plans: the same as a magic's line would give."""

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
"""Fields that take several numbers, as in the magic's line: `1,2,4`; each gives a run."""
TEXTS = ("name", "checkpoint", "checkpoint_every", "on_failure", "log")
"""Further flags of the magic's line that have a field in the panel."""
ON_FAILURE = ("stop", "continue", "replace", "heal")


@dataclass(frozen=True)
class Wrong:
    """An invalid value that the user typed into a field.

    Attributes:
        typed: The typed text; it stays in the field.
        why: The reason in one line, shown at the field.
    """

    typed: str
    why: str


@dataclass
class Choice:
    """The choices of the user.

    Invalid text is kept separately (`wrong`). So every panel of the notebook still shows it, and
    nothing is run before it is corrected. Collections are replaced, never changed, because one
    thread can draw while another thread handles a click.

    Attributes:
        recipe: Name of the recipe; empty: the notebook's last training cell, or the first built-in
            recipe if there is no such cell.
        framework: `torch` or `tensorflow`; empty: the recipe's, or the cluster's.
        picks: Selected strategies of each framework, in the order of selection.
        options: Given options, by framework and strategy; also those of strategies that are not
            selected now.
        parameters: Given parameters, by the name of the recipe.
        workers: Number of replicas; the greatest if several are given. None: the number of engines.
        engines: The number in the Engines field; Run starts so many if there is no cluster.
        seeds: Number of seeds for each plan; 1: the recipe's own seed.
        overrides: Values of `epochs`, `steps`, `batch_size`, `seed`.
        several: Fields of `SEVERAL` with more than one value.
        faults: Faults at the start of the runs, as `--inject` takes them.
        texts: The text of each field of `TEXTS` that is not empty.
        wrong: Invalid texts by field: `workers`, `inject`, `torch.mirrored.bucket_mb`,
            `recipe.NAME.PARAMETER`.
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
        """Return the framework for training."""
        if self.framework:
            return self.framework
        if not self.recipe and session.recipe is not None and session.recipe.framework:
            return session.recipe.framework
        return session.cluster.framework if session.cluster is not None else default_framework()

    def recipe_in(self, session: Session) -> Recipe:
        """Return the recipe with the given parameters.

        Raises:
            PlanError: The recipe with this name no longer exists.
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
        """Return the magic's line for a strategy; several strategies get different run names."""
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
        """Return a magic's line for each selected strategy, in the order of selection."""
        return [self.line(strategy, framework) for strategy in self.picks[framework]]

    def plans(self, session: Session) -> list[Plan]:
        """Return the plans, validated like those of a magic's line.

        Raises:
            PlanError: No strategy is selected, a field is wrong, or settings do not fit together.
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
        """Raise PlanError if no strategy is selected, or a relevant field is wrong."""
        if not self.picks[framework]:
            raise PlanError(
                "No strategy is selected.",
                next_step='select a strategy on the tab "Choose"',
                code="WB-PLAN-063",
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
        """Select a strategy, or deselect it.

        Raises:
            PlanError: The framework has no such strategy.
        """
        name, picked = catalog.lookup(strategy, framework).name, self.picks[framework]
        left = [one for one in picked if one != name]
        self.picks = {**self.picks, framework: left if name in picked else [*picked, name]}

    def set_count(self, name: str, typed: object) -> None:
        """Set the typed text for workers, seeds, epochs, steps, batch_size or seed.

        Raises:
            PlanError: The field does not exist.
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
        """Set the typed text for a field of `TEXTS`; empty text keeps the recipe's setting.

        Raises:
            PlanError: The field does not exist.
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
        """Set faults in the form of `--inject`, separated by spaces or commas."""

        def put(text: str) -> None:
            words = [word for word in re.split(r"[\s,]+", text) if word not in ("", "--inject")]
            self.faults = [parse_fault(word).text for word in words]

        self._take("inject", typed, put)

    def set_option(self, framework: str, strategy: str, option: str, typed: object) -> None:
        """Set the typed text for an option; empty text: its default.

        Raises:
            PlanError: The strategy or the option does not exist.
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
        """Set the typed text for a parameter of a recipe; empty text: its default.

        Args:
            recipe: The registered recipe.

        Raises:
            PlanError: The recipe has no such parameter.
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
    """Raise PlanError if a recipe is written for the other framework."""
    if recipe.framework not in ("", framework):
        names = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
        name, selected = names[recipe.framework], names[framework]
        raise PlanError(
            f"The recipe {recipe.name or recipe.origin} is written for {name}, but the selected "
            f"framework is {selected}.",
            seen=framework,
            next_step=f"select the framework {name}, or choose another recipe",
            code="WB-PLAN-066",
        )


def short(error: PlanError) -> str:
    """Return an error as one line, for the place where it occurred."""
    said = error.what if error.seen is None else f"{error.what.rstrip('.')}: {error.seen}."
    return f"{said} Allowed: {error.allowed}." if error.allowed else said


def field_name(name: str) -> str:
    """Return the name of a field in messages."""
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
    more = "; or several numbers: 1,2,4" if several else ""
    raise PlanError(
        "This value is not valid.",
        seen=text,
        allowed=f"a whole number, {limits}{more}",
        code="WB-PLAN-067",
    )
