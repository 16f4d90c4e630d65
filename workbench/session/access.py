"""The part of a cluster that its queue, debugger and status table use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo, Engines
    from ..cluster.vitals import EngineVitals
    from ..devices.leases import Leases
    from ..execution.allocator import EngineAllocator
    from ..execution.paused import Paused
    from ..execution.run import Run
    from ..execution.task import Task
    from ..shared.plan import Plan


class Sampled(Protocol):
    """The state of the engines; `vitals.Vitals` is one."""

    @property
    def latest(self) -> list[EngineVitals]:
        """The last sample, without waiting; empty before the first sample."""

    def sample(self) -> list[EngineVitals]:
        """Return the last sample, or a new sample if the last one is older than a second."""

    def now(self) -> list[EngineVitals]:
        """Return a sample taken now."""


class Heard(Protocol):
    """The runs of the cluster; `RunDispatcher` is one."""

    @property
    def folders(self) -> Mapping[int, Path]:
        """The folders of all runs of this cluster, by run number."""


class ClusterAccess(Protocol):
    """The methods of a cluster that its parts use; `Cluster` has them."""

    engine_set: Engines
    pool: EngineAllocator
    paused: Paused

    @property
    def vitals(self) -> Sampled:
        """The state of its engines."""

    @property
    def hearing(self) -> Heard:
        """Its runs."""

    @property
    def ids(self) -> list[int]:
        """Ids of the living engines."""

    @property
    def engines(self) -> list[EngineInfo]:
        """Every engine, dead ones too, by id."""

    @property
    def worker_ids(self) -> list[int]:
        """Ids of the living engines that run cells."""

    @property
    def framework(self) -> str:
        """The framework of engines, cells and runs that do not name one."""

    @property
    def devices_asked(self) -> str:
        """The value of the `devices` argument."""

    @property
    def busy(self) -> Run | Task | None:
        """The current run or cell, or the last one."""

    @property
    def is_busy(self) -> bool:
        """Whether a cell or a run is active."""

    @property
    def last_task(self) -> Task | None:
        """The current or the last cell, with or without a run."""

    def lease(self, workers: int) -> Leases:
        """Return the device of each of this many workers."""

    def start(self, plan: Plan) -> Run:
        """Start a validated plan; returns at once."""

    def claim(self) -> None:
        """Raise BusyError if the cluster is busy; otherwise replace dead engines."""

    def stop(self) -> None:
        """End every process of the cluster."""

    def release(self, reason: str) -> None:
        """Release a kept cluster; stop any other cluster."""
