"""Rows of `%cluster`: what each engine is, where, how big, doing what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from .cluster import Cluster


def rows(cluster: Cluster) -> list[dict[str, Any]]:
    """Return one mapping per engine: rank, pid, host, device, memory_bytes, state."""
    living, workers = cluster.ids, cluster.worker_ids
    leases = cluster.lease(max(1, len(workers))).leases
    found = []
    for engine in cluster.engines:
        rank = workers.index(engine.id) if engine.id in workers else None
        server = engine.id in living and rank is None
        found.append(
            {
                "engine": engine.id,
                "rank": rank,
                "pid": engine.pid,
                "host": engine.host,
                "device": ("server" if server else "") if rank is None else leases[rank].label,
                "memory_bytes": memory_bytes(engine.pid) if engine.id in living else None,
                "state": engine.state + (f" ({_shortly(engine.exit)})" if engine.exit else ""),
            }
        )
    return found


def _shortly(how: str) -> str:
    """Return how an engine ended, without what is suspected: `SIGKILL`."""
    return how.partition(" (")[0].removeprefix("killed by ")


def rejected(cluster: Cluster) -> int:
    """Return how many messages and connections did not know the cluster's or a run's key."""
    router = cluster._engines.router
    return int(router.rejected + sum(router.refused.values()))


def notes(cluster: Cluster) -> list[str]:
    """Return what stands below the table."""
    count = rejected(cluster)
    if not count:
        return []
    return [
        f"{count} messages or connections were refused: they did not know the key, or were sent "
        "again. Somebody else on this machine or network may be trying; docs/security.md."
    ]


def memory_bytes(pid: int) -> int | None:
    """Return the proportional set size of a process of this host, None where it cannot be read."""
    try:
        memory = psutil.Process(pid).memory_full_info()
    except (psutil.Error, OSError):
        return None
    return int(getattr(memory, "pss", 0) or memory.rss)
