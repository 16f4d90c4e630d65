"""Lends clusters to tests that do not have to start one themselves.

Most of a start's time is the import of the framework in the warm parent, and ipyparallel's
controller. Both are kept for the next test of this process. The rest is new each time: the
`Cluster`, its engines with ids from 0, and their store. A test starts its own cluster if it tests
the start or the end, or needs a warm parent with another environment.
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
    """Start a cluster, with kept parts of an earlier one if possible; no engine remains."""
    cluster = Cluster(workers, engines=take(), **settings)
    try:
        yield cluster
    finally:
        take_back(cluster)


def take() -> Engines | None:
    """Return parts with which a cluster can start: an engine pool without engines, or None."""
    while _spare:
        if (engines := _spare.pop()).reusable:
            return engines
        engines.stop()
    return None


def take_back(cluster: Cluster) -> None:
    """Stop a cluster, but keep the parts that the next cluster can use."""
    if not _is_quiet(cluster):
        cluster.stop()
    elif (engines := cluster.hand_back()) is not None:
        give(engines)


def give(engines: Engines) -> None:
    """Keep an engine pool without engines; one of each kind is enough."""
    if _spare or not engines.reusable:
        engines.stop()
    else:
        _spare.append(engines)


def mend() -> None:
    """Give every cluster of this process fresh engines if it lost one, or is still busy.

    A failed test leaves such clusters to the tests that follow, and to its own repetition.
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
    """Return the kept resources, for `leak_guard`."""
    kept = Kept()
    for engines in _spare:
        kept.add(engines.about(), str(engines.folder()))
    return kept


@atexit.register
def end() -> None:
    """Stop the kept parts."""
    while _spare:
        _spare.pop().stop()
