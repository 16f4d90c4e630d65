"""The services for engines: folder, controller, client, warm parent, keeper; made in advance.

Local engines are forked from a warm parent where the system allows it. Everything else (another
system, a launcher the user named) is left to ipyparallel's own launchers, unchanged.

`Starter` starts engines: how they are forked or spawned, their ids, and how long it waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import ClusterError
from . import controller, folders, processes, progress
from .forkserver.parents import Parents, Store
from .hosts.places import HostedEngines
from .hosts.settings import LOCAL
from .hub import ENGINE_ARGS, Controller, WarmEngineSetLauncher
from .processes import Exit, is_halted

if TYPE_CHECKING:
    from .forkserver.client import WarmParent
    from .hosts.agents import Host
    from .hosts.settings import LaunchSettings

log = logging.getLogger("workbench.cluster")
PREPARED_POLL_S = 0.1
HEARD_S = 5.0
"""How long the report of a killed helper's end may take."""
DID_NOT_ANSWER = "Workbench ended the engine, because the engine did not answer"
NO_LOGS = "the engines' logs are empty"
ANEW = "run %cluster stop, then %cluster start"
START_AGAIN = f"if the log shows an error, correct its cause; then {ANEW}"


def _engines(ids: Sequence[int]) -> str:
    return f"Engine{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


