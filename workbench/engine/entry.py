"""Where ipyparallel enters an engine; the only engine module that knows IPython.

For each of Workbench's requests, an engine sends only messages that are read. ipykernel announces
each request, logs it, and passes both streams to its thread three times, which takes longer than an
empty cell.
The order of outputs is kept: everything that a cell printed is sent before `idle`, and `idle` means
that nothing more follows.

An engine that replaces another one borrows what its cell needs from a living engine, because it
lacks the definitions of earlier cells. Functions, classes and data are sent by value, through the
kernel, which never looks inside.

It also reports which frameworks this engine has imported, and can import another one besides them.
"""

from __future__ import annotations

import array
import ast
import asyncio
import codecs
import contextlib
import fcntl
import functools
import importlib
import logging
import multiprocessing
import os
import pickle
import platform
import select
import socket
import sys
import termios
import threading
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import cloudpickle
import psutil

from .. import catalog
from ..errors import ClusterError
from ..shared import cluster_env
from ..shared.cluster_env import import_environment
from ..shared.messages import CellOutcome
from . import activity_log, output
from .debugging import debugger, postmortem, stdin_bridge, tracebacks
from .debugging.marks import machinery
from .interrupt import InterruptWatch, leave_signals_to_us
from .kernel_watch import Home, KeptHome, LastHome
from .output import held_back
from .runtime import Engine, give_back, run_cell, support
from .telemetry import notices
from .telemetry.control_link import ControlLink
from .telemetry.departure import Departure

machinery(__name__)
_engine: Engine | None = None
_diary: activity_log.Diary | None = None

TELEMETRY = "workbench_telemetry"
"""Message type for frames over ipyparallel if the socket cannot be reached."""


class IPythonShell:
    """The engine's own IPython shell, as `runtime.Shell`."""

    _autoreload: ClassVar[dict[str, str]] = {}
    _inline: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        from IPython import get_ipython

        self.shell = get_ipython()
        self.namespace: dict[str, Any] = self.shell.user_ns
        self.shell.loop_runner = _run_beside

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the source as cell `number` of the notebook; outputs are sent as the cell prints."""
        shell = self.shell
        shell.execution_count = number
        # What the display hook looks at to see whether the cell ends in a semicolon.
        shell.history_manager.input_hist_parsed.append(source)
        with held_back():
            result = shell.run_cell(source, store_history=False)
            sys.stdout.flush()  # output of C code counts too
            sys.stderr.flush()
        self._show_figures()
        sys.stdout.flush()
        sys.stderr.flush()
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        # An error's frames hold the cell's variables; only `postmortem` may keep it.
        shell.last_execution_result = shell.InteractiveTB.tb = None
        return error

    def _show_figures(self) -> None:
        """Show figures below the cell from now on, as a notebook's kernel does.

        Matplotlib's inline backend does this when it is imported in a kernel; engines are forked
        from a process that had imported it before there was one.
        """
        if self._inline or "matplotlib.pyplot" not in sys.modules:
            return
        import matplotlib

        backend_inline: Any = importlib.import_module("matplotlib_inline.backend_inline")

        self._inline.append(True)
        backend = matplotlib.get_backend()
        if "inline" in backend and not matplotlib.is_interactive():
            matplotlib.interactive(True)
            backend_inline.configure_inline_support(self.shell, backend)
            backend_inline.show(close=True)

    def autoreload(self, mode: str) -> None:
        """Switch IPython's autoreload on or off, as it is in the notebook."""
        if mode == self._autoreload.get("mode", "0"):
            return
        self._autoreload["mode"] = mode
        if "AutoreloadMagics" not in self.shell.magics_manager.registry:
            self.shell.run_line_magic("load_ext", "autoreload")
        self.shell.run_line_magic("autoreload", mode)


