"""Starts Workbench's helper processes from the kernel, and explains how processes end.

The end is described in words: the signal, whether memory ran out, the last lines of the log. The
parent that reaped the process knows its exit. Lack of memory is certain if the system's kernel
reports it, in its log or in its counts of such kills. Otherwise, if a SIGKILL hit a process with
much memory, lack of memory is only called likely.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import select
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import ClusterError
from ..shared import cluster_env
from ..shared.cluster_env import import_environment
from .forkserver import keeper

FORK = "WORKBENCH_FORK"
"""Environment variable: `off` starts engines fresh, as where no process can be forked."""
_DEFAULTS = {
    **cluster_env.WAITS_PASSIVELY,
    # TensorFlow would take all memory of every GPU it sees, also where a cell imports it by itself.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
# One thread in the parent, whatever the notebook says: see the fork hazards in server.py.
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
        held_bytes: The most memory it ever had; 0 if not known.
        parent: The process with which it ended, in words; empty if it ended alone.
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

    After its parent has reaped a process, its pid can belong to another process. So this function
    opens a handle on the process, checks its parent, and then signals the handle. If the pid
    changed its owner in between, the handle's process has ended, and no process is signalled.
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
    """Whether a process exists and has not ended; a zombie has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def left_unreaped(pid: int) -> Exit | None:
    """Return how a zombie process ended; None if the process lives, or no longer exists.

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
    """Return whether a warm parent can work here, and if it cannot, the reason."""
    asked = os.environ.get(FORK, "")
    if asked not in ("", "on", "off"):
        raise ClusterError(
            f"{FORK} has an invalid value.", seen=asked, allowed="on, off", code="WB-CLUSTER-016"
        )
    if asked == "off":
        return False, f"{FORK}=off is set"
    if not sys.platform.startswith("linux"):
        return False, f"forking after imports is safe only on Linux; this system is {sys.platform}"
    if not installed(framework):
        return False, f"{framework} is not installed"
    return True, ""


def installed(framework: str) -> bool:
    """Whether the framework can be imported here; it is not imported for that."""
    try:
        return importlib.util.find_spec(framework) is not None
    except ValueError:  # a module that something put there by hand
        return False


def start_keeper(
    folder: str = "", host: str = keeper.LOOPBACK, ports: tuple[int, int] | None = None
) -> tuple[subprocess.Popen[bytes], str, int]:
    """Start a TCPStore keeper without a warm parent; returns process, host and port.

    It ends when its stdin is closed, which the end of this process does too.

    Args:
        folder: The cluster's.
        host, ports: Where it listens, as in `cluster_env.listening`.

    Raises:
        ClusterError: It cannot listen there, or did not come up.
    """
    with cluster_env.listening(host, ports) as sock:
        address, port = sock.getsockname()[:2]
        process = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__, str(sock.fileno())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment(folder=folder), start_new_session=True, pass_fds=[sock.fileno()],
        )  # fmt: skip
    assert process.stdout is not None
    if not process.stdout.readline():
        raise ClusterError(
            "Workbench could not start the rendezvous store (the process through which workers "
            "find each other).",
            seen=f"exit code {process.wait()}",
            next_step=f"run {sys.executable} -c 'import torch.distributed' to see why",
            code="WB-CLUSTER-017",
        )
    return process, str(address), int(port)


def environment(framework: str = "torch", folder: str = "") -> dict[str, str]:
    """The parent's own environment; our package must be importable where it is not installed."""
    wanted = import_environment(framework, os.environ)
    env = {**_DEFAULTS, **os.environ, **_PARENT_ENV, **wanted}
    root = str(Path(__file__).resolve().parents[2])
    if root not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    if folder:
        env[cluster_env.MARK] = folder
    return env


LIKELY_SHARE = 0.1
"""If a killed process had at least this share of the memory, lack of memory is likely."""
REFUSED_S = 10.0
"""How long a refused process counts as a possible cause of other ends."""
EXCERPT_LINES = 8
PIDFD_POLL_S = 0.5

