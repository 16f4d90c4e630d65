"""The store that the workers of a cluster meet at: a TCPStore in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal as signals
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ..errors import ClusterError
from . import deaths
from .parents import Parents
from .processes import ExitCallback, is_halted
from .warm_client import start_keeper

END_S = 10.0
"""How long a keeper that was killed may take to be gone."""


class Store:
    """The keeper of one cluster's store, started when the first process group needs it.

    Args:
        folder: The cluster's.
        on_exit: Told how the keeper ended, where no warm parent does that.

    Attributes:
        pid: Its process; 0 while there is none.
        process: The same, where it was not forked from a warm parent.
    """

    def __init__(self, parents: Parents, folder: Path, on_exit: ExitCallback) -> None:
        self._parents, self._folder, self._on_exit = parents, folder, on_exit
        self._address: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self.pid = 0
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return its host and port; a keeper is started where there is none, or a halted one."""
        with self._lock:
            if self.pid and is_halted(self.pid):
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signals.SIGKILL)
                self._gone.wait(END_S)
            if self._address is None:
                self._address = self._start()
            return self._address

    def _start(self) -> tuple[str, int]:
        self._gone = threading.Event()
        # The store is torch's: a parent that has imported it hosts one at once.
        warm = self._parents.find("torch")
        if warm is not None:
            self.pid, host, port = warm.fork_keeper(str(self._folder / "log" / "keeper.log"))
        else:
            self.process, host, port = start_keeper(str(self._folder))
            self.pid = self.process.pid
            deaths.watch(self.pid, self._on_exit)
        return host, port

    def left(self) -> None:
        """Its process ended: the next run gets a fresh one."""
        self._address, self.pid = None, 0
        self._gone.set()

    def end(self) -> None:
        """End the keeper and wait until it is gone: process groups are counted anew.

        Raises:
            ClusterError: It does not end.
        """
        with self._lock:
            pid, gone = self.pid, self._gone
        if not pid:
            return
        self._parents.signal(pid, signals.SIGKILL)
        self.stop()
        if not gone.wait(END_S):
            raise ClusterError(
                "The store that workers meet at does not end.",
                seen=f"pid {pid}, for {END_S:g} s",
                next_step="%cluster stop, then start again",
                code="WB-CLUSTER-019",
            )

    def about(self) -> dict[str, Any]:
        """Return what another kernel must know of it, for `recall`."""
        with self._lock:
            return {"store": self._address, "store_pid": self.pid}

    def recall(self, about: Mapping[str, Any]) -> None:
        """Go on with the one that another kernel started, if it lives."""
        if about["store"] is not None and psutil.pid_exists(int(about["store_pid"])):
            host, port = about["store"]
            self._address, self.pid = (str(host), int(port)), int(about["store_pid"])

    def stop(self) -> None:
        """End the keeper, where no warm parent does that."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=5)
            self.process = None
