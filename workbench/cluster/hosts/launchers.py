"""How agents are started: by ssh, in a Slurm job (sbatch), in the allocation we are in (srun), MPI.

A launcher starts one agent for each host (mpiexec: for each rank) and says, in the words of the
program it uses, why none comes. It ends what it started and nothing else: its own processes by pid,
its own job by number.
"""

from __future__ import annotations

import contextlib
import os
import re
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
from typing import IO, Protocol

from ...errors import ClusterError
from ...shared import cluster_env
from ...shared.cluster_env import own_address
from . import wire
from .settings import MPI, SLURM, SSH, LaunchSettings

ROOT = Path(__file__).resolve().parents[3]
ASK_S = 20.0
LOOK_S = 1.0
TAIL_BYTES = 4000
END_S = 3.0
ALLOCATION = "SLURM_JOB_ID"
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
        state: As the scheduler says it: `PENDING`.
        reason: Why it waits: `Resources`; empty where that is not known.
        position: Which one it is among the waiting jobs of its partition; 0: not known.
    """

    state: str
    reason: str = ""
    position: int = 0


class Launcher(Protocol):
    """Starts agents and ends them.

    Attributes:
        on_end: Called, on any thread, when something of what was started has ended.
    """

    on_end: Callable[[], None]

    def start(self, join: wire.Join, engines: int) -> None:
        """Begin to start agents for so many engines; returns at once.

        Raises:
            ClusterError: The launcher's program refused.
        """

    @property
    def agents(self) -> int:
        """How many agents will come; 0 while that is not known."""

    def look(self) -> Queued | None:
        """Return how the job waits; None: it runs, or there is no queue.

        Raises:
            ClusterError: What was started has ended before its agents came.
        """

    def ended(self, place: int) -> str:
        """Return why the agent of that place cannot live any more, in words; empty: it may."""

    def stop(self) -> None:
        """End what was started; returns when the order is given."""


def launcher_of(settings: LaunchSettings) -> Launcher:
    """Return what starts the agents; inside of an allocation of Slurm that is srun."""
    if settings.launcher == SSH:
        return Ssh(settings)
    if settings.launcher == MPI:
        return Mpi(settings)
    assert settings.launcher == SLURM, settings.launcher
    return Srun(settings) if os.environ.get(ALLOCATION) else Sbatch(settings)


def way_to_hosts(settings: LaunchSettings) -> str:
    """Return the address of this machine from which the hosts are reached.

    Raises:
        ClusterError: A host is not known here.
    """
    if settings.launcher == SSH:
        return own_address(_address_of(ssh_name(settings, settings.on[0].name)))
    if settings.launcher == SLURM:
        nodes = _text(["sinfo", "-h", "-N", "-o", "%o"]).split()
        for node in nodes:
            with contextlib.suppress(OSError):
                return own_address(socket.gethostbyname(node))
    if {"host", "hostfile", "machinefile"} & set(settings.options):
        with contextlib.suppress(OSError):
            return own_address("192.0.2.1")  # nothing is sent: the way to everywhere else
    return "127.0.0.1"


def ssh_name(settings: LaunchSettings, host: str) -> str:
    """Return the name or address that ssh's configuration gives a host."""
    for line in _text(["ssh", "-G", *_ssh_options(settings), host]).splitlines():
        word, _, value = line.partition(" ")
        if word == "hostname":
            return value
    return host.rpartition("@")[2]


def _address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ClusterError(
            "That host is not known here.",
            seen=f"{name}: {error}",
            allowed="a name that this machine resolves, an address, or a host of ~/.ssh/config",
            next_step=f"try  ssh {name}  in a terminal; behind a jump host name the notebook's "
            "side by --listen",
            code="WB-CLUSTER-065",
        ) from error


def _text(command: Sequence[str]) -> str:
    """Return what a program says; empty where it cannot be asked."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=ASK_S, check=False,
            stdin=subprocess.DEVNULL, env=_environment(),
        ).stdout  # fmt: skip
    return ""


def _environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what belongs to its own cluster."""
    ours = {cluster_env.MARK, "IPP_PROFILE_DIR", wire.JOIN}
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **more}