def attach(info: Mapping[str, Any]) -> dict[str, Any]:
    """Make this process an engine of the cluster: connect its control link.

    Args:
        info: `engine`, `url`, `key` (hex), `cwd`, `sys_path`; of a cluster on this host `folder`
            and `kept`; `patience_s` for an engine that nobody else ends; `curve`, the kernel's
            public key, if messages are encrypted.

    Returns:
        `pid`, `began` (start time), `host`, `place` (its difference from other hosts), `address`
        (by which they reach it), `python`, `frameworks` (what is imported already).
    """
    global _engine
    if info.get("cwd") and os.path.isdir(info["cwd"]):
        os.chdir(info["cwd"])
    for path in info.get("sys_path", ()):
        if path not in sys.path:
            sys.path.append(path)
    # IPython's mark of a prompt. There is no prompt here: libraries that refuse to start workers
    # from a prompt (Lightning) should see a process like a torchrun worker.
    sys.__dict__.pop("ps1", None)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "python": platform.python_version()}
    began = psutil.Process().create_time()
    answer = {**about, "frameworks": imported(), "began": began, "place": cluster_env.host_token()}
    answer["address"] = cluster_env.own_address(str(urlsplit(info["url"]).hostname))
    attached_before = _engine is not None
    if _engine is not None:
        _engine.link.close()
    link = ControlLink(
        info["engine"],
        info["url"],
        bytes.fromhex(info["key"]),
        about,
        fallback=_over_ipyparallel(),
        home=_home(info),
        kernel_key=info.get("curve", ""),
    )
    _keep_diary(info)
    if cluster_env.folder() is not None:  # where multiprocessing puts its sockets
        vars(multiprocessing.current_process())["_config"]["tempdir"] = cluster_env.folder()
    # Names that ipyparallel's launchers set before the first cell are not the user's.
    found = set() if attached_before else set(IPythonShell().namespace)
    departure = Departure() if _engine is None else _engine.departure
    watch = InterruptWatch(_break_out)
    watch.on_terminate = departure.signalled
    if _engine is None:
        departure.install()
        notices.serve(departure)
    _engine = Engine(info["engine"], link, watch, injected=found, departure=departure)
    stdin_bridge.install(info["engine"], link.say)
    debugger.install()
    tracebacks.install(IPythonShell().shell)
    output.install()
    _behave_as_a_notebooks(IPythonShell().shell)
    leave_signals_to_us(IPythonShell().shell.kernel)
    if not attached_before:
        shorten(IPythonShell().shell.kernel)
    brief(sys.stdout)
    brief(sys.stderr)
    vars(importlib.import_module("IPython.core.debugger"))["set_trace"] = debugger.stop_here
    return answer


def _behave_as_a_notebooks(shell: Any) -> None:
    """Replace functions that need a terminal or end the engine by versions for a cell."""
    page = importlib.import_module("IPython.core.page")
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), priority=0)
    shell.ask_exit = _leave  # IPython's own `exit` calls this, and a reset restores that `exit`
    for name in ("exit", "quit"):
        shell.user_ns[name] = shell.user_ns_hidden[name] = _leave
        shell.builtin_trap.auto_builtins[name] = _leave  # in scripts and modules
    warnings.filterwarnings("ignore", "To exit: use", module="IPython")
    # A script that fails must fail its cell, or the other ranks would wait for it.
    shell.safe_execfile = functools.partial(shell.safe_execfile, raise_exceptions=True)


class _Leave:
    """The `exit` and `quit` of an engine; the engine continues."""

    def __repr__(self) -> str:
        return "exit() ends the cell on this engine"

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)


_leave = _Leave()


def _home(info: Mapping[str, Any]) -> Home | None:
    if info.get("kept"):
        return KeptHome(Path(info["folder"]))
    return LastHome(float(info["patience_s"])) if info.get("patience_s") else None


