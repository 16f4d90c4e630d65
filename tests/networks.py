"""The networks of two hosts: namespaces joined by a cable, each with a loopback."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

CLONE_NEWNET = 0x40000000
ADDRESSES = "10.79.0.2", "10.79.0.3"


@contextlib.contextmanager
def two() -> Iterator[tuple[str, str]]:
    """Make two network namespaces; their names. They know each other only by `ADDRESSES`."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need `ip` (Debian: iproute2)")
    first, second = names = f"wb{os.getpid()}a", f"wb{os.getpid()}b"
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        _ip(
            "-n",
            first,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            second,
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def enter(name: str) -> None:
    """Put the calling thread, and the threads it starts from now on, into a namespace.

    Raises:
        OSError: The namespace cannot be entered.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")


def keep_store(name: str, address: str, pipe: Any) -> None:
    """Be the keeper of a store in a namespace, until the pipe closes."""
    enter(name)
    from workbench.cluster.forkserver import keeper
    from workbench.shared import cluster_env

    sock = cluster_env.listening(address)
    port = sock.getsockname()[1]
    store = keeper.host(sock.detach())
    pipe.send(port)
    with contextlib.suppress(EOFError):
        pipe.recv()
    del store


def start_store(name: str, address: str) -> tuple[Any, Any, int]:
    """Start `keep_store` in a process; return it, the pipe that ends it, and the port."""
    starter = multiprocessing.get_context("forkserver")
    ours, theirs = starter.Pipe()
    process = starter.Process(target=keep_store, args=(name, address, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours, ours.recv()
