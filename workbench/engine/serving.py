"""Where parameters are on servers: a worker's links to them, and what a server does meanwhile."""

from __future__ import annotations

from typing import Any

from . import settings
from .context import RunContext
from .links import Hub, connect


def open_links(run: RunContext, framework: Any) -> None:
    """Connect a worker to the servers of its run, for as long as the cell runs."""
    spec = run.spec
    if not (spec.servers and run.entry.links):
        return
    way = str(spec.options.get("link", "auto"))
    store = framework.open_store(spec)
    run.links = connect(store, spec.servers, spec.rank, bytes.fromhex(spec.key), way)
    run.closers += [link.close for link in run.links]


def serve(run: RunContext, framework: Any) -> None:
    """Be an engine that runs no cell: answer the workers until they are done or gone.

    Raises:
        LinkError: A worker's link says why a session could not be.
    """
    spec = run.spec
    strategy = settings.load_strategy(run)
    if not run.entry.links:  # the framework's own servers know how to meet
        strategy.serve()
        return
    assert spec.store is not None, "a run with links has a store"
    run.hub = hub = Hub(spec.world_size, bytes.fromhex(spec.key))
    try:
        hub.admit(framework.open_store(spec), spec.rank - spec.world_size, spec.store[0])
        strategy.serve()
    finally:
        strategy.close()
        hub.close()
        run.hub = None