def _keep_diary(info: Mapping[str, Any]) -> None:
    """Record this engine's activity, if its cluster's folder is on this host."""
    global _diary
    folder = Path(info.get("folder") or "/nowhere")
    if not folder.is_dir():
        return
    session = IPythonShell().shell.kernel.session
    if _diary is not None:
        _diary.close()
    if _diary is None and info.get("kept"):
        session.send = activity_log.tee(session.send, lambda: _diary)
    _diary = activity_log.Diary(folder, info["engine"], outputs=bool(info.get("kept")))


def cell(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one cell (see `runtime.run_cell`); return its outcome in the form in which it is sent."""
    if _engine is None:
        raise RuntimeError("this engine is not attached to a notebook")
    shell = IPythonShell()
    shell.autoreload(request.get("autoreload") or "0")
    tracebacks.show_as(request.get("traceback") or tracebacks.KINDS[0])
    if _diary is None:
        return _answered(_engine, run_cell(_engine, shell, request))
    _diary.begin(str(request.get("call", "")), str(request.get("what", "a cell")))
    outcome = CellOutcome(status="error", ename="RuntimeError", evalue="it was cut off")
    try:
        outcome = run_cell(_engine, shell, request)
    finally:
        _diary.end(outcome)
    return _answered(_engine, outcome)


def _answered(engine: Engine, outcome: CellOutcome) -> dict[str, Any]:
    """Return an outcome in its sent form; a process that was told to end ends after sending."""
    if engine.departure.is_due:
        engine.departure.leave(asyncio.get_running_loop())
    return outcome.to_wire()


def push(values: Mapping[str, Any]) -> None:
    """Set names in the cells' namespace."""
    IPythonShell().namespace.update(values)


def pull(names: list[str]) -> dict[str, Any]:
    """Return names of the cells' namespace; missing ones are left out.

    Tensors are sent as the CPU's, because the receiver may not have such a device.
    """
    namespace = IPythonShell().namespace
    return {name: _leaving(namespace[name]) for name in names if name in namespace}


def take(names: list[str]) -> dict[str, Any]:
    """Return names of the cells' namespace and forget them there."""
    namespace = IPythonShell().namespace
    return {name: _leaving(namespace.pop(name)) for name in names if name in namespace}


def _leaving(value: Any) -> Any:
    for one in _with_devices():
        value = one.on_cpu(value)
    return value


def _with_devices() -> list[Any]:
    """Return the imported frameworks' modules for devices."""
    names = [f"workbench.engine.{framework}.accelerator" for framework in imported()]
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in loaded if hasattr(module, "on_cpu")]


def variables() -> list[str]:
    """Return the names that the user's cells have set here, imports included."""
    shell = IPythonShell().shell
    ours = {*shell.user_ns_hidden, *(_engine.injected if _engine is not None else ())}
    return sorted(n for n in shell.user_ns if n not in ours and not n.startswith("_"))


def examine(name: str, *args: Any) -> Any:
    """Inspect the kept failure (`postmortem.frames`, `command`, `evaluate`)."""
    watch = contextlib.nullcontext() if _engine is None else _engine.watch.armed()
    with watch:
        return getattr(postmortem, name)(*args)


def load(framework: str) -> list[str]:
    """Import a framework in addition to the other one (see `import_framework`)."""
    return import_framework(framework)


def free() -> int:
    """Forget the user's variables and collect garbage; return how many names were dropped."""
    import gc

    postmortem.clear()
    shell = IPythonShell().shell
    keep = set(shell.user_ns_hidden)
    names = [n for n in shell.user_ns if n not in keep and not n.startswith("_")]
    shell.reset(new_session=False, aggressive=False)
    gc.collect()
    for framework in imported():
        if (loaded := sys.modules.get(f"workbench.engine.{framework}.support")) is not None:
            give_back(loaded)
    return len(names)


def leave_group() -> None:
    """Drop the process group of SPMD cells, if there is one."""
    if _engine is not None and _engine.group:
        support(_engine.framework).destroy_group()
        _engine.group = ""


_loop: asyncio.AbstractEventLoop | None = None


