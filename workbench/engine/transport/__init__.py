"""Links between workers and servers: whole buffers, both ways, without a framework.

    worker r                                         server s
    gradient (size_bytes) ----- push ------> mailbox r (size_bytes)
    parameters            <---- reply ------ board     (size_bytes)

Every link is one stream that carries small headers (`connection`). How the buffers themselves are
sent depends on where the two processes are:

    shared_memory   same host: mailbox and board are mapped by both; headers on a Unix socket
    unix            same host: buffers follow their headers on the Unix socket
    tcp             any hosts: the same on TCP, listening only where the run's store is reached

Both ends prove that they know the run's key before anything else is sent. Sizes are agreed when a
session opens, and a header that announces another size is refused before a byte of it is read or
written. A buffer is never read while it is written. A mailbox belongs to its worker until the push
is sent, and then to the server until the reply. The board belongs to the workers that received it
until each has reported that it holds a copy (`release`), or sends its next push.

    connection  how do frames travel on a stream, who is at the other end, what is in shared memory
    address     where is a server found
    server      how does a server answer all its links
    worker      how does a worker talk to one server
    chained     how does it talk to two that hold the same
    ring        which links does a server have if its part is held twice
    peers       how do workers of one host talk to each other
    handover    how does one worker send others all of its state
"""

from .chained import connect_chains, sessions_before
from .connection import LinkClosedError, LinkError, Message
from .ring import ServerLinks
from .server import REGROUP, Gone, Hub
from .worker import Link, connect, dial_server

__all__ = [
    "REGROUP", "Gone", "Hub", "Link", "LinkClosedError", "LinkError", "Message", "ServerLinks",
    "connect", "connect_chains", "dial_server", "sessions_before",
]  # fmt: skip
