"""A process of a cluster: its owner, its files, its ports, the environment of its imports.

Also its host: how hosts are distinguished, and the address at which other hosts reach this one.
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
WAITS_PASSIVELY = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that spin while they wait for each other block each other when the machine runs other
programs: one process with two threads ran 15 to 40 times slower beside other work."""
THREADS = "WORKBENCH_OMP_NUM_THREADS"
"""Environment variable of the processes of `workbench run`: OMP_NUM_THREADS, if the user set it."""
TMP = "tmp"
PAGE_BYTES = 64 << 10
BACKLOG = 1024


def replace(path: Path, content: str | bytes) -> None:
    """Write a file in one operation: readers see either the old file or the complete new file.

    Raises:
        OSError: It could not be written; the old file remains, and no partial file.
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
    """Write a file that the user requested, either complete or not at all; return its path.

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
            next_step="delete some files on this disk, or use another path"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "use another path",
            code="WB-RUN-058",
        ) from error
    return path


def folder() -> str | None:
    """Return the folder for Workbench's temporary files.

    None (the system's folder) outside a cluster.

    Files there are removed with the cluster, even if this process is killed.
    """
    path = Path(os.environ.get(MARK) or "/nowhere") / TMP
    return str(path) if path.is_dir() else None


def listening(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that listens on one address, on the first free port in the range.

    Args:
        host: An IPv4 address of this host; empty: every interface.
        ports: The first and last allowed port; None: the system chooses a port.

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
    which = "any port" if ports is None else f"ports {ports[0]} to {ports[1]}"
    is_elsewhere = reason == os.strerror(errno.EADDRNOTAVAIL)
    return ClusterError(
        f"This host does not have the address {host}."
        if is_elsewhere
        else f"There is no free port on {host or 'this host'}.",
        seen=f"{which}: {reason}",
        allowed="an address of this host"
        if is_elsewhere
        else "one free port for each server, each TensorFlow worker, and PyTorch's TCPStore",
        next_step="give an address of this host: %cluster start --listen ADDRESS"
        if is_elsewhere
        else "start the cluster again with more ports: %cluster start --ports FIRST-LAST",
        code="WB-CLUSTER-046",
    )


def run_folder(run_dir: str, run_id: str) -> Path | None:
    """Return where an engine writes a run's files: the run's folder, or one that is fetched.

    None if it got no folder and has no Workbench folder, as on a machine without an agent.

    Args:
        run_dir: The run's folder, if the engine is on the kernel's machine.
    """
    if run_dir:
        return Path(run_dir)
    ours = folder()
    return Path(ours) / run_id if ours and run_id else None


class Page:
    """A small file whose last complete line is its value; for values that change with every cell.

    Replacing a file takes milliseconds if the file system first writes the new file to disk. Adding
    a line takes microseconds. An incomplete line is ignored, so readers never see half of a value.
    A full disk must not make a cell fail, so values that cannot be written are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._fresh: Path | None = None  # the file's name until it is complete
        self._size = 0

    def write(self, value: object) -> None:
        """Set the value of the file."""
        line = json.dumps(value, default=str).encode() + b"\n"
        with contextlib.suppress(OSError):
            if self._file is None or self._size + len(line) > PAGE_BYTES:
                self._turn_over()
            assert self._file is not None
            self._size = PAGE_BYTES  # a half-written line is always the last line of its file
            if self._file.write(line) == len(line):
                self._size = self._file.tell()
            self._publish()

    def _turn_over(self) -> None:
        """Begin a new file; the old file exists until the new one has content."""
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
        """Close the file; its value stays."""
        if self._file is not None:
            self._file.close()
            self._file = None


def last_page(path: Path) -> Any:
    """Return the value of a `Page`; None if it is missing or damaged."""
    with contextlib.suppress(OSError):
        for line in reversed(path.read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None


NVIDIA_DRIVER = "/dev/nvidiactl"


def import_environment(framework: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the import of a framework, in addition to the given one.

    Frameworks read these variables once, while they load or at their first message. Keras uses the
    requested framework, even if the user's settings name another one. Messages from C++ code are
    switched off, because they would appear below cells: TensorFlow reports a missing NVIDIA driver
    as an error, and torch warns on every rank if a host name cannot be resolved.
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
    """Return a token of this host: processes with the same token share memory and loopback.

    The host name is not enough: cloned machines share it. Two containers of one machine even share
        the boot id, but not the network.
    """
    node = platform.node()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{node}-{boot}-{os.stat('/proc/self/ns/net').st_ino}{_own_time()}"
    except OSError:  # no Linux
        return f"{node}-{uuid.getnode():012x}"


def own_address(towards: str) -> str:
    """Return the address from which this host reaches another; others reach it there too.

    No host name is resolved: Debian gives a host's own name the address 127.0.1.1, and containers
        do not know the names of other hosts.

    Args:
        towards: An IPv4 address.

    Raises:
        ClusterError: There is no IPv4 route to it.
    """
    try:
        ipaddress.IPv4Address(towards)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing: it only finds the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"This host ({platform.node()}) cannot reach the other hosts of the run.",
            seen=f"{towards}: {error}",
            allowed="hosts that can reach each other over IPv4 (IPv6 alone is not enough)",
            next_step="give the network that all hosts share, for example: "
            "%cluster start --listen 10.0.0.0/8",
            code="WB-CLUSTER-073",
        ) from error


def _own_time() -> str:
    """Return a token that differs between a machine and containers with their own clocks."""
    with contextlib.suppress(OSError):
        return f"-{os.stat('/proc/self/ns/time').st_ino}"
    return ""


class Wakeup:
    """A pair of sockets, because zmq's poller takes no pipes on Windows; neither end blocks."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """The socket that the poller watches."""
        return self._read.fileno()

    def set(self) -> None:
        """Wake the poller; several wake-ups that are still waiting count as one."""
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
