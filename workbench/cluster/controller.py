"""ipyparallel's controller, which ends by itself when nobody is left whom it could serve.

The warm parent ends the controller when the kernel is gone. This is for when the warm parent is
gone too, or never was: the cluster's folder names the process that must be alive for the cluster to
be in use (`profile.own`), and the controller looks whether it is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import zmq
from traitlets.config import Config

from .. import scratch
from . import profile

LOOK_S = 1.0
TOPICS = (b"heartmonitor", b"tracktask", b"intask", b"outtask", b"inbcast", b"outbcast")
"""What the hub is told. Requests to single engines and their outputs are not for it: it would keep
a record of each that nobody reads, and took longer for them than the engines for an empty cell."""
PATIENCE = 3
"""Looks in a row that must find the owner dead: its successor may be about to sign."""


def config(folder: Path) -> Config:
    """Return ipyparallel's settings for a controller of ours, and the mark for all processes."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.append({root!r}); "
        "from workbench.cluster.controller import main; main()  # an ipyparallel.controller"
    )
    return Config(
        {
            "BaseLauncher": {"environment": {scratch.MARK: str(folder)}},
            "LocalControllerLauncher": {"controller_cmd": [sys.executable, "-c", code]},
        }
    )


def watch(folder: Path) -> None:
    """Wait until the folder's owner is gone, then end this process group and the folder."""
    misses = 0
    while misses < PATIENCE:
        time.sleep(LOOK_S)
        misses = 0 if _in_use(folder) else misses + 1
    profile.end_family(folder)  # its own children, and engines that nobody forked
    profile.remove(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _in_use(folder: Path) -> bool:
    owner = profile.owner(folder)
    return owner is not None and profile.same_process(owner["pid"], owner["create_time"])


def main() -> None:
    """Run ipyparallel's controller under a watch."""
    folder = os.environ.get(scratch.MARK)
    if folder:
        threading.Thread(target=watch, args=(Path(folder),), daemon=True).start()
    from ipyparallel.controller.app import IPController

    class Controller(IPController):  # type: ignore[misc]
        """ipyparallel's, whose hub hears of what it must act on and of nothing else."""

        def init_hub(self) -> None:
            super().init_hub()
            heard = self.hub.monitor.socket
            heard.setsockopt(zmq.UNSUBSCRIBE, b"")
            for topic in TOPICS:
                heard.setsockopt(zmq.SUBSCRIBE, topic)

    Controller.launch_instance()
