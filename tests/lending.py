"""Lends clusters to tests that need none of their own making.

Most of a start is the import of the framework in the warm parent, and ipyparallel's controller.
These are kept for the next test of the process that asks. What makes a cluster new is new each
time: the `Cluster`, its engines, with ids from 0, and the store they meet at. A test that looks at
starting or ending itself, or wants a warm parent that has another environment, starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from typing import Any

from leaks import Kept
from notebook_shell import soon

from workbench.cluster.engines import Engines
from workbench.errors import WorkbenchError
from workbench.execution import registry
from workbench.session.cluster import Cluster

_spare: list[Engines] = []
SETTLE_S = 10


@contextlib.contextmanager
def lent(workers: int, **settings: Any) -> Iterator[Cluster]:
    """Start a cluster, on what an earlier one stood on if there is such; no engine is left."""
    cluster = Cluster(workers, engines=take(), **settings)
    try:
        yield cluster
    finally:
        take_back(cluster)


def take() -> Engines | None:
    """Return what a cluster can be started on: engines of which none was started, or None."""
    while _spare:
        if (engines := _spare.pop()).reusable:
            return engines
        engines.stop()
    return None


def take_back(cluster: Cluster) -> None:
    """Stop a cluster, but keep what the next one can stand on."""
    if not _is_quiet(cluster):
        cluster.stop()
    elif (engines := cluster.hand_back()) is not None:
        give(engines)


def give(engines: Engines) -> None:
    """Keep engines of which none was started; one of a kind is enough."""
    if _spare or not engines.reusable:
        engines.stop()
    else:
        _spare.append(engines)


def mend() -> None:
    """Give every cluster of this process fresh engines if it lost one, or is still busy.

    A test that failed leaves them so to those that follow, and to itself when it is repeated.
    """
    for cluster in registry.running_clusters():
        if _is_quiet(cluster) and all(info.state == "idle" for info in cluster.engines):
            continue
        with contextlib.suppress(WorkbenchError):  # what fails here fails again in the test
            cluster.restart()


def _is_quiet(cluster: Cluster) -> bool:
    busy = cluster.busy
    if busy is None or busy.is_over:
        return True
    busy.stop() if hasattr(busy, "stop") else busy.interrupt()
    return soon(lambda: busy.is_over, SETTLE_S)


def kept_resources() -> Kept:
    """Return what is kept for the next who asks, for `leak_guard`."""
    kept = Kept()
    for engines in _spare:
        kept.add(engines.about(), str(engines.folder()))
    return kept


@atexit.register
def end() -> None:
    """Stop what is kept."""
    while _spare:
        _spare.pop().stop()
