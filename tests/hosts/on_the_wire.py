"""What goes over the cables of the simulated hosts, and what listens on each of them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hosts.simulated_hosts import ADDRESSES, NAME, SSH_PORT, SimulatedHosts

ALL_PROTOCOLS, TCP, IPV4 = 0x0003, 6, 0x0800
FRAME_BYTES = 1 << 17
LISTENS = "0A"

Flow = tuple[str, int, str, int]
"""Address and port of who sends, and of who receives."""


@dataclass
class Wire:
    """What was sent by TCP, by flow, in the order in which it was seen."""

    sent: dict[Flow, bytearray] = field(default_factory=lambda: defaultdict(bytearray))

    def carries(self, word: bytes) -> list[Flow]:
        """Return the flows, other than ssh's, in which some bytes stand as they are."""
        return [flow for flow, data in self.sent.items() if word in data and not _is_ssh(flow)]

    def mechanisms(self) -> set[str]:
        """Return by what connections of ZeroMQ are kept secret (ZMTP 3's greeting says it)."""
        greetings = [bytes(data[:64]) for data in self.sent.values() if data[:1] == b"\xff"]
        whole = [one for one in greetings if len(one) == 64 and one[9] == 0x7F]
        return {one[12:32].rstrip(b"\0").decode() for one in whole}


def _is_ssh(flow: Flow) -> bool:
    return SSH_PORT in (flow[1], flow[3])


@contextlib.contextmanager
def listened_in() -> Iterator[Wire]:
    """Record what goes over the cable of the first host, to whomever."""
    wire, over = Wire(), threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, 33, 256 << 20)  # SO_RCVBUFFORCE: nothing may be missed
        tap.bind((f"{NAME}xh1", 0))
        tap.setblocking(False)

        def read() -> None:
            while not over.is_set():
                ready, _, _ = select.select([tap], [], [], 0.1)
                if ready:
                    _keep(wire, tap.recv(FRAME_BYTES))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield wire
        finally:
            over.set()
            thread.join()


def _keep(wire: Wire, frame: bytes) -> None:
    kind, head = struct.unpack_from("!H", frame, 12)[0], 14
    if kind != IPV4 or len(frame) < 34 or frame[23] != TCP:
        return
    source, target = (socket.inet_ntoa(frame[at : at + 4]) for at in (26, 30))
    tcp = head + 4 * (frame[head] & 15)
    ports = struct.unpack_from("!HH", frame, tcp)
    end = head + struct.unpack_from("!H", frame, 16)[0]
    data = frame[tcp + 4 * (frame[tcp + 12] >> 4) : end]
    wire.sent[source, ports[0], target, ports[1]] += data


# -- what listens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens.

    Attributes:
        host: Where; `here` is the notebook's machine.
        process: The name of who has it.
    """

    host: str
    process: str
    address: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether it takes connections to any address."""
        return ipaddress.ip_address(self.address).is_unspecified

    @property
    def beyond(self) -> bool:
        """Whether other machines can reach it."""
        return not ipaddress.ip_address(self.address).is_loopback


def listeners(hosts: SimulatedHosts, pids: list[int]) -> set[Listener]:
    """Return what listens on the hosts, but for sshd and Slurm; and here, of these processes."""
    here = set(pids)
    found = set()
    for host in ADDRESSES:
        all_of_host = [one.pid for one in hosts.processes(host)]
        here -= set(all_of_host)
        found |= _of_namespace(host, all_of_host)
    found |= _of_namespace("here", sorted(here))
    return {one for one in found if one.port != SSH_PORT and not one.process.startswith("slurm")}


def _of_namespace(host: str, pids: list[int]) -> set[Listener]:
    owners = {}
    tables: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    owners[os.readlink(f"/proc/{pid}/fd/{fd}")] = name
            for table in ("tcp", "tcp6"):
                tables[table] = Path(f"/proc/{pid}/net/{table}").read_text()
    found = set()
    for table in tables.values():
        for line in table.splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == LISTENS and owner is not None:
                address, _, port = fields[1].partition(":")
                found.add(Listener(host, owner, _address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Return an address of /proc/net/tcp, which is words of the machine's byte order."""
    words = struct.unpack(f"<{len(text) // 8}I", bytes.fromhex(text)[::1])
    packed = b"".join(struct.pack(">I", word) for word in words)
    found = ipaddress.ip_address(packed)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
