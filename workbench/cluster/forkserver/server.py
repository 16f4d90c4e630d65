"""The warm parent: a process that has imported the framework and forks engines from it.

Forking takes milliseconds, but a new engine imports for seconds. The children also share the
framework's memory. Forking is safe under these conditions (each violation caused a hang): one
thread, no operation ever run, one OpenMP thread, no ZeroMQ context, no TCPStore, no CUDA call.

It also watches its children: it reaps them and tells the kernel how they ended. When the kernel has
ended, it kills them in any state. It talks JSON lines over an inherited
socket pair; nothing listens.

What libraries read from the environment while they are imported (OMP_NUM_THREADS, TORCH_LOGS) is
the parent's; everything else engines take from the notebook when they are forked. Threads are set
per run, by `torch.set_num_threads`.

    kernel -> warm   {"id", "cmd": fork_engine | fork_keeper | signal | stop | guard | guard_dir |
                      keep | soon | status, ...}
    warm -> kernel   {"id", ...the answer... | "error"},
                     {"event": "ready" | "warmed" | "exit" | "failed" | "taken" | "later", ...}

Imports of a user's notebooks run one after another. If memory is scarce, they wait until engines
are requested ("later", `turns.py`).

A kept cluster's parent stays while it has engines, even if its kernel ends. It waits until another
kernel takes it over, or ends after a long idle time (`owner.py`).

The other end of the line to its owner is `client.py`. The code of a forked child, before it becomes
an engine or the store's keeper, is here too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ...errors import ClusterError
from ...shared import cluster_env
from . import keeper, preload, turns
from .owner import Nanny, Owner

PARENT_CHECK_S = 1.0
SOON_S = 10.0
AGAIN_S = 1.0
TOGETHER_S = 1.0
"""SIGTERMs within this time count as one, because a platform can send several."""
ESCALATE_EVERY_S = 0.05

Job = Callable[[], None]


class WarmServer:
    """Answers the kernel's commands in one thread, which waits only in `select`.

    Args:
        sock: Our end of the socket pair.
        framework: What to preload: torch or tensorflow.
        extra: Further modules to preload after the first stage.
        log_path: Our own log, removed at the end.
    """

    def __init__(
        self, sock: socket.socket, framework: str, extra: Sequence[str], log_path: str
    ) -> None:
        self._line, self._framework, self._log_path = OwnerLine(sock), framework, log_path
        self._nanny = Nanny()
        self._owner = Owner(self._nanny, framework)
        self._over = False
        self._told_at: float | None = None  # when it was told to end
        self._report: Message = {}
        self._imported = False
        self._later = preload.SecondStage(framework, extra)
        self._job: Job | None = None  # set in a fresh child only
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- life ----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Import the first stage and report it, or report why it is postponed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._import(asked=False)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake_up)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_term)

    def _import(self, asked: bool) -> None:
        """Import the first stage when it is this process's turn; the kernel's death ends even this.

        Args:
            asked: Whether engines are requested now. If not, nothing is imported when memory is
                scarce.
        """
        with preload.on_hangup(self._line.sock, self._end), turns.turn():
            why = "" if asked else turns.too_little(self._framework)
            if why:
                self._send({"event": "later", "why": why})
                return
            report = self._report = preload.first_stage(self._framework)
        self._imported = True
        gc.collect()
        gc.disable()
        gc.freeze()
        self._later.touch()
        self._send({"event": "failed" if report.get("error") else "ready", **report})
        if not self._later.waiting:
            self._send({"event": "warmed"})

    def serve(self) -> Job | None:
        """Serve until the kernel has ended (then return None); in a new child, return its task."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._over:
                self._listen_to(selector)
                ready = {key.fd for key, _ in selector.select(self._timeout())}
                self._reap()
                self._owner.look()
                if self._line.fileno() in ready:
                    self._read()
                if self._job is not None:
                    return self._job
                door = self._owner.door
                if door is not None and door.fileno() in ready:
                    self._admit()
                self._nanny.escalate()
                self._warm_up()
                self._over |= self._owner.alone and not self._owner.needed()
                self._over |= self._has_left
        self._end()
        return None

    def _listen_to(self, selector: selectors.BaseSelector) -> None:
        """Let the selector watch the owner, if there is one, and the door."""
        wanted = {self._wake_in}
        if not self._owner.alone:
            wanted.add(self._line.fileno())
        if self._owner.door is not None:
            wanted.add(self._owner.door.fileno())
        watched = set(selector.get_map())
        for fd in watched - wanted:
            selector.unregister(fd)
        for fd in wanted - watched:
            selector.register(fd, selectors.EVENT_READ)

    def _admit(self) -> None:
        """Accept the next owner; the previous owner is told."""
        came = self._owner.admit()
        if came is None:
            return
        sock, message, refused = came
        if refused:
            with sock, contextlib.suppress(OSError):
                answer = {"error": refused, "owner": self._owner.who}
                sock.sendall(json.dumps(answer).encode() + b"\n")
            return
        self._line.send({"event": "taken", "pid": message["pid"]})
        self._line.change(sock)
        exits, self._owner.exits = self._owner.exits, []
        children = {str(pid): what for pid, what in self._nanny.children.items()}
        self._send({"children": children, "exits": exits, "report": self._report})

    def _on_term(self, number: int, _frame: FrameType | None) -> None:
        """Pass a SIGTERM on to the engines, which first report their end.

        A later SIGTERM ends all.
        """
        now = time.monotonic()
        if number == signal.SIGTERM and self._told_at is None:
            self._told_at = now
            for pid in self._nanny.engines:
                with contextlib.suppress(ProcessLookupError):
                    self._nanny.signal(pid, number)
        elif number != signal.SIGTERM or now - (self._told_at or now) >= TOGETHER_S:
            self._over = True

    @property
    def _has_left(self) -> bool:
        """Whether it was told to end, and its engines have ended."""
        return self._told_at is not None and not self._nanny.engines

    def _timeout(self) -> float:
        if self._nanny.busy:
            return ESCALATE_EVERY_S
        idle = self._owner.alone or not self._imported
        return PARENT_CHECK_S if idle else min(PARENT_CHECK_S, self._later.due_s)

    def _warm_up(self) -> None:
        """Import one module of the second stage when there is no request."""
        if self._owner.alone or not self._imported or self._later.due_s > 0:
            return
        with turns.turn(wait_s=0) as free:
            if not free or turns.too_little(self._framework):
                self._later.touch(AGAIN_S)  # engines that train before then import it themselves
                return
            done = self._later.go_on()
        if done:
            gc.collect()
            gc.freeze()
            self._send({"event": "warmed"})

    def _end(self) -> None:
        """Clean up everything, and end."""
        self._drain_guards()
        successor = self._owner.successor()
        if successor:
            self._nanny.hand_over(successor)
        else:
            self._nanny.end()
        with contextlib.suppress(OSError):
            os.unlink(self._log_path)
        turns.leave()
        os._exit(0)

    def _drain_guards(self) -> None:
        """Accept the guard requests that the kernel sent before it died."""
        for message in self._line.rest():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if message["cmd"] in ("guard", "guard_dir"):
                    self._answer(message)

    # -- messages ------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if not self._line.send(message):
            self._owner.lost()
        self._owner.tell_later(message)

    def _read(self) -> None:
        messages = self._line.receive()
        if messages is None:
            self._owner.lost()
            return
        self._later.touch()
        for message in messages:
            try:
                answer = self._answer(message)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            if self._job is not None:
                return
            self._send({"id": message.get("id"), **answer})

    def _answer(self, message: Message) -> Message:
        handler = getattr(self, f"_on_{message['cmd']}")
        result: Message = handler(message)
        return result

    def _on_fork_engine(self, message: Message) -> Message:
        warm = os.getpid()
        if self._imported:
            self._later.before(message["together"])
        return {"pid": self._fork(lambda: run_engine(message, warm), "engine")}

    def _on_fork_keeper(self, message: Message) -> Message:
        # Bound here, so that the port is known at once; hosted by the child.
        warm, ports = os.getpid(), message["ports"]
        try:
            sock = cluster_env.listening(message["host"], tuple(ports) if ports else None)
        except ClusterError as error:
            return {"unheard": error.seen}
        host, port = sock.getsockname()[:2]
        fd = os.dup(sock.fileno())
        sock.close()
        try:
            pid = self._fork(lambda: run_keeper(message, warm, fd), "keeper")
        finally:
            if self._job is None:
                os.close(fd)
        return {"pid": pid, "host": host, "port": port}

    def _fork(self, job: Job, what: str) -> int:
        if not self._imported:
            self._import(asked=True)
        trouble = preload.fork_hazard()
        if trouble:
            raise RuntimeError(f"it is not safe to fork this process: {trouble}")
        pid = os.fork()
        if pid == 0:
            self._job = job
            signal.set_wakeup_fd(-1)
            self._line.close()
            self._owner.leave()
            os.close(self._wake_in)
            os.close(self._wake_out)
            return 0
        self._nanny.children[pid] = what
        return pid

    def _on_signal(self, message: Message) -> Message:
        return {"sent": self._nanny.signal(message["pid"], message["sig"])}

    def _on_stop(self, message: Message) -> Message:
        self._nanny.stop(message["pids"], message["grace_s"])
        return {}

    def _on_guard(self, message: Message) -> Message:
        self._nanny.guarded[message["pid"]] = message["create_time"]
        return {}

    def _on_guard_dir(self, message: Message) -> Message:
        self._nanny.guard_dir(message["path"])
        return {}

    def _on_keep(self, message: Message) -> Message:
        if message["keep"]:
            self._owner.keep(Path(message["folder"]), float(message["idle_timeout_s"]))
        else:
            self._owner.let_go()
        return {}

    def _on_soon(self, _message: Message) -> Message:
        if not self._imported:
            self._import(asked=True)
        self._later.touch(SOON_S)
        return {}

    def _on_status(self, _message: Message) -> Message:
        return {
            "children": {str(pid): what for pid, what in self._nanny.children.items()},
            "guarded": list(self._nanny.guarded),
            "waiting": self._later.waiting,
            "hazard": preload.fork_hazard(),
        }

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 4096)
        for pid, code, number, held_bytes in self._nanny.reap():
            self._send(
                {"event": "exit", "pid": pid, "code": code, "signal": number, "held": held_bytes}
            )


