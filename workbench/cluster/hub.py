"""ipyparallel's controller of one cluster, and this kernel's client of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ipyparallel
import zmq

from . import controller, deaths
from .calls import Gathering
from .launcher import CLUSTER_SETTINGS
from .pending import NoAnswerError
from .processes import Exit

REAPED_S = 0.5
UNLISTED_S = 10.0
"""How long the hub is given to let go of engines that are gone."""
ANSWER_S = 20.0
ATTEMPT_S, CONNECT_S = 10.0, 90.0
"""How long one request to connect waits, and all of them: a class whose controllers start at once
on a few cores takes longer than ipyparallel's 10 s."""


class Hub:
    """Starts or finds the controller, connects to it, and says who is registered there.

    Args:
        folder: The cluster's.
        launcher: One of ipyparallel's, that starts engines; empty where engines are forked.
        interface: Where the controller listens; empty: on this machine only.
        on_left: Told when the controller's process ended.
        on_unlisted: Told of an engine that is no longer registered.

    Attributes:
        cluster: ipyparallel's cluster; None until `start` or `reconnect`.
        client: This kernel's client; None until it is connected.
        socket: The stream that calls are sent on; None until then.
    """

    def __init__(
        self,
        folder: Path,
        launcher: str,
        interface: str,
        on_left: Callable[[Exit], None],
        on_unlisted: Callable[[int], None],
    ) -> None:
        self.cluster: Any = None
        self.client: Any = None
        self.socket: Any = None
        self._folder, self._launcher, self._interface = folder, launcher, interface
        self._on_left, self._on_unlisted = on_left, on_unlisted
        self._changed, self._ended = threading.Event(), threading.Event()

    @property
    def controller(self) -> Any:
        """The controller's launcher, which has its `pid`; None before it was started."""
        return None if self.cluster is None else self.cluster.controller

    def start(self, guard: Callable[[int], None]) -> None:
        """Start the controller and connect.

        Args:
            guard: Given the controller's pid as soon as there is one.
        """
        self.cluster = self._ipyparallel()
        self.cluster.start_controller_sync()
        deaths.watch(self.cluster.controller.pid, self._left)
        guard(self.cluster.controller.pid)
        self._connect()

    def reconnect(self, saved: Mapping[str, Any]) -> None:
        """Connect to the controller that another kernel left.

        Args:
            saved: What its launcher's `to_dict` said.
        """
        self.cluster = cluster = self._ipyparallel()
        cluster.controller = cluster.controller_launcher_class.from_dict(saved, parent=cluster)
        deaths.watch(cluster.controller.pid, self._left)
        self._connect()

    def _ipyparallel(self) -> Any:
        quiet = logging.getLogger("workbench.ipyparallel")
        quiet.setLevel(logging.CRITICAL)
        settings: dict[str, Any] = {**CLUSTER_SETTINGS}
        if self._launcher:
            settings["engines"] = self._launcher
        if self._interface:
            settings["controller_ip"] = self._interface
        return ipyparallel.Cluster(
            profile_dir=str(self._folder),
            cluster_id="",
            config=controller.config(self._folder),
            log=quiet,
            n=0,
            shutdown_atexit=False,
            **settings,
        )

    def _connect(self) -> None:
        end = time.monotonic() + CONNECT_S
        while self.client is None:
            try:
                self.client = self.cluster.connect_client_sync(timeout=ATTEMPT_S)
            except TimeoutError:  # noqa: PERF203 - the wait is what costs
                if self._ended.is_set() or time.monotonic() > end:
                    raise
        self.client._registration_callbacks.append(self._registration)
        # The stream that direct views send on; sending on the bare socket below it would eat
        # the wake-up of a reply that arrives meanwhile.
        self.socket = stream = self.client._mux_stream
        flush = partial(stream.flush, zmq.POLLOUT)
        self.client._io_loop = Gathering(self.client._io_loop, flush)

    # -- who is registered -------------------------------------------------------------------------

    def uuids(self, engines: Sequence[int]) -> dict[int, str]:
        """Return the ipyparallel uuids of registered engines."""
        known = self.client._engines
        return {i: str(known[i]) for i in engines}

    def await_change(self, timeout_s: float) -> None:
        """Wait until somebody registers or is struck off, or time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def await_unlisted(self, engines: Sequence[int]) -> None:
        """Wait until the hub has let go of engines, for `UNLISTED_S` at most."""
        end = time.monotonic() + UNLISTED_S
        while set(engines) & set(self.client.ids) and time.monotonic() < end:
            for engine in engines:
                self.unlist(engine)
            self.await_change(0.1)

    def unlist(self, engine: int, uuid: str = "") -> None:
        """Tell the hub that an engine is gone, as ipyparallel's nanny would; heartbeats are slow.

        Args:
            uuid: Of the engine that is meant: another one may have its id by now.
        """
        # Engines that end after the client was closed have no hub to be struck off from.
        if self.client._closed:
            return
        listed = self.client._engines.get(engine)
        if listed is not None and (not uuid or listed == uuid):
            self._strike_off(engine)

    def make_room(self, engines: Sequence[int]) -> None:
        """Have the hub forget engines, also those that clients do not see; returns when it has.

        A request that the hub reads later would strike off the next engine of that id.

        Raises:
            NoAnswerError: The hub does not answer.
        """
        for engine in engines:
            self._strike_off(engine)
        # Any request with a reply will do: it is read after those that were sent before it.
        answer = self.client._send(self.client._query_stream, "connection_request")
        if not answer.wait(ANSWER_S):
            raise NoAnswerError(
                "The cluster's controller does not answer.",
                seen=f"nothing for {ANSWER_S:g} s",
                next_step="%cluster stop, then start again",
                code="WB-CLUSTER-012",
            )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Send what this thread asks for in the block together, at its end (`calls.Gathering`)."""
        client = self.client
        return contextlib.nullcontext() if client is None else client._io_loop.together()

    def _strike_off(self, engine: int) -> None:
        # By the stream: sending on the socket below it would eat the wake-up of a reply.
        self.client._send(self.client._query_stream, "unregistration_request", {"id": engine})

    def _registration(self, event: dict[str, Any]) -> None:
        self._changed.set()
        if event["event"] == "unregister":
            self._on_unlisted(int(event["id"]))

    # -- the end -----------------------------------------------------------------------------------

    def _left(self, end: Exit) -> None:
        self._ended.set()
        if end.code is None and end.signal is None:  # ipyparallel has reaped it before we looked
            with contextlib.suppress(Exception):
                running = self.cluster.controller
                # Of two that wait for a process at once, who comes second learns no code.
                running._wait_thread.join(REAPED_S)
                code = running.process.wait(timeout=REAPED_S)
                end = Exit(end.pid, code if code >= 0 else None, -code if code < 0 else None)
        self._on_left(end)

    def close(self) -> None:
        """Disconnect; the controller goes on."""
        if self.client is not None and not self.client._closed:
            with contextlib.suppress(Exception):
                # Its loop closes the sockets before `close` does, and what they still have for a
                # controller that is gone would keep them for ever.
                self.client._io_loop.add_callback(self._drop_unsent)
                self.client.close(linger=0)

    def _drop_unsent(self) -> None:
        for name in self.client.trait_names():
            if name.endswith("_socket") and (socket := getattr(self.client, name)) is not None:
                socket.setsockopt(zmq.LINGER, 0)

    def stop(self) -> None:
        """End the controller, and engines that ipyparallel started."""
        if self.cluster is None:
            return
        with contextlib.suppress(Exception):
            if self._launcher:
                self.cluster.stop_engines_sync()
            running = self.cluster.controller
            if running is not None and running.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.pid, signals.SIGTERM)
                with contextlib.suppress(Exception):
                    self.cluster.stop_controller_sync()
        _end_thread(self.cluster)


def _end_thread(cluster: Any) -> None:
    """End the thread on which ipyparallel runs what is called within a running event loop.

    It would live as long as the kernel, with its loop's files.
    """
    thread, loop = getattr(cluster, "_async_thread", None), getattr(cluster, "_thread_loop", None)
    if thread is None or loop is None or thread is threading.current_thread():
        return
    loop.add_callback(loop.stop)
    thread.join(REAPED_S)
    if not thread.is_alive():
        with contextlib.suppress(Exception):
            loop.close(all_fds=True)