class ClusterServices:
    """Everything of a cluster except its engines.

    Args:
        on_exit: `on_exit(engine, how)` when an engine's process ended or its heart stopped.
        on_helper_exit: `on_helper_exit(what, pid, how)` when another process of the cluster did.
        folder: Of a kept cluster that is taken over (`take_over`); by default a fresh one.

    Attributes:
        broken: Why engines can no longer be reached, in words; empty while they can.
    """

    def __init__(
        self,
        framework: str,
        launch: LaunchSettings,
        on_exit: Callable[[int, processes.Ending], None],
        on_helper_exit: Callable[[str, int, processes.Ending], None] = lambda what, pid, how: None,
        folder: Path | None = None,
    ) -> None:
        self.framework, self.launch_settings, self.launcher = framework, launch, launch.launcher
        self.folder = folder or folders.create()
        self.parents = Parents(self.launcher, self._child_left, self.folder)
        self.why_not = self.parents.why_not(framework)
        self.forks = not self.why_not
        self.hosted: HostedEngines | None = None
        if launch.has_agents:
            try:
                self.hosted = HostedEngines(
                    launch, self.folder, self._hosted_left, self._keeper_left
                )
            except BaseException:
                folders.remove(self.folder)
                raise
        self.address = launch.listen if self.hosted is None else self.hosted.address
        self.hub = Controller(
            self.folder,
            "" if self.forks or self.hosted else self.launcher,
            self.address,
            self._controller_left,
            self._unlisted,
            secret=launch.launcher != LOCAL,
            ports=launch.ports,
            options={} if launch.has_agents else launch.options,
        )
        keep = None if self.hosted is None else self.hosted.keep_store
        self.store = Store(self.parents, self.folder, self._child_left, keep)
        self.store.host, self.store.ports = self.address or self.store.host, launch.ports
        self.starter = Starter(
            self.hub, self.parents, self.forks, lambda end: str(self._ending(end)), self.hosted
        )
        self.broken = ""
        self._on_exit, self._on_helper_exit = on_exit, on_helper_exit
        self._memory = processes.MemoryWatch()
        self._ended_by_us: dict[int, str] = {}  # pid -> why
        self._stopping = False
        self._prepared: threading.Thread | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    @property
    def warm(self) -> WarmParent | None:
        """The warm parent of the default framework; None where engines are not forked."""
        return self.parents.find(self.framework)

    @property
    def reusable(self) -> bool:
        """Whether other engines can use these services: engines are forked here, and all works."""
        warm = self.warm
        return (
            self.forks and not self.address and not self.broken and not self._stopping
            and warm is not None and warm.alive
        )  # fmt: skip

    @property
    def client(self) -> Any:
        """The kernel's client of ipyparallel; None until it is connected."""
        return self.hub.client

    @property
    def socket(self) -> Any:
        """The stream that calls are sent on; None until it is connected."""
        return self.hub.socket

    def together(self) -> AbstractContextManager[None]:
        """Send this thread's requests to engines in the block together, at its end."""
        return self.hub.together()

    def can_fork(self, framework: str) -> bool:
        """Whether engines that have this framework can be forked where they are to be."""
        if self.hosted is not None:
            return self.hosted.has(framework)
        return self.forks and not self.parents.why_not(framework)

    def prefer(self, framework: str) -> None:
        """Make another framework the default; its parent is started at once."""
        self.framework = framework
        if self._prepared is not None and self.can_fork(framework):
            self.parents.start(framework)

    # -- before the engines ------------------------------------------------------------------------

    def prepare_in_background(self) -> None:
        """Begin `ensure` on a thread of its own; the warm parent first, it takes longest."""
        with self._lock:
            if self._prepared is not None:
                return
            if self.forks:
                self.parents.start(self.framework)
            self._prepared = threading.Thread(
                target=self._prepare, name="workbench-prewarm", daemon=True
            )
            self._prepared.start()

    def ensure(self, report: progress.Report = progress.quiet, engines: int = 1) -> None:
        """Wait until controller and client are up.

        Args:
            report: Told how far it is.
            engines: For how many hosts are asked for, where engines are on others.

        Raises:
            ClusterError: They did not start.
        """
        if self.hosted is not None:
            self.hosted.begin(engines, self.framework, report)
        self.prepare_in_background()
        if self.warm is not None and self.warm.alive:  # else another one is started below
            self.warm.soon()
        assert self._prepared is not None
        report(self._preparing())
        while self._prepared.is_alive():
            self._prepared.join(PREPARED_POLL_S)
            report(self._preparing())
        if self._error is not None:
            raise ClusterError(
                "ipyparallel's controller did not start.",
                seen=str(self._error),
                next_step=f"read the controller's log in {self.folder / 'log'}",
                code="WB-CLUSTER-011",
            ) from self._error

    def _preparing(self) -> progress.Progress:
        warm = self.warm
        imports = "" if warm is None or warm.ready.is_set() else self.framework
        return progress.preparing(self.hub.controller is not None, self.socket is not None, imports)

    def _prepare(self) -> None:
        try:
            if self.forks:  # before there is a controller that could be left behind
                self.parents.guard_dir(self.folder)
            self.hub.start(self.parents.guard if self.forks else lambda pid: None)
        except Exception as error:
            self._error = error

    # -- kept clusters -----------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return what `take_over` needs to know; see `folders.py`."""
        running = self.hub.controller
        return {
            "parents": {name: _who(pid) for name, pid in self.parents.living.items()},
            "controller": _who(running.pid) if running is not None else None,
            "ipyparallel": running.to_dict() if running is not None else None,
            **self.store.about(),
            **self.starter.about(),
        }

    def take_over(self, about: Mapping[str, Any], *, take: bool) -> None:
        """Use the services that another kernel has left.

        Raises:
            ClusterError: It is gone, or has an owner.
        """
        for framework, who in about["parents"].items():
            self.parents.adopt(framework, who, self.folder, about["idle_timeout_s"], take)
            take = True  # who owns one owns all
        self.starter.recall(about)
        self.store.recall(about)
        self._prepared = threading.Thread(
            target=self._reconnect, args=(about["ipyparallel"],), daemon=True
        )
        self._prepared.start()
        self.ensure()

    def _reconnect(self, saved: Mapping[str, Any]) -> None:
        try:
            self.hub.reconnect(saved)
        except Exception as error:
            self._error = error

    def release(self) -> None:
        """Release everything; it continues without this kernel."""
        self._stopping = True
        self.parents.release()
        self.hub.close()

    # -- engines -----------------------------------------------------------------------------------

    def launch(
        self,
        ids: Sequence[int],
        timeout_s: float,
        framework: str = "",
        report: progress.Report = progress.quiet,
    ) -> dict[int, str]:
        """Start engines (see `Starter.launch`); return their ipyparallel uuids.

        Args:
            framework: What they have imported when they start, where they are forked; by default
                the cluster's.
        """
        if self.hosted is not None:
            return self.starter.launch(ids, timeout_s, framework or self.framework, report)
        # Where the framework cannot be forked, engines import it when they need it.
        parent = framework if framework and self.can_fork(framework) else self.framework
        return self.starter.launch(ids, timeout_s, parent, report)

    def signal(self, engine: int, pid: int, sig: int) -> None:
        """Signal one engine: by pid where it is on this machine, else through its nanny."""
        if self.hosted is not None:
            by_us = DID_NOT_ANSWER if sig == signals.SIGKILL else ""
            self.hosted.signal(engine, sig, by_us)
            return
        forked = self.starter.pids.get(engine)
        if forked is not None:
            if sig == signals.SIGKILL:
                self._ended_by_us[forked] = DID_NOT_ANSWER
            self.parents.signal(forked, sig)
        elif self.launcher == LOCAL and pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        else:
            self.client.send_signal(sig, targets=engine, block=False)

    def host_of(self, engine: int) -> Host | None:
        """Return the host of an engine that an agent has started; None of any other."""
        return None if self.hosted is None else self.hosted.host_of(engine)

    def end(self, engine: int, pid: int) -> None:
        """End an engine for good and wait until it is gone."""
        self.signal(engine, pid, signals.SIGKILL)
        self.hub.await_unlisted([engine])

    # -- exits -------------------------------------------------------------------------------------

    def _child_left(self, end: Exit) -> None:
        how = self._ending(end)
        engine = self.starter.left(end.pid)
        if engine is not None:
            # First: ipyparallel, once told, ends the engine's calls with words of its own.
            self._on_exit(engine, how)
            self.hub.unlist(engine, self.starter.uuids.pop(end.pid, ""))
        elif end.pid == self.store.pid:
            self.store.left()
            if not self._stopping:
                self._on_helper_exit("the workers' rendezvous store", end.pid, how)

    def _hosted_left(self, engine: int, how: processes.Ending) -> None:
        self._on_exit(engine, how)
        self.hub.unlist(engine)

    def _keeper_left(self, how: processes.Ending) -> None:
        pid = self.store.pid
        self.store.left()
        if not self._stopping:
            self._on_helper_exit("the workers' rendezvous store", pid, how)

    def _controller_left(self, end: Exit) -> None:
        if not self._stopping:
            how = self._part_ending() or self._ending(end)
            self.broken = f"ipyparallel's controller (pid {end.pid}) died: {how}"
            self._on_helper_exit("ipyparallel's controller", end.pid, how)

    def _part_ending(self) -> processes.Ending | None:
        """Return the part whose loss ended the controller; None: it died itself."""
        lost = controller.lost_part(self.folder)
        if lost is None:
            return None
        who, code = f"the controller's {lost['name']} (pid {lost['pid']})", lost["code"]
        if code is None:
            return processes.Ending(what=f"{who} was suspended by SIGSTOP")
        end = Exit(lost["pid"], code if code >= 0 else None, -code if code < 0 else None)
        return processes.Ending(what=f"{who} ended: {self._ending(end)}")

    def look(self) -> None:
        """Find halted processes that do not answer, and give them up.

        A halted process has not died, so its end is not reported. Without the controller no engine
        can be reached; the other processes are replaced by new ones.
        """
        if self.hosted is not None:
            self.hosted.look()
        running = self.hub.controller
        if not self.broken and running is not None and is_halted(running.pid):
            self.broken = f"ipyparallel's controller (pid {running.pid}) was suspended by SIGSTOP"
        for pid in self._helpers():
            if pid and is_halted(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signals.SIGKILL)
                self._gone_soon(pid)

    def _helpers(self) -> list[int]:
        """Return the pids of helpers on this machine: a store that a host keeps is not here."""
        here = [] if self.hosted is not None else [self.store.pid]
        return [*self.parents.living.values(), *here]

    def _gone_soon(self, pid: int) -> None:
        """Wait until we have heard of the end of a helper."""
        end = time.monotonic() + HEARD_S
        while pid in self._helpers() and time.monotonic() < end:
            time.sleep(PREPARED_POLL_S)

    def _unlisted(self, engine: int) -> None:
        if engine not in self.starter.pids:
            self._on_exit(engine, processes.Ending(what="its heartbeat stopped"))

    def _ending(self, end: Exit) -> processes.Ending:
        memory = self._memory.seen(end.pid, end.signal == signals.SIGKILL)
        return processes.ending(end, memory, self._ended_by_us.pop(end.pid, ""))

    def log_path(self, engine: int) -> Path:
        """Where an engine's output goes."""
        return Path(self.starter.logs.get(engine, self.folder / "log" / f"engine-{engine}.log"))

    def stop(self) -> None:
        """End everything; safe to call twice."""
        self._stopping = True
        if self._prepared is not None:
            self._prepared.join(timeout=30)
        self.hub.close()
        self.store.stop()
        if self.hosted is not None:
            self.hosted.stop()
        self.hub.stop()
        self.parents.stop()
        # processes that lost their parent, and processes that cells started
        folders.end_family(self.folder)
        folders.remove(self.folder)


