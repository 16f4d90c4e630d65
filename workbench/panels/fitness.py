"""Which strategies can run here and now, and why the others cannot: asked of the plans' checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .. import catalog, limits
from ..cookbook.recipe import Recipe
from ..cookbook.ways import Use, misfit
from ..errors import ClusterError, PlanError
from ..plan import Plan, make_plan, plan_of
from ..run_request import RunRequest
from ..session.checks import check_framework

if TYPE_CHECKING:
    from ..session.state import Session
    from .choice import Choice

NOTHING = Recipe("pass")
LOOK_AGAIN_S = 5.0
"""So often it is asked anew what is installed and allowed here."""


@dataclass(frozen=True)
class Place:
    """What there is to run on.

    Attributes:
        framework: What is trained with.
        workers: How many replicas a run has that is not told.
        devices: One per replica: `cpu`, `cuda:0`; None where there is no cluster yet.
        allowed: What the administrator allows.
    """

    framework: str
    workers: int
    devices: tuple[str, ...] | None
    allowed: limits.Limits


def place_of(session: Session, choice: Choice) -> Place:
    """Return what there is to run on: the notebook's engines, or as many as Run would start."""
    cluster, allowed = session.cluster, limits.load()
    framework = choice.framework_in(session)
    if cluster is None:
        return Place(framework, choice.workers or choice.engines, None, allowed)
    workers = choice.workers or max(1, len(cluster.worker_ids))
    devices = tuple(one.device for one in cluster.lease(workers).leases)
    return Place(framework, workers, devices, allowed)


def missing_framework(framework: str) -> str:
    """Return why a framework cannot be used here; empty: it can. Looks again after a while."""
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
        check(plan, place)
    except PlanError as error:
        return error.what
    return ""


def check(plan: Plan, place: Place) -> None:
    """Raise PlanError where a plan needs devices or engines that there cannot be."""
    place.allowed.check_engines(plan.engines + len(plan.helpers))
    if place.devices:
        plan.check_devices([place.devices[i % len(place.devices)] for i in range(plan.workers)])


def draft(line: RunRequest, recipe: Recipe, place: Place) -> Plan:
    """Return the plan of a line with one strategy, also where there is no cluster yet.

    Raises:
        PlanError: Something does not fit.
    """
    plan = plan_of(line, recipe, framework=place.framework, workers=place.workers)
    check(plan, place)
    return plan


def problem(line: RunRequest, recipe: Recipe, place: Place) -> str:
    """Return what is wrong with a strategy as it is set; empty: nothing is."""
    try:
        draft(line, recipe, place)
    except PlanError as error:
        return str(error)
    return ""


def choices(
    entry: catalog.Strategy, option: catalog.Option, devices: Sequence[str] | None
) -> list[str]:
    """Return the values of an option that need devices which are not there."""
    if not devices or all(device.startswith("cuda") for device in devices):
        return []
    return [value for name, value in entry.needs_gpus if name == option.name]
