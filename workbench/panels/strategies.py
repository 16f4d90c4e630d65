"""The cards of the catalog: the strategies to run, their options and the number of runs.

The plans' checks decide which strategies can run now, and why the others cannot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..catalog.diagrams import messages
from ..cookbook.recipe import Recipe, Use, misfit, use_of
from ..devices import limits
from ..errors import ClusterError, PlanError, WorkbenchError
from ..execution.requests import check_framework
from ..shared.flags.several import check_runs
from ..shared.plan import Plan, make_plan, plan_of, plans_of
from ..views.explain.diagram import DiagramPicture
from .choice import COUNTS, TEXTS, check_written_for
from .model import Part, Wire, action

if TYPE_CHECKING:
    from ..notebook.session import Session
    from ..shared.run_request import RunRequest
    from .choice import Choice
    from .model import Panel

GLYPH_WORKERS = 3
DRAWN_WORKERS = 8
"""More nodes would be too small to distinguish in the panel; the pattern is the same."""


class StrategiesPart(Part):
    """Cards of the chosen framework's strategies, and the settings of all runs."""

    name = "strategies"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._known: tuple[object, Wire] | None = None

    def wire(self) -> Wire:
        """Cards, fields and their summary; computed again when something has changed."""
        session, choice = self.panel.session, self.panel.choice
        cluster, recipe = session.cluster, self._recipe()
        workers = () if cluster is None else tuple(cluster.worker_ids)
        about = repr(cluster and (cluster.framework, cluster.devices_asked))
        age = int(time.monotonic() / LOOK_AGAIN_S)
        key = (repr(choice), workers, about, recipe, recipe and recipe.framework, age)
        known = self._known
        if known is None or known[0] != key:
            self._known = known = (key, self._look(choice, recipe, len(workers)))
        return known[1]

    def _recipe(self) -> Recipe | None:
        try:
            return self.panel.choice.recipe_in(self.panel.session)
        except PlanError:
            return None

    def _look(self, choice: Choice, recipe: Recipe | None, engines: int) -> Wire:
        place = place_of(self.panel.session, choice)
        use = use_of(recipe.source if recipe is not None else "")
        cards = [
            _card(entry, choice, place, reason(entry, place, use), recipe)
            for entry in catalog.strategies(place.framework)
        ]
        found: Wire = {
            "framework": place.framework,
            "frameworks": [
                {"name": name, "reason": missing_framework(name)} for name in catalog.FRAMEWORKS
            ],
            "cards": cards,
            "common": _common(choice, engines, place),
            "summary": summary(choice, place, recipe),
        }
        found["problem"] = self._problem(choice, place, recipe, cards)
        found["ready"] = not found["problem"]
        none = self.panel.session.cluster is None
        starts = max(choice.workers or 1, choice.engines)
        engines_words = f"{starts} engine{'s' if starts > 1 else ''}"
        found["note"] = (
            f"No engine is running yet. The button Run starts {engines_words}." if none else ""
        )
        return found

    def _problem(
        self, choice: Choice, place: Place, recipe: Recipe | None, cards: list[Wire]
    ) -> str:
        """Return in one line why the current choices cannot be run; empty: they can."""
        for card in cards:
            if card["picked"] and (card["reason"] or card["problem"]):
                return f"{card['name']}: {card['reason'] or card['problem'].splitlines()[0]}"
        try:
            if recipe is None:
                choice.recipe_in(self.panel.session)
            else:
                check_written_for(recipe, place.framework)
            choice.check(place.framework)
            if self.panel.session.cluster is not None:
                choice.plans(self.panel.session)
            elif recipe is not None:
                lines = choice.lines(place.framework)
                check_runs(sum(len(drafts(line, recipe, place)) for line in lines), choice.seeds)
        except WorkbenchError as error:
            return (
                f"{error.what.rstrip('.')}: {error.next_step}." if error.next_step else error.what
            )
        return ""

    # -- what is clicked ---------------------------------------------------------------------------

    @action()
    def framework(self, name: str) -> None:
        """Switch the framework; each framework has a separate selection."""
        if name not in catalog.FRAMEWORKS:
            raise PlanError(
                "Workbench has no framework with this name.",
                seen=name,
                allowed=", ".join(catalog.FRAMEWORKS),
                code="WB-PLAN-077",
            )
        self.panel.choice.framework = name

    @action()
    def toggle(self, strategy: str) -> None:
        """Pick a strategy, or put it back."""
        self.panel.choice.toggle(self._framework(), strategy)

    @action()
    def option(self, strategy: str, option: str, value: object = None) -> None:
        """Set an option, or reset it to its default."""
        self.panel.choice.set_option(self._framework(), strategy, option, value)

    @action()
    def common(self, name: str, value: object = None) -> None:
        """Set a value for all runs; empty: the recipe's value."""
        if name == "inject":
            self.panel.choice.set_faults(value)
        elif name in TEXTS:
            self.panel.choice.set_text(name, value)
        else:
            self.panel.choice.set_count(name, value)

    @action()
    def diagram(self, strategy: str) -> dict[str, str]:
        """Return a drawing of the messages in a step with the current settings."""
        choice, framework = self.panel.choice, self._framework()
        entry = catalog.lookup(strategy, framework)
        cluster = self.panel.session.cluster
        engines = choice.engines if cluster is None else len(cluster.worker_ids)
        workers = max(2, min(DRAWN_WORKERS, choice.workers or engines))
        given = choice.options.get((framework, entry.name), {})
        try:
            drawn = messages(entry.name, workers, given, framework=framework)
        except PlanError as error:
            return {"svg": "", "text": error.what}
        picture = DiagramPicture(drawn)
        return {"svg": picture.canvas().svg(), "text": picture.text()}

    def _framework(self) -> str:
        return self.panel.choice.framework_in(self.panel.session)


