"""How agents are started, and by ssh and mpiexec; Slurm is in a module of its own.

A launcher starts one agent for each host (mpiexec: for each rank) and reports, with the program's
own message, why no agent comes. It ends only what it started: its own processes by pid, its own job
by number.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from ...errors import ClusterError
from ...shared import cluster_env
from . import wire

if TYPE_CHECKING:
    from .settings import LaunchSettings

ROOT = Path(__file__).resolve().parents[3]
ASK_S = 20.0
TAIL_BYTES = 4000
END_S = 3.0
_CODE = (
    "import sys\n"
    "try:\n"
    "    import workbench\n"
    "except ImportError:\n"
    "    sys.path.append({root!r})\n"
    "try:\n"
    "    from workbench.cluster.hosts.agent import main\n"
    "except ImportError as error:\n"
    "    print(f'{{error}} ({{sys.executable}})', file=sys.stderr)\n"
    "    sys.exit({code})\n"
    "main()\n"
)


@dataclass(frozen=True)
class Queued:
    """A job that waits for its turn.

    Attributes:
        state: The scheduler's state: `PENDING`.
        reason: Why it waits: `Resources`; empty if not known.
        position: Its position among the waiting jobs of its partition; 0: not known.
    """

    state: str
    reason: str = ""
    position: int = 0


class Launcher(Protocol):
    """Starts agents and ends them.

    Attributes:
        on_end: Called, on any thread, when a started process or job has ended.
    """

    on_end: Callable[[], None]

    @property
    def asks(self) -> str:
        """Its first action, in words: `asking Slurm for a job`."""

    def start(self, join: wire.Join, engines: int) -> None:
        """Begin to start agents for this many engines; returns at once.

        Raises:
            ClusterError: The launcher's program refused.
        """

    @property
    def agents(self) -> int:
        """How many agents will come; 0 while that is not known."""

    def look(self) -> Queued | None:
        """Return the job's place in the queue; None: it runs, or there is no queue.

        Raises:
            ClusterError: The started process or job has ended before its agents came.
        """

    def ended(self, place: int) -> str:
        """Return why the agent at this place must have ended, in words; empty: it may be alive."""

    def stop(self) -> None:
        """End the started processes or jobs; returns without waiting."""


def ssh_name(settings: LaunchSettings, host: str) -> str:
    """Return the name or address that ssh's configuration gives a host."""
    for line in ask_program(["ssh", "-G", *_ssh_options(settings), host]).splitlines():
        word, _, value = line.partition(" ")
        if word == "hostname":
            return value
    return host.rpartition("@")[2]


def address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ClusterError(
            "This machine cannot resolve the host's name.",
            seen=f"{name}: {error}",
            allowed="a name that this machine can resolve, an address, or a host in ~/.ssh/config",
            next_step=f"run `ssh {name}` in a terminal. If ssh fails, correct the name. If ssh "
            "works (for example through a jump host in ~/.ssh/config), start the cluster with "
            "--listen ADDRESS. ADDRESS is an address of this machine that the host can reach",
            code="WB-CLUSTER-060",
        ) from error


def ask_program(command: Sequence[str]) -> str:
    """Return a program's output; empty if it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=ASK_S, check=False,
            stdin=subprocess.DEVNULL, env=environment(),
        ).stdout  # fmt: skip
    return ""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables of its own cluster."""
    ours = {cluster_env.MARK, "IPP_PROFILE_DIR", wire.JOIN}
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **more}


def _words(settings: LaunchSettings) -> str:
    """Return the shell command that starts the agent."""
    code = shlex.quote(_CODE.format(root=str(ROOT), code=wire.CANNOT_IMPORT))
    named = settings.options.get("python", "")
    if named:
        return f"exec {named} -c {code}"
    python = shlex.quote(sys.executable)
    return f'WB_PY={python}; [ -x "$WB_PY" ] || WB_PY=python3; exec "$WB_PY" -c {code}'


def script_of(settings: LaunchSettings) -> str:
    """Return the shell's lines from the user's set-up to the agent."""
    setup = [line for line in settings.setup if not line.lstrip().startswith("#SBATCH")]
    return "\n".join([*setup, _words(settings)])


def launcher_options(settings: LaunchSettings) -> dict[str, str]:
    """Return the options of the launcher's program, by their long names; an empty value: a flag."""
    return {k: v for k, v in settings.options.items() if k not in ("python", "profile")}


