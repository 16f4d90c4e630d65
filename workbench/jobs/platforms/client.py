"""The interface of a job platform, and how its client is called.

Workbench does not use a platform's network interface. It calls the client that the user has
installed (sbatch, kubectl, ray, sky, ssh), with the user's configuration and credentials. A call
is a list of words, never a line for a shell, and no call may take longer than `ASK_S`.

    check -> submit -> Ticket       a ticket is JSON: with it, a notebook opened later finds the job
    state, logs, cancel, place      take a ticket
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ...cluster.hosts.launchers import environment
from ...cluster.hosts.slurm import ALLOCATION
from ...errors import ClusterError, PlanError
from ...export.folder import RUNS
from ..frames import MARK

if TYPE_CHECKING:
    from ...export.envelopes import Resources

ASK_S = 20.0
COPY_S = 120.0
"""Limit for the copy of a folder with Workbench's wheel over a slow line."""
END_S = 15.0
"""How long a job on this machine may take to end after it was told to, before it is killed."""
LOG_BYTES = 1 << 20
OUTPUT_BYTES = 16 << 20

Word = Literal["pending", "running", "finished", "failed", "cancelled", "unknown"]


@dataclass(frozen=True)
class Ticket:
    """A submitted job: the data with which to find it again.

    Attributes:
        platform: A name of `platforms.PLATFORMS`.
        id: The platform's name or number of the job.
        folder: The job folder on this machine.
        submitted_s: The time of the submission, in seconds since 1970.
        extra: Further data that the platform needs: a host, a namespace.
    """

    platform: str
    id: str
    folder: str
    submitted_s: float
    extra: Mapping[str, str] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Return the ticket as JSON-ready data."""
        return {**vars(self), "extra": dict(self.extra)}

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Ticket:
        """Rebuild a ticket from the data that `to_wire` returned.

        Raises:
            ValueError: The data are not a ticket.
        """
        try:
            extra = {str(key): str(value) for key, value in dict(data["extra"]).items()}
            ticket = Ticket(
                str(data["platform"]), str(data["id"]), str(data["folder"]),
                float(data["submitted_s"]), extra,
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"no ticket: {error}") from error
        if not JOB_ID.fullmatch(ticket.id):
            raise ValueError(f"no ticket: {ticket.id}")
        return ticket


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Attributes:
        state: The state as Workbench names it.
        reason: The platform's words: `PENDING (Resources)`.
        began_s: When it began to run, in seconds since 1970; None: not yet, or not known.
        gone: Whether the platform does not know the job any more.
        stepped: Whether a failed job had taken a step; None: it did not fail, or not known.
    """

    state: Word
    reason: str = ""
    began_s: float | None = None
    gone: bool = False
    stepped: bool | None = None

    @property
    def is_over(self) -> bool:
        """Whether the state is final."""
        return self.gone or self.state in ("finished", "failed", "cancelled")


class Platform(Protocol):
    """One way to run a job folder. After `submit` everything is read from the ticket.

    Attributes:
        name: Its name in `wb.submit(on=...)`.
        envelope: The part of `export.envelopes` that writes the platform's files; empty: none.
    """

    name: str
    envelope: str

    def check(self, folder: Path, resources: Resources) -> None:
        """Check before anything is submitted.

        Raises:
            ClusterError: There is no client, or the platform lacks a requested resource.
            PlanError: The folder lacks the platform's file.
        """

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Submit the job; returns at once.

        Raises:
            ClusterError: The platform refused the job; the error quotes the platform.
        """

    def state(self, ticket: Ticket) -> JobState:
        """Return the job's state.

        Raises:
            ClusterError: The platform does not answer.
        """

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Return the last lines that the job printed; empty if it has not printed yet."""

    def cancel(self, ticket: Ticket) -> None:
        """Cancel the job; a job that is over does not change."""

    def place(self, ticket: Ticket) -> str | list[str]:
        """Return the argument for `wb.follow`: a folder, an address, or the words of a command."""


# -- programs --------------------------------------------------------------------------------------

_INSTALL = {
    "sbatch": "install Slurm's client (Debian: apt-get install slurm-client), or load "
    "Slurm's environment module before you start Jupyter. Or copy the job folder to the login "
    "node, and run in the copy: sbatch job.sbatch",
    "ssh": "install ssh (Debian: apt-get install openssh-client). Or copy the job folder to the "
    "host by hand, and run in the copy: bash start.sh",
    "ray": 'install Ray: pip install "ray[default]". Or copy the job folder to a machine with Ray, '
    "and run in the copy: ray job submit --working-dir . --runtime-env ray-env.yaml -- "
    "python run_ray.py",
    "kubectl": "install kubectl (https://kubernetes.io/docs/tasks/tools). Or copy the job folder "
    "to a machine with kubectl, and run in the copy: kubectl create -f trainjob.yaml",
    "sky": 'install SkyPilot: pip install "skypilot[aws]" (instead of aws, write the name of your '
    "cloud). Or copy the job folder to a machine with SkyPilot, and run in the copy: "
    "sky launch sky.yaml",
}  # fmt: skip
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,120}")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Said(NamedTuple):
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The end of the program's error text, without the frames of tracebacks."""
        lines = plain(self.err.strip() or self.out.strip()).splitlines()
        kept = [line for line in lines if not line.startswith((" ", "Traceback "))]
        return "\n".join((kept or lines)[-6:]) or f"exit code {self.code}"


