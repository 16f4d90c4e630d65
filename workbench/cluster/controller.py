"""ipyparallel's controller, which ends by itself when the cluster has no owner left.

The warm parent ends the controller when the kernel has ended. This program covers the case that the
warm parent has ended too, or never existed. The cluster's folder names the process that must be
alive while the cluster is in use (`own`, in `folders.py`), and the controller checks that it is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq
from traitlets.config import Config

from ..shared import cluster_env
from . import folders
from .processes import is_halted

LOOK_S = 1.0
TOPICS = (b"heartmonitor", b"tracktask", b"intask", b"outtask", b"inbcast", b"outbcast")
"""The messages that the hub receives.

Requests to single engines and their outputs are not sent to it. It would keep unused records of
them, which took longer than an empty cell on the engines.
"""
PATIENCE = 3
"""So many checks in a row must find the owner dead, because a successor may be about to take over.

The same number must find a part of the controller halted.
"""
LOST = "controller-lost.json"
"""A file in the cluster's folder: the part whose loss ended the controller (`lost_part`)."""
PART_LOST = 70
"""The controller's exit code in this case."""


def config(folder: Path) -> Config:
    """Return ipyparallel's settings for Workbench's controller, and its processes' mark."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.append({root!r}); "
        "from workbench.cluster.controller import main; main()  # an ipyparallel.controller"
    )
    return Config(
        {
            "BaseLauncher": {"environment": {cluster_env.MARK: str(folder)}},
            "LocalControllerLauncher": {"controller_cmd": [sys.executable, "-c", code]},
        }
    )


_abandoned = threading.Event()
"""Set when the cluster has no owner left: then the controller's parts end because it ends."""


def watch(folder: Path) -> None:
    """Wait until the folder's owner has ended, then end this process group and the folder."""
    misses = 0
    while misses < PATIENCE:
        time.sleep(LOOK_S)
        misses = 0 if _in_use(folder) else misses + 1
    _abandoned.set()
    folders.end_family(folder)  # its own children, and engines that were not forked
    folders.remove(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _in_use(folder: Path) -> bool:
    owner = folders.owner(folder)
    return owner is not None and folders.same_process(owner["pid"], owner["create_time"])


def await_loss(parts: Mapping[str, Any], look_s: float = LOOK_S) -> dict[str, Any]:
    """Wait until a part of the controller ends or is halted; return this part, for `lost_part`.

    Args:
        parts: Processes of `multiprocessing`, by name.
    """
    halted = dict.fromkeys(parts, 0)
    while True:
        ended = wait([part.sentinel for part in parts.values()], look_s)
        for name, part in parts.items():
            if part.sentinel in ended:
                part.join(look_s)
                return {"name": name, "pid": part.pid, "code": part.exitcode}
            halted[name] = halted[name] + 1 if is_halted(part.pid) else 0
            if halted[name] >= PATIENCE:
                return {"name": name, "pid": part.pid, "code": None}


def lost_part(folder: Path) -> dict[str, Any] | None:
    """Return the part whose loss ended the controller: `name`, `pid`, `code`; None: no part.

    The code is negative for a signal, and None if the part was halted.
    """
    found: dict[str, Any] | None = folders.read_json(folder / LOST)
    return found


def main() -> None:
    """Run ipyparallel's controller under a watch."""
    folder = os.environ.get(cluster_env.MARK)
    if folder:
        threading.Thread(target=watch, args=(Path(folder),), daemon=True).start()
    from ipyparallel.controller.app import IPController

    class Controller(IPController):  # type: ignore[misc]
        """ipyparallel's controller, whose hub receives only messages on which it must act."""

        def init_hub(self) -> None:
            super().init_hub()
            heard = self.hub.monitor.socket
            heard.setsockopt(zmq.UNSUBSCRIBE, b"")
            for topic in TOPICS:
                heard.setsockopt(zmq.SUBSCRIBE, topic)

        def init_signal(self) -> None:
            super().init_signal()
            parts = {one.name: getattr(one, "launcher", one) for one in self.children}
            parts["HeartMonitor"] = self.heartmonitor_process
            threading.Thread(target=self._end_with_a_part, args=(parts,), daemon=True).start()

        def handle_signal(self, sig: int, frame: object) -> None:
            self.ending = True
            super().handle_signal(sig, frame)

        ending = False

        def _end_with_a_part(self, parts: Mapping[str, Any]) -> None:
            """End when a process of the controller has ended, because calls would be lost silently.

            The owner sees that this process ends, and which process ended first.
            """
            lost = await_loss(parts)
            if self.ending or _abandoned.is_set():
                return
            if folder:
                with suppress(OSError):  # the disk may be full
                    folders.write_json(Path(folder) / LOST, lost)
            for part in parts.values():
                part.kill()
            os._exit(PART_LOST)

    Controller.launch_instance()