def options_of(settings: LaunchSettings) -> list[str]:
    """Return them as words of its command line."""
    found = launcher_options(settings).items()
    return [f"--{name}={value}" if value else f"--{name}" for name, value in found]


def nothing() -> None:
    """Tell nobody."""


class Started:
    """A process that was started for agents, with the end of its output.

    Args:
        what: Its name in messages: `ssh node1`.
        on_end: Called, on a thread of its own, when it has ended.
        stdin: A line it is given; its stdin then stays open for as long as this kernel lives.
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        env: Mapping[str, str],
        on_end: Callable[[], None],
        stdin: str = "",
    ) -> None:
        self.what, self._on_end = what, on_end
        self._tail = b""
        # A separate session, because an interrupt of the kernel must not reach it.
        self.process = subprocess.Popen(
            list(command), env=dict(env), start_new_session=True,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self.process.stdout,), name="workbench-launcher", daemon=True
        )
        self._reader.start()
        if stdin:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):
                self.process.stdin.write(stdin.encode() + b"\n")
                self.process.stdin.flush()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 1 << 14):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
        self.process.wait()
        self._on_end()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    @property
    def said(self) -> str:
        """The end of its output."""
        if self.code is not None and self._reader is not threading.current_thread():
            self._reader.join(1.0)
        return self._tail.decode(errors="replace").strip()

    def stop(self) -> None:
        """End it: its stdin first, which ends the agent at the other end."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self._signal(signal.SIGTERM)

    def wait(self, until: float | None = None) -> None:
        """Wait until it has ended; otherwise it is killed.

        Args:
            until: On `time.monotonic`'s clock; by default some seconds from now.
        """
        try:
            self.process.wait(END_S if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


SSH_FAILED = 255
"""The exit code with which ssh reports its own failure."""


def failed(what: str, code: int | None, said: str) -> ClusterError:
    """Return the error for a process that ended before its agent came."""
    last = said or "no output"
    if code == wire.CANNOT_IMPORT:
        return ClusterError(
            f"{what}: Python on the host cannot import Workbench.",
            seen=last.splitlines()[-1],
            next_step="install the notebook's version of Workbench on the host (pip install "
            "'distributed-workbench[torch]'). If another Python on the host has Workbench, give "
            "the path of that Python instead: --launcher-option python=/path/to/python",
            code="WB-CLUSTER-061",
        )
    if code == wire.NO_ROUTE:
        return ClusterError(
            f"{what}: the host cannot connect to the notebook.",
            seen=last.splitlines()[-1],
            allowed="an address of this machine that the hosts can connect to, and ports that are "
            "open",
            next_step="set --listen to an address that the hosts can connect to. Set --ports to "
            "ports that the firewall allows. `workbench doctor --on HOST` checks the connection",
            code="WB-CLUSTER-062",
        )
    program, _, host = what.partition(" ")
    if program == "ssh" and code == SSH_FAILED:
        return ClusterError(
            f"ssh cannot connect to {host}.",
            seen=last.splitlines()[-1],
            next_step=f"change ssh's settings until `ssh {host} true` works without a password",
            code="WB-CLUSTER-079",
        )
    tries = {
        "ssh": f"ssh {host} true", "srun": "srun hostname", "mpiexec": "mpiexec -n 2 hostname"
    }  # fmt: skip
    command = tries.get(program, f"scontrol show {host}")  # Slurm's job 42
    return ClusterError(
        f"{what} ended before an engine could be started.",
        seen=f"exit code {code}: {last}" if code is not None else last,
        next_step="remove the cause that this output shows, and start the cluster again; if the "
        f"output does not show the cause, run `{command}` in a terminal",
        code="WB-CLUSTER-063",
    )


def refuse_missing(program: str, package: str) -> None:
    """Raise ClusterError if a launcher's program is not installed."""
    if shutil.which(program) is None:
        raise ClusterError(
            f"{program} is not installed on this machine.",
            seen=f"PATH={os.environ.get('PATH', '')}",
            next_step=f"install {program} (Debian: apt-get install {package}), or load its "
            "environment module before you start Jupyter",
            code="WB-CLUSTER-064",
        )


# -- ssh ---------------------------------------------------------------------------------------


def _ssh_options(settings: LaunchSettings) -> list[str]:
    return [w for n, v in launcher_options(settings).items() for w in ("-o", f"{n}={v}")]


class Ssh:
    """An ssh connection to each host, which sends the agent its pass and ends with the kernel."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("ssh", "openssh-client")
        self._settings = settings
        self.on_end: Callable[[], None] = nothing
        self._started: list[Started] = []

    @property
    def asks(self) -> str:
        """Its first action."""
        names = [one.name for one in self._settings.on]
        return f"connecting to {names[0] if len(names) == 1 else f'{len(names)} hosts'}"

    def start(self, join: wire.Join, engines: int) -> None:
        """Connect to all hosts at once."""
        settings = self._settings
        slots = spread(engines, [one.slots for one in settings.on])
        fixed = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        fixed += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        for place, host in enumerate(settings.on):
            about = f"export {wire.PLACE}={place} {wire.SLOTS}={slots[place]}"
            # The user's login shell there can be any, even csh: it gets one line, and sh runs the
            # rest.
            script = base64.b64encode(f"{about}\n{script_of(settings)}".encode()).decode()
            command = f"exec sh -c 'eval \"$(printf %s {script} | base64 -d)\"'"
            self._started.append(
                Started(
                    f"ssh {host.name}",
                    ["ssh", *_ssh_options(settings), *fixed, host.name, command],
                    environment(), lambda: self.on_end(), join.to_text(),
                )
            )  # fmt: skip

    @property
    def agents(self) -> int:
        """One for each host."""
        return len(self._settings.on)

    def look(self) -> Queued | None:
        """Raise where a connection has ended."""
        for one in self._started:
            if one.code is not None:
                raise failed(one.what, one.code, one.said)
        return None

    def ended(self, place: int) -> str:
        """Whether the connection to a host has ended."""
        if place < len(self._started) and (code := self._started[place].code) is not None:
            one = self._started[place]
            last = one.said.splitlines()[-1:] or [f"exit code {code}"]
            return f"{one.what} has ended: {last[0].rstrip('.')}"
        return ""

    def stop(self) -> None:
        """Close the connections; an agent ends when its stdin does."""
        for one in self._started:
            one.stop()
        until = time.monotonic() + END_S
        for one in self._started:
            one.wait(until)


def spread(engines: int, slots: Sequence[int]) -> list[int]:
    """Return how many engines each host gets, host by host.

    Args:
        slots: The slots of each host; 0: the remaining engines, divided evenly.
    """
    open_hosts = [place for place, count in enumerate(slots) if not count]
    given, left = list(slots), max(0, engines - sum(slots))
    for nth, place in enumerate(open_hosts):
        given[place] = left // len(open_hosts) + (nth < left % len(open_hosts))
    return given


# -- MPI ---------------------------------------------------------------------------------------


class Mpi:
    """One agent for each rank of mpiexec, so that its engine can be this rank (mpi4py)."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("mpiexec", "openmpi-bin")
        self._settings = settings
        self.on_end: Callable[[], None] = nothing
        self._ranks = 0
        self._started: Started | None = None

    @property
    def asks(self) -> str:
        """Its first action."""
        return "starting mpiexec"

    def start(self, join: wire.Join, engines: int) -> None:
        """Start mpiexec."""
        self._ranks = engines
        # Open MPI passes the variables named here to other hosts; MPICH passes all.
        env = environment(**{
            wire.JOIN: join.to_text(), wire.SLOTS: "1",
            "OMPI_MCA_mca_base_env_list": f"{wire.JOIN};{wire.SLOTS}",
        })  # fmt: skip
        command = ["mpiexec", "-n", str(engines)]
        for name, value in launcher_options(self._settings).items():
            command += [*f"--{name}".split(), *([value] if value else [])]
        # Within an allocation of Slurm all ranks of a node have that node's number as well.
        rank = f'export {wire.PLACE}="${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-$PMIX_RANK}}}}"'
        command += ["sh", "-c", f"{rank}\n{script_of(self._settings)}"]
        self._started = Started("mpiexec", command, env, lambda: self.on_end())

    @property
    def agents(self) -> int:
        """One for each rank."""
        return self._ranks

    def look(self) -> Queued | None:
        """Raise where mpiexec has ended."""
        one = self._started
        if one is not None and one.code is not None:
            raise failed("mpiexec", one.code, one.said)
        return None

    def ended(self, place: int) -> str:
        """Whether mpiexec is over."""
        one = self._started
        return "" if one is None or one.code is None else f"mpiexec ended (exit code {one.code})"

    def stop(self) -> None:
        """End mpiexec."""
        if self._started is not None:
            self._started.stop()
            self._started.wait()
