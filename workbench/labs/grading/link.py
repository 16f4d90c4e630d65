"""The grader's connection to a kernel: start it, run cells with a time limit, interrupt it, end it.

Outputs are not read, so a cell may print as much as it likes: its kernel drops it.

A check, and so the mark, runs here in the grader's own process, and asks the kernel by messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.session import Session

from ...errors import WorkbenchError
from ..answers import exercises
from ..asking import check as look
from ..limit import Late, at_most
from . import processes
from .isolation import NOTHING, Isolation, Place, environment
from .processes import Limits, Watch

if TYPE_CHECKING:
    from ..side import Wire

START_S = 90.0
LEAVE_S = 8.0
POLL_MS = 50
MOST_REPLY_BYTES = 16_000_000
MOST_ERROR_CHARACTERS = 5000
MOST_RUNS = 200
MOST_FACTS_BYTES = 100_000_000


class Gone(Exception):
    """The kernel has ended; the message says why."""


@dataclass(frozen=True)
class Reply:
    """The result of a cell.

    Attributes:
        error: The error that it raised, in one line; empty if it raised none.
        interrupted: Whether it took too long and reacted to the interrupt.
        answer: The answer of `inside`.
    """

    error: str = ""
    interrupted: bool = False
    seconds: float = 0.0
    answer: dict[str, Any] | None = None


class KernelLink:
    """One kernel in its own folder.

    Args:
        folder: New and empty, in the notebook's own folder; no other kernel uses anything of it.
        deadline: When everything must have ended, by `time.monotonic`.
    """

    def __init__(
        self, folder: Path, lab: int, mark: str, limits: Limits, deadline: float,
        isolation: Isolation = NOTHING,
    ) -> None:  # fmt: skip
        self._limits, self._mark, self._deadline = limits, mark, deadline
        self._nonce = secrets.token_hex(16)
        env = environment(folder, mark)
        key = secrets.token_hex(32)
        wire = {
            "transport": "ipc", "ip": str(folder / "k"), "key": key, "shell_port": 1,
            "iopub_port": 2, "stdin_port": 3, "control_port": 4, "hb_port": 5,
            "signature_scheme": "hmac-sha256", "kernel_name": "",
        }  # fmt: skip
        connection = folder / "kernel.json"
        connection.write_text(json.dumps(wire), encoding="utf-8")
        connection.chmod(0o600)
        self._log = folder / "kernel.log"
        self._facts_bytes = 0
        self.lab = lab
        self.known: dict[str, dict[str, Any]] = {}
        """Facts of the runs that the lab's own cells have made."""
        self.workers = 0
        """The number of engines that the lab's own cells have started."""
        stubs = write_stubs(folder.parent / f"{folder.name}-checks", lab) if isolation.how else None
        with processes.starting, self._log.open("wb") as log:
            place = Place(isolation, folder, stubs, limits.memory_bytes)
            self.process = subprocess.Popen(
                place.command("-m", "workbench.labs.grading.kernel"),
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True,
                cwd="/" if isolation.how else folder / "work",
            )  # fmt: skip
        given = {"nonce": self._nonce, "limits": asdict(limits)}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:
            stdin.write(json.dumps({**given, "connection": str(connection)}).encode() + b"\n")
        self._session = Session(key=key.encode())
        self._context = zmq.Context()
        self._shell, self._control = (self._socket(f"{folder / 'k'}-{port}") for port in (1, 4))
        self.watch = Watch(limits, self.family, self.kill, folder.parent)

    def _socket(self, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_REPLY_BYTES)
        socket.connect(f"ipc://{path}")
        return socket

    # -- its processes -----------------------------------------------------------------------------

    def family(self) -> list[Any]:
        """Every process that the notebook has started: all our descendants."""
        return processes.below(os.getpid())

    def kill(self) -> None:
        """End the kernel and every process that it has started, at once."""
        processes.end(self.family)

    def end(self) -> None:
        """End the kernel as Jupyter does, so that it can clean up; then end what is left."""
        if self.process.poll() is None:
            self._send(self._control, "shutdown_request", {"restart": False})
        until = time.monotonic() + LEAVE_S
        while self.family() and time.monotonic() < until:
            time.sleep(0.05)
        self.watch.stop()
        processes.end(lambda: {*self.family(), *processes.marked(self._mark)})
        self.process.wait()
        for socket in (self._shell, self._control):
            socket.close(linger=0)
        self._context.term()

    # -- cells -------------------------------------------------------------------------------------

    def begin(self) -> dict[str, str]:
        """Wait until the kernel answers; return the titles of the lab's exercises.

        Raises:
            Gone: It did not start.
        """
        try:
            answer = self._run(self._nonce + "{}", START_S, interrupt=False).answer or {}
        except Gone as gone:
            tail = self._log.read_bytes()[-800:].decode("utf-8", "replace").strip()
            raise Gone(f"{gone} (its last output: {tail})" if tail else str(gone)) from None
        if "ready" not in answer:
            raise Gone(answer.get("failed") or "it did not answer")
        try:
            return {one.number: one.title for one in exercises(self.lab)}
        except WorkbenchError as error:
            raise Gone(str(error)) from None

    def ask(self, do: str, *, wait_s: float = 30.0, **what: Any) -> Reply:
        """Let `inside` do something.

        Raises:
            Gone: The kernel has ended.
        """
        return self._run(self._nonce + json.dumps({"do": do, **what}), wait_s)

    def remember(self, runs: object) -> None:
        """Store the facts of runs that the lab's own cell has made: no later cell changes them."""
        for name in runs if isinstance(runs, dict) else {}:
            room = len(self.known) < MOST_RUNS and self._facts_bytes < MOST_FACTS_BYTES
            if name not in self.known and room:
                answer = self.ask("run", name=name).answer or {}
                if "facts" in answer:
                    self.known[name] = {"facts": answer["facts"]}
                    self._facts_bytes += len(json.dumps(answer["facts"]))

    def check(self, number: str, limit_s: float) -> Reply:
        """Make the check of an exercise here: the kernel only gives plain data.

        Raises:
            Gone: The kernel has ended.
        """
        began = time.monotonic()

        def send(what: dict[str, Any], left_s: float) -> dict[str, Any] | None:
            try:
                reply = self.ask(what.pop("do"), wait_s=left_s, **what)
            except Gone as gone:
                raise Away(str(gone)) from None
            return None if reply.interrupted else reply.answer or {}

        try:
            report, late = mark(number, Told(send, self.known, limit_s, self.workers))
        except Away as away:
            raise Gone(str(away)) from None
        after = self.ask("mend").answer or {}
        return Reply("", late, time.monotonic() - began, {**after, "report": report})

    def run(self, source: str, limit_s: float) -> Reply:
        """Run a cell.

        Raises:
            Gone: The kernel ended, or had to be ended.
        """
        return self._run(source, limit_s)

    def _run(self, source: str, limit_s: float, *, interrupt: bool = True) -> Reply:
        began = time.monotonic()
        number = self._send(self._shell, "execute_request", {
            "code": source, "silent": False, "store_history": False, "user_expressions": {},
            "allow_stdin": False, "stop_on_error": False,
        })  # fmt: skip
        until = min(began + limit_s, self._deadline)
        content = self._reply(number, until)
        interrupted = content is None
        if content is None and interrupt:
            self._interrupt()
            content = self._reply(number, time.monotonic() + self._limits.grace_s)
        if content is None:
            self.kill()
            late = f"the code did not end within {round(max(until - began, 0), 1):g} s"
            raise Gone(f"{late}, and it ignored the interrupt" if interrupt else late)
        error = ""
        if content.get("status") == "error":
            error = f"{content.get('ename')}: {content.get('evalue')}"[:MOST_ERROR_CHARACTERS]
        answer = content.get(self._nonce)
        if not isinstance(answer, dict):  # a kernel may answer with anything
            answer = None
        return Reply(error, interrupted, time.monotonic() - began, answer)

    def _send(self, socket: zmq.Socket[bytes], kind: str, content: dict[str, Any]) -> str:
        message = self._session.msg(kind, content)
        with contextlib.suppress(zmq.ZMQError):
            self._session.send(socket, message)
        return str(message["header"]["msg_id"])

    def _reply(self, number: str, until: float) -> dict[str, Any] | None:
        """Return the reply to a message; None if it has not come by then."""
        while True:  # check the time after each message: a kernel may send without end
            if self._shell.poll(POLL_MS):
                with contextlib.suppress(Exception):  # it may not be a message of Jupyter's
                    _, message = self._session.recv(self._shell, mode=zmq.NOBLOCK)
                    if message and message["parent_header"].get("msg_id") == number:
                        return dict(message["content"])
                if time.monotonic() < until and not self.watch.broken:
                    continue  # read first what was sent before the kernel ended
            if self.watch.broken:
                raise Gone(self.watch.broken)
            if self.process.poll() is not None:
                raise Gone(self.watch.broken or _ended(self.process.returncode))
            if time.monotonic() > until:
                return None

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGINT)


