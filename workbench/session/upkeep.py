"""What is done with a cluster's engines beside running something: more of them, logs, variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..cluster.devices import Leases
from ..cluster.engines import EngineInfo, Engines
from .checks import check_arrived, check_framework, check_travels
from .paused import Paused
from .postmortem import PostMortem
from .requests import FREE, PULL, PUSH
from .stacks import Stacks, gather
from .turns import Turns, begins
from .vitals import Vitals


class Upkeep(Turns):
    """The engines of a cluster, looked at and looked after; `cluster.Cluster` is the rest of it."""

    vitals: Vitals
    paused: Paused
    _engines: Engines

    @property
    def ids(self) -> list[int]:
        """Ids of the living engines."""
        return self._engines.ids

    @property
    def engines(self) -> list[EngineInfo]:
        """Every engine, dead ones too, by id."""
        return self._pool.all

    @property
    def worker_ids(self) -> list[int]:
        """Ids of the living engines that run cells; the others were started as servers."""
        return self._pool.worker_ids

    @property
    def devices_asked(self) -> str:
        """What `devices` said."""
        return self._pool.devices_asked

    def lease(self, workers: int) -> Leases:
        """Return which device each of so many workers gets; the same answer every time."""
        return self._pool.lease(workers)

    @property
    def framework(self) -> str:
        """The framework of engines, cells and runs that name none."""
        return self._engines.framework

    def use(self, framework: str) -> None:
        """Let engines, cells and runs that name no framework have this one from now on.

        Raises:
            ClusterError: It is not installed.
        """
        check_framework(framework)
        self._engines.framework = framework

    @begins
    def add(self, count: int, framework: str = "") -> list[int]:
        """Start more engines; return their ids."""
        return self._pool.add(count, framework)

    def restart(self, ids: Iterable[int] | None = None) -> list[int]:
        """Replace engines (all, or those named) by fresh ones under the same ids.

        What they are doing ends: a run or a cell on them fails.

        Raises:
            ClusterError: There is no engine of that id.
        """
        self._pool.drop_group()
        return self._engines.restart(list(ids) if ids is not None else [e.id for e in self.engines])

    @begins
    def free(self) -> dict[int, int]:
        """Drop the cells' variables on all engines; return how many names each dropped.

        Raises:
            RunError: A cell or a run is going on.
        """
        self._claim()
        return self._engines.call(self.ids, FREE)

    def logs(self, engine: int) -> str:
        """The last lines of an engine's log.

        Raises:
            ClusterError: There is no engine of that id.
        """
        self._engines.known(engine)
        return self._engines.log_tail(engine)

    def stacks(self, ids: Iterable[int] | None = None) -> Stacks:
        """Return where the engines' threads are, now; also while a cell or a run goes on.

        Raises:
            ClusterError: There is no engine of that id.
        """
        return gather(self, ids)

    def debug(self, rank: int | None = None) -> PostMortem:
        """Return the frames of the rank whose cell failed (by default the first to fail).

        Raises:
            RunError: It keeps no failure, or a cell is going on.
        """
        from .debug import post_mortem

        return post_mortem(self, rank)

    def status(self) -> Any:
        """A table: a row per engine."""
        from .status import table

        return table(self)

    @property
    def rejected(self) -> int:
        """Messages and connections that were refused: they knew no key, or were sent again."""
        from .status import rejected

        return rejected(self)

    @begins
    def push(self, values: Mapping[str, Any], ids: Sequence[int] | None = None) -> None:
        """Set variables on engines (all, or those named).

        Raises:
            RunError: A cell or a run is going on.
            PlanError: A value cannot be sent.
        """
        self._claim()
        check_travels(values)
        self._engines.call(ids or self.ids, PUSH, (dict(values),))

    @begins
    def pull(
        self, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return variables of engines, by engine id.

        Raises:
            RunError: A cell or a run is going on, or a value cannot be had here.
        """
        self._claim()
        found = self._engines.fetch(ids or self.ids, PULL, (list(names),))
        check_arrived(found)
        return found
