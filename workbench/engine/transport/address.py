"""Where servers are found: they write their addresses into the run's store."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from ...errors import ClusterError
from ...shared import cluster_env
from ...shared.cluster_env import host_token, own_address
from ..debugging.marks import ANSWER, waits_in
from .connection import LinkError

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec

LOOPBACK = "127.0.0.1"
LOOPBACK_BUFFER_BYTES = 1 << 18


class Store(Protocol):
    """The methods of the store in which a run's processes meet."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""


def address_in(spec: RunSpec) -> str:
    """Return where this engine listens for the others of its run; loopback if all are here.

    Raises:
        ClusterError: This engine cannot reach the others.
    """
    if len(set(spec.hosts)) <= 1:
        return LOOPBACK
    if spec.store is not None:
        return own_address(spec.store[0])
    if spec.address:
        return spec.address
    raise ClusterError(
        "Other hosts must connect to this engine, but the engine has no address.",
        seen=spec.run_id,
        next_step="%cluster restart",
        code="WB-CLUSTER-074",
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address; empty if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return ""


def addresses() -> list[str]:
    """Return every address by which other hosts may know this host."""
    every = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    inet = [entry for entry in every if entry.family in (socket.AF_INET, socket.AF_INET6)]
    plain = {entry.address.partition("%")[0] for entry in inet}
    return sorted(one for one in plain if not ipaddress.ip_address(one).is_loopback)


class Listeners:
    """A server's two listening sockets: a Unix socket in a private folder, and TCP.

    Args:
        host: The one address on which TCP listens (`address_in`).
        ports: The first and last port that may be taken; None: any.

    Raises:
        ClusterError: All of these ports are taken.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None = None) -> None:
        self._folder = ""
        self.sockets: list[socket.socket] = []
        self.about: dict[str, Any] = {"host": host_token(), "pid": os.getpid()}
        with contextlib.suppress(OSError):  # no folder, or a long name: only TCP remains
            self._bind_nearby()
        try:
            tcp = cluster_env.listening(host, ports)
        except BaseException:
            self.close()
            raise
        _bound_buffers(tcp, host)  # accepted connections inherit the sizes
        self.about["tcp"] = list(tcp.getsockname()[:2])
        self.sockets.append(tcp)
        for sock in self.sockets:
            sock.setblocking(False)

    def _bind_nearby(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            return
        self._folder = tempfile.mkdtemp(
            prefix="wb-link-", dir=cluster_env.folder()
        )  # made with mode 0700
        path = os.path.join(self._folder, "s")
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unix.bind(path)
        except OSError:
            unix.close()
            raise
        unix.listen(cluster_env.BACKLOG)
        self.about["unix"] = path
        self.sockets.append(unix)

    def close(self) -> None:
        """Stop listening."""
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _bound_buffers(sock: socket.socket, host: str) -> None:
    """On loopback, keep the data in transit small enough for the processor's cache.

    Between hosts the system sizes the buffers, by the delay it sees.
    """
    if host.startswith("127."):
        for which in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, which, LOOPBACK_BUFFER_BYTES)


def publish(store: Store, server: int, about: Mapping[str, Any], role: str = "link") -> None:
    """Write a server's addresses to the place where its workers look."""
    store.set(f"{role}/{server}", json.dumps(dict(about)))


@waits_in(ANSWER)
def look_up(store: Store, server: int, role: str = "link") -> dict[str, Any]:
    """Wait for a server's addresses and return them.

    Args:
        role: `link`, if it answers for its own part; `copy`, for the part of which it has a copy.

    Raises:
        LinkError: The server did not start.
    """
    try:
        return json.loads(store.get(f"{role}/{server}"))  # type: ignore[no-any-return]
    except RuntimeError as error:  # torch's stores raise subclasses of it
        raise LinkError(
            f"Server s{server} did not start.",
            seen=str(error).splitlines()[0],
            next_step="%cluster logs shows the output of all engines",
            code="WB-RUN-012",
        ) from error


@waits_in(ANSWER)
def dial(about: Mapping[str, Any], way: str) -> socket.socket:
    """Connect to a server.

    Args:
        way: `auto`, `shared_memory`, `unix` or `tcp`; `auto` takes the Unix socket if the server is
            on this host and its socket can be seen from here (containers may not share one).

    Raises:
        LinkError: There is no such way to that server.
    """
    near = about["host"] == host_token() and "unix" in about
    if way != "tcp" and near:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(about["unix"])
            return sock
        except OSError:
            sock.close()
    if way in ("unix", "shared_memory"):
        raise LinkError(
            f"A link of type `{way}` needs a Unix socket of the server. So the worker and the "
            "server must be on the same host. Two containers usually count as two hosts.",
            seen="the worker cannot open the server's socket"
            if near
            else "the server is on another host, or has no Unix socket",
            next_step="use -o link=tcp or -o link=auto",
            code="WB-RUN-013",
        )
    host, port = about["tcp"]
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    _bound_buffers(sock, host)
    sock.settimeout(10)
    sock.connect((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock)
    return sock


def keep_alive(sock: socket.socket) -> None:
    """Notice within a minute that the other host has ended."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
