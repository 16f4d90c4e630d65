"""What is checked before a cluster is started or asked for anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import catalog, limits
from ..cluster import census, exposure
from ..cluster.calls import Unread, travels
from ..cluster.processes import installed
from ..cookbook.recipe import Recipe
from ..errors import ClusterError, PlanError, RunError, unknown
from ..plan import check_count

MAX_ENGINES = 256


class BusyError(RunError):
    """A cell or a run goes on, so nothing else can begin."""


def check_travels(values: Mapping[str, object]) -> None:
    """Raise PlanError where a value cannot be sent to another process."""
    for name, value in values.items():
        if not travels(value):
            raise PlanError(
                f"{name} cannot be sent to the engines: it cannot be pickled.",
                seen=type(value).__name__,
                allowed="data, arrays, models, functions and classes",
                next_step="make it there: put the line that makes it under %%distributed",
                code="WB-PLAN-099",
            )


def check_arrived(found: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RunError where an engine's value cannot be had in the notebook: which, why, what now.

    Args:
        found: Values by name, by engine.
    """
    for engine, values in found.items():
        for name, value in values.items():
            if isinstance(value, Unread):
                what = f"{name} cannot be brought from engine {engine} to the notebook."
                raise RunError(what, **_why(value, name), code="WB-RUN-062")


def _why(unread: Unread, name: str) -> dict[str, Any]:
    parcel = unread.parcel
    parts = "pull what it holds, as numbers, arrays and lists"
    if parcel.parts:
        parts = f"pull what it holds: parts = {parcel.parts} on the engines, then %pull parts"
    if unread.lacks and unread.module == "__main__":
        return {
            "seen": f"the notebook has no {unread.lacks}",
            "allowed": "objects of classes that the notebook has too",
            "next_step": f"define {unread.lacks} in the notebook too, or {parts}",
        }
    if unread.lacks:
        return {
            "seen": f"the notebook has no {unread.module}.{unread.lacks}",
            "allowed": "objects of modules that the notebook can import too",
            "next_step": f"make {unread.module} importable in the notebook, or {parts}",
        }
    if parcel.remade:
        return {
            "seen": f"{parcel.kind} was defined again after {name} was made",
            "allowed": "objects of the class as it is now",
            "next_step": f"make {name} again, or {parts}",
        }
    return {
        "seen": unread.fault,
        "allowed": "data, arrays, models, functions and classes",
        "next_step": parts,
    }


def check_size(what: str, count: object) -> int:
    """Return how many engines are wanted.

    Raises:
        PlanError: It is no whole number of at least 1, or more than one notebook can serve.
    """
    checked = check_count(what, count)
    if checked > MAX_ENGINES:
        raise PlanError(
            f"{what}: that is more workers than one notebook can serve.",
            seen=checked,
            allowed=f"1 to {MAX_ENGINES}",
            code="WB-PLAN-100",
        )
    return checked


def check_limits(wanted: int, own: Sequence[int] = (), *, hosts: str = "") -> None:
    """Raise PlanError where so many more engines are beyond the administrator's limits.

    Who asks to listen beyond loopback, and may, is told what that exposes.

    Args:
        own: Pids of the engines that the cluster has already.
        hosts: What is to be listened on beyond loopback.
    """
    allowed = limits.load()
    allowed.check_hosts(hosts)
    exposure.warn(hosts)
    if allowed.max_engines is not None:  # the census looks at every process of the machine
        allowed.check_engines(wanted + len(own), census.elsewhere(own))


def check_members(ids: Sequence[int], members: Sequence[int]) -> None:
    """Raise PlanError unless all of `ids` are among the workers `members`."""
    strange = [i for i in ids if i not in members]
    if strange:
        raise PlanError(
            "There is no such engine among the workers.",
            seen=", ".join(map(str, strange)),
            allowed=", ".join(map(str, members)),
            next_step="%cluster lists them",
            code="WB-PLAN-101",
        )


def check_framework(framework: str) -> None:
    """Raise unless engines on this machine can import the framework.

    Raises:
        PlanError: It is unknown.
        ClusterError: It is not installed; names what installs it.
    """
    if framework not in catalog.FRAMEWORKS:
        raise unknown("framework", framework, catalog.FRAMEWORKS)
    if not installed(framework):
        raise ClusterError(
            f"{framework} is not installed here.",
            seen=framework,
            next_step=f"pip install 'distributed-workbench[{framework}]', then restart the kernel",
            code="WB-CLUSTER-036",
        )


def to_recipe(source: str | Callable[..., Any] | Recipe, args: tuple[Any, ...] = ()) -> Recipe:
    """Make a recipe of source or a function.

    Raises:
        PlanError: It is neither, or the function cannot be sent to engines.
    """
    if isinstance(source, Recipe):
        return source
    if isinstance(source, str):
        return Recipe(source)
    if callable(source):
        return Recipe.from_function(source, args)
    raise PlanError(
        "A recipe is source code or a function.", seen=type(source).__name__, code="WB-PLAN-102"
    )
