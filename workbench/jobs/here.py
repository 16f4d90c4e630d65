"""`workbench run`: the processes of a run on this machine, from their start to their end.

    a job folder            the processes in its run.json: torchrun, TensorFlow's processes, or one
                            process
    a script, -n N          torchrun (or TensorFlow's processes) of `workbench run SCRIPT`
    a script                one process of `workbench run SCRIPT`
    a cell, --strategy      a job folder is written first

Each process that a launcher has started as one of several, by this command or by the user's own
torchrun, is an engine (`run_rank`). An engine loads no module of the notebook's side. So this
module imports at its top only modules that both sides have, and the others where they are used.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import PlanError, WorkbenchError
from ..shared.cluster_env import THREADS, WAITS_PASSIVELY
from .telling import (
    FAILED,
    INTERRUPTED,
    LINE_S,
    WELL,
    Teller,
    description,
    follow_place,
    is_job,
    let_go,
    load_place,
    runs_in,
    say,
)

if TYPE_CHECKING:
    from ..execution.run import Run

GRACE_S = 40.0
"""Time limit for processes that were told to end; torchrun gives its processes 30 s."""
_LOOK_S = 0.2
_LAST_S = 5.0  # for the last records
_CONDUCTOR = "workbench.jobs.conductor"  # the conductor ends by itself and writes how the run ended


JOB_KEY = "WORKBENCH_JOB_KEY"  # `engine.meeting.KEY`
_AS_RANK = "WORKBENCH_RUN_AS_RANK"  # a single process, which torchrun's variables do not mark
_RUNS = Path("workbench-runs")  # as `engine.job.record_script` has it
_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process to start.

    Attributes:
        env: Environment variables in addition to this process's.
        serves: Whether it serves the other processes; it does not have to end by itself.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    serves: bool = False


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = run.add_argument
    add(
        "-n",
        type=int,
        metavar="N",
        help="number of processes (default 1); not allowed with a job folder, because its "
        "run.json contains this number",
    )
    add(
        "--strategy",
        metavar="LINE",
        help="use this flag if the file contains the code of a %%%%distributed cell; LINE is the "
        "text after %%%%distributed",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the script's records. With --strategy: the job folder that Workbench "
        "makes from the file. Default: workbench-runs/NAME, where NAME is the file's name "
        "without .py",
    )
    add("--plain", action="store_true", help="record nothing")
    add("what", metavar="WHAT", help="a job folder, or a Python file")
    add("args", nargs=argparse.REMAINDER, help="arguments that the script finds in sys.argv")


def run_rank(argv: Sequence[str]) -> int:
    """Run as one process of `workbench run` that a launcher has started."""
    parser = argparse.ArgumentParser(prog="workbench run")
    parser.add_argument("--json", action="store_true")
    add_run_arguments(parser)
    return _as_rank(parser.parse_args(argv))


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process to train."""
    return "RANK" in environ or bool(environ.get("TF_CONFIG")) or _AS_RANK in environ


def _as_rank(given: argparse.Namespace) -> int:
    """Run the script in this process; a job's script joins the run by itself."""
    os.environ.pop(_AS_RANK, None)  # what the script starts is none
    path = Path(given.what)
    if path.is_dir():
        path = path / "train.py"
    if given.plain or is_job(path.parent):
        sys.argv, sys.path[0] = [str(path), *given.args], str(path.resolve().parent)
        runpy.run_path(str(path), run_name="__main__")
        return WELL
    # Imported by name, because the command line must not import engine modules and this process is
    # now an engine.
    job = importlib.import_module("workbench.engine.job")
    job.record_script(path, given.args, str(given.out or ""))
    return WELL


