"""Keeps the server from ending a kernel as idle while something runs in the background.

jupyter_server (`MappingKernelManager.cull_idle_timeout`) and JupyterHub's idle culler call a kernel
idle when it runs no cell and has sent no message that belongs to one. A cell with `--background`
ends at once, so its kernel is idle for them although its workers train.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..views.blocks import in_notebook, notebook_publisher

AWAKE_S = 5.0
"""Seconds between two messages; servers that cull count in minutes."""
_NOWHERE = "workbench-awake"


def keep_awake(is_over: Callable[[float], bool]) -> None:
    """Send a message each 5 s in the name of the cell that runs now, until something is over.

    The message updates a display that does not exist, so front ends show nothing. Outside a
    notebook nothing is sent. Returns at once.

    Args:
        is_over: Waits for the number of seconds that it is given; returns whether it is over.
    """
    if not in_notebook():
        return
    publish = notebook_publisher()

    def send() -> None:
        while not is_over(AWAKE_S):
            publish({"text/plain": ""}, _NOWHERE, True)

    threading.Thread(target=send, name="workbench-awake", daemon=True).start()