def summary(choice: Choice, place: Place, recipe: Recipe | None) -> str:
    """Return a summary of the runs: `2 strategies × 3 seeds = 6 runs on 2 workers`."""
    picked = choice.picks[place.framework]
    if not picked:
        return "Nothing is selected"
    named = "" if recipe is None else f" of {recipe.name or recipe.origin}"
    if choice.several:
        return _swept(choice, place, recipe, named)
    on = f"on {place.workers} worker{'s' if place.workers != 1 else ''}"
    count = len(picked) * choice.seeds
    if count == 1:
        return f"1 run{named}: {picked[0]} {on}"
    factors = [f"{len(picked)} strategies"] if len(picked) > 1 else [picked[0]]
    factors += [f"{choice.seeds} seeds"] if choice.seeds > 1 else []
    if len(factors) == 1:
        return f"{count} runs{named}: {', then '.join(picked)}, {on}"
    return f"{' × '.join(factors)} = {count} runs{named} {on}"


def _swept(choice: Choice, place: Place, recipe: Recipe | None, named: str) -> str:
    """Return the summary for several numbers of workers or batches; one device is run once."""
    picked, several = choice.picks[place.framework], choice.several
    counts = several.get("workers", (place.workers,))
    on = f"on {_listed(counts)} worker{'s' if counts != (1,) else ''}"
    if "batch_size" in several:
        on += f"; batch sizes {_listed(several['batch_size'])}"
    if choice.seeds > 1:
        on += f"; {choice.seeds} seeds each"
    try:
        lines = choice.lines(place.framework)
        plans = [plan for line in lines for plan in drafts(line, recipe or NOTHING, place)]
    except PlanError:  # said beside it
        return f"{', then '.join(picked)}, {on}"
    count = len(plans) * choice.seeds
    return f"{count} run{'s' * (count != 1)}{named}: {', then '.join(picked)}, {on}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _card(
    entry: catalog.Strategy, choice: Choice, place: Place, why_not: str,
    recipe: Recipe | None,
) -> Wire:  # fmt: skip
    picked = choice.picks[place.framework]
    problem = ""
    if not why_not and recipe is not None:
        problem = fitness_problem(choice.line(entry.name, place.framework), recipe, place)
    return {
        "name": entry.name,
        "term": entry.term,
        "summary": entry.summary,
        "suits": entry.suits,
        "source": entry.source,
        "aliases": list(entry.aliases),
        "facts": _facts(entry, place),
        "picked": picked.index(entry.name) + 1 if entry.name in picked else 0,
        "reason": why_not,
        "problem": problem,
        "options": [_option(entry, option, choice, place) for option in entry.options],
        "glyph": glyph(entry.framework, entry.name),
    }