def run_here(given: argparse.Namespace) -> int:
    """Carry out `workbench run`; return the exit status."""
    if is_rank():
        return _as_rank(given)
    what = _checked(given)
    if given.strategy is not None:
        what = _write_job(given, what)
    if what.is_dir():
        recorded = None if description(what).get("plain") else what
        return Started(processes_of_job(what, given.args), recorded).attend(given)
    recorded = None if given.plain else given.out or _RUNS / what.stem
    if recorded is not None and is_job(recorded):
        raise PlanError(
            "A script's records cannot be written into a job folder. In a job folder, "
            "Workbench reads only the records that the job has written.",
            seen=str(recorded),
            allowed="a folder that is not a job folder",
            next_step=f"use another folder with --out DIR. Or use --strategy LINE, if {what.name} "
            "contains the code of a %%distributed cell. LINE is the text after %%distributed",
            code="WB-PLAN-263",
        )
    processes = processes_of_script(what, given)
    return Started(processes, recorded).attend(given)


def _checked(given: argparse.Namespace) -> Path:
    """Check the arguments; return the file or folder to run."""
    what = Path(given.what).expanduser()
    is_folder = what.is_dir()
    if not what.exists() or (is_folder and not is_job(what)):
        raise PlanError(
            "This file or folder does not exist."
            if not what.exists()
            else "This folder is not a job folder.",
            seen=given.what,
            allowed="a Python file, or a folder that run.to_job(DIR) has written",
            next_step="give a Python file of this folder"
            if is_folder
            else f"check the path; the current folder is {Path.cwd()}",
            code="WB-PLAN-254",
        )
    if given.n is not None and given.n < 1:
        raise PlanError(
            "-n must be a whole number of at least 1.",
            seen=given.n,
            allowed="1 or more",
            code="WB-PLAN-255",
        )
    flags = {"-n": given.n, "--strategy": given.strategy, "--out": given.out,
             "--plain": given.plain or None}  # fmt: skip
    too_many = [flag for flag, value in flags.items() if value is not None]
    if is_folder and too_many:
        raise PlanError(
            "A job folder has its own settings and records, so -n, --strategy, --out and --plain "
            "do not work with it.",
            seen=" ".join(too_many),
            allowed=f"workbench run {shlex.quote(given.what)}",
            next_step="to change the settings, write a new job folder in a notebook: "
            "%%distributed mirrored -n 2 --to-job DIR",
            code="WB-PLAN-256",
        )
    return what


def _write_job(given: argparse.Namespace, script: Path) -> Path:
    """Make a job folder from a file with a cell; return the folder."""
    from ..cookbook.recipe import Recipe, framework_of
    from ..shared.plan import plan_of
    from ..shared.run_request import parse_cell_line

    source = script.read_text("utf-8")
    request = parse_cell_line(given.strategy, prog="--strategy")
    ignored = (
        request.seeds, request.to_job, request.plain,
        given.n and request.workers not in (None, given.n),
    )  # fmt: skip
    if len(request.strategies) != 1 or any(ignored):
        raise PlanError(
            "`workbench run` does not accept this value of --strategy. The command trains a cell "
            "once, under one strategy.",
            seen=f"--strategy {shlex.quote(given.strategy)}",
            allowed="one strategy and its flags, without --seeds, --to-job and --plain. If you "
            "give -n to `workbench run`, you can leave out -n in the value of --strategy. If you "
            "give -n in both places, the two numbers must be equal",
            next_step="for example: workbench run --strategy 'mirrored --seed 1' "
            f"{shlex.quote(given.what)} (--out and --plain are flags of `workbench run`: write "
            "them before --strategy, not between the quotes)",
            code="WB-PLAN-261",
        )
    recipe = Recipe(source, origin=script.name, framework=framework_of(source))
    workers = given.n or request.workers or 1
    plan = plan_of(request, recipe, framework="torch", workers=workers)
    out = given.out or _RUNS / script.stem
    from ..export.folder import write_job

    return Path(write_job(plan, out, plain=given.plain))