def _words(settings: LaunchSettings) -> str:
    """Return the shell's words that become the agent."""
    code = shlex.quote(_CODE.format(root=str(ROOT), code=wire.CANNOT_IMPORT))
    named = settings.options.get("python", "")
    if named:
        return f"exec {named} -c {code}"
    python = shlex.quote(sys.executable)
    return f'WB_PY={python}; [ -x "$WB_PY" ] || WB_PY=python3; exec "$WB_PY" -c {code}'


def _script(settings: LaunchSettings) -> str:
    """Return the shell's lines from the user's set-up to the agent."""
    setup = [line for line in settings.setup if not line.lstrip().startswith("#SBATCH")]
    return "\n".join([*setup, _words(settings)])


def _options(settings: LaunchSettings, prefix: str = "--") -> list[str]:
    ours = {"python", "profile"}
    return [
        f"{prefix}{name}={value}" if value else f"{prefix}{name}"
        for name, value in settings.options.items()
        if name not in ours
    ]


def _nothing() -> None:
    """Tell nobody."""


class Started:
    """A process that was started for agents, with the end of what it says.

    Args:
        what: How it is called in messages: `ssh node1`.
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
        # A session of its own: an interrupt of the kernel is not meant for it.
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
        """The end of what it has printed."""
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

    def wait(self) -> None:
        """Wait until it has ended; it is killed where it does not."""
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def failed(what: str, code: int | None, said: str) -> ClusterError:
    """Return the error of something that ended before its agent was there."""
    last = said or "nothing"
    if code == wire.CANNOT_IMPORT:
        return ClusterError(
            f"{what}: Workbench cannot be used there.",
            seen=last.splitlines()[-1],
            next_step="install it there in the same version (pip install 'distributed-workbench"
            "[torch]'), or name the interpreter: --launcher-option python=/path/to/python",
            code="WB-CLUSTER-066",
        )
    if code == wire.NO_ROUTE:
        return ClusterError(
            f"{what}: the notebook cannot be reached from there.",
            seen=last.splitlines()[-1],
            allowed="an address of this machine that the hosts can connect to, and open ports",
            next_step="--listen names another interface or address, --ports the ports that a "
            "firewall lets through; workbench doctor --on HOST tries it",
            code="WB-CLUSTER-067",
        )
    return ClusterError(
        f"{what} has ended before an engine could be started.",
        seen=f"exit code {code}: {last}" if code is not None else last,
        next_step="try the same in a terminal; docs/clusters-of-machines.md has examples",
        code="WB-CLUSTER-068",
    )


def refuse_missing(program: str, package: str) -> None:
    """Raise ClusterError where a launcher's program is not installed."""
    if shutil.which(program) is None:
        raise ClusterError(
            f"{program} is not installed here.",
            seen=f"PATH={os.environ.get('PATH', '')}",
            next_step=f"install it (Debian: apt-get install {package}), or load its module before "
            "Jupyter is started",
            code="WB-CLUSTER-069",
        )


# -- ssh ---------------------------------------------------------------------------------------


def _ssh_options(settings: LaunchSettings) -> list[str]:
    found: list[str] = []
    for name, value in settings.options.items():
        if name not in ("python", "profile"):
            found += ["-o", f"{name}={value}"]
    return found


