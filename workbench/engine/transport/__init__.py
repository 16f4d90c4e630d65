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

    connection  frames on a stream, the proof of identity, and shared memory
    address     how a worker finds a server
    server      a server's end of all its links
    worker      a worker's end of the link to one server
    chained     a worker's end of the links to two servers with the same part
    ring        the links of a server if its part has a copy on another server
    peers       links between the workers of one host
    handover    one worker sends others all of its state
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
