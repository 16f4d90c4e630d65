"""The engine's end of the control path: one DEALER and one thread for the engine's whole life.

Records (packed, in batches) and events go up; stop, pause, step and fault messages come down. The
training thread only writes to the recorder's ring or appends to a deque. This thread sends, so
telemetry never waits in a step. A failed message or a full disk does not end this thread, because
without it the kernel would get no more reports.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from ...errors import WorkbenchError
from ...history import disk
from ...shared import events
from ...shared.cluster_env import Wakeup
from ...shared.messages import (
    SERVER_GONE,
    WORKERS_DONE,
    Advance,
    AskClock,
    AskStacks,
    AskWhere,
    BadMessageError,
    ClockAnswer,
    Down,
    Halt,
    HaltAt,
    Happened,
    Hello,
    Inject,
    Interrupt,
    OfRun,
    Position,
    Records,
    Refused,
    Regroup,
    Resume,
    Told,
    Up,
    Welcome,
)
from ...shared.protocol import Seal, decode_down, encode
from ...shared.record import RECORD, clock_name
from ..debugging import stacks, stdin_bridge
from ..transport import connection
from .recorder import FINAL_S
from .step_gate import ENDS

if TYPE_CHECKING:
    from ..context import RunContext
    from ..kernel_watch import Home

log = logging.getLogger("workbench.engine")
DRAIN_S = 0.1
FLUSH_S = 0.005
"""How often unfinished rows of a device are checked while they are waited for."""
IDLE_S = 1.0
WELCOME_S = 2.0
MAX_EVENTS = 10_000
MAX_EARLY = 100
MOST_TOLD = 10
"""At most this number of the thread's errors is written to the engine's log."""


class Writer(Protocol):
    """Where a run's records and events also go on this side (`history.disk.RunWriter`).

    A writer that raises is dropped, with a note: the run continues in the kernel's memory.
    """

    def append_records(self, data: bytes) -> None:
        """Append packed rows."""

    def append_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append one event."""

    def close(self) -> None:
        """Close the files."""