def _ended(code: int) -> str:
    if code >= 0:
        return f"the notebook's process ended (exit code {code})"
    try:
        return f"the notebook's process ended ({signal.Signals(-code).name})"
    except ValueError:
        return f"the notebook's process ended (signal {-code})"


_MOST_FINDINGS, _MOST_CHARACTERS = 50, 2000
_OWN_S = 30.0
"""Time for a check's own computation, beyond the time allowed for answers."""

_STUB = '''"""Replaces the checks of lab {lab}: the checks run in another process."""

from ..answers import exercise


def _away(c):
    c.wrong("This check runs after all cells of the notebook, and outside of the notebook.")


for _number, _title, _where in {known!r}:
    exercise(_number, _title, where=_where)(_away)
'''

_LOOK_AT = {
    "workbench.labs": r"workbench\.labs|labs\.(?:exercise|asking|answers|checks)",
    "the grader's names": r"_inside\b|_labs_|\bGuard\b|\bgrading\b",
    "frames": r"_getframe|f_locals|f_back|tb_frame|currentframe",
    "solutions": r"solutions|lab_\d+\.md",
    "the memory": r"gc\.get_|\bctypes\b|\.contents\b",
    "/proc": r"/proc\b",
    "a case's hidden numbers": r"\.(?:whole_s|latency_s|bytes_per_s|faults|link)\b|labs\.cases",
    "replaced functions of PyTorch": (
        r"(?:torch\.(?:Tensor|nn|autograd|distributed)\.|\bdist\.)[\w.]+\s*=[^=]"
    ),
    "imports": r"\bimportlib\b|__import__|sys\.modules|meta_path",
    "code of others": r"__code__|__globals__|__closure__|setattr\s*\(|__dict__",
    "other processes": r"os\.(?:kill|fork|exec|_exit)|subprocess|\bsignal\b|getppid",
    "the history of a run": r"\.(?:summarise|history|weights|plan|_runs)\s*=[^=]",
    "Workbench's list of runs": r"session\.(?:registry|results|run)\b|RunHistory|copy\.copy",
    "a run's file": r"run\.json",
    "the class Mail": r"class\s+Mail\b|Mail\.\w+\s*=|sent_bytes\s*=[^=]|sent_to\s*=[^=]",
}
_USUAL = {("a case's hidden numbers", lab) for lab in range(1, 14) if lab != 9}
_USUAL |= {("the class Mail", lab) for lab in range(1, 14) if lab != 2} | {("a run's file", 13)}
"""What answers of a lab may need, such as `self.link`, or a file that an exercise reads."""


