"""The kernel's end of the control path: one authenticated ROUTER on loopback, one thread.

Messages that are not signed with the cluster's key are counted and dropped before they are parsed,
and so is one that was recorded and comes again.

Questions to engines go the same way: their control threads answer, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, overload

import zmq

from ..devices import limits
from ..errors import ClusterError
from ..shared.messages import (
    AskStacks,
    AskWhere,
    BadMessageError,
    Down,
    Hello,
    OfEngine,
    Refused,
    StacksAnswer,
    Up,
    Welcome,
    WhereAnswer,
)
from ..shared.protocol import Seal, Wakeup, decode_up, encode, new_key

log = logging.getLogger("workbench.cluster")

OnMessage = Callable[[int, Up], None]
"""`on_message(engine, message)`, called on the router's thread; must return quickly."""


class ControlRouter:
    """Receives from and sends to every engine of one cluster.

    Args:
        on_message: Called with each authentic message and the engine it is from (-1: not known).
        host: Interface to listen on; loopback unless engines run on other hosts.
        key: The cluster's; by default a fresh one.
        secret: Whether what travels is encrypted (CURVE), as it must be between hosts.
        ports: First and last port that may be listened on; None: any.

    Attributes:
        public_key: What engines encrypt with (Z85); empty where nothing is encrypted.
        rejected: Messages that were not signed with the key, were malformed or of no known kind,
            or came again.
        refused: The same as each engine counts it, with the connections that did not know a key.
    """

    def __init__(
        self,
        on_message: OnMessage,
        host: str = "127.0.0.1",
        key: bytes | None = None,
        *,
        secret: bool = False,
        ports: tuple[int, int] | None = None,
    ) -> None:
        self._on_message = on_message
        self.key = key or new_key()
        self._outbox: deque[tuple[int, Down]] = deque()
        self._peers: dict[int, tuple[bytes, str]] = {}  # address on the socket, nonce
        self._speakers: dict[str, int] = {}  # engines by nonce
        self.questions = Questions(self.send)
        self._closed = False
        self._seal = Seal(self.key, open_to_any=True)
        self.rejected = 0
        self.refused: dict[int, int] = {}
        self.thread_s = 0.0
        self._wakeup = Wakeup()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.RCVHWM, 10_000)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
        self.public_key = ""
        if secret:
            public, private = zmq.curve_keypair()
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = public, private
            self.public_key = public.decode()
        port = bind(self._socket, host, ports)
        self.url = f"tcp://{limits.reachable(host)}:{port}"
        self._thread = threading.Thread(target=self._main, name="workbench-router", daemon=True)
        self._thread.start()

    def send(self, engine: int, message: Down) -> None:
        """Send to one engine; a message for an engine that has not said hello waits for it."""
        self._outbox.append((engine, message))
        self._wake()

    def feed(self, frames: list[bytes]) -> None:
        """Take frames that came another way (through ipyparallel) as if the socket had."""
        self._accept(b"", frames)

    @property
    def connected(self) -> frozenset[int]:
        """Engines that have said hello."""
        return frozenset(self._peers)

    def forget(self, engine: int) -> None:
        """Drop an engine that has died, with whatever waits for it."""
        self._peers.pop(engine, None)

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._closed = True
        self._wake()
        self._thread.join(timeout=2)

    def _wake(self) -> None:
        self._wakeup.set()

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        try:
            while not self._closed:
                ready = dict(poller.poll())
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                if self._socket in ready:
                    self._receive()
                self._send_waiting()
        finally:
            self._socket.close()
            self._context.term()
            self._wakeup.close()

    def _receive(self) -> None:
        for _ in range(1000):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._accept(identity, frames)

    def _accept(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            packet, nonce = self._seal.unpack(frames)
            message = decode_up(packet)
        except BadMessageError:
            self.rejected += 1
            return
        engine = message.engine if isinstance(message, OfEngine) else -1
        try:
            match message:
                case Refused():
                    self.refused[engine] = message.count
                case WhereAnswer():
                    self.questions.heard(message)
                case _:
                    if isinstance(message, Hello):
                        self._speakers[nonce] = engine
                    if isinstance(message, Hello) and identity:
                        self._peers[engine] = identity, nonce
                        self._outbox.append((engine, Welcome()))
                    self._on_message(self._speakers.get(nonce, engine), message)
        except Exception:  # one run's trouble must not deafen the others
            log.exception("A message of engine %d was not understood", engine)

    def _send_waiting(self) -> None:
        later = []
        while self._outbox:
            engine, message = self._outbox.popleft()
            peer = self._peers.get(engine)
            if peer is None:
                later.append((engine, message))
                continue
            with contextlib.suppress(zmq.Again):
                identity, nonce = peer
                frames = self._seal.pack(encode(message), nonce)
                self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        self._outbox.extend(later)


def bind(sock: Any, address: str, ports: tuple[int, int] | None) -> int:
    """Bind a socket of ZeroMQ to a free port; return it.

    Raises:
        ClusterError: None of those that may be taken is free, or there is no such address here.
    """
    try:
        if ports is None:
            return int(sock.bind_to_random_port(f"tcp://{address}"))
        for port in range(ports[0], ports[1] + 1):
            if _bind_to(sock, f"tcp://{address}:{port}"):
                return port
    except zmq.ZMQError as error:
        raise ClusterError(
            "This machine cannot listen there.",
            seen=f"{address}: {error}",
            allowed="an address of this machine",
            next_step="--listen names an interface, an address or a network of this machine",
            code="WB-CLUSTER-062",
        ) from error
    raise ClusterError(
        "All ports that may be taken are in use.",
        seen=f"{ports[0]}-{ports[1]} on {address}",
        next_step="--ports with a wider range, or end what uses them (ss -ltnp)",
        code="WB-CLUSTER-063",
    )


def _bind_to(sock: Any, url: str) -> bool:
    try:
        sock.bind(url)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return False
    return True


@dataclass
class _Question:
    missing: set[int]
    wanted: type[WhereAnswer]
    answers: dict[int, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)


class Questions:
    """Asks engines and gathers what they answer.

    Args:
        send: Sends a message to one engine.
    """

    def __init__(self, send: Callable[[int, Down], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._lock = threading.Lock()

    @overload
    def ask(
        self, question: type[AskWhere], engines: Iterable[int], timeout_s: float
    ) -> dict[int, WhereAnswer]: ...
    @overload
    def ask(
        self, question: type[AskStacks], engines: Iterable[int], timeout_s: float
    ) -> dict[int, StacksAnswer]: ...
    def ask(
        self, question: type[AskWhere | AskStacks], engines: Iterable[int], timeout_s: float
    ) -> dict[int, Any]:
        """Return what each engine answered within `timeout_s`; who was silent is missing."""
        asked = _Question(set(engines), StacksAnswer if question is AskStacks else WhereAnswer)
        number = next(self._numbers)
        with self._lock:
            self._open[number] = asked
        for engine in sorted(asked.missing):
            self._send(engine, question(ask=number))
        if asked.missing:
            asked.complete.wait(timeout_s)
        with self._lock:
            del self._open[number]
            return dict(asked.answers)

    def heard(self, answer: WhereAnswer) -> None:
        """Take an answer; one that comes too late is nobody's."""
        with self._lock:
            asked = self._open.get(answer.ask)
            if asked is None or type(answer) is not asked.wanted:
                return
            if answer.engine not in asked.missing:
                return
            asked.missing.remove(answer.engine)
            asked.answers[answer.engine] = answer
            if not asked.missing:
                asked.complete.set()