def _facts(entry: catalog.Strategy, place: Place) -> list[str]:
    """Return further remarks, a few words each."""
    facts = [entry.cadence or ("synchronous" if entry.sync else "asynchronous")]
    if entry.max_workers is not None and place.workers > entry.max_workers:
        facts.append(f"uses {entry.max_workers} of {place.workers} workers")
    servers = entry.server_count(entry.settings({}))
    if servers:
        engines = f"{servers} engines as servers" if servers > 1 else "one engine as server"
        facts.append(f"also needs {engines}")
    if entry.one_engine and not entry.remote_workers and place.workers > 1:
        facts.append("one engine does all the work")
    return facts


def _option(entry: catalog.Strategy, option: catalog.Option, choice: Choice, place: Place) -> Wire:
    key = (place.framework, entry.name)
    given = choice.options.get(key, {})
    wrong = choice.wrong.get(f"{place.framework}.{entry.name}.{option.name}")
    unfit = choices(entry, option, place.devices)
    return {
        "name": option.name,
        "kind": option.kind,
        "help": option.help,
        "allowed": option.allowed,
        "minimum": option.minimum,
        "maximum": option.maximum,
        "choices": [{"name": c, "fits": c not in unfit} for c in option.choices],
        "optional": option.optional,
        "default": _text(option.default),
        "value": wrong.typed if wrong else _text(given.get(option.name, option.default)),
        "given": bool(wrong) or option.name in given,
        "error": wrong.why if wrong else "",
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _common(choice: Choice, engines: int, place: Place) -> dict[str, Wire]:
    several = {name: ",".join(map(str, values)) for name, values in choice.several.items()}
    given: dict[str, Any] = {"workers": choice.workers, **choice.overrides, **several}
    given["seeds"] = choice.seeds if choice.seeds > 1 else None
    found: dict[str, Wire] = {}
    for name in COUNTS:
        wrong = choice.wrong.get(name)
        found[name] = {
            "value": wrong.typed if wrong else _text(given.get(name)),
            "error": wrong.why if wrong else "",
        }
    for name in TEXTS:
        wrong = choice.wrong.get(name)
        found[name] = {
            "value": wrong.typed if wrong else choice.texts.get(name, ""),
            "error": wrong.why if wrong else "",
        }
    found["workers"]["hint"] = _workers_hint(choice.workers, engines, place)
    found["seed"]["off"] = choice.seeds > 1
    wrong = choice.wrong.get("inject")
    found["inject"] = {
        "value": wrong.typed if wrong else " ".join(choice.faults),
        "error": wrong.why if wrong else "",
    }
    return found


def _workers_hint(workers: int | None, engines: int, place: Place) -> str:
    if not engines:
        return "no engine is running yet"
    if workers is None:
        return f"uses all {engines} engines" if engines > 1 else "uses the engine"
    if workers > engines:
        return _starts_hint(workers - engines, engines)
    return f"uses {workers} of {engines} engines" if workers < engines else ""


def _starts_hint(more: int, there: int) -> str:
    s, are = "s" if more > 1 else "", "are" if there > 1 else "is"
    return f'"Run" starts {more} more engine{s}; {there} {are} running'


@lru_cache(maxsize=64)
def glyph(framework: str, strategy: str) -> Wire | None:
    """Return a strategy's messages in a few numbers, for the small picture on its card.

    Nodes are numbered from left to right; None where the pattern cannot be drawn.
    """
    try:
        drawn = messages(strategy, GLYPH_WORKERS, framework=framework)
    except PlanError:
        return None
    place = {node.id: i for i, node in enumerate(drawn.nodes)}
    return {
        "nodes": [node.kind for node in drawn.nodes],
        "phases": [
            {
                "busy": [place[name] for name in phase.busy],
                "arrows": [
                    [place[a.source], place[a.target], a.kind, a.order] for a in phase.arrows
                ],
            }
            for phase in drawn.phases
        ],
    }


NOTHING = Recipe("pass")
LOOK_AGAIN_S = 5.0
"""Period of checks for installed frameworks and limits."""


@dataclass(frozen=True)
class Place:
    """The resources for a run.

    Attributes:
        framework: The framework for training.
        workers: The default number of replicas.
        devices: One per replica: `cpu`, `cuda:0`; None if there is no cluster yet.
        allowed: The administrator's limits.
    """

    framework: str
    workers: int
    devices: tuple[str, ...] | None
    allowed: limits.Limits


def place_of(session: Session, choice: Choice) -> Place:
    """Return the resources: the notebook's engines, or those that Run would start."""
    cluster, allowed = session.cluster, limits.load()
    framework = choice.framework_in(session)
    if cluster is None:
        return Place(framework, choice.workers or choice.engines, None, allowed)
    workers = choice.workers or max(1, len(cluster.worker_ids))
    devices = tuple(cluster.lease(workers).words)
    return Place(framework, workers, devices, allowed)


def missing_framework(framework: str) -> str:
    """Return why a framework cannot be used here; empty: it can.

    The result is checked again after a while.
    """
    return _missing(framework, int(time.monotonic() / LOOK_AGAIN_S))


@lru_cache(maxsize=8)
def _missing(framework: str, _: int) -> str:
    try:
        check_framework(framework)
    except ClusterError as error:
        return f"{error.what} {error.next_step}" if error.next_step else error.what
    return ""


def reason(entry: catalog.Strategy, place: Place, use: Use) -> str:
    """Return why a strategy cannot run here with its default options; empty: it can."""
    if missing := missing_framework(entry.framework):
        return missing
    if unfit := misfit(entry, use):
        return unfit
    try:
        plan = make_plan(
            NOTHING, entry.name, framework=entry.framework, workers=max(1, place.workers)
        )
        check_fitness(plan, place)
    except PlanError as error:
        return error.what
    return ""


def check_fitness(plan: Plan, place: Place) -> None:
    """Raise PlanError if a plan needs devices or engines that are not available."""
    place.allowed.check_engines(plan.engines + len(plan.helpers))
    if place.devices and plan.workers <= len(place.devices):
        plan.check_devices(place.devices[: plan.workers])


def draft(line: RunRequest, recipe: Recipe, place: Place) -> Plan:
    """Return the plan of a line with one strategy, even if there is no cluster yet.

    If there are several numbers of workers, the plan has the greatest.

    Raises:
        PlanError: The settings do not fit together.
    """
    one = replace(line, several=())
    plan = plan_of(one, recipe, framework=place.framework, workers=place.workers)
    check_fitness(plan, place)
    return plan


def drafts(line: RunRequest, recipe: Recipe, place: Place) -> list[Plan]:
    """Return all plans of such a line, but only one for all seeds.

    Raises:
        PlanError: The settings do not fit together.
    """
    whole = replace(line, seeds=None)
    found = plans_of(whole, recipe, framework=place.framework, workers=place.workers)
    check_runs(len(found), line.seeds or 1)
    for plan in found:
        check_fitness(plan, place)
    return found


def fitness_problem(line: RunRequest, recipe: Recipe, place: Place) -> str:
    """Return the error in a strategy's current settings; empty if there is none."""
    try:
        drafts(line, recipe, place)
    except PlanError as error:
        return str(error)
    return ""


def choices(
    entry: catalog.Strategy, option: catalog.Option, devices: Sequence[str] | None
) -> list[str]:
    """Return the values of an option that need missing devices."""
    if not devices or all(device.startswith("cuda") for device in devices):
        return []
    return [value for name, value in entry.needs_gpus if name == option.name]
