"""Starting engines: who forks or spawns them, under which id, how long they are waited for."""

from __future__ import annotations

import contextlib
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ClusterError
from . import progress
from .hub import Hub
from .launcher import ENGINE_ARGS, WarmEngineSetLauncher
from .parents import Parents
from .processes import Exit

REGISTER_POLL_S = 0.01
LOG_CHARS = 2000


class Starter:
    """Starts the engines of one cluster, and knows what it has started.

    Args:
        forks: Whether they are forked from a warm parent; else ipyparallel's launcher starts them.
        words: Says how a process ended.

    Attributes:
        pids: Processes of the engines that were forked, by engine id.
        uuids: What ipyparallel calls these engines, by pid; when the end of one is heard of, its id
            may be another's.
        logs: Where their output goes, by engine id.
        highest: The highest id that an engine has had; -1 before the first.
    """

    def __init__(
        self, hub: Hub, parents: Parents, forks: bool, words: Callable[[Exit], str]
    ) -> None:
        self._hub, self._parents, self._forks, self._words = hub, parents, forks, words
        self.pids: dict[int, int] = {}
        self.uuids: dict[int, str] = {}
        self.logs: dict[int, str] = {}
        self.highest = -1

    def launch(
        self,
        ids: Sequence[int],
        timeout_s: float,
        parent: str,
        report: progress.Report,
    ) -> dict[int, str]:
        """Start engines and wait until they have registered; return their ipyparallel uuids.

        An id that a dead engine had is waited for until the hub has let go of it.

        Args:
            parent: Framework of the warm parent that forks them, where that is done.
            report: Told how far it is, on this and on other threads.

        Raises:
            ClusterError: They did not come up; shows the end of their logs.
        """
        self._hub.await_unlisted(ids)
        # The hub keeps an id for an engine that asked for it and died before its heart was heard,
        # and would give another one to who asks next; it is told even where clients see none.
        if used := [i for i in ids if i <= self.highest]:
            self._hub.make_room(used)
        settings = self._launcher_settings(ids, parent, report)
        sets = [self._start_set(one) for one in settings]
        warm_sets = [one for one in sets if isinstance(one, WarmEngineSetLauncher)]
        for one in warm_sets:
            self.logs.update(one.log_paths)
        self._await(ids, sets, timeout_s, report)
        for one in warm_sets:
            self.pids.update(one.pids)
        self.highest = max(self.highest, *ids)
        found = self._hub.uuids(ids)
        self.uuids.update({self.pids[i]: uuid for i, uuid in found.items() if i in self.pids})
        return found

    def _await(
        self, ids: Sequence[int], sets: Sequence[Any], timeout_s: float, report: progress.Report
    ) -> None:
        """Wait until engines have registered; those that did are ended where another one failed."""
        client, end = self._hub.client, time.monotonic() + timeout_s
        warm_sets = [one for one in sets if isinstance(one, WarmEngineSetLauncher)]
        while missing := sorted(set(ids) - set(client.ids)):
            report(progress.connected(len(ids) - len(missing), len(ids)))
            self._hub.await_change(REGISTER_POLL_S * 10)
            dead = {i: left for one in warm_sets for i, left in one.exits.items()}
            if not dead and time.monotonic() <= end:
                continue
            missing = sorted(set(ids) - set(client.ids))
            logs = "\n".join(self._output(one, missing) for one in sets)
            how = [f"engine {i} {self._words(left)}" for i, left in dead.items()]
            for one in warm_sets:  # those that did start are nobody's
                one.signal(signals.SIGKILL)
            raise ClusterError(
                f"Engines {missing} did not start"
                + (f": {', '.join(how)}." if how else f" within {timeout_s:g} s."),
                seen=logs or "nothing in their logs",
                next_step="%cluster stop, then start again",
                code="WB-CLUSTER-018",
            )

    def _output(self, engine_set: Any, missing: Sequence[int]) -> str:
        """Return the ends of the logs of missing engines, where each has its own."""
        if not isinstance(engine_set, WarmEngineSetLauncher):
            return str(engine_set.get_output()[-LOG_CHARS:])
        ends = []
        for engine in missing:
            with contextlib.suppress(OSError):
                text = Path(self.logs[engine]).read_text(errors="replace")
                ends.append(f"engine {engine}: {text[-LOG_CHARS:]}")
        return "\n".join(ends)

    def _start_set(self, settings: dict[str, Any]) -> Any:
        cluster = self._hub.cluster
        return cluster.engines[cluster.start_engines_sync(**settings)]

    def _launcher_settings(
        self, ids: Sequence[int], parent: str, report: progress.Report
    ) -> list[dict[str, Any]]:
        """Return the arguments of each engine set that is to be started; waits for the parent."""
        if self._forks:
            found = self._parents.find(parent)
            if found is None or not found.ready.is_set():
                report(progress.importing(parent))
            warm = self._parents.ready(parent)
            report(progress.starting(len(ids)))
            settings = {"n": len(ids), "warm": warm, "ids": list(ids)}
            settings["on_fork"] = lambda done: report(progress.forked(done, len(ids)))
            return [{**settings, "engine_args": list(ENGINE_ARGS)}]
        report(progress.starting(len(ids)))
        if min(ids) > self.highest:
            return [{"n": len(ids)}]  # the hub counts on by itself
        return [{"n": 1, "engine_args": [f"--IPEngine.id={i}"]} for i in ids]

    def left(self, pid: int) -> int | None:
        """Return the engine whose process ended, and forget it; None where it was none."""
        engine = next((i for i, known in self.pids.items() if known == pid), None)
        if engine is not None:
            self.pids.pop(engine)
        return engine

    # -- kept clusters -----------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return what another kernel must know, for `recall`."""
        logs = {str(engine): path for engine, path in self.logs.items()}
        return {"highest": self.highest, "logs": logs}

    def recall(self, about: Mapping[str, Any]) -> None:
        """Know what another kernel has started."""
        self.pids = {int(i): int(one["pid"]) for i, one in about["engines"].items()}
        self.logs = {int(i): str(path) for i, path in about["logs"].items()}
        self.highest = int(about["highest"])
        self.uuids = {int(one["pid"]): str(one["uuid"]) for one in about["engines"].values()}
