"""The functions that a job's script calls: this process joins the run described by `run.json`.

Torchrun, a scheduler or the user has started the processes; the environment says which of them this
is. Rank 0 starts one more process, the conductor. It is to the job what a notebook's kernel is to
its engines: it hands out the parts, keeps the records, and agrees on a Stop.

    rank 0 ── starts ──> conductor ── parts for all ──> rank 0
       ^                     ^                            │
       │ who, where          │ records, outcomes          │ each rank's part
    rank 1, 2, ... ──────────┴────────────────────────────┘

The ranks meet in the store of torchrun's agent. If TF_CONFIG is set, rank 0 listens at its first
address, and the other ranks connect to it. TensorFlow itself listens there only later. After the
meeting everything is as on an engine of a notebook.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import linecache
import os
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from ..devices.discovery import survey
from ..devices.leases import cpu_count
from ..errors import ClusterError, PlanError, RunError, WorkbenchError
from ..shared import cluster_env
from ..shared.messages import AskedToEnd, CellEnded, CellOutcome
from ..shared.protocol import control_key
from . import context
from .debugging.marks import machinery
from .interrupt import InterruptWatch
from .meeting import KEY, About, Surroundings, meeting_of
from .runtime import Engine, run_cell, support
from .telemetry import notices
from .telemetry.control_link import ControlLink
from .transport.address import addresses

machinery(__name__)
FORMAT = "workbench-job/1"
DESCRIPTION = "run.json"
CONDUCTOR = "workbench.jobs.conductor"
SCRIPTS = "workbench.strategies.torch.parts.scripts"
CONDUCT_S = 60.0
SETTLE_S = 30.0
OTHERS_S = 600.0
"""How long rank 0 waits at the end for the conductor, which waits for the other ranks: after an
error, and without an error (others may evaluate, or data may be sent to a tracker)."""
MOST_LOG_BYTES = 16 << 20


# -- the conductor ---------------------------------------------------------------------------------


class Conductor:
    """The process next to rank 0 that keeps the job's records; it ends when the job has ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._file = ours.makefile("rwb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CONDUCTOR, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # the conductor needs time to report the end of the ranks
            )

    def conduct(self, job: About, abouts: Sequence[About]) -> list[About]:
        """Let it begin; return the message for each process.

        Raises:
            WorkbenchError: The job cannot begin, with the conductor's message.
        """
        self._socket.settimeout(CONDUCT_S)
        answer: About = {}
        with contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps({**job, "processes": list(abouts)}).encode() + b"\n")
            self._file.flush()
            answer = json.loads(self._file.readline() or b"{}")
        self._socket.settimeout(None)
        if "error" in answer:
            raise PlanError(str(answer["error"]), code="WB-PLAN-193")
        if "parts" not in answer:
            status = self._process.poll()
            raise ClusterError(
                "The process that stores the job's measurements did not start.",
                seen=f"exit status {status}"
                if status is not None
                else f"no message within {CONDUCT_S} s",
                next_step="read the messages of this process above; if a module is missing, "
                "install Workbench again",
                code="WB-CLUSTER-081",
            )
        parts: list[About] = answer["parts"]
        return parts

    def settle(self, *, well: bool) -> None:
        """Wait until it has written how the job ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(OTHERS_S if well else SETTLE_S)
        self._file.close()
        self._socket.close()


# -- this process ----------------------------------------------------------------------------------


_OURS = str(Path(__file__).parents[1]) + os.sep


class Script:
    """The job's script as the shell that runs the cell (`runtime.Shell`).

    Attributes:
        namespace: That of `__main__`, so that what the script defines can be pickled.
    """

    def __init__(self, path: str) -> None:
        self.namespace: dict[str, Any] = vars(sys.modules["__main__"])
        self._path = path

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the script; an error's traceback begins at the script's own lines."""
        lines = source.splitlines(keepends=True)
        linecache.cache[self._path] = (len(source), None, lines, self._path)
        try:
            exec(compile(source, self._path, "exec"), self.namespace)
        except SystemExit as left:
            if left.code in (None, 0):
                return None
            return RunError(f"The script ended with sys.exit({left.code!r}).", code="WB-RUN-101")
        except BaseException as error:
            if type(error).__name__ != "RunStopped":
                self._print(error)
            return error
        return None

    def _print(self, error: BaseException) -> None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != self._path:
            trace = trace.tb_next
        told = traceback.TracebackException(type(error), error, trace or error.__traceback__)
        told.stack = traceback.StackSummary.from_list(
            [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
        )
        sys.stderr.write("".join(told.format()))
        sys.stderr.flush()


class _Tee:
    """Writes what is printed also into the run's log, up to a limit."""

    def __init__(self, stream: IO[str], file: IO[str]) -> None:
        self._stream, self._file, self._left = stream, file, MOST_LOG_BYTES

    def write(self, text: str) -> int:
        if self._left > 0:
            self._left -= len(text)
            with contextlib.suppress(OSError, ValueError):  # a full disk
                end = "" if self._left > 0 else f"\n[the log ends at {MOST_LOG_BYTES >> 20} MiB]\n"
                self._file.write(text + end)
                self._file.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _logged(path: Path | None) -> Iterator[None]:
    """Keep what this rank prints in a file of the run."""
    if path is None:
        yield
        return
    before = sys.stdout, sys.stderr
    try:
        file = path.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        yield
        return
    with file:
        sys.stdout, sys.stderr = _Tee(before[0], file), _Tee(before[1], file)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


_running = False


def run_job(script: str | os.PathLike[str]) -> None:
    """Join the run that `run.json` (next to the script) describes, and end with this run.

    The script calls this function first. The function then executes the script once more, as the
    cell of the run; in this second execution the call returns immediately. When the second
    execution has ended, the process ends too. The call also returns immediately in processes that
    the script starts with `multiprocessing` (`spawn`).

    Args:
        script: The path of the script, `__file__`.

    Raises:
        PlanError: There is no `run.json`, Workbench did not write it, or it needs another number of
            processes.
        SystemExit: Always raised at the end: with 0 if the run succeeded, otherwise with 1.
    """
    if _running or sys._getframe(1).f_globals.get("__name__") == "__mp_main__":
        return  # in the second case it is a process that the script started, not a rank
    path = Path(script).resolve()
    os.chdir(path.parent)  # files that the script reads are next to it
    _end(_guarded(lambda: _take_part(path, _described(path.parent))))


def record_script(script: str | os.PathLike[str], args: Sequence[str], out: str = "") -> NoReturn:
    """Run any training script and record its steps; its code does not change.

    Args:
        args: The script's arguments.
        out: Folder for the records; by default `workbench-runs/NAME` below the working directory.
    """
    path = Path(script).resolve()
    sys.argv = [str(script), *args]
    sys.path[0] = str(path.parent)
    # As if Python had been given the script: processes that it spawns begin by reading it.
    vars(sys.modules["__main__"]).update(__file__=str(path), __spec__=None)
    where = Path(out or Path("workbench-runs") / path.stem).absolute()
    job = {"script": path.name, "out": str(where), "framework": _framework_of(path)}
    _end(_guarded(lambda: _take_part(path, job)))


def _framework_of(path: Path) -> str:
    """Return the framework that a script imports; PyTorch if it imports both or none."""
    names: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return "tensorflow" if names & {"tensorflow", "keras"} and "torch" not in names else "torch"


def _guarded(run: Callable[[], bool]) -> bool:
    try:
        return run()
    except WorkbenchError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return False


def _end(well: bool) -> NoReturn:
    """Exit, so that threads of a framework cannot delay the end or change the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(0 if well else 1)


def _described(folder: Path) -> About:
    """Return the content of a job's `run.json`.

    Raises:
        PlanError: There is no such file, or it is not a job's.
    """
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_text())
        version = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"The script's folder contains no job: {DESCRIPTION} cannot be read.",
            seen=f"{path}: {type(error).__name__}: {error}",
            allowed="the unchanged folder that run.to_job(DIR) wrote",
            next_step="write the folder again: run.to_job(DIR)",
            code="WB-PLAN-194",
        ) from error
    if version != FORMAT:
        raise PlanError(
            "The job was written by another version of Workbench.",
            seen=f"format {version}",
            allowed=f"format {FORMAT}",
            next_step="install Workbench from the wheel in the job's folder",
            code="WB-PLAN-195",
        )
    return {"folder": str(folder), **found}


def _take_part(path: Path, job: About) -> bool:
    """Run one process of the job, from the meeting to its end; return whether it succeeded."""
    global _running
    where = Surroundings.found()
    os.environ.pop("TF_CONFIG", None)  # TensorFlow is told by the strategy, for the time of the run
    if (wanted := job.get("launch", {}).get("processes", where.world_size)) != where.world_size:
        raise PlanError(
            "The job needs a different number of processes.",
            seen=f"processes: {where.world_size}",
            allowed=f"processes: {wanted} ({_launch_words(job['launch'])})",
            next_step=f"start {wanted} process{'' if wanted == 1 else 'es'}. If the job runs on "
            f"one host, start it with `workbench run {path.parent}`",
            code="WB-PLAN-196",
        )
    conductor = Conductor() if where.rank == 0 else None
    part = _meet(where, job, conductor)
    if "error" in part:
        raise PlanError(str(part["error"]), code="WB-PLAN-197")
    source = path.read_text(encoding="utf-8")
    request = {**part["request"], "source": source}
    spec = request["spec"]
    _running = True
    watch = InterruptWatch(lambda harder: support(engine.framework).break_collectives(store=harder))
    secret = os.environ.get(KEY, "")
    key = bytes.fromhex(part["key"]) if part["key"] else control_key(secret)
    link = ControlLink(
        where.rank, part["url"], key, part["about"],
        kernel_key=part["curve"],
    )  # fmt: skip
    engine = Engine(where.rank, link, watch, framework=spec["framework"])
    watch.on_terminate = lambda: link.say(AskedToEnd(engine=where.rank, why="SIGTERM"))
    notices.serve(engine.departure)
    # An interrupt is for the cell; before or after the cell it has no effect.
    before = signal.signal(signal.SIGTERM, _heard), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        folder = Path(part["run_dir"])
        is_shared = _is_there(folder, part["token"])
        spec["run_dir"] = str(folder) if is_shared else ""
        with _logged(folder / f"log-rank{where.rank}.txt" if is_shared else None):
            watches = part["watches"] and engine.framework == "torch"
            shell = WatchedScript(str(path)) if watches else Script(str(path))
            outcome = run_cell(engine, shell, request)
            _tell(outcome)
        link.say(CellEnded(engine=where.rank, outcome=outcome))
        link.flush(10.0)
        if conductor is not None:
            conductor.settle(well=outcome.is_well)
        return outcome.is_well
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
        link.close()
        watch.close()


class WatchedScript(Script):
    """A script that does not use Workbench; its training is found while it trains."""

    def execute(self, source: str, number: int) -> BaseException | None:
        """Run the script, and record what it trains."""
        run = context.require("workbench run")
        undo = importlib.import_module(SCRIPTS).watch_scripts(run)
        try:
            return super().execute(source, number)
        finally:
            undo()


def _tell(outcome: CellOutcome) -> None:
    """Print how the cell ended if its own traceback does not show it."""
    if outcome.status == "error" and outcome.traceback:
        sys.stderr.write(f"{outcome.words}\n")
    if outcome.advice and not outcome.is_well:
        sys.stderr.write(f"  next: {outcome.advice}\n")


def _meet(where: Surroundings, job: About, conductor: Conductor | None) -> About:
    """Return this process's part in the job."""
    meeting = meeting_of(where)
    about = _about(where, job)
    if conductor is None:
        return meeting.ask(about)
    abouts = meeting.gather(about)
    store = where.store
    if where.world_size == 1 and not where.has_agent:
        store = _own_store(job)
    try:
        parts = conductor.conduct(
            {"job": job, "store": store, "key": os.environ.get(KEY, "")},
            abouts,
        )
    except WorkbenchError as error:
        meeting.hand_out([{"error": str(error)}] * where.world_size)
        raise
    meeting.hand_out(parts)
    _kept.append(meeting)  # rank 0 may host the store in which the run's groups meet
    return parts[0]


_kept: list[Any] = []


def _own_store(job: About) -> tuple[str, int] | None:
    """Host a store for a single process of PyTorch, on loopback; None for other frameworks."""
    if job.get("framework", "torch") != "torch":
        return None
    listener = cluster_env.listening("127.0.0.1")
    host, port = listener.getsockname()[:2]
    dist = importlib.import_module("torch.distributed")
    _kept.append(
        dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    )
    return str(host), int(port)


def _about(where: Surroundings, job: About) -> About:
    """Return this process's description for the conductor."""
    me, facts = psutil.Process(), survey(str(job.get("framework", "torch")))
    store, address, port, meets_at = where.store, "", 0, ""
    if where.addresses:
        host, _, port_text = where.addresses[where.rank].rpartition(":")
        address, port = socket.gethostbyname(host), int(port_text)
    elif store is not None and where.world_size > 1:
        meets_at = socket.gethostbyname(store[0])
        address = cluster_env.own_address(meets_at)
    return {
        "rank": where.rank,
        "attempt": where.attempt,
        "host": socket.gethostname(),
        "place": cluster_env.host_token(),
        "address": address,
        "addresses": addresses() if meets_at else [],
        "store": meets_at,
        "port": port,
        "cores": cpu_count(),
        "pid": me.pid,
        "began": me.create_time(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "devices": [asdict(one) for one in facts.devices],
        "notes": list(facts.notes),
    }


def _is_there(folder: Path, token: str) -> bool:
    """Whether this process sees the run's folder, because other hosts may have another disk."""
    try:
        return secrets.compare_digest((folder / "token").read_text(), token)
    except OSError:
        return False


def _launch_words(launch: Mapping[str, Any]) -> str:
    servers = int(launch.get("servers", 0))
    workers = int(launch.get("workers", 1))
    words = f"{workers} worker{'s' if workers > 1 else ''}"
    return f"{words} and {servers} server{'s' if servers > 1 else ''}" if servers else words


def _heard(number: int, frame: object) -> None:
    """Do nothing: the watchdog of interrupts reads of the signal, and asks for a Stop."""