def look_at(source: str, lab: int) -> list[str]:
    """Return what a teacher should look at in a cell, because no answer of the lab needs it."""
    return [
        name
        for name, pattern in _LOOK_AT.items()
        if (name, lab) not in _USUAL and re.search(pattern, source)
    ]


def write_stubs(folder: Path, lab: int) -> Path:
    """Write what replaces the checks in a kernel: numbers and titles, and no check."""
    folder.mkdir(mode=0o755)
    known: list[tuple[str, str, str]] = []
    with contextlib.suppress(WorkbenchError):  # the kernel's start says so
        known = [(one.number, one.title, one.where) for one in exercises(lab)]
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / f"lab_{lab}.py").write_text(_STUB.format(lab=lab, known=known), encoding="utf-8")
    return folder


class OutOfTime(BaseException):
    """The time for a check is over; no `except Exception` of a check catches it."""


class Away(BaseException):
    """The kernel has ended; the cause says why."""


class Told:
    """The other side of a check: a kernel, which is not trusted.

    Args:
        send: Sends a request with its time limit; gives the answer, or None if it was
            interrupted.
        known: Facts of runs as they were when the lab's own cell had made them.
        workers: How many engines must answer; 0 if that is not known.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any], float], Wire | None],
        known: dict[str, Wire],
        limit_s: float,
        workers: int = 0,
    ) -> None:
        self._send, self._known, self._workers = send, known, workers
        self._until = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left for the answers."""
        return self._until - time.monotonic()

    def _told(self, do: str, **what: Any) -> Wire:
        left_s = self.left_s
        found = None if left_s <= 0 else self._send({"do": do, **what}, left_s)
        if found is None:
            raise OutOfTime
        if "failed" in found:
            raise ValueError(str(found["failed"])[:_MOST_CHARACTERS])
        return found

    def value(self, name: str) -> Wire:
        """See `Side`."""
        return self._told("value", name=name)

    def call(self, name: str, args: list[Any], limit_s: float) -> Wire:
        """See `Side`."""
        return self._told("call", name=name, args=args, limit_s=limit_s)

    def ask(self, source: str, limit_s: float, framework: str | None) -> Wire:
        """See `Side`."""
        found = self._told("run_on_engines", source=source, limit_s=limit_s, framework=framework)
        values = found.get("values")
        if values is not None and (not isinstance(values, list) or not values):
            raise ValueError("no engine answered")
        if values is not None and self._workers > 0 and len(values) != self._workers:
            count = "1 engine" if len(values) == 1 else f"{len(values)} engines"
            words = f"The check got answers from {count}, but the lab uses {self._workers} engines."
            return {"wrong": words, "hint": "did a cell of the notebook start or stop engines?"}
        return found

    def run(self, name: str) -> Wire:
        """See `Side`."""
        return self._known[name] if name in self._known else self._told("run", name=name)

    def play(self, name: str) -> Wire:
        """See `Side`."""
        return self._told("play", name=name)


def mark(number: str, told: Told) -> tuple[dict[str, Any], bool]:
    """Return the report of a check on an answer, and whether its time was over."""
    late = False
    try:
        with at_most(max(told.left_s, 0) + _OWN_S):
            report = look(number, told).to_wire()
    except (OutOfTime, Late):
        late = True
        words = "The check was stopped at the time limit, because the answer's code did not end."
        hint = "does every loop end? Is there a message for every worker that waits for one?"
        finding = {"right": False, "words": words, "hint": hint}
        report = {"exercise": number, "passed": False, "findings": [finding]}
    report["findings"] = [_cut(one) for one in report["findings"][:_MOST_FINDINGS]]
    return report, late


def _cut(finding: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(finding[key])[:_MOST_CHARACTERS] for key in ("words", "hint")}
    return {"right": finding["right"] is True, **texts}
