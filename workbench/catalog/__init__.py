"""Every strategy as data: its names, options, roles, abilities and source.

This package has no strategy code and imports only the errors. So the kernel, the engines, the
documentation and the tests all read the same table. To add a strategy, add one entry in
`entries.py` and one file under `strategies/`.

    spec           which properties do a strategy and an option have
    schedules      what does each pipeline schedule ask for and promise
    diagrams       what is a picture of a step made of, and how do collectives look in it
    step_messages  who sends what to whom in a step of each strategy
    entries        which strategies are there
"""

from __future__ import annotations

from ..errors import PlanError, unknown
from .entries import COMPRESSIONS, TENSORFLOW, TORCH
from .spec import FIT_FEATURES, FRAMEWORKS, MEET_IN_STORE, Framework, Option, Strategy, Way

__all__ = [
    "CATALOG", "COMPRESSIONS", "FIT_FEATURES", "FRAMEWORKS", "MEET_IN_STORE", "Framework",
    "Option", "Strategy", "Way", "canonical", "lookup", "names", "strategies",
]  # fmt: skip

CATALOG: tuple[Strategy, ...] = (*TORCH, *TENSORFLOW)


def strategies(framework: str | None = None) -> list[Strategy]:
    """Return the entries of the catalog; only those of one framework if it is given."""
    return [entry for entry in CATALOG if framework in (None, entry.framework)]


def names(framework: str | None = None) -> list[str]:
    """Return the names that `%%distributed` accepts, without aliases."""
    return list(dict.fromkeys(entry.name for entry in strategies(framework)))


def plain(word: str) -> str:
    """Return a normal form, equal for `MultiWorkerMirroredStrategy` and `multi-worker_mirrored`."""
    return word.lower().removesuffix("strategy").replace("_", "").replace("-", "")


def _is_called(entry: Strategy, name: str) -> bool:
    return plain(name) in map(plain, (entry.name, *entry.aliases))


def canonical(name: str, framework: str | None = None) -> str:
    """Return the strategy's name for an alias; without a framework, any framework counts.

    Names of classes (`DistributedDataParallel`) work too, in any spelling.

    Raises:
        PlanError: No strategy has this name, or the framework has no strategy with this name.
    """
    for entry in strategies() if framework is None else ():
        if _is_called(entry, name):
            return entry.name
    return lookup(name, framework or FRAMEWORKS[0]).name


def lookup(name: str, framework: str = "torch") -> Strategy:
    """Return the entry for a name or alias.

    Raises:
        PlanError: No strategy has this name, or the framework has no strategy with this name.
    """
    if framework not in FRAMEWORKS:
        raise unknown("framework", framework, FRAMEWORKS)
    for entry in strategies(framework):
        if _is_called(entry, name):
            return entry
    elsewhere = [entry.framework for entry in CATALOG if _is_called(entry, name)]
    if elsewhere:
        raise PlanError(
            f"Strategy {name} is not available for {framework}.",
            allowed=", ".join(names(framework)) or f"no strategy has a version for {framework}",
            next_step="use an allowed strategy, or write the training code for "
            f"{elsewhere[0]} and use --framework {elsewhere[0]}",
            code="WB-PLAN-001",
        )
    every = [*names(framework), *(a for e in strategies(framework) for a in e.aliases)]
    raise unknown("strategy", name, every, next_step="wb.strategies() lists all strategies")
