"""The process that hosts the TCPStore, the meeting point of a run's process group.

It is outside the ranks, so that the others can meet again if a rank is killed. It is also outside
the kernel and outside the warm parent, which must have no other thread when it forks. torch is
imported by name.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any

LOOPBACK = "127.0.0.1"


def host(listen_fd: int) -> Any:
    """Host a TCPStore on a listening socket; it lives as long as the returned object.

    torch's own socket would listen on every interface; this socket does not.

    Args:
        listen_fd: Descriptor of the socket; the store owns it from now on.
    """
    with socket.socket(fileno=os.dup(listen_fd)) as sock:
        address, port = sock.getsockname()[:2]
    dist = importlib.import_module("torch.distributed")
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd
    )


def main() -> None:
    """Host a store on the inherited socket, report this in a line, and end when stdin closes."""
    store = host(int(sys.argv[1]))
    sys.stdout.write(json.dumps({"pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    del store


if __name__ == "__main__":
    main()