def processes_of_script(script: Path, given: argparse.Namespace) -> list[Process]:
    """Return the processes for a script: torchrun, TensorFlow's processes, or one process."""
    from ..cookbook.recipe import framework_of

    count = given.n or 1
    framework = framework_of(script.read_text("utf-8", "replace")) or "torch"
    flags = [
        *(["--out", str(given.out)] if given.out else []),
        *(["--plain"] if given.plain else []),
    ]
    rank = ("-m", "workbench", "run", *flags, str(script), *given.args)
    if framework == "tensorflow" and count > 1:
        return with_tf_config((sys.executable, *rank), workers=count)
    if framework == "torch" and (given.n is not None):
        return [Process(torchrun(count, *rank), {JOB_KEY: secrets.token_hex(16)})]
    return [Process((sys.executable, *rank), {_AS_RANK: "1"})]


def processes_of_job(folder: Path, args: Sequence[str] = ()) -> list[Process]:
    """Return the processes for a job folder, from its `run.json`.

    Raises:
        PlanError: `run.json` does not describe the processes.
    """
    launch: Any = description(folder).get("launch")
    try:
        count, servers = int(launch["processes"]), int(launch["servers"])
        framework = {"torch": "torch", "tensorflow": "tensorflow"}[launch["framework"]]
        if not 0 <= servers < count <= 4096:
            raise ValueError(f"{servers} servers of {count} processes")
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            "The job's run.json does not describe the processes to start.",
            seen=f"launch: {launch!r} ({error})",
            allowed='{"workers": 2, "servers": 0, "processes": 2, "framework": "torch"}',
            next_step="write the folder again: run.to_job(DIR)",
            code="WB-PLAN-257",
        ) from None
    script = str(folder / "train.py")
    if count == 1:
        return [Process((sys.executable, script, *args))]
    if framework == "torch":
        return [Process(torchrun(count, script, *args), {JOB_KEY: secrets.token_hex(16)})]
    return with_tf_config((sys.executable, script, *args), workers=count - servers, servers=servers)


