"""What a forked child does before it becomes an engine or the store's keeper."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

from . import keeper

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

# Loaded by the parent, so that a child calls it without a dlopen of its own.
_libc = ctypes.CDLL(None, use_errno=True)

STACKS_SIGNAL = signal.SIGUSR2
"""Makes an engine write the stacks of all its threads to its log, even while it is blocked."""


def run_engine(job: Mapping[str, Any], parent_pid: int) -> None:
    """Turn this fresh child into an ipyparallel engine; ends the process when the engine stops.

    Args:
        job: `argv`, `env`, `cwd`, `sys_path`, `log_path` and `name` as sent by the kernel.
        parent_pid: The warm parent; the child ends with it.
    """
    _detach(parent_pid, job["log_path"], job.get("name", "ipengine"))
    sys.argv = ["ipengine", *job["argv"]]
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[:] = job["sys_path"]
    _enter_folder(job["cwd"])
    _reseed()
    # IPEngine's default is the working directory of whoever imported it: the parent's.
    argv = [*job["argv"], f"--IPEngine.work_dir={os.getcwd()}"]
    code = 0
    try:
        importlib.import_module("ipyparallel.engine.app").IPEngine.launch_instance(argv=argv)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException as error:
        # What a SIGTERM looks like here: it stops the loop under a main task that never returns.
        if "Event loop stopped" not in str(error):
            traceback.print_exc()
            code = 1
    _leave(code)


def _leave(code: int) -> None:
    """End as multiprocessing's forked children do: exit handlers run, memory is not torn down.

    Tearing down every module would write to, and so copy, all memory shared with the parent.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def run_keeper(job: Mapping[str, Any], parent_pid: int, listen_fd: int, port: int) -> None:
    """Turn this fresh child into the process that hosts the TCPStore; never returns."""
    _detach(parent_pid, job["log_path"], "store-keeper")
    store = keeper.host(listen_fd, port)
    while True:
        signal.pause()
        del store  # pragma: no cover - every signal that is handled ends the process


def _detach(parent_pid: int, log_path: str, name: str) -> None:
    os.setsid()
    # Set before the check: a parent that died in between has left us to another process.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    _libc.prctl(PR_SET_NAME, name.encode()[:15])
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    log = open(log_path, "ab", buffering=0)  # noqa: SIM115 - faulthandler needs it for life
    os.chmod(log_path, 0o600)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # A descriptor of its own: the engine later redirects 1 and 2 to the notebook.
    faulthandler.enable(file=log)
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)
    _KEPT.append(log)


_KEPT: list[object] = []


def _enter_folder(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        sys.stderr.write(f"The working directory {path} is out of reach ({error}); staying in /\n")
        os.chdir("/")


def _reseed() -> None:
    """Give each child its own random numbers; forked ones would all draw the same."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