_MEANING = {
    "SIGSEGV": "a segmentation fault: native code used an invalid memory address",
    "SIGBUS": "native code used memory that the system could not provide; perhaps shared memory is "
    "full",
    "SIGABRT": "native code called abort()",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "native code used an instruction that this processor does not have",
    "SIGTERM": "sent by another process or by a user",
    "SIGXCPU": "the process reached its limit of CPU time",
}
_NOISE = re.compile(r"\[IPEngine\]|\[IPController\]|^\s*$|^\d{4}-\d\d-\d\d [\d:., ]+\[")
_CELL = re.compile(r'"[^"]*/ipykernel_\d+/\d+\.py"')
_SHELL = re.compile(r"[/\\]IPython[/\\]core[/\\]")  # below it is nothing of the user's


@dataclass(frozen=True)
class Ending:
    """How a process ended; as text `killed by SIGKILL (perhaps out of memory: it used 3.1 GB ..)`.

    Attributes:
        signal: Name of the signal that killed it; empty if none did.
        code: Its exit code; None if it has none or it is not known.
        what: How it ended in other cases: `its heartbeat stopped`.
        hint: The likely cause, if known.
        since: The other process whose end caused this one.
        with_all: Whether all engines ended with it, so that one engine cannot be replaced alone.
    """

    signal: str = ""
    code: int | None = None
    what: str = ""
    hint: str = ""
    since: str = ""
    with_all: bool = False

    @property
    def short(self) -> str:
        """The same in a word or two, for a table."""
        return self.signal or self._said

    @property
    def _said(self) -> str:
        if self.signal:
            return f"killed by {self.signal}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return self.what or "for an unknown reason"

    def __str__(self) -> str:
        since = f", because {self.since}" if self.since else ""
        return f"{self._said}{since}" + (f" ({self.hint})" if self.hint else "")


RESTARTED = Ending(what="restarted")
"""How an engine ended that its user had replaced."""
GIVEN_UP = Ending(what="its cluster has ended")
"""How an engine ended whose controller and warm parent another cluster takes over."""


class EngineDiedError(ClusterError):
    """An engine has ended by itself or was killed.

    Args:
        log: The last useful lines of its log; empty if there are none.
        host: Where it was; empty on this machine.
    """

    def __init__(
        self, engine: int, pid: int, how: Ending, log: str = "", *, host: str = ""
    ) -> None:
        self.pid, self.how, self.log = pid, how, log
        one = "" if how.with_all else f" {engine}"
        who = f"Engine {engine}" + (f" on {host}" if host else "") + f" (pid {pid})"
        if how == RESTARTED:
            what, step = f"{who} was restarted.", "run the cell again"
        else:
            what, step = f"{who} died: {how}.", f"%cluster restart{one}"
        super().__init__(what, code="WB-CLUSTER-003", next_step=step)


@dataclass(frozen=True)
class Memory:
    """The memory situation at a process's death.

    Attributes:
        total_bytes: What the machine, or our control group, has at most; 0 where unknown.
        kills: How many processes were killed for lack of memory since we began to count.
        logged: Whether the kernel's log names this process.
        refused: A text if a limit refused a process or thread; otherwise empty.
    """

    total_bytes: int = 0
    kills: int = 0
    logged: bool = False
    refused: str = ""


class MemoryWatch:
    """Counts the kernel's kills for lack of memory, and what it refused, from when it was made."""

    def __init__(self) -> None:
        self._before = _count_kills()
        self._total = _limit_bytes()
        self._refused = sum(refused for _, refused in _pids_limits())
        self._refused_at = -math.inf

    def seen(self, pid: int, killed: bool) -> Memory:
        """Return what is known at the death of `pid`; only a kill makes us ask the system."""
        if not killed:
            return Memory(self._total, refused=self.refused())
        count = _count_kills()
        kills, self._before = count - self._before, count
        return Memory(self._total, kills, kills > 0 and _in_kernel_log(pid))

    def refused(self) -> str:
        """Return which limit refused a process, or a thread, just now, in words; "" for none."""
        limits = _pids_limits()
        count = sum(refused for _, refused in limits)
        if count > self._refused:
            self._refused, self._refused_at = count, time.monotonic()
        if not count or time.monotonic() - self._refused_at > REFUSED_S:
            return ""
        least = min(limit for limit, refused in limits if refused)
        return (
            f"perhaps the container reached its limit of {least} processes and threads: raise the "
            "limit (docker run --pids-limit=-1), or start fewer engines"
        )


