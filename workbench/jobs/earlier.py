"""A job's earlier starts: their run folders, and whether the last one still trains."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import psutil

from ..errors import WorkbenchError
from ..history import disk
from ..shared import events

ALIVE = "alive"
"""File that the conductor of a running run writes again each `ALIVE_S`."""
ALIVE_S = 2.0
GONE_S = 5.0
"""Time after the end of a process, or of rank 0, in which the others can report their end."""
LOOK_S = 0.1


def runs_in(root: Path) -> list[Path]:
    """Return a job's run folders, the newest last."""
    with contextlib.suppress(OSError):
        found = [one for one in root.iterdir() if one.name.isdecimal() and one.is_dir()]
        return sorted(found, key=lambda one: int(one.name))
    return []


def goes_on(folder: Path) -> bool:
    """Whether the job's last run still trains; waits for a conductor that is writing the end."""
    end = time.monotonic() + GONE_S + ALIVE_S
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, WorkbenchError):
        first = text = (folder / ALIVE).read_text()
        while disk.read_meta(folder).get("state") not in events.OVER:
            about = json.loads(text)
            if about["host"] == socket.gethostname() and (
                not psutil.pid_exists(int(about["pid"])) or time.time() - about["t"] > 2 * GONE_S
            ):
                return False
            if time.monotonic() > end:
                return text != first
            time.sleep(LOOK_S)
            text = (folder / ALIVE).read_text()
    return False
