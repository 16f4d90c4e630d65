"""debugpy in an engine, for VS Code: listens on loopback, in the engine's own process."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from types import FrameType
from typing import Any

HOST = "127.0.0.1"

_served: int | None = None


def serve(port: int) -> dict[str, Any]:
    """Let debuggers attach to this engine; asked again, the port that it has is kept.

    The adapter runs in this process, so that no other one outlives the engine.

    Args:
        port: 0 takes any that is free.

    Returns:
        `port`, and `before` (whether it was served already); or `missing` or `taken` (why not).
    """
    global _served
    if _served is not None:
        return {"port": _served, "before": True}
    try:
        debugpy = importlib.import_module("debugpy")
    except ImportError as error:
        return {"missing": str(error)}
    _leave_ours_alone()
    try:
        port = _free(port)
        debugpy.listen((HOST, port), in_process_debug_adapter=True)
    except (OSError, RuntimeError) as error:
        return {"taken": str(error)}
    _served = port
    return {"port": port, "before": False}


def _free(port: int) -> int:
    """Return the port when it can be listened on; debugpy would say so too late, on a thread."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return int(probe.getsockname()[1])


def _leave_ours_alone() -> None:
    """Exempt this engine's own threads: it must answer the notebook while a debugger holds it."""
    for thread in threading.enumerate():
        if thread.name.startswith("workbench-"):
            about = vars(thread)
            about["pydev_do_not_trace"] = about["is_pydev_daemon_thread"] = True


def holds() -> bool:
    """Whether an attached debugger holds the main thread."""
    if _served is None:
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_do_wait_suspend":
            return True
        frame = frame.f_back
    return False


def stop(frame: FrameType) -> bool:
    """Stop in `frame` where a debugger is attached; return whether one is."""
    if _served is None:
        return False
    debugpy: Any = sys.modules["debugpy"]
    if not debugpy.is_client_connected():
        return False
    importlib.import_module("pydevd").settrace(
        suspend=True, trace_only_current_thread=True, patch_multiprocessing=False,
        stop_at_frame=frame,
    )  # fmt: skip
    return True
