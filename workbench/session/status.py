"""Rows of `%cluster`: what each engine is, where, how big, doing what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..views.table import Table
from ..views.tables import cluster_table

if TYPE_CHECKING:
    from .access import ClusterAccess

RESIDENT = "Memory is the resident set: pages that engines share count in each of them."


def rows(cluster: ClusterAccess, *, now: bool = False) -> list[dict[str, Any]]:
    """Return one mapping per engine: engine, rank, pid, host, device, memory_bytes, and so on.

    Args:
        now: Take a fresh sample with everybody's memory, which may take some tenths of a second;
            else the last one does while it is younger than a second.
    """
    found = cluster.vitals.now() if now else cluster.vitals.sample()
    gpus = any(one.gpu_percent is not None or one.gpu_memory_bytes is not None for one in found)
    logged = any(one.log_line for one in found)
    return [
        {
            "engine": one.engine,
            "rank": one.rank,
            "pid": one.pid,
            "host": one.host,
            "device": one.device,
            "cpu_percent": one.cpu_percent,
            "memory_bytes": one.memory_bytes,
            **({"gpu_percent": one.gpu_percent} if gpus else {}),
            **({"gpu_memory_bytes": one.gpu_memory_bytes} if gpus else {}),
            "state": one.doing,
            **({"log_line": one.log_line} if logged else {}),
        }
        for one in found
    ]


def rejected(cluster: ClusterAccess) -> int:
    """Return how many messages and connections did not know the cluster's or a run's key."""
    router = cluster.engine_set.router
    return int(router.rejected + sum(router.refused.values()))


def notes(cluster: ClusterAccess) -> list[str]:
    """Return what stands below the table."""
    count = rejected(cluster)
    if not count:
        return []
    return [
        f"{count} messages or connections were refused: they did not know the key, or were sent "
        "again. Somebody else on this machine or network may be trying; docs/security.md."
    ]


def table(cluster: ClusterAccess) -> Table:
    """Return `%cluster`: a row per engine, sampled now."""
    found = rows(cluster, now=True)
    resident = any(one.memory_kind == "RSS" and one.memory_bytes for one in cluster.vitals.latest)
    said = [RESIDENT] if resident else []
    return cluster_table(found, notes=[*said, *notes(cluster)])
