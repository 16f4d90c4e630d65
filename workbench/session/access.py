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
        """The last sample, at once; empty before the first."""

    def sample(self) -> list[EngineVitals]:
        """Return the last sample, or a new one where that is older than a second."""

    def now(self) -> list[EngineVitals]:
        """Return a sample taken now."""


class Heard(Protocol):
    """The runs of the cluster; `RunDispatcher` is one."""

    @property
    def folders(self) -> Mapping[int, Path]:
        """Folders of all runs that the cluster has had, by number."""


class ClusterAccess(Protocol):
    """What the parts of a cluster ask of it; `Cluster` is one."""

    engine_set: Engines
    pool: EngineAllocator
    paused: Paused

    @property
    def vitals(self) -> Sampled:
        """How its engines are."""

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
        """What `devices` said."""

    @property
    def busy(self) -> Run | Task | None:
        """The current run or cell, or the last one."""

    @property
    def is_busy(self) -> bool:
        """Whether a cell or a run is going on."""

    @property
    def last_task(self) -> Task | None:
        """The cell that runs, or ran last, be it a run's or not."""

    def lease(self, workers: int) -> Leases:
        """Return the device of each of this many workers."""

    def start(self, plan: Plan) -> Run:
        """Start a validated plan; returns at once."""

    def claim(self) -> None:
        """Raise BusyError if the cluster is busy; have dead engines replaced."""

    def stop(self) -> None:
        """End every process of the cluster."""

    def release(self, reason: str) -> None:
        """Let go of a kept cluster; any other one is stopped."""
