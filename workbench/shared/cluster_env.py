"""A process of a cluster: its owner, its files, its ports, the environment of its imports.

Also its host: how hosts are told apart, and the address at which others reach this one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import platform
import socket
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import ClusterError, RunError

MARK = "WORKBENCH_CLUSTER"
"""Environment variable of every process of a cluster: the cluster's folder."""
TMP = "tmp"
PAGE_BYTES = 64 << 10
BACKLOG = 1024


def replace(path: Path, content: str | bytes) -> None:
    """Write a file in one go: readers see the old one or the new one, never half of it.

    Raises:
        OSError: It could not be written; the old one stands, and nothing else is left.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def export(path: Path, content: bytes) -> Path:
    """Write a file that the user asked for, whole or not at all; return its path.

    Raises:
        RunError: It cannot be written.
    """
    try:
        replace(path, content)
    except OSError as error:
        raise RunError(
            f"The file cannot be written: {error.strerror}.",
            seen=str(path),
            allowed="a file in an existing folder, on a disk with free space",
            next_step="free disk space there, or name another file",
            code="WB-RUN-058",
        ) from error
    return path


def folder() -> str | None:
    """Return where temporary files of ours go; None (the system's place) outside a cluster.

    What is there goes with the cluster, also when this process is killed.
    """
    path = Path(os.environ.get(MARK) or "/nowhere") / TMP
    return str(path) if path.is_dir() else None


def listening(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that listens on one address: on the first free port of those that may be.

    Args:
        host: An IPv4 address of this host; empty: every interface.
        ports: The first and last port that may be taken; None: the system chooses one.

    Raises:
        ClusterError: All of them are taken, or the address is not this host's.
    """
    reason = ""
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                break
    raise cannot_listen(host, ports, reason)


def cannot_listen(host: str, ports: tuple[int, int] | None, reason: str) -> ClusterError:
    """Return the error of `listening`."""
    which = "any port" if ports is None else f"each of {ports[0]} to {ports[1]}"
    return ClusterError(
        f"No free port is left on {host or 'this host'}.",
        seen=f"{which}: {reason}",
        allowed="each server, the store and each TensorFlow worker needs one port of its host",
        next_step="name more ports: %cluster start --ports FIRST-LAST",
        code="WB-CLUSTER-046",
    )


def run_folder(run_dir: str, run_id: str) -> Path | None:
    """Return where an engine writes files of a run: its folder, or one that the kernel fetches.

    None if it was given no folder and has no folder of Workbench: on a machine without an agent.

    Args:
        run_dir: The run's folder, where the engine is on the kernel's machine.
    """
    if run_dir:
        return Path(run_dir)
    ours = folder()
    return Path(ours) / run_id if ours and run_id else None


class Page:
    """A small file of which the last whole line holds: for what changes with every cell.

    To replace a file takes milliseconds where the file system then writes the new one out first; to
    add a line takes microseconds. A line that was cut off counts for nothing, so readers never meet
    half of a value. A full disk must not fail a cell: what cannot be written is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._fresh: Path | None = None  # where the file is until it is whole
        self._size = 0

    def write(self, value: object) -> None:
        """Have the file say this from now on."""
        line = json.dumps(value, default=str).encode() + b"\n"
        with contextlib.suppress(OSError):
            if self._file is None or self._size + len(line) > PAGE_BYTES:
                self._turn_over()
            assert self._file is not None
            self._size = PAGE_BYTES  # a line that stays half written is the last of its file
            if self._file.write(line) == len(line):
                self._size = self._file.tell()
            self._publish()

    def _turn_over(self) -> None:
        """Begin a fresh file; the old one is there until it holds something."""
        self.close()
        self._fresh = self.path.with_name(
            f".{self.path.name}.{os.getpid()}.{threading.get_ident()}"
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = open(os.open(self._fresh, flags, 0o600), "ab", buffering=0)  # noqa: SIM115

    def _publish(self) -> None:
        if self._fresh is not None:
            self._fresh.replace(self.path)
            self._fresh = None

    def close(self) -> None:
        """Close the file; what it says stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def last_page(path: Path) -> Any:
    """Return what a `Page` says; None where it is missing or damaged."""
    with contextlib.suppress(OSError):
        for line in reversed(path.read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None


NVIDIA_DRIVER = "/dev/nvidiactl"


def import_environment(framework: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a framework is to be imported with, besides what is given.

    Frameworks read these once, while they load or at their first message. Which framework Keras
    computes with is what was asked for, whatever the user's settings say. Messages of the C++ side
    would stand below cells: TensorFlow's, whose errors are about the NVIDIA driver that is not
    there, and torch's, which warns on every rank where a host's name cannot be looked up.
    """
    if framework == "torch":
        return {"TORCH_CPP_LOG_LEVEL": given.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    if framework != "tensorflow":
        return {}
    level = "2" if os.path.exists(NVIDIA_DRIVER) else "3"
    return {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": given.get("TF_CPP_MIN_LOG_LEVEL", level),
    }


def host_token() -> str:
    """Return what tells hosts apart: processes with the same one share memory and loopback.

    The name alone does not: machines that were cloned share it, and two containers of one machine
    its boot as well, but not its network.
    """
    node = platform.node()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{node}-{boot}-{os.stat('/proc/self/ns/net').st_ino}{_own_time()}"
    except OSError:  # no Linux
        return f"{node}-{uuid.getnode():012x}"


def own_address(towards: str) -> str:
    """Return the address from which this host reaches another: there it is reached, too.

    No name is resolved, neither its own nor the other's: Debian gives a host's own name the address
    127.0.1.1, and containers know no names of others.

    Args:
        towards: An IPv4 address.

    Raises:
        ClusterError: IPv4 has no way there.
    """
    try:
        ipaddress.IPv4Address(towards)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"This host ({platform.node()}) cannot reach the other hosts of the run.",
            seen=f"{towards}: {error}",
            allowed="hosts that can reach each other over IPv4 (IPv6 alone is not enough)",
            next_step="name the network that all hosts share: %cluster start --listen ADDRESS",
            code="WB-CLUSTER-073",
        ) from error


def _own_time() -> str:
    """Return what tells a container with clocks of its own from its machine."""
    with contextlib.suppress(OSError):
        return f"-{os.stat('/proc/self/ns/time').st_ino}"
    return ""


class Wakeup:
    """A pair of sockets, since zmq's poller takes no pipes on Windows; neither end ever blocks."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """What the poller watches."""
        return self._read.fileno()

    def set(self) -> None:
        """Wake the poller; a wake-up that is still waiting stands for this one too."""
        with contextlib.suppress(OSError):
            self._write.send(b"x")

    def clear(self) -> None:
        """Forget the wake-ups that came so far."""
        with contextlib.suppress(OSError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends; `set` does nothing from then on."""
        self._read.close()
        self._write.close()
