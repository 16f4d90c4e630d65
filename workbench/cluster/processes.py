"""Starting our own helper processes from the kernel, and how processes end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import site
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from .. import scratch
from ..errors import ClusterError
from ..frameworks import import_environment
from . import keeper

FORK = "WORKBENCH_FORK"
"""Environment variable: `off` starts engines fresh, as where no process can be forked."""
_DEFAULTS = {
    # Threads that spin while they wait for each other starve one another as soon as the machine has
    # anything else to do: one_device with two threads ran 15 to 40 times slower beside other work.
    "OMP_WAIT_POLICY": "PASSIVE",
}
# One thread in the parent, whatever the notebook says: see the fork hazards in warm.py.
_PARENT_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Exit:
    """How a process ended: an exit code, or the number of the signal that killed it.

    Attributes:
        held_bytes: The most memory it ever had; 0 where that is not known.
        parent: What took it along, in words; empty where it ended by itself.
    """

    pid: int
    code: int | None
    signal: int | None
    held_bytes: int = 0
    parent: str = ""

    @property
    def text(self) -> str:
        """In words: "exit code 3", "SIGKILL"."""
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


ExitCallback = Callable[[Exit], None]


def signal_child(parent_pid: int, pid: int, sig: int) -> bool:
    """Signal a process if it is a child of `parent_pid`; return whether it was signalled.

    A pid may be another process's as soon as its parent has reaped it. So the process is held, then
    its parent is looked up, then what is held is signalled: where the pid changed hands in between,
    what is held has ended, and nobody is signalled.
    """
    try:
        held = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, an old kernel; or it is gone
        return False
    try:
        if psutil.Process(pid).ppid() != parent_pid:
            return False
        signal.pidfd_send_signal(held, sig)
    except (AttributeError, OSError, psutil.Error):
        return False
    finally:
        os.close(held)
    return True


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended; one that nobody has reaped yet has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def left_unreaped(pid: int) -> Exit | None:
    """Return how a process ended that its parent has not reaped; None where it lives, or is gone.

    Source: proc_pid_stat(5), `state` and `exit_code`, which is a status as waitpid(2) gives it.
    """
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
        if fields[0] != b"Z":
            return None
        code = os.waitstatus_to_exitcode(int(fields[49]))
        return Exit(pid, code if code >= 0 else None, -code if code < 0 else None)
    return None


def is_halted(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP), so that it does nothing."""
    # Asked at each cell: the file itself is read in a tenth of the time that psutil takes.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] == b"T"
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def can_fork(framework: str = "torch") -> tuple[bool, str]:
    """Say whether a warm parent can work here, and if not, why."""
    asked = os.environ.get(FORK, "")
    if asked not in ("", "on", "off"):
        raise ClusterError(
            f"{FORK} is not understood.", seen=asked, allowed="on, off", code="WB-CLUSTER-016"
        )
    if asked == "off":
        return False, f"{FORK}=off says so"
    if not sys.platform.startswith("linux"):
        return False, f"forking after imports is only safe on Linux, this is {sys.platform}"
    if not installed(framework):
        return False, f"{framework} is not installed"
    return True, ""


def installed(framework: str) -> bool:
    """Whether the framework can be imported here; it is not imported for that."""
    try:
        return importlib.util.find_spec(framework) is not None
    except ValueError:  # a module that something put there by hand
        return False


def start_keeper(folder: str = "") -> tuple[subprocess.Popen[bytes], str, int]:
    """Start a TCPStore keeper without a warm parent; returns process, host and port.

    It ends when its stdin is closed, which the end of this process does too.

    Raises:
        ClusterError: It did not come up.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench.cluster.keeper"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment(folder=folder), start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ClusterError(
            "The store that workers meet at did not start.",
            seen=f"exit code {process.wait()}",
            next_step=f"run {sys.executable} -m {keeper.__name__} in a terminal to see why",
            code="WB-CLUSTER-017",
        )
    answer = json.loads(line)
    return process, str(answer["host"]), int(answer["port"])


def environment(framework: str = "torch", folder: str = "") -> dict[str, str]:
    """The parent's own environment; our package must be importable where it is not installed."""
    wanted = import_environment(framework, os.environ)
    env = {**_DEFAULTS, **os.environ, **_PARENT_ENV, **wanted}
    root = str(Path(__file__).resolve().parents[2])
    if root not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    if folder:
        env[scratch.MARK] = folder
    return env
