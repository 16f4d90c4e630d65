"""The process that hosts the TCPStore, the meeting point of a run's process group.

It lives outside the ranks, so that the survivors of a killed rank can meet again, and outside the
kernel and the warm parent, which must own no thread when it forks. torch is imported by name.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any

HOST = "127.0.0.1"


def listen(address: str = HOST, ports: tuple[int, int] | None = None) -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface only.

    torch's own TCPStore listens on every interface; handed this socket it does not.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, 0))
    sock.listen(1024)
    return sock


def host(listen_fd: int, port: int, address: str = HOST) -> Any:
    """Host a TCPStore on a listening socket; it lives as long as the returned object.

    Args:
        listen_fd: Descriptor of the listening socket; the store owns it from now on.
        port: Its port.
    """
    dist = importlib.import_module("torch.distributed")
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd
    )


def main() -> None:
    """Host a store, print `{"host", "port", "pid"}` as one line, end when stdin closes."""
    sock = listen()
    port = sock.getsockname()[1]
    store = host(sock.detach(), port)
    sys.stdout.write(json.dumps({"host": HOST, "port": port, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    del store


if __name__ == "__main__":
    main()
