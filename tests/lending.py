"""Lends clusters to tests that need none of their own making.

Most of a start is the import of the framework in the warm parent, and ipyparallel's controller.
These are kept for the next test of the process that asks. What makes a cluster new is new each
time: the `Cluster`, its engines, with ids from 0, and the store they meet at. A test that looks at
starting or ending itself, or wants a warm parent that has another environment, starts its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from notebook_shell import soon

from workbench.cluster.engines import Engines, Listeners
from workbench.errors import WorkbenchError
from workbench.session import registry
from workbench.session.cluster import Cluster
from workbench.session.frameworks import default_framework

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
        if _is_whole(engines := _spare.pop()):
            return engines
        engines.stop()
    return None


def take_back(cluster: Cluster) -> None:
    """Stop a cluster, but keep what the next one can stand on."""
    engines = cluster._engines
    if not _is_whole(engines) or not _is_quiet(cluster):
        cluster.stop()
        return
    with patch.object(engines, "stop"):
        cluster.stop()
    try:
        _clear(engines)
    except BaseException:
        engines.stop()
        raise
    give(engines)


def give(engines: Engines) -> None:
    """Keep engines of which none was started; one of a kind is enough."""
    if _spare or not _is_whole(engines):
        engines.stop()
    else:
        _spare.append(engines)


def _is_whole(engines: Engines) -> bool:
    ground = engines._ground
    warm = ground.warm
    return (
        ground.forks and not ground.hosts and not ground.broken and not engines._stopping
        and not engines.kept and warm is not None and warm.alive
    )  # fmt: skip


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
    busy = cluster._busy
    if busy is None or busy.is_over:
        return True
    busy.stop() if hasattr(busy, "stop") else busy.interrupt()
    return soon(lambda: busy.is_over, SETTLE_S)


def _clear(engines: Engines) -> None:
    """End the engines and their store; nobody hears of it."""
    engines.listen(Listeners(message=lambda engine, message: None, death=lambda engine: None))
    engines.on_change = lambda: None
    engines.when_taken(lambda pid: None)
    ground = engines._ground
    for info in list(engines.engines.values()):
        if info.state != "dead":
            engines._lost(info, "its test is over")
            ground.end(info.id, info.pid)
    engines.engines.clear()
    engines._next_id = 0
    if ground.store.pid:  # the next cluster counts its process groups from 1 again
        with contextlib.suppress(ProcessLookupError):
            os.kill(ground.store.pid, signal.SIGKILL)
        assert soon(lambda: not ground.store.pid)
    engines.framework = default_framework()


@atexit.register
def end() -> None:
    """Stop what is kept."""
    while _spare:
        _spare.pop().stop()