def _run_beside(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell with a top-level `await` to its end, on a loop of its own.

    ipyparallel calls this function inside the engine's event loop, where no other loop can run. The
    cell blocks the engine, like every cell.
    """
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    engines_loop = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    task = _loop.create_task(coroutine)
    try:
        return _loop.run_until_complete(task)
    finally:
        if not task.done():  # interrupted: it must not continue during the next cell
            task.cancel()
            _loop.run_until_complete(asyncio.wait([task]))
        asyncio.events._set_running_loop(engines_loop)


def _break_out(harder: bool) -> None:
    if _engine is not None:
        support(_engine.framework).break_collectives(store=harder)


def _over_ipyparallel() -> Any:
    """Return a function that sends frames on the engine's iopub channel, under the cell."""
    kernel = IPythonShell().shell.kernel

    def send(frames: list[Any]) -> None:
        kernel.session.send(
            kernel.iopub_socket,
            TELEMETRY,
            content={},
            parent=kernel.get_parent(),
            ident=f"engine.{kernel.int_id}.telemetry".encode(),
            buffers=[bytes(frame) for frame in frames],
        )

    return send


LET_GO_S = 2.0
PIPE_BYTES = 1 << 16

OURS = "workbench"
"""Metadata of the kernel's requests (`cluster/calls.py`); others are answered as usual."""

NEEDED = ("_publish_status", "init_metadata", "should_handle", "get_parent", "aborted")
"""The attributes that are used here; some are internals of ipykernel."""


def shorten(kernel: Any) -> None:
    """Let an engine's kernel answer Workbench's requests with fewer messages."""
    if not all(hasattr(kernel, name) for name in NEEDED):
        return  # another ipykernel: it answers as usual
    say, metadata, handles = kernel._publish_status, kernel.init_metadata, kernel.should_handle

    def publish_status(status: str, channel: str, parent: Any = None) -> None:
        # No receiver waits for `busy`, because the sender knows that it sent a request.
        if status != "busy" or not _is_ours(parent or kernel.get_parent(channel)):
            say(status, channel, parent)

    def init_metadata(parent: Any) -> dict[str, Any]:
        about: dict[str, Any] = metadata(parent)
        if _is_ours(parent):
            about.pop("started", None)  # the client would parse it as a date
        return about

    def should_handle(stream: Any, message: Any, idents: Any) -> Any:  # may be awaitable
        if _is_ours(message) and message["header"]["msg_id"] not in kernel.aborted:
            return True  # without a line in the log
        return handles(stream, message, idents)

    kernel._publish_status, kernel.init_metadata = publish_status, init_metadata
    kernel.should_handle = should_handle
    if kernel.log.level < logging.INFO:  # its handlers show no more; records were made for nothing
        kernel.log.setLevel(logging.INFO)


def _is_ours(message: Any) -> bool:
    return OURS in (message.get("metadata") or {})


def brief(stream: Any) -> None:
    """Let a stream of ipykernel's pass on its output only if there was any."""
    if "flush" in vars(stream) or not hasattr(stream, "_flush_pending"):
        return
    watched = getattr(stream, "_should_watch", False)
    if watched and not hasattr(stream, "_original_stdstream_fd"):
        return  # ipykernel before 6.29: its thread cannot be woken, so it keeps the pipe
    pipe = _Pipe(stream) if watched else None
    if pipe is not None and not pipe.begin():
        return
    flush = stream.flush

    def flush_if_printed() -> None:
        if pipe is not None:
            pipe.take_in()
        if stream._flush_pending:
            flush()

    stream.flush = flush_if_printed


class _Pipe:
    """The output of C code and child processes in a stream of ipykernel.

    ipykernel's thread reads it sooner or later; a cell's last output could come after the end of
    the cell, and was then lost. Here a reader holds a lock until it has written the text. So at the
    end of a cell, after the last read, no text is between reader and writer.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self) -> bool:
        """Take over from ipykernel's thread; return whether that worked."""
        stream = self._stream
        stream._should_watch = False  # it looks when it has read something, as in its `close`
        os.write(stream._original_stdstream_fd, b"\0")
        stream.watch_fd_thread.join(LET_GO_S)
        stream._should_watch = True
        if stream.watch_fd_thread.is_alive():
            return False
        os.set_blocking(stream._fid, False)
        stream.watch_fd_thread = threading.Thread(
            target=self._watch, name=f"workbench-{stream.name}", daemon=True
        )
        stream.watch_fd_thread.start()
        return True

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._stream._fid, select.POLLIN)
        # Looked at after reading too: what was read may have been the byte that `close` wakes with.
        while self._stream._should_watch and poller.poll() and self._stream._should_watch:
            with self._lock:
                if not self._take(PIPE_BYTES):
                    return

    def take_in(self) -> None:
        """Write the present content of the pipe.

        A child that prints all the time does not block this.
        """
        waiting = array.array("i", [0])
        with self._lock, contextlib.suppress(OSError):
            fcntl.ioctl(self._stream._fid, termios.FIONREAD, waiting)
            if waiting[0]:
                self._take(waiting[0])
                if not self._stream._should_watch:  # what was read may be what wakes the reader
                    os.write(self._stream._original_stdstream_fd, b"\0")

    def _take(self, most_bytes: int) -> bool:
        """Read and write; return whether the pipe is still open."""
        try:
            data = os.read(self._stream._fid, most_bytes)
        except BlockingIOError:  # the other reader was first
            return True
        if text := self._decoder.decode(data):
            self._stream.write(text)
        os.write(self._stream._original_stdstream_copy, data)
        return bool(data)