def _wake_up(_number: int, _frame: FrameType | None) -> None:
    """Write the signal to the wake-up descriptor; the loop does the rest."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the warm parent on an inherited socket; in a new child, run the child's task."""
    parser = argparse.ArgumentParser(prog="workbench.cluster.forkserver.server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--framework", default="torch", choices=sorted(preload.FRAMEWORK_MODULES))
    parser.add_argument("--preload", nargs="*", default=[])
    parser.add_argument("--log", required=True)
    options = parser.parse_args(argv)
    os.set_inheritable(options.fd, False)
    server = WarmServer(
        socket.socket(fileno=options.fd), options.framework, options.preload, options.log
    )
    server.prepare()
    job = server.serve()
    if job is not None:
        gc.enable()
        job()
    sys.exit(0)


Message = dict[str, Any]
_CHUNK_BYTES = 1 << 16


class OwnerLine:
    """Sends to the owner and splits the received data into messages.

    Args:
        sock: Our end of the socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._input = b""

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; return whether the owner still exists."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that are complete now; None when the owner has ended."""
        try:
            chunk = self.sock.recv(_CHUNK_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            return None
        *lines, self._input = (self._input + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def rest(self) -> list[Message]:
        """Return the messages received before the owner ended; invalid ones are left out."""
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            while chunk := self.sock.recv(_CHUNK_BYTES):
                self._input += chunk
        found = []
        for line in self._input.split(b"\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def change(self, sock: socket.socket) -> None:
        """Continue with another owner."""
        # First a new descriptor: if the old number were used again, the change would not be
        # noticed.
        old, self.sock, self._input = self.sock, sock, b""
        old.close()

    def close(self) -> None:
        """Close the connection, in a forked child."""
        self.sock.close()


PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

# Loaded by the parent, so that a child calls it without a dlopen of its own.
_libc = ctypes.CDLL(None, use_errno=True)

STACKS_SIGNAL = signal.SIGUSR2
"""Makes an engine write the stacks of all its threads to its log, even while it is blocked."""


def run_engine(job: Mapping[str, Any], parent_pid: int) -> None:
    """Turn this fresh child into an ipyparallel engine; ends the process when the engine stops.

    Args:
        job: `argv`, `env`, `cwd`, `sys_path`, `log_path` and `name` as sent by the kernel.
        parent_pid: The warm parent; the child ends with it.
    """
    _detach(parent_pid, job["log_path"], job.get("name", "ipengine"))
    sys.argv = ["ipengine", *job["argv"]]
    os.environ.clear()
    os.environ.update(job["env"])
    sys.path[:] = job["sys_path"]
    _enter_folder(job["cwd"])
    _reseed()
    # IPEngine's default is the working directory of whoever imported it: the parent's.
    argv = [*job["argv"], f"--IPEngine.work_dir={os.getcwd()}"]
    code = 0
    try:
        importlib.import_module("ipyparallel.engine.app").IPEngine.launch_instance(argv=argv)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException as error:
        # A SIGTERM looks like this here: it stops the loop, but the main task never returns.
        if "Event loop stopped" not in str(error):
            traceback.print_exc()
            code = 1
    _leave(code)


def _leave(code: int) -> None:
    """End as multiprocessing's forked children do: exit handlers run, memory is not torn down.

    Otherwise every module would be torn down. That would write to all memory shared with the
    parent, and so copy it.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def run_keeper(job: Mapping[str, Any], parent_pid: int, listen_fd: int) -> None:
    """Turn this fresh child into the process that hosts the TCPStore; never returns."""
    _detach(parent_pid, job["log_path"], "store-keeper")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending engines may still use it
    store = keeper.host(listen_fd)
    while True:
        signal.pause()
        del store  # pragma: no cover - every signal that is handled ends the process


def _detach(parent_pid: int, log_path: str, name: str) -> None:
    os.setsid()
    # Set before the check: a parent that died in between has left us to another process.
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    _libc.prctl(PR_SET_NAME, name.encode()[:15])
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    log = open(log_path, "ab", buffering=0)  # noqa: SIM115 - faulthandler needs it for life
    os.chmod(log_path, 0o600)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # A descriptor of its own: the engine later redirects 1 and 2 to the notebook.
    faulthandler.enable(file=log)
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)
    _KEPT.append(log)


_KEPT: list[object] = []


def _enter_folder(path: str) -> None:
    try:
        os.chdir(path)
    except OSError as error:
        sys.stderr.write(
            f"The engine cannot use the working directory {path} ({error}). "
            "The engine uses the folder `/` instead.\n"
        )
        os.chdir("/")


def _reseed() -> None:
    """Give each child its own random numbers; otherwise forked children would all draw the same."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