def ending(end: Exit, memory: Memory = Memory(), by_us: str = "") -> Ending:
    """Return how a process ended, and why if that can be known.

    Args:
        by_us: Why Workbench ended it; empty if it did not.
    """
    if end.signal is None:
        hint = "the cell called os._exit, or a library ended the process" if end.code else ""
        if end.code and memory.refused:
            hint = memory.refused
        return Ending(code=end.code, hint=hint)
    if end.parent:
        return Ending(what=f"it ended together with {end.parent}", with_all=True)
    if by_us:
        return Ending(end.text, hint=by_us)
    held = f"it used {end.held_bytes / 1e9:.1f} GB of memory" if end.held_bytes else ""
    if end.signal == signal.SIGKILL:
        return Ending(end.text, hint=_why_killed(end.held_bytes, held, memory))
    meaning = _MEANING.get(end.text, "")
    if end.signal == signal.SIGABRT and memory.refused:
        meaning = memory.refused
    return Ending(end.text, hint=meaning)


def _why_killed(held_bytes: int, held: str, memory: Memory) -> str:
    if memory.logged:
        return f"out of memory according to the system's log: {held}" if held else "out of memory"
    if memory.kills > 0:
        words = "out of memory according to the system's counter `oom_kill`"
        return f"{words}: {held}" if held else words
    if memory.total_bytes and held_bytes >= LIKELY_SHARE * memory.total_bytes:
        return f"perhaps out of memory: {held}"
    return held


def excerpt(log: str, lines: int = EXCERPT_LINES) -> str:
    """Return the most useful lines of an engine's log: a crash's message, otherwise the last lines.

    Routine messages of ipyparallel are left out.
    """
    found = [line for line in log.splitlines() if not _NOISE.search(line)]
    fatal = [i for i, line in enumerate(found) if line.startswith("Fatal Python error")]
    if not fatal:
        return "\n".join(found[-lines:])
    crash = found[fatal[-1] :]
    current = [i for i, line in enumerate(crash) if line.startswith("Current thread")]
    stack = crash[current[0] + 1 :] if current else crash[1:]
    ours = [i for i, line in enumerate(stack) if _SHELL.search(line) or not line.startswith("  ")]
    stack = [_CELL.sub('"the cell"', line) for line in stack[: min([*ours, lines])]]
    return "\n".join([crash[0], *stack])


def watch(pid: int, on_end: Callable[[Exit], None]) -> None:
    """Call `on_end`, on a thread of its own, when a process ends that somebody else waits for."""

    def main() -> None:
        on_end(_wait(pid))

    threading.Thread(target=main, name=f"workbench-watch-{pid}", daemon=True).start()


def _wait(pid: int) -> Exit:
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # no Linux, or gone already
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).wait(PIDFD_POLL_S)
        return Exit(pid, None, None)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        return _status(pid)
    finally:
        os.close(descriptor)


def _status(pid: int) -> Exit:
    """How a child ended, left for whoever reaps it; unknown where it is not ours or is reaped."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except (ChildProcessError, AttributeError):
        found = None
    if found is None:
        return Exit(pid, None, None)
    if found.si_code == os.CLD_EXITED:
        return Exit(pid, found.si_status, None)
    return Exit(pid, None, found.si_status)


def _count_kills() -> int:
    """Return how many processes of this machine were killed for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _limit_bytes() -> int:
    """Return the memory there is: the machine's, or less where a control group says so."""
    found = [int(psutil.virtual_memory().total)]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(found)


def _pids_limits(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Return the limits on how many processes and threads our control groups may have.

    Each with how often it refused one. In a container the groups' names may be those of the host,
    while what is mounted begins with the container's own.
    """
    found: dict[Path, tuple[int, int]] = {}
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number != "0" and "pids" not in names.split(","):
                continue
            top = root / "pids" if number != "0" else root
            here = top / path.lstrip("/")
            for folder in (here, *here.parents):
                if not folder.is_relative_to(top):
                    break
                with contextlib.suppress(OSError, ValueError, IndexError):
                    limit = int((folder / "pids.max").read_text())  # "max": none
                    refused = (folder / "pids.events").read_text().split()
                    found[folder] = limit, int(refused[refused.index("max") + 1])
    return list(found.values())


def _in_kernel_log(pid: int) -> bool:
    """Whether the kernel's log says that it killed this process for lack of memory."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        log = subprocess.run(
            ["dmesg"], capture_output=True, text=True, timeout=1.0, errors="replace", check=False
        )
        return re.search(rf"(?i)killed process {pid}\b", log.stdout) is not None
    return False
