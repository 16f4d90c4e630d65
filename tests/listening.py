"""Finds our sockets and files that others could use; for tests."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

LOOPBACK = ("127.", "::1", "::ffff:127.")


def family() -> list[psutil.Process]:
    """This process and all below it."""
    kernel = psutil.Process()
    return [kernel, *kernel.children(recursive=True)]


def open_ports() -> Iterator[tuple[str, str, int]]:
    """Yield (process, address, port) of every TCP socket that listens and every bound UDP one."""
    for process in family():
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("inet"):
                unbound = not one.laddr or (one.raddr and one.status != psutil.CONN_LISTEN)
                if not unbound and one.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    yield process.name(), one.laddr.ip, one.laddr.port


def beyond_loopback() -> set[tuple[str, str]]:
    """Return (process, address) of sockets that other machines can connect to."""
    return {(name, ip) for name, ip, _ in open_ports() if not ip.startswith(LOOPBACK)}


def unix_sockets() -> set[str]:
    """Return the paths of all named Unix sockets of ours."""
    found = set()
    for process in family():
        with contextlib.suppress(psutil.Error):
            found |= {str(one.laddr) for one in process.net_connections("unix") if one.laddr}
    return found


def reachable_by_others(path: str | Path) -> bool:
    """Whether another user can open a path: neither it nor a folder above is only ours."""
    path = Path(path)
    for place in [path, *path.parents]:
        status = os.stat(place)
        if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            return False
    return True


def loose_folders(folder: Path) -> list[str]:
    """Return the folders, itself and below, in which group or others have any right."""
    found = []
    for parent, _, _ in os.walk(folder):
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(parent).st_mode
            if stat.S_IMODE(mode) & 0o077:
                found.append(f"{parent} {stat.filemode(mode)}")
    return found