def torchrun(count: int, *command: str) -> tuple[str, ...]:
    """Return the command that starts this many processes of PyTorch on this machine.

    Raises:
        PlanError: PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise PlanError(
            "PyTorch is not installed in this Python, so `torchrun` cannot start the processes.",
            seen=sys.executable,
            next_step="pip install 'distributed-workbench[torch]'",
            code="WB-PLAN-258",
        )
    head = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    return (*head, "--nproc-per-node", str(count), *command)


def with_tf_config(command: Sequence[str], *, workers: int, servers: int = 0) -> list[Process]:
    """Return TensorFlow's processes on this machine, each with its TF_CONFIG and one secret."""
    ports = _free_ports(workers + servers)
    places = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"worker": places[:workers]} | ({"ps": places[workers:]} if servers else {})
    secret = secrets.token_hex(16)
    return [
        Process(
            tuple(command),
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}),
             JOB_KEY: secret},
            serves=kind == "ps",
        )
        for kind, members in cluster.items() for index in range(len(members))
    ]  # fmt: skip


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _end_with_parent() -> None:
    """In a child process, before its program: ask for a signal to end if the parent is killed."""
    _libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Started:
    """The processes of a run on this machine, from their start to their end.

    Signals are passed on to the processes. Each process has a separate session, so that a
    terminal's Ctrl-C reaches it only once.

    Args:
        processes: The processes to start.
        place: Folder for the records; None: nothing is recorded.
    """

    def __init__(self, processes: Sequence[Process], place: Path | None) -> None:
        self._wanted, self._place = processes, place
        self._processes: list[subprocess.Popen[bytes]] = []
        self._told_at: float | None = None  # when they were told to end
        self._interrupted = self._hurry = self._cannot_follow = False
        self._before = set(runs_in(place)) if place is not None else set()

    def attend(self, given: argparse.Namespace) -> int:
        """Start the processes and print the run's progress; return the exit status at the end."""
        teller = Teller(as_json=given.json, aside=True)
        with self._signals():
            try:
                self._start(2 if given.json else None)
                self._watch(teller)
            finally:
                self._kill()
        return self._tell_end(teller)

    def _start(self, output: int | None) -> None:
        env = WAITS_PASSIVELY | os.environ
        if threads := env.get("OMP_NUM_THREADS"):
            env[THREADS] = threads
        for one in self._wanted:
            if self._interrupted:
                break
            self._processes.append(
                subprocess.Popen(
                    one.command, env={**env, **one.env},
                    stdin=subprocess.DEVNULL, stdout=output, start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            )  # fmt: skip
        if self._interrupted:  # the last process can be missing in the list
            self._tell(signal.SIGTERM)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on a signal to end; a second signal ends the processes faster."""
        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: object) -> None:
        self._hurry, self._interrupted = self._interrupted, True
        self._tell(signal.SIGTERM if number == signal.SIGHUP else number)

    def _tell(self, number: int) -> None:
        self._told_at = self._told_at or time.monotonic()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _watch(self, teller: Teller) -> None:
        """Print the run's progress until all processes have ended."""
        run: Run | None = None
        said_at = time.monotonic()
        try:
            while not self._have_ended():
                time.sleep(_LOOK_S)
                run = run or self._follow()
                if run is not None and time.monotonic() - said_at >= LINE_S:
                    said_at = time.monotonic()
                    teller.tell(run)
            if run is not None:
                run.over.wait(_LAST_S)
                teller.tell(run)
        finally:
            if run is not None:
                let_go(run)

    def _follow(self) -> Run | None:
        """Return the followed run when its records exist."""
        folder = self._folder()
        if folder is None or self._cannot_follow or not (folder / "run.json").exists():
            return None
        try:
            return follow_place([str(folder)])
        except WorkbenchError as error:
            self._cannot_follow = True
            say(f"The run's progress cannot be shown: {error}", sys.stderr)
        return None

    def _folder(self) -> Path | None:
        """Return the folder of this run's records when it exists."""
        found = [] if self._place is None else runs_in(self._place)
        fresh = [one for one in found if one not in self._before]
        return fresh[-1] if fresh else None

    def _have_ended(self) -> bool:
        """Whether all have ended; ends the rest if one failed or only servers still run."""
        codes = [process.poll() for process in self._processes]
        if None not in codes:
            return True
        left = [one for one, code in zip(self._wanted, codes, strict=False) if code is None]
        if self._told_at is None and (any(codes) or all(one.serves for one in left)):
            self._tell(signal.SIGTERM)
        late = self._told_at is not None and time.monotonic() - self._told_at > GRACE_S
        return late or self._hurry

    def _kill(self) -> None:
        """End the remaining processes and their children; the conductor writes the run's end."""
        for process in self._processes:
            if process.poll() is None:
                tree = []
                with contextlib.suppress(psutil.Error):
                    tree = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for one in tree:
                    with contextlib.suppress(psutil.Error):
                        if _CONDUCTOR not in one.cmdline():
                            one.kill()
            process.wait()

    def _tell_end(self, teller: Teller) -> int:
        """Print how the run ended; return the exit status."""
        codes = [
            process.returncode
            for one, process in zip(self._wanted, self._processes, strict=False)
            if not one.serves
        ]
        failed = next((code for code in codes if code), 0)
        folder = self._folder()
        run = None
        if folder is not None:
            with contextlib.suppress(WorkbenchError):  # it ended before anything was written
                run, _ = load_place(folder)
        state = ("failed" if failed else "finished") if run is None else run.state
        if self._interrupted:
            return teller.end(run, "stopped" if run is None else state, INTERRUPTED)
        error = f"a process ended with exit status {failed}" if failed else None
        if failed < 0:
            error = f"a process was ended by signal {-failed} ({signal.strsignal(-failed)})"
        return teller.end(run, state, FAILED if failed or state == "failed" else WELL, error)