class ControlLink:
    """Connects this engine to the kernel.

    Args:
        engine: Permanent id of this engine.
        url: The kernel's control socket.
        key: The cluster's key; every message is signed with it.
        about: Fields of `messages.Hello`.
        fallback: Sends frames another way (through ipyparallel) if the socket cannot be reached
            within `WELCOME_S`.
        home: Knows when the kernel is another one, or gone permanently.
        kernel_key: The kernel's public key (Z85), if messages are encrypted.

    Attributes:
        kernels_clock: Whether this engine reads the same clock as the kernel.
    """

    def __init__(
        self,
        engine: int,
        url: str,
        key: bytes,
        about: Mapping[str, Any],
        fallback: Callable[[list[bytes | memoryview]], None] | None = None,
        home: Home | None = None,
        kernel_key: str = "",
    ) -> None:
        self._kernel_key = kernel_key.encode()
        self._engine, self._url, self._about = engine, url, dict(about)
        self._seal, self._kernel = Seal(key), ""  # the kernel's nonce, once it has answered
        self._clock, self.kernels_clock = clock_name(), True
        self._fallback, self._home = fallback, home
        self._events: deque[tuple[int, events.Event]] = deque(maxlen=MAX_EVENTS)
        self._sayings: deque[Up] = deque(maxlen=MAX_EVENTS)
        self._run: RunContext | None = None
        self._writer: Writer | None = None
        self._lost = 0
        self._early: deque[Down] = deque(maxlen=MAX_EARLY)
        self._closed = False
        self._welcomed = False
        self._flushed = threading.Event()
        self._flush_wanted = False
        self._flush_to, self._flush_until_s = 0, 0.0
        self._told_unmeasured = False
        self._wakeup = Wakeup()
        self.rejected = self._told_refused = self.faults = 0
        self.using_fallback = False
        self._thread = threading.Thread(target=self._main, name="workbench-control", daemon=True)
        self._thread.start()

    def attach(self, context: RunContext, writer: Writer | None) -> None:
        """Begin to carry a run's records."""
        self._lost, self._told_unmeasured = 0, False
        self._writer, self._run = writer, context
        self._wake()

    def detach(self, timeout_s: float = 10.0) -> bool:
        """Send the remaining records of the run and release it; return whether all were sent."""
        sent = self.flush(timeout_s)
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except Exception as error:  # disks of other hosts say only now that they are full
            self._tell_unwritten(error)
            sent = self.flush(timeout_s) and sent
        self._run = None
        return sent

    def emit(self, event: events.Event) -> None:
        """Send an event of the current run; never waits."""
        run = self._run.spec.run if self._run is not None else 0
        self._events.append((run, event))
        self._wake()

    def say(self, message: Up) -> None:
        """Send a message that belongs to no run; never waits."""
        self._sayings.append(message)
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything recorded so far is sent.

        Rows that a device has not finished are waited for, for a limited time, and then sent
        without its times. Messages from the kernel are handled meanwhile.
        """
        self._flushed.clear()
        self._flush_to = 0 if self._run is None else self._run.recorder.written
        self._flush_until_s = time.monotonic() + min(FINAL_S, 0.5 * timeout_s)
        self._flush_wanted = True
        self._wake()
        return self._flushed.wait(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake()
        self._thread.join(timeout=2)

    def _wake(self) -> None:
        self._wakeup.set()

    def _main(self) -> None:
        context = zmq.Context()
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        socket = self._connect(context, poller)
        began = time.monotonic()
        try:
            while not self._closed:
                ready = dict(poller.poll(int(1e3 * (self._interval() if self._run else IDLE_S))))
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                if self._home is not None and (url := self._home.moved()) not in ("", self._url):
                    poller.unregister(socket)
                    socket.close(linger=0)
                    self._url = url
                    socket, ready = self._connect(context, poller), {}
                late = time.monotonic() - began > WELCOME_S
                try:
                    self._turn(socket, heard=socket in ready, late=late)
                except Exception:  # a message that cannot be sent does not block others
                    self._stumbled()
        finally:
            socket.close()
            context.term()
            self._wakeup.close()

    def _turn(self, socket: Any, *, heard: bool, late: bool) -> None:
        if self._run is not None and self._run.membership.stale:
            self._run.membership.remind()
        if heard:
            self._receive(socket)
        if self._early and self._run is not None:
            self._catch_up()
        if not self._welcomed and not self.using_fallback:
            self.using_fallback = late and self._fallback is not None
            if self.using_fallback:
                self._say_hello()
        self._send_pending()

    def _stumbled(self) -> None:
        self.faults += 1
        if self.faults <= MOST_TOLD:
            log.exception("Engine %d keeps its link to the kernel after this error", self._engine)
        time.sleep(DRAIN_S)  # an immediate error must not repeat in every iteration

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> Any:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"engine-{self._engine}-{os.getpid()}".encode())
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, 1000)
        if self._kernel_key:
            socket.curve_serverkey = self._kernel_key
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        if self._home is not None:
            self._home.watch(socket)
        socket.connect(self._url)
        poller.register(socket, zmq.POLLIN)
        self._socket = socket
        self._say_hello()
        return socket

    def _say_hello(self) -> None:
        self._send(Hello(engine=self._engine, clock=self._clock, **self._about))

    def _interval(self) -> float:
        if self._flush_wanted:
            return FLUSH_S
        # Many workers together must not flood the kernel: 64 of them send 4 batches a second each.
        world = self._run.spec.world_size if self._run else 1
        return min(0.5, max(DRAIN_S, world / 250))

    def _send_pending(self) -> None:
        if self._fallback is not None and not self._welcomed and not self.using_fallback:
            return  # not known yet which connection works; messages on a closed one would be lost
        run = self._run
        wanted = self._flush_wanted
        held = False
        if run is not None:
            overdue = wanted and time.monotonic() >= self._flush_until_s
            while rows := run.recorder.drain(final=overdue, within_s=0.0):
                self._send_rows(run, rows)
            held = run.recorder.drained < self._flush_to and not overdue
            self._tell_unmeasured(run, over=wanted and not held)
        if (count := self.rejected + connection.refused.count) != self._told_refused:
            self._told_refused = count
            self._send(Refused(engine=self._engine, count=count))
        while self._sayings:
            self._send(self._sayings.popleft())
        while self._events:
            number, event = self._events.popleft()
            self._write(partial(_append_event, name=event.name, fields=event.to_wire()))
            self._send(Happened(run=number, event=event))
        if wanted and not held:
            self._flush_wanted = False
            self._flushed.set()

    def _send_rows(self, run: RunContext, rows: bytes) -> None:
        self._write(lambda writer: writer.append_records(rows))
        dropped = run.recorder.dropped + self._lost
        if not self._send(Records(run=run.spec.run, dropped=dropped, rows=rows)):
            self._lost += len(rows) // RECORD.itemsize

    def _tell_unmeasured(self, run: RunContext, *, over: bool) -> None:
        """Report once, at the end of a run, that a device did not report all step times."""
        recorder = run.recorder
        if not (over and recorder.unmeasured) or self._told_unmeasured:
            return
        self._told_unmeasured = True
        many = recorder.unmeasured
        steps = "The last step was" if many == 1 else f"The last {many} steps were"
        self.emit(
            events.Warned(
                rank=run.spec.rank,
                text=f"{steps} not measured: {recorder.trouble}. For "
                f"{'this step' if many == 1 else 'these steps'}, the history shows when the CPU "
                "finished its part; the device may have finished later.",
            )
        )

    def _write(self, write: Callable[[Writer], None]) -> None:
        """Write to the run's files; if that fails, the run continues without them."""
        writer = self._writer
        if writer is None:
            return
        try:
            write(writer)
        # probably a full disk: the files are lost, but the run continues
        except Exception as error:
            self._writer = None
            with contextlib.suppress(Exception):
                writer.close()
            self._tell_unwritten(error)

    def _tell_unwritten(self, error: Exception) -> None:
        if self._run is not None:
            spec = self._run.spec
            self.emit(disk.unwritten(spec.run_dir, error, spec.rank))

    def _send(self, message: Up) -> bool:
        if isinstance(message, Hello):
            self._kernel = ""
        frames = self._seal.pack(encode(message), self._kernel)
        if self.using_fallback and self._fallback is not None:
            self._fallback(frames)
            return True
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                packet, sender = self._seal.unpack(frames)
                message = decode_down(packet)
            except BadMessageError:
                self.rejected += 1
                continue
            if isinstance(message, Welcome):
                self._kernel = sender
            self._obey(message)

    def _catch_up(self) -> None:
        """Execute the orders that came between the run's start in the kernel and its start here."""
        early = list(self._early)
        self._early.clear()
        for message in early:
            self._obey(message)

    def _obey(self, message: Down) -> None:
        """Handle a message; an invalid message must not end this thread."""
        try:
            self._handle(message)
        except (KeyError, ValueError, TypeError, AttributeError, WorkbenchError):
            self.rejected += 1

    def _handle(self, message: Down) -> None:
        match message:
            case Welcome():
                self._welcomed, self.using_fallback = True, False
                self.kernels_clock = message.clock in ("", self._clock)
            case AskClock():
                at_s = time.perf_counter()
                self._send(ClockAnswer(engine=self._engine, ask=message.ask, at_s=at_s))
            case AskWhere() | AskStacks():
                self._send(stacks.answer(message, self._engine))
            case Interrupt():
                os.kill(os.getpid(), signal.SIGINT)
            case OfRun():
                if isinstance(message, (Halt, HaltAt)) and message.purpose in ENDS:
                    stdin_bridge.release("Workbench is ending the cell on this worker")
                run = self._run
                if run is None:
                    self._early.append(message)  # Stop was pressed before this engine has begun
                elif message.run == run.spec.run:
                    self._steer(run, message)
            case _:
                stdin_bridge.hear(message)

    def _steer(self, run: RunContext, message: OfRun) -> None:
        if isinstance(message, (Halt, HaltAt, Regroup)):
            run.departure.answered()
        match message:
            case Halt():
                step = run.gate.halt()
                self._send(Position(run=run.spec.run, rank=run.membership.place, step=step))
            case HaltAt(purpose="leave_now"):
                run.departure.leave_now()
            case HaltAt():
                run.gate.halt_at(message.purpose, message.step)
            case Resume():
                run.gate.resume()
            case Advance():
                run.gate.advance(message.steps)
            case Told(topic=events.SHARES):
                self._change_shares(run, message.value)
            case Told(topic=topic) if topic == SERVER_GONE:
                run.server_gone(int(message.value))
            case Told(topic=topic) if topic == WORKERS_DONE:
                run.workers_done()
            case Told():
                run.board.hear(message.topic, message.rank, message.value)
            case Regroup():
                run.membership.announce(message)  # from here on nobody completes a step of before
                run.gate.drop_deal()
            case Inject():
                run.faults.set(message.faults)

    def _change_shares(self, run: RunContext, asked: Mapping[str, Any]) -> None:
        """Answer, apply or cancel a change of the workers' shares (`execution/workers/shedding`).

        A message for other members than the last announced ones is not for this worker.
        """
        step, portions = int(asked["step"]), [int(one) for one in asked["portions"]]
        if asked["generation"] != run.membership.announced:
            return
        if portions:
            run.gate.deal(step, portions)
        elif asked["over"]:
            run.gate.drop_deal()
        else:
            place, at = run.membership.place, run.gate.ask_to_deal()
            self.emit(events.Dealing(rank=place, number=int(asked["number"]), step=at))


def _append_event(writer: Writer, name: str, fields: Mapping[str, Any]) -> None:
    writer.append_event(name, fields)
