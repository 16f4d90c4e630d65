"""The kernel's end of the control path: one authenticated ROUTER on loopback, one thread.

Messages that are not signed with the cluster's key are counted and dropped before they are parsed,
and so is one that was recorded and comes again.

Questions to engines go the same way: their control threads answer, whatever the main thread does.

One of them is what an engine's clock reads, asked of those only whose clock is not the kernel's
(another machine, or a time namespace of a container):

    kernel's clock   t0 ......... t2        offset = t1 - (t0 + t2) / 2
    engine's clock         t1               bound  = (t2 - t0) / 2, whatever each way took

Of the latest answers the one counts whose bound is least, each being worse by `DRIFT` of its age.
Rows and events of such an engine are put on the kernel's clock here, as they arrive, so nobody
behind it meets another clock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import zmq

from ..devices import limits
from ..shared.cluster_env import Wakeup
from ..shared.messages import (
    AskClock,
    AskStacks,
    AskWhere,
    BadMessageError,
    ClockAnswer,
    Down,
    Happened,
    Hello,
    OfEngine,
    Records,
    Refused,
    StacksAnswer,
    Up,
    Welcome,
    WhereAnswer,
)
from ..shared.protocol import Seal, decode_up, encode, new_key, records_from
from ..shared.record import FLAG_KERNEL_CLOCK, FLAG_SKEWED_CLOCK, MOMENTS, clock_name
from .hosts.wire import bind, encrypt

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
        self._clocks = Clocks(clock_name())
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
            self.public_key = encrypt(self._socket)
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

    def clock(self, engine: int) -> Clock:
        """Return what is known of an engine's clock; exactly 0 where it is the kernel's own."""
        return self._clocks.clock(engine)

    def clock_bounds(self, engines: Iterable[int]) -> list[float | None]:
        """Return how far rows of engines may be off, in their order; None: not known."""
        bounds = [self._clocks.bound_s(engine) for engine in engines]
        return [one if math.isfinite(one) else None for one in bounds]

    @property
    def connected(self) -> frozenset[int]:
        """Engines that have said hello."""
        return frozenset(self._peers)

    def forget(self, engine: int) -> None:
        """Drop an engine that has died, with all messages for it."""
        self._peers.pop(engine, None)
        self._clocks.silence(engine)

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
                ready = dict(poller.poll(self._clocks.until_due_ms()))
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                if self._socket in ready:
                    self._receive()
                self._send_waiting()
                self._ask_clocks()
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
        at_s = clock()
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
                case ClockAnswer():
                    self._clocks.heard(nonce, message, at_s)
                case _:
                    if isinstance(message, Hello):
                        self._clocks.hello(nonce, message, asked=bool(identity))
                        self._speakers[nonce] = engine
                    if isinstance(message, Hello) and identity:
                        self._peers[engine] = identity, nonce
                        self._outbox.append((engine, Welcome(clock=self._clocks.name)))
                    if isinstance(message, (Records, Happened)):
                        message = self._clocks.arrived(nonce, message, at_s)
                    self._on_message(self._speakers.get(nonce, engine), message)
        except Exception:  # an error in one run must not block the others
            log.exception("A message from engine %d could not be processed", engine)

    def _send_waiting(self) -> None:
        later = []
        while self._outbox:
            engine, message = self._outbox.popleft()
            peer = self._peers.get(engine)
            if peer is None:
                later.append((engine, message))
                continue
            self._send_to(peer, message)
        self._outbox.extend(later)

    def _send_to(self, peer: tuple[bytes, str], message: Down) -> None:
        with contextlib.suppress(zmq.Again):
            identity, nonce = peer
            frames = self._seal.pack(encode(message), nonce)
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)

    def _ask_clocks(self) -> None:
        for engine in self._clocks.due():
            peer = self._peers.get(engine)
            if peer is not None:
                self._send_to(peer, AskClock(ask=self._clocks.ask(engine)))


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
        """Return the answers of the engines within `timeout_s`; silent engines are missing."""
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
        """Take an answer; a late answer is ignored."""
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


clock = time.perf_counter
WINDOW = 32
"""How many answers are kept."""
AT_ONCE, APART_S, EVERY_S = 8, 0.1, 10.0
"""An engine that says hello is asked so often, so far apart; from then on in this interval."""
DRIFT = 50e-6
"""How fast the clocks of two machines may drift apart: quartz is a few tens of millionths off."""
SLEW = 500e-6
"""How fast the offset that rows are converted by follows a better one: a step's length is changed
by no more than this share of it, and no moment comes before an earlier one."""
FAR_S = 1.0
"""An offset that is off by more (a machine slept) is followed as fast as time goes."""
KNOTS = 16


@dataclass(frozen=True)
class Clock:
    """What an engine's clock is to the kernel's.

    Attributes:
        offset_s: The engine's reads so much more.
        bound_s: The offset is right to this; 0: it is the kernel's own clock; infinite: nobody has
            answered yet.
    """

    offset_s: float = 0.0
    bound_s: float = 0.0


class Clocks:
    """The clocks of a cluster's engines. All methods may be called from any thread.

    Args:
        name: Of the kernel's clock (`record.clock_name`).
        now: Reads it.
    """

    def __init__(self, name: str, now: Callable[[], float] = clock) -> None:
        self.name, self._now = name, now
        self._by_nonce: dict[str, EngineClock] = {}  # of engines whose clock is another one
        self._by_engine: dict[int, tuple[str, EngineClock]] = {}
        self._lock = threading.Lock()

    def hello(self, nonce: str, hello: Hello, *, asked: bool) -> None:
        """Take note of an engine; `asked`: it can be reached, so its clock will be asked for."""
        with self._lock:
            before, _ = self._by_engine.pop(hello.engine, ("", None))
            self._by_nonce.pop(before, None)
            if hello.clock in ("", self.name):
                return
            found = EngineClock(self._now() if asked else math.inf)
            self._by_nonce[nonce], self._by_engine[hello.engine] = found, (nonce, found)

    def silence(self, engine: int) -> None:
        """Ask an engine no more: it is gone; what it said before may still be on the way."""
        with self._lock:
            if engine in self._by_engine:
                self._by_engine[engine][1].due_s = math.inf

    def until_due_ms(self) -> int | None:
        """Return for how long nobody need be asked; None: for ever."""
        if not self._by_engine:  # the usual case costs nothing
            return None
        with self._lock:
            due_s = min((one.due_s for _, one in self._by_engine.values()), default=math.inf)
        return None if due_s == math.inf else max(0, math.ceil(1e3 * (due_s - self._now())))

    def due(self) -> list[int]:
        """Return the engines that are to be asked at this moment."""
        if not self._by_engine:
            return []
        with self._lock:
            now_s = self._now()
            return [engine for engine, (_, one) in self._by_engine.items() if one.due_s <= now_s]

    def ask(self, engine: int) -> int:
        """Return the number of a question that is sent to an engine at this moment."""
        with self._lock:
            _, found = self._by_engine.get(engine, ("", None))
            return 0 if found is None else found.ask(self._now())

    def heard(self, nonce: str, answer: ClockAnswer, at_s: float) -> None:
        """Take an answer that arrived at `at_s`."""
        with self._lock:
            found = self._by_nonce.get(nonce)
            if found is not None:
                found.heard(answer.ask, answer.at_s, at_s)

    def clock(self, engine: int) -> Clock:
        """Return what is known of an engine's clock."""
        with self._lock:
            _, found = self._by_engine.get(engine, ("", None))
            return Clock() if found is None else found.at(self._now())

    def bound_s(self, engine: int) -> float:
        """Return how far an engine's latest rows may be off: they follow a better offset slowly."""
        with self._lock:
            _, found = self._by_engine.get(engine, ("", None))
            if found is None:
                return 0.0
            best = found.at(self._now())
            return best.bound_s + abs(best.offset_s - found.used_s(best.offset_s))

    def arrived(self, nonce: str, message: Records | Happened, at_s: float) -> Records | Happened:
        """Return a message of a run with its moments on the kernel's clock."""
        found = self._by_nonce.get(nonce)
        if found is None:
            return message
        with self._lock:
            if isinstance(message, Records):
                return replace(message, rows=found.converted(message.run, message.rows, at_s))
            event, said_s = message.event, getattr(message.event, "t_s", 0.0)
            if not (isinstance(said_s, float) and said_s and math.isfinite(said_s)):
                return message  # such events are of the moment of their arrival
            t_s = float(found.kernels(message.run, said_s, at_s))
            return replace(message, event=replace(event, **{"t_s": t_s}))