class Ssh:
    """An ssh connection to each host, which carries the agent's pass and ends with the kernel."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("ssh", "openssh-client")
        self._settings = settings
        self.on_end: Callable[[], None] = _nothing
        self._started: list[Started] = []

    def start(self, join: wire.Join, engines: int) -> None:
        """Connect to all hosts at once."""
        settings = self._settings
        slots = spread(engines, [one.slots for one in settings.on])
        fixed = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        fixed += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        for place, host in enumerate(settings.on):
            about = f"export {wire.PLACE}={place} {wire.SLOTS}={slots[place]}"
            # The user's login shell there may be any; what runs is sh's.
            command = f"exec sh -c {shlex.quote(about + chr(10) + _script(settings))}"
            self._started.append(
                Started(
                    f"ssh {host.name}",
                    ["ssh", *_ssh_options(settings), *fixed, host.name, command],
                    _environment(), lambda: self.on_end(), join.to_text(),
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
        for one in self._started:
            one.wait()


def spread(engines: int, slots: Sequence[int]) -> list[int]:
    """Return how many engines each host gets, host by host.

    Args:
        slots: Of each host; 0: as many as the others leave, evenly.
    """
    open_hosts = [place for place, count in enumerate(slots) if not count]
    given, left = list(slots), max(0, engines - sum(slots))
    for nth, place in enumerate(open_hosts):
        given[place] = left // len(open_hosts) + (nth < left % len(open_hosts))
    return given


# -- Slurm -------------------------------------------------------------------------------------

_LASTING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"})


class Sbatch:
    """A job of Slurm's: one agent on each of its nodes, started by srun."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("sbatch", "slurm-client")
        self._settings = settings
        self.on_end: Callable[[], None] = _nothing
        self.job = ""
        self._about: dict[str, str] = {}
        self._looked_at = 0.0

    def start(self, join: wire.Join, engines: int) -> None:
        """Hand the job in.

        Raises:
            ClusterError: sbatch refused it; says its words.
        """
        done = subprocess.run(
            ["sbatch", "--parsable"], input=self.script(join, engines), capture_output=True,
            text=True, timeout=60, env=_environment(), check=False,
        )  # fmt: skip
        if done.returncode:
            raise ClusterError(
                "Slurm refused the job.",
                seen=done.stderr.strip() or f"exit code {done.returncode}",
                next_step="sinfo shows partitions and their limits",
                code="WB-CLUSTER-070",
            )
        self.job = done.stdout.strip().partition(";")[0]

    def script(self, join: wire.Join, engines: int) -> str:
        """Return the job's script."""
        settings = self._settings
        head = ["--job-name=workbench", "--output=/dev/null", "--no-requeue", f"--ntasks={engines}"]
        if settings.nodes:
            per_node = -(-engines // settings.nodes)
            head += [f"--nodes={settings.nodes}", f"--ntasks-per-node={per_node}"]
        for name in ("gpus_per_node", "time", "partition", "account"):
            if value := getattr(settings, name):
                head.append(f"--{name.replace('_', '-')}={value}")
        head += _options(settings)
        raw = [line.strip() for line in settings.setup if line.lstrip().startswith("#SBATCH")]
        return "\n".join([
            "#!/bin/sh",
            *(f"#SBATCH {one}" for one in head),
            *raw,
            f"export {wire.JOIN}={join.to_text()} {wire.SLOTS}=\"$SLURM_TASKS_PER_NODE\"",
            "said=$(mktemp)",
            # One task on each node, which has all that the job has there.
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" '
            "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --export=ALL "
            f"sh -c {shlex.quote(_script(settings))} > \"$said\" 2>&1",
            "code=$?",
            # What an agent said that could not reach its notebook: nothing else of it gets there.
            '[ $code = 0 ] || scontrol update JobId="$SLURM_JOB_ID" '
            "Comment=\"$(grep -v '^srun: ' \"$said\" | uniq | tail -c 600 | tr '\\n=' ' :')\"",
            'rm -f "$said"',
            "exit $code",
            "",
        ])  # fmt: skip

    @property
    def agents(self) -> int:
        """One for each node, once the job has got them."""
        nodes = self._about.get("NumNodes", "")
        return int(nodes) if nodes.isdecimal() and self._state in _RUNNING else 0

    @property
    def _state(self) -> str:
        return self._about.get("JobState", "")

    def look(self) -> Queued | None:
        """Ask Slurm how the job is, at most once a second."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._about = job_facts(self.job) or self._about
        if not self._about or self._state in _RUNNING:
            return None
        if self._state in _LASTING:
            reason = self._about.get("Reason", "None")
            return Queued(self._state, "" if reason == "None" else reason, self._position())
        raise self._failed()

    def _position(self) -> int:
        """Return which of the partition's waiting jobs it is, those of higher priority first."""
        partition = self._about.get("Partition", "")
        waiting = _text(["squeue", "-h", "-t", "PD", "-p", partition, "-S", "-p,i", "-o", "%i"])
        jobs = waiting.split()
        return jobs.index(self.job) + 1 if self.job in jobs else 0

    def _failed(self) -> ClusterError:
        comment = self._about.get("Comment", "")
        code = self._about.get("ExitCode", "0:0").partition(":")[0]
        what = f"Slurm's job {self.job}"
        if self._state == "FAILED" and comment:
            number = int(code) if code.isdecimal() else None
            return failed(what, number, comment)
        return failed(what, None, self.words())

    def words(self) -> str:
        """Return how the job is, in Slurm's words."""
        reason = self._about.get("Reason", "None")
        end = {
            "TIMEOUT": f"its time limit of {self._about.get('TimeLimit', '?')} was reached",
            "CANCELLED": "somebody cancelled it (scancel)",
            "PREEMPTED": "another job needed its nodes",
            "NODE_FAIL": "one of its nodes failed",
            "OUT_OF_MEMORY": "it needed more memory than it was given (--mem)",
        }.get(self._state, f"reason {reason}" if reason != "None" else "")
        return self._state + (f": {end}" if end else "")

    def ended(self, place: int) -> str:
        """Whether the job is over; asked when a host fell silent."""
        self._about = job_facts(self.job) or self._about
        over = self._state not in _RUNNING | _LASTING
        return f"Slurm's job {self.job} has ended ({self.words()})" if over else ""

    def stop(self) -> None:
        """Cancel the job."""
        if self.job:
            _text(["scancel", self.job])


def job_facts(job: str) -> dict[str, str]:
    """Return what Slurm knows of a job, by the names that `scontrol show job` uses."""
    found = _text(["scontrol", "show", "job", job, "--oneliner"])
    return dict(re.findall(r"(\w+(?:/\w+)?)=(.*?)(?=\s+\w+(?:/\w+)?=|\s*$)", found.strip()))


class Srun:
    """A step in the allocation that this kernel runs in (salloc, batchspawner, JupyterHub)."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("srun", "slurm-client")
        self._settings = settings
        self.on_end: Callable[[], None] = _nothing
        self._nodes = settings.nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        self._started: Started | None = None

    def start(self, join: wire.Join, engines: int) -> None:
        """Start the step."""
        nodes = self._nodes
        per_node = ",".join(str(one) for one in spread(engines, [0] * nodes))
        job = os.environ[ALLOCATION]
        command = ["srun", f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}"]
        command += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        if self._settings.gpus_per_node:
            command.append(f"--gpus-per-node={self._settings.gpus_per_node}")
        command += [*_options(self._settings), "sh", "-c", _script(self._settings)]
        env = _environment(**{wire.JOIN: join.to_text(), wire.SLOTS: per_node})
        for name in (
            "SLURM_NTASKS",
            "SLURM_NPROCS",
            "SLURM_TASKS_PER_NODE",
            "SLURM_NTASKS_PER_NODE",
        ):
            env.pop(name, None)  # the allocation's, which srun would take as asked for
        self._started = Started("srun", command, env, lambda: self.on_end())

    @property
    def agents(self) -> int:
        """One for each node."""
        return self._nodes

    def look(self) -> Queued | None:
        """Raise where the step has ended."""
        one = self._started
        if one is not None and one.code is not None:
            raise failed("srun", one.code, one.said)
        return None

    def ended(self, place: int) -> str:
        """Whether the step is over."""
        one = self._started
        if one is None or one.code is None:
            return ""
        return f"srun has ended: {(one.said.splitlines() or ['exit code ' + str(one.code)])[-1]}"

    def stop(self) -> None:
        """End the step."""
        if self._started is not None:
            self._started.stop()
            self._started.wait()


# -- MPI ---------------------------------------------------------------------------------------


class Mpi:
    """One agent for each rank of mpiexec, so that its engine may be that rank (mpi4py)."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("mpiexec", "openmpi-bin")
        self._settings = settings
        self.on_end: Callable[[], None] = _nothing
        self._ranks = 0
        self._started: Started | None = None

    def start(self, join: wire.Join, engines: int) -> None:
        """Start mpiexec."""
        self._ranks = engines
        # Open MPI hands on to other hosts what is named here; MPICH hands on everything.
        env = _environment(**{
            wire.JOIN: join.to_text(), wire.SLOTS: "1",
            "OMPI_MCA_mca_base_env_list": f"{wire.JOIN};{wire.SLOTS}",
        })  # fmt: skip
        command = ["mpiexec", "-n", str(engines)]
        for name, value in self._settings.options.items():
            if name not in ("python", "profile"):
                command += [f"--{name}", *([value] if value else [])]
        # Within an allocation of Slurm all ranks of a node have that node's number as well.
        rank = f'export {wire.PLACE}="${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-$PMIX_RANK}}}}"'
        command += ["sh", "-c", f"{rank}\n{_script(self._settings)}"]
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
        return "" if one is None or one.code is None else f"mpiexec has ended (code {one.code})"

    def stop(self) -> None:
        """End mpiexec."""
        if self._started is not None:
            self._started.stop()
            self._started.wait()
