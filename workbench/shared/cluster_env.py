"""Which cluster a process belongs to, its files there, what a framework's import depends on.

And which host it is on: what tells that from others, and the address others reach it by.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import RunError

MARK = "WORKBENCH_CLUSTER"
"""Environment variable of every process of a cluster: the cluster's folder."""
TMP = "tmp"
PAGE_BYTES = 64 << 10


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
            allowed="a file in a folder that is there, on a disk with room",
            next_step="make room there, or name another file",
            code="WB-RUN-058",
        ) from error
    return path


def folder() -> str | None:
    """Return where temporary files of ours go; None (the system's place) outside a cluster.

    What is there goes with the cluster, also when this process is killed.
    """
    path = Path(os.environ.get(MARK) or "/nowhere") / TMP
    return str(path) if path.is_dir() else None


def run_folder(run_dir: str, run_id: str) -> Path | None:
    """Return where an engine writes files of a run: its folder, or one that the kernel fetches.

    None where it is told no folder and has none of ours: on a machine without an agent.

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

    TensorFlow reads these once, while it loads or at its first message. Which framework Keras
    computes with is what was asked for, whatever the user's settings say. Messages of the C++ side
    would stand below cells; without an NVIDIA driver its errors are about that.
    """
    if framework != "tensorflow":
        return {}
    level = "2" if os.path.exists(NVIDIA_DRIVER) else "3"
    return {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": given.get("TF_CPP_MIN_LOG_LEVEL", level),
    }


def host_token() -> str:
    """Return what tells hosts apart: processes with the same one share loopback, and may memory.

    Containers of one machine have its boot id, and clones their original's name; what differs then
    is the network.
    """
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "-".join(parts)


def own_address(towards: str) -> str:
    """Return this host's address where its way to another one begins.

    Args:
        towards: The other one's address; nothing is sent there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