def say(
    command: Sequence[str], *, cwd: Path | None = None, stdin: IO[bytes] | None = None,
    timeout_s: float | None = None,
) -> Said:  # fmt: skip
    """Run a platform's client and return how it ended.

    Raises:
        ClusterError: The client is not installed, or does not answer.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise ClusterError(
            f"{program} is not installed on this machine.",
            seen=f"PATH={os.environ.get('PATH', '')}",
            next_step=_INSTALL.get(program, f"install {program}"),
            code="WB-CLUSTER-082",
        )
    limit_s = ASK_S if timeout_s is None else timeout_s
    env = environment()
    if ALLOCATION in env:  # a job of its own, not a step of the kernel's
        keep = ("SLURM_CONF", "SLURM_CLUSTERS")
        env = {k: v for k, v in env.items() if not k.startswith("SLURM_") or k in keep}
    # Files, not pipes: a process that the program leaves behind may hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=env, stdin=stdin or subprocess.DEVNULL, stdout=out,
            stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise ClusterError(
                f"{program} does not answer.",
                seen=f"{shlex.join(command[:3])} did not end within {limit_s:g} s",
                next_step="try the command below in a terminal. If the command submits a job, "
                "first make sure that the platform does not already have the job. The command: "
                f"{shlex.join(command)[:200]}",
                code="WB-CLUSTER-083",
            ) from error
        return Said(code, _end(out), _end(err))


def _end(file: IO[bytes], limit: int = OUTPUT_BYTES) -> str:
    """Return the end of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - limit))
    return file.read(limit).decode(errors="replace")


def must(command: Sequence[str], what: str, next_step: str, **options: Any) -> str:
    """Return the output of a client.

    Raises:
        ClusterError: The client failed; the error quotes its words.
    """
    said = say(command, **options)
    if said.code:
        raise ClusterError(what, seen=said.words, next_step=next_step, code="WB-CLUSTER-084")
    return said.out


def plain(text: str) -> str:
    """Return text without control codes for a terminal: a job's output is only data."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def last_lines(text: str, lines: int) -> str:
    """Return the last lines that are not records of the run."""
    found = [line for line in plain(text).splitlines() if MARK + "{" not in line]
    return "\n".join(found[-lines:]) if lines > 0 else ""


def read_end(path: Path) -> str:
    """Return the end of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return _end(file, LOG_BYTES)
    return ""


def parsed(text: str) -> Any:
    """Return a program's JSON; None if the text is not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def checked_id(job: str, said: str) -> str:
    """Return the job's name from the platform's answer, if it has the form of a name."""
    if JOB_ID.fullmatch(job):
        return job
    raise ClusterError(
        "The platform accepted the job but did not report its name.",
        seen=said.strip() or "nothing",
        next_step="look for the job in the platform's own list",
        code="WB-CLUSTER-090",
    )


# -- the folder ------------------------------------------------------------------------------------


def needed(folder: Path, name: str, on: str) -> Path:
    """Return a file of a job folder.

    Raises:
        PlanError: The file does not exist.
    """
    if not (folder / name).is_file():
        raise PlanError(
            f"The job folder does not contain {name}, which {on} needs.",
            seen=f"{folder}, with the files: "
            + ", ".join(sorted(one.name for one in folder.glob("*") if one.is_file())),
            next_step=f"run wb.submit(plan, on={on!r}): it makes a job folder that has this file",
            code="WB-PLAN-241",
        )
    return folder / name


def _runs(folder: Path) -> list[int]:
    found = (folder / RUNS).glob("*")
    return sorted(int(one.name) for one in found if one.name.isdecimal())


def runs_before(folder: Path) -> dict[str, str]:
    """Return how many runs a folder had, for the ticket: later runs belong to the job."""
    return {"runs_before": str(max(_runs(folder), default=0))}


def own_run(ticket: Ticket) -> Path | None:
    """Return the newest run folder of a job, on a file system that this machine can read."""
    newest = max(_runs(Path(ticket.folder)), default=0)
    before = int(ticket.extra.get("runs_before", "0"))
    return Path(ticket.folder) / RUNS / str(newest) if newest > before else None


def has_stepped(ticket: Ticket) -> bool:
    """Whether a job with a run folder on this machine has taken a step."""
    run = own_run(ticket)
    return run is not None and any(one.stat().st_size for one in run.glob("records-rank*.bin"))


def stepped_in(log: str) -> bool | None:
    """Whether the marked lines contain records; None: there are no marked lines."""
    marked = [line for line in log.splitlines() if MARK + "{" in line]
    return any('"records-rank' in line for line in marked) if marked else None