MOST_BYTES = 1 << 30


def names_in(source: str) -> set[str]:
    """Return the names that a cell mentions; none if it is not plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magics: everything may be needed
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def lend(source: str) -> dict[str, bytes]:
    """Return the user's variables that a cell mentions, packed; empty if one cannot be sent.

    If the total exceeds `MOST_BYTES`, nothing is sent, because loading the data again is faster.
    """
    wanted, space = names_in(source), IPythonShell().namespace
    packed: dict[str, bytes] = {}
    left_bytes = MOST_BYTES
    for name in variables():
        if wanted and name not in wanted:
            continue
        try:
            data = _packed(space[name])
        except Exception:  # a lock, a file, a generator: packing can raise any error
            data = b""
        packed[name] = data if len(data) <= left_bytes else b""
        left_bytes -= len(packed[name])
    return packed


def _packed(value: Any) -> bytes:
    for one in _with_devices():
        packed: bytes = one.pack(value)
        return packed
    data: bytes = cloudpickle.dumps(value)
    return data


def borrow(packed: Mapping[str, bytes]) -> list[str]:
    """Take over variables from another engine; return the names for which this failed.

    Tensors of a device move to this engine's own when its next cell names it.
    """
    space, missing = IPythonShell().namespace, []
    for name, data in packed.items():
        try:
            space[name] = pickle.loads(data)
        except Exception:  # noqa: PERF203 - not packed, or of a module that is not here
            missing.append(name)
    return missing


def imported() -> list[str]:
    """Return the frameworks that a cell can use at once."""
    return [name for name in catalog.FRAMEWORKS if name in sys.modules]


def import_framework(framework: str) -> list[str]:
    """Import a framework in addition; variables stay. Return what is imported then.

    Raises:
        ClusterError: It cannot be imported here, or what it needs is here in another form.
    """
    os.environ.update(import_environment(framework, os.environ))
    try:
        importlib.import_module(framework)
        importlib.import_module(f"workbench.engine.{framework}.support")
    except ImportError as error:
        raise ClusterError(
            f"{framework} could not be imported on this engine.",
            seen=str(error),
            next_step=f"on the host of this engine, install {framework}: "
            f"pip install 'distributed-workbench[{framework}]'",
            code="WB-CLUSTER-026",
        ) from error
    return imported()
