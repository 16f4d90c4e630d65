"""Where ipyparallel enters an engine; the only engine module that knows IPython."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import multiprocessing
import os
import platform
import socket
import sys
import warnings
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil

from .. import scratch
from ..messages import CellOutcome
from . import (
    answers,
    attention,
    breakpoints,
    diary,
    frameworks,
    postmortem,
    progress_bars,
    tracebacks,
)
from .flood import held_back
from .home import Home, KeptHome, LastHome
from .interrupt import InterruptWatch, leave_signals_to_us
from .link import ControlLink
from .marks import machinery
from .runtime import Engine, run_cell, support

machinery(__name__)
_engine: Engine | None = None
_diary: diary.Diary | None = None

TELEMETRY = "workbench_telemetry"
"""Message type that carries our frames over ipyparallel where the socket is out of reach."""


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
        """Run the source as cell `number` of the notebook; outputs travel as the cell prints."""
        shell = self.shell
        shell.execution_count = number
        # What the display hook looks at to see whether the cell ends in a semicolon.
        shell.history_manager.input_hist_parsed.append(source)
        with held_back():
            result = shell.run_cell(source, store_history=False)
            sys.stdout.flush()  # what C code printed counts too
            sys.stderr.flush()
        self._show_figures()
        sys.stdout.flush()
        sys.stderr.flush()
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        # An error's frames hold the cell's variables; who may keep it is `postmortem`.
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
            and `kept`; `patience_s` for an engine that nobody else ends.

    Returns:
        `pid`, `began` (start time), `host`, `python`, `frameworks` (what is imported already).
    """
    global _engine
    if info.get("cwd") and os.path.isdir(info["cwd"]):
        os.chdir(info["cwd"])
    for path in info.get("sys_path", ()):
        if path not in sys.path:
            sys.path.append(path)
    # IPython's mark of a prompt. Nobody types here: libraries that refuse to start workers from a
    # prompt (Lightning) should see what torchrun's workers are.
    sys.__dict__.pop("ps1", None)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "python": platform.python_version()}
    began = psutil.Process().create_time()
    answer = {**about, "frameworks": frameworks.imported(), "began": began}
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
    )
    _keep_diary(info)
    if scratch.folder() is not None:  # where multiprocessing puts its sockets
        vars(multiprocessing.current_process())["_config"]["tempdir"] = scratch.folder()
    _engine = Engine(info["engine"], link, InterruptWatch(_break_out))
    attention.install(info["engine"], link.say)
    breakpoints.install()
    tracebacks.install(IPythonShell().shell)
    progress_bars.install()
    _behave_as_a_notebooks(IPythonShell().shell)
    leave_signals_to_us(IPythonShell().shell.kernel)
    if not attached_before:
        answers.shorten(IPythonShell().shell.kernel)
    answers.brief(sys.stdout)
    answers.brief(sys.stderr)
    vars(importlib.import_module("IPython.core.debugger"))["set_trace"] = breakpoints.stop_here
    return answer


def _behave_as_a_notebooks(shell: Any) -> None:
    """Have what would need a terminal, or end the engine, do what it can in a notebook's cell."""
    page = importlib.import_module("IPython.core.page")
    shell.set_hook("show_in_pager", page.as_hook(page.display_page), priority=0)
    shell.ask_exit = _leave  # what IPython's own `exit` calls, which a reset brings back
    for name in ("exit", "quit"):
        shell.user_ns[name] = shell.user_ns_hidden[name] = _leave
        shell.builtin_trap.auto_builtins[name] = _leave  # in scripts and modules
    warnings.filterwarnings("ignore", "To exit: use", module="IPython")
    # A script that fails must fail its cell, or the other ranks would wait for it.
    shell.safe_execfile = functools.partial(shell.safe_execfile, raise_exceptions=True)


class _Leave:
    """What `exit` and `quit` are on an engine, which lives on."""

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
    """Write down what this engine does, where its cluster's folder is on this host."""
    global _diary
    folder = Path(info.get("folder") or "/nowhere")
    if not folder.is_dir():
        return
    session = IPythonShell().shell.kernel.session
    if _diary is not None:
        _diary.close()
    if _diary is None and info.get("kept"):
        session.send = diary.tee(session.send, lambda: _diary)
    _diary = diary.Diary(folder, info["engine"], outputs=bool(info.get("kept")))


def cell(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one cell (see `runtime.run_cell`); return its outcome as it travels."""
    if _engine is None:
        raise RuntimeError("this engine is not attached to a notebook")
    shell = IPythonShell()
    shell.autoreload(request.get("autoreload") or "0")
    tracebacks.show_as(request.get("traceback") or tracebacks.KINDS[0])
    if _diary is None:
        return run_cell(_engine, shell, request).to_wire()
    _diary.begin(str(request.get("call", "")), str(request.get("what", "a cell")))
    outcome = CellOutcome(status="error", ename="RuntimeError", evalue="it was cut off")
    try:
        outcome = run_cell(_engine, shell, request)
    finally:
        _diary.end(outcome)
    return outcome.to_wire()


def push(values: Mapping[str, Any]) -> None:
    """Set names in the cells' namespace."""
    IPythonShell().namespace.update(values)


def pull(names: list[str]) -> dict[str, Any]:
    """Return names of the cells' namespace; missing ones are left out."""
    namespace = IPythonShell().namespace
    return {name: namespace[name] for name in names if name in namespace}


def take(names: list[str]) -> dict[str, Any]:
    """Return names of the cells' namespace and forget them there."""
    namespace = IPythonShell().namespace
    return {name: namespace.pop(name) for name in names if name in namespace}


def variables() -> list[str]:
    """Return the names that the user's cells have set here, imports included."""
    shell = IPythonShell().shell
    ours = {*shell.user_ns_hidden, *(_engine.injected if _engine is not None else ())}
    return sorted(n for n in shell.user_ns if n not in ours and not n.startswith("_"))


def examine(name: str, *args: Any) -> Any:
    """Look at the failure that is kept (`postmortem.frames`, `command`, `evaluate`)."""
    watch = contextlib.nullcontext() if _engine is None else _engine.watch.armed()
    with watch:
        return getattr(postmortem, name)(*args)


def load(framework: str) -> list[str]:
    """Import a framework beside the other one (see `frameworks.load`)."""
    return frameworks.load(framework)


def free() -> int:
    """Forget the user's variables and collect garbage; return how many names were dropped."""
    import gc

    postmortem.clear()
    shell = IPythonShell().shell
    keep = set(shell.user_ns_hidden)
    names = [n for n in shell.user_ns if n not in keep and not n.startswith("_")]
    shell.reset(new_session=False, aggressive=False)
    gc.collect()
    return len(names)


def leave_group() -> None:
    """Drop the process group of SPMD cells, if there is one."""
    if _engine is not None and _engine.group:
        support(_engine.framework).destroy_group()
        _engine.group = ""


_loop: asyncio.AbstractEventLoop | None = None


def _run_beside(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a cell with a top-level `await` to its end, on a loop of its own.

    ipyparallel calls us from within the engine's event loop, where no other loop may run; the
    cell blocks the engine, as every cell does.
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
        if not task.done():  # interrupted: it must not go on with the next cell
            task.cancel()
            _loop.run_until_complete(asyncio.wait([task]))
        asyncio.events._set_running_loop(engines_loop)


def _break_out(harder: bool) -> None:
    if _engine is not None:
        support(_engine.framework).shutdown_group_sockets(store=harder)


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