class EngineClock:
    """One clock that is not the kernel's: what it read, and what a run's rows are converted by.

    Within a run the conversion is one continuous function of the engine's time, which never goes
    backwards: it follows better estimates slowly, by rows to come. The next run begins with the
    best one.

    Args:
        due_s: When to ask it first; infinite: it cannot be asked.
    """

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self._asked: dict[int, float] = {}  # when each question that is not answered was sent
        self._questions = 0
        self._answers: deque[tuple[float, Clock]] = deque(maxlen=WINDOW)  # and when it came
        self._at_least_s = -math.inf  # no message is newer than its arrival
        self._run = -1
        self._knots: deque[tuple[float, float]] = deque(maxlen=KNOTS)  # engine's time, offset

    def ask(self, now_s: float) -> int:
        """Return the number of a question that is sent at this moment."""
        self._questions += 1
        self.due_s = now_s + (APART_S if self._questions < AT_ONCE else EVERY_S)
        self._asked[self._questions] = now_s
        self._asked.pop(self._questions - WINDOW, None)
        return self._questions

    def heard(self, number: int, read_s: float, at_s: float) -> None:
        """Take an answer: what the clock read, and when that arrived."""
        asked_s = self._asked.pop(number, None)
        if asked_s is None or not math.isfinite(read_s):
            return
        answer = Clock(read_s - (asked_s + at_s) / 2, (at_s - asked_s) / 2)
        known = self.at(at_s)
        if abs(answer.offset_s - known.offset_s) > answer.bound_s + known.bound_s:
            self._answers.clear()  # one of both slept, or was set: what was before holds no more
        self._answers.append((at_s, answer))

    def at(self, now_s: float) -> Clock:
        """Return the best that is known of it."""
        aged = (
            Clock(answer.offset_s, answer.bound_s + DRIFT * max(now_s - at_s, 0.0))
            for at_s, answer in self._answers
        )
        unknown = Clock(self._at_least_s if self._at_least_s > -math.inf else 0.0, math.inf)
        return min(aged, key=lambda one: one.bound_s, default=unknown)

    def used_s(self, best_s: float) -> float:
        """Return the offset that the latest rows were converted by; `best_s` before the first."""
        return self._knots[-1][1] if self._knots else best_s

    def converted(self, run: int, packed: bytes | memoryview, at_s: float) -> bytes:
        """Return rows of a run with their moments on the kernel's clock."""
        rows = records_from(packed).copy()
        ends_s = rows["end_s"][np.isfinite(rows["end_s"])]
        if not len(ends_s):
            return rows.tobytes()
        newest_s = float(ends_s.max())
        self._begin(run, newest_s, at_s)
        self._follow(newest_s, at_s)
        for name in MOMENTS:
            rows[name] = self._on_kernels(rows[name])
        rows["flags"] |= FLAG_SKEWED_CLOCK | FLAG_KERNEL_CLOCK
        return rows.tobytes()

    def kernels(self, run: int, read_s: float, at_s: float) -> Any:
        """Return a moment of a run on the kernel's clock."""
        self._begin(run, read_s, at_s)
        return self._on_kernels(read_s)

    def _begin(self, run: int, read_s: float, at_s: float) -> None:
        if not self._answers:
            self._at_least_s = max(self._at_least_s, read_s - at_s)
        if run != self._run:
            self._run = run
            self._knots.clear()
            self._knots.append((read_s, self.at(at_s).offset_s))

    def _follow(self, newest_s: float, at_s: float) -> None:
        last_s, offset_s = self._knots[-1]
        passed_s, gap_s = newest_s - last_s, self.at(at_s).offset_s - offset_s
        if passed_s > 0:
            most_s = passed_s * (SLEW if abs(gap_s) < FAR_S else 1.0)
            self._knots.append((newest_s, offset_s + min(max(gap_s, -most_s), most_s)))

    def _on_kernels(self, read_s: Any) -> Any:
        known_s, offset_s = np.array(self._knots).T
        return read_s - np.interp(read_s, known_s, offset_s)