def _who(pid: int) -> dict[str, Any] | None:
    try:
        return folders.identity(pid)
    except psutil.Error:
        return None


REGISTER_POLL_S = 0.01
REGISTER_S = 60.0
"""How long an engine that an agent has forked may take to connect."""
LOG_CHARS = 2000


class Starter:
    """Starts the engines of one cluster, and knows what it has started.

    Args:
        forks: Whether they are forked from a warm parent; else ipyparallel's launcher starts them.
        words: Says how a process ended.
        hosted: What forks them on other hosts, if they are to be there.

    Attributes:
        pids: Processes of the engines that were forked, by engine id.
        uuids: What ipyparallel calls these engines, by pid; when the end of one is heard of, its id
            may be another's.
        logs: Where their output goes, by engine id.
        highest: The highest id that an engine has had; -1 before the first.
    """

    def __init__(
        self,
        hub: Controller,
        parents: Parents,
        forks: bool,
        words: Callable[[Exit], str],
        hosted: HostedEngines | None = None,
    ) -> None:
        self._hub, self._parents, self._forks, self._words = hub, parents, forks, words
        self._hosted = hosted
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
        sets: list[Any] = []
        if self._hosted is not None:
            self._on_hosts(self._hosted, ids, parent, time.monotonic() + timeout_s, report)
        else:
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
            if self._hosted is not None:
                gone = [i for i in missing if not self._hosted.pid_of(i)]
                if gone or time.monotonic() > end:
                    raise self._not_started(gone or missing, 0 if gone else timeout_s)
                continue
            if not dead and time.monotonic() <= end:
                continue
            missing = sorted(set(ids) - set(client.ids))
            logs = "\n".join(self._output(one, missing) for one in sets)
            how = [f"engine {i} {self._words(left)}" for i, left in dead.items()]
            for one in warm_sets:  # the engines that did start have no owner
                one.signal(signals.SIGKILL)
            raise ClusterError(
                f"{_engines(missing)} did not start"
                + (f": {', '.join(how)}." if how else f" within {timeout_s:g} s."),
                seen=logs or NO_LOGS,
                next_step=START_AGAIN if logs else ANEW,
                code="WB-CLUSTER-018",
            )

    def _on_hosts(
        self,
        hosted: HostedEngines,
        ids: Sequence[int],
        framework: str,
        until: float,
        report: progress.Report,
    ) -> None:
        """Start engines on other hosts and wait for them; on failure none of them is left."""
        hosted.order(self._hub.connection(), framework)
        hosted.await_hosts(report, until)
        report(progress.starting(len(ids)))
        try:
            hosted.fork(ids, framework)
            self.logs.update({i: str(hosted.log_path(i)) for i in ids})
            self._await(ids, [], REGISTER_S, report)
        except BaseException:
            hosted.abandon(ids)
            raise

    def _not_started(self, engines: Sequence[int], timeout_s: float) -> ClusterError:
        """Return the error for engines that ended, or were too late for a time limit."""
        logs = [Path(self.logs[i]) for i in engines if i in self.logs]
        said = "".join(one.read_text(errors="replace") for one in logs if one.exists())
        return ClusterError(
            f"{_engines(engines)} did not connect to the notebook within {timeout_s:g} s."
            if timeout_s
            else f"{_engines(engines)} ended before connecting to the notebook.",
            seen=said[-LOG_CHARS:] or NO_LOGS,
            next_step=START_AGAIN if said else ANEW,
            code="WB-CLUSTER-070",
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
