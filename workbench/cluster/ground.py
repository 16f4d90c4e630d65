"""What engines stand on: folder, controller, client, warm parent, keeper; prepared ahead of need.

Local engines are forked from a warm parent where the system allows it. Everything else (another
system, a launcher the user named) is left to ipyparallel's own launchers, unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal as signals
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipyparallel
from traitlets.config import Config

from ..errors import ClusterError
from . import profile
from .launcher import CLUSTER_SETTINGS, ENGINE_ARGS, WarmEngineSetLauncher
from .parents import Parents
from .warm_client import Exit, WarmParent, start_keeper

log = logging.getLogger("workbench.cluster")
REGISTER_POLL_S = 0.01


class Ground:
    """Everything of a cluster but its engines.

    Args:
        on_exit: `on_exit(engine, how)` when an engine's process ended or its heart stopped.
    """

    def __init__(
        self, framework: str, launcher: str, hosts: str, on_exit: Callable[[int, str], None]
    ) -> None:
        self.framework, self.launcher, self.hosts = framework, launcher, hosts
        self.parents = Parents(launcher, self._child_left)
        self.why_not = self.parents.why_not(framework)
        self.forks = not self.why_not
        self.folder: Path = profile.create()
        self.client: Any = None
        self.socket: Any = None
        self.cluster: Any = None
        self._on_exit = on_exit
        self._pids: dict[int, int] = {}
        self._highest = -1
        self._logs: dict[int, str] = {}
        self._keeper: subprocess.Popen[bytes] | None = None
        self._store: tuple[str, int] | None = None
        self._prepared: threading.Thread | None = None
        self._error: Exception | None = None
        self._changed = threading.Event()
        self._lock = threading.Lock()

    @property
    def warm(self) -> WarmParent | None:
        """The warm parent of the default framework; None where engines are not forked."""
        return self.parents.find(self.framework)

    def can_fork(self, framework: str) -> bool:
        """Whether engines that have this framework can be forked here."""
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

    def ensure(self) -> None:
        """Wait until controller and client are up.

        Raises:
            ClusterError: They did not come up.
        """
        self.prepare_in_background()
        if self.warm is not None:
            self.warm.soon()
        assert self._prepared is not None
        self._prepared.join()
        if self._error is not None:
            raise ClusterError(
                "The cluster's controller did not start.",
                seen=str(self._error),
                next_step=f"its log is in {self.folder / 'log'}",
            ) from self._error

    def _prepare(self) -> None:
        quiet = logging.getLogger("workbench.ipyparallel")
        quiet.setLevel(logging.CRITICAL)
        settings: dict[str, Any] = {**CLUSTER_SETTINGS}
        if not self.forks:
            settings["engines"] = self.launcher
        if self.hosts:
            settings["controller_ip"] = self.hosts
        try:
            if self.forks:  # before there is a controller that could be left behind
                self.parents.guard_dir(self.folder)
            self.cluster = ipyparallel.Cluster(
                profile_dir=str(self.folder),
                cluster_id="",
                config=Config(),
                log=quiet,
                n=0,
                shutdown_atexit=False,
                **settings,
            )
            self.cluster.start_controller_sync()
            if self.forks:
                self.parents.guard(self.cluster.controller.pid)
            self.client = self.cluster.connect_client_sync()
            self.client._registration_callbacks.append(self._registration)
            # The stream that direct views send on; sending on the bare socket below it would eat
            # the wake-up of a reply that arrives meanwhile.
            self.socket = self.client._mux_stream
        except Exception as error:
            self._error = error

    # -- engines -----------------------------------------------------------------------------------

    def launch(self, ids: Sequence[int], timeout_s: float, framework: str = "") -> dict[int, str]:
        """Start engines and wait until they have registered; return their ipyparallel uuids.

        An id that a dead engine had is waited for until the hub has let go of it.

        Args:
            framework: What they have imported when they start, where they are forked; by default
                the cluster's.

        Raises:
            ClusterError: They did not come up; shows the end of their logs.
        """
        self._wait_unregistered(ids)
        settings = self._launcher_settings(ids, framework or self.framework)
        sets = [self._start_set(one) for one in settings]
        warm_sets = [one for one in sets if isinstance(one, WarmEngineSetLauncher)]
        for one in warm_sets:
            self._logs.update(one.log_paths)
        end = time.monotonic() + timeout_s
        while not set(ids) <= set(self.client.ids):
            self._changed.wait(REGISTER_POLL_S * 10)
            self._changed.clear()
            dead = any(one.exits for one in warm_sets)
            if dead or time.monotonic() > end:
                missing = sorted(set(ids) - set(self.client.ids))
                logs = "\n".join(one.get_output()[-2000:] for one in sets)
                raise ClusterError(
                    f"Engines {missing} did not start"
                    + ("." if dead else f" within {timeout_s:g} s."),
                    seen=logs or "nothing in their logs",
                    next_step="%cluster stop, then start again",
                )
        for one in warm_sets:
            self._pids.update(one.pids)
        self._highest = max(self._highest, *ids)
        known = self.client._engines
        return {i: str(known[i]) for i in ids}

    def _start_set(self, settings: dict[str, Any]) -> Any:
        return self.cluster.engines[self.cluster.start_engines_sync(**settings)]

    def _launcher_settings(self, ids: Sequence[int], framework: str) -> list[dict[str, Any]]:
        """Return the arguments of each engine set that is to be started."""
        if self.forks:
            # Where the framework cannot be forked, engines import it when they need it.
            warm = self.parents.ready(framework if self.can_fork(framework) else self.framework)
            engine_args = list(ENGINE_ARGS)
            return [{"n": len(ids), "warm": warm, "ids": list(ids), "engine_args": engine_args}]
        if min(ids) > self._highest:
            return [{"n": len(ids)}]  # the hub counts on by itself
        return [{"n": 1, "engine_args": [f"--IPEngine.id={i}"]} for i in ids]

    def signal(self, engine: int, pid: int, sig: int) -> None:
        """Signal one engine: by pid where it is on this machine, else through its nanny."""
        if engine in self._pids:
            self.parents.signal(self._pids[engine], sig)
        elif self.launcher == "local" and pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        else:
            self.client.send_signal(sig, targets=engine, block=False)

    def end(self, engine: int, pid: int) -> None:
        """End an engine for good and wait until it is gone."""
        self.signal(engine, pid, signals.SIGKILL)
        self._wait_unregistered([engine])

    def _wait_unregistered(self, engines: Sequence[int]) -> None:
        end = time.monotonic() + 10
        while set(engines) & set(self.client.ids) and time.monotonic() < end:
            self._unregister(engines)
            self._changed.wait(0.1)
            self._changed.clear()

    def _unregister(self, engines: Sequence[int]) -> None:
        """Tell the hub that engines are gone, as ipyparallel's nanny would; heartbeats are slow."""
        for engine in engines:
            # Engines that end after the client was closed have no hub to be struck off from.
            if not self.client._closed and engine in self.client.ids:
                self.client._send(
                    self.client._query_socket, "unregistration_request", {"id": engine}
                )

    # -- exits -------------------------------------------------------------------------------------

    def _child_left(self, end: Exit) -> None:
        engine = next((i for i, pid in self._pids.items() if pid == end.pid), None)
        if engine is not None:
            self._pids.pop(engine)
            self._unregister([engine])
            self._on_exit(engine, end.text)

    def _registration(self, event: dict[str, Any]) -> None:
        self._changed.set()
        if event["event"] == "unregister" and event["id"] not in self._pids:
            self._on_exit(int(event["id"]), "its heart stopped")

    # -- the store ---------------------------------------------------------------------------------

    def store(self) -> tuple[str, int]:
        """Return host and port of the TCPStore's keeper, started on first use."""
        with self._lock:
            if self._store is None:
                # The store is torch's: a parent that has imported it hosts one at once.
                warm = self.parents.find("torch")
                if warm is not None:
                    _, host, port = warm.fork_keeper(str(self.folder / "log" / "keeper.log"))
                else:
                    self._keeper, host, port = start_keeper()
                self._store = (host, port)
            return self._store

    def log_path(self, engine: int) -> Path:
        """Where an engine's output goes."""
        return Path(self._logs.get(engine, self.folder / "log" / f"engine-{engine}.log"))

    def stop(self) -> None:
        """End everything; safe to call twice."""
        if self._prepared is not None:
            self._prepared.join(timeout=30)
        if self.client is not None:
            with contextlib.suppress(Exception):
                self.client.close(linger=0)
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait(timeout=5)
        if self.cluster is not None:
            with contextlib.suppress(Exception):
                if not self.forks:
                    self.cluster.stop_engines_sync()
                self._end_controller()
        self.parents.stop()
        profile.remove(self.folder)

    def _end_controller(self) -> None:
        controller = self.cluster.controller
        if controller is not None and controller.pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller.pid, signals.SIGTERM)
            with contextlib.suppress(Exception):
                self.cluster.stop_controller_sync()
