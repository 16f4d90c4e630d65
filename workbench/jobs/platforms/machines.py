"""Jobs on machines with a login: this machine, machines of Slurm, and machines behind ssh."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from ...cluster.hosts.slurm import job_facts
from ...devices.discovery import discover
from ...errors import ClusterError, PlanError
from ...export.envelopes import far_folder
from ...export.folder import read_job
from ...shared import cluster_env
from ..places import SSH_OPTIONS
from .client import (
    ASK_S,
    COPY_S,
    END_S,
    JobState,
    Said,
    Ticket,
    Word,
    checked_id,
    has_stepped,
    last_lines,
    must,
    needed,
    own_run,
    parsed,
    read_end,
    runs_before,
    say,
)

if TYPE_CHECKING:
    from ...export.envelopes import Resources

# -- this machine ----------------------------------------------------------------------------------

_KEEPER = """
import json, os, signal, subprocess, sys
log, end, *command = sys.argv[1:]
ready, begun = os.pipe()
if pid := os.fork():
    os.close(begun)
    os.read(ready, 1)
    print(pid, flush=True)
    os._exit(0)
os.setsid()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
os.close(begun)
for number, file, how in ((0, os.devnull, os.O_RDONLY),
                          (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)):
    opened = os.open(file, how, 0o600)
    os.dup2(opened, number)
    os.close(opened)
os.dup2(1, 2)
try:
    code = subprocess.call(command)
except OSError as error:
    print(error, flush=True)
    code = 127
with open(end + ".new", "w") as file:
    json.dump({"pid": os.getpid(), "code": code, "told": bool(told)}, file)
os.replace(end + ".new", end)
"""
"""This process outlives the notebook and keeps the job's exit code; SIGTERM does not end it."""


class Local:
    """A process of this machine that outlives the notebook."""

    name = "local"
    envelope = ""

    def check(self, folder: Path, resources: Resources) -> None:
        """Raise PlanError if one machine is not enough."""
        read_job(folder)
        if resources.nodes > 1:
            raise ClusterError(
                "A job on this machine can have only one node.",
                seen=f"nodes={resources.nodes}",
                next_step="use nodes=1; or use on='slurm', on='ssh' or another platform",
                code="WB-CLUSTER-085",
            )
        if resources.gpus_per_node > (found := len(discover())):
            raise ClusterError(
                "This machine has fewer GPUs than requested.",
                seen=f"gpus_per_node={resources.gpus_per_node}",
                allowed=f"gpus_per_node from 0 to {found}",
                next_step=f"use gpus_per_node={found}, or another platform",
                code="WB-CLUSTER-095",
            )

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Start the job in a new session."""
        folder = folder.resolve()
        command = self._command(folder)
        (folder / "job.exit").unlink(missing_ok=True)
        keeper = [sys.executable, "-I", "-S", "-c", _KEEPER, str(folder / "job.log"),
                  str(folder / "job.exit"), *command]  # fmt: skip
        before = runs_before(folder)
        step = "make sure that you can write files into the job folder"
        pid = must(keeper, "The job could not be started.", step, cwd=folder)
        began = time.time()
        with contextlib.suppress(psutil.Error):  # the process may be over
            began = psutil.Process(int(pid)).create_time()
        return Ticket(
            self.name, pid.strip(), str(folder), time.time(),
            {"began": repr(began), "host": cluster_env.host_token(), **before},
        )  # fmt: skip

    def _command(self, folder: Path) -> list[str]:
        launch = read_job(folder).launch
        if launch["processes"] == 1:
            return [sys.executable, "train.py"]
        if launch["framework"] == "torch":
            count = f"--nproc-per-node={launch['processes']}"
            return [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                count,
                "train.py",
            ]
        return [sys.executable, "-m", "workbench", "run", str(folder)]  # it sets each TF_CONFIG

    def state(self, ticket: Ticket) -> JobState:
        """Look for the job's process, then for the files that it left."""
        began = float(ticket.extra["began"])
        if self._process(ticket) is not None:
            return JobState("running", f"pid {ticket.id}", began)
        left = parsed(read_end(Path(ticket.folder) / "job.exit"))
        if not isinstance(left, dict) or str(left.get("pid")) != ticket.id:
            if ticket.extra.get("host") != cluster_env.host_token():
                words = (
                    "the job was started on another machine, or before this machine was restarted"
                )
                return JobState("unknown", words, began, gone=True)
            words = f"process {ticket.id} was killed: it ended without an exit code"
            return JobState("failed", words, began, stepped=has_stepped(ticket))
        code = left.get("code")
        if left.get("told"):
            return JobState("cancelled", "SIGTERM", began)
        if code == 0:
            return JobState("finished", "exit code 0", began)
        words = f"exit code {code}"
        if isinstance(code, int) and code < 0:
            with contextlib.suppress(ValueError):
                words = signal.Signals(-code).name
        return JobState("failed", words, began, stepped=has_stepped(ticket))

    def _process(self, ticket: Ticket) -> psutil.Process | None:
        if ticket.extra.get("host") != cluster_env.host_token():
            return None
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(int(ticket.id))
            same = abs(found.create_time() - float(ticket.extra["began"])) < 1.0
            if same and found.status() != psutil.STATUS_ZOMBIE:
                return found
        return None

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Read the job's output file."""
        return last_lines(read_end(Path(ticket.folder) / "job.log"), last)

    def cancel(self, ticket: Ticket) -> None:
        """Ask the job's processes to end, then kill the processes that do not end."""
        keeper = self._process(ticket)
        if keeper is None:
            return
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # torchrun starts its workers in separate sessions.
            below = keeper.children(recursive=True)
            os.killpg(keeper.pid, signal.SIGTERM)
            _, alive = psutil.wait_procs([keeper, *below], timeout=END_S)
            for one in alive:
                if one.pid != keeper.pid:
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            if psutil.wait_procs([keeper], timeout=2.0)[1]:  # else the keeper notes the end itself
                keeper.kill()

    def place(self, ticket: Ticket) -> str:
        """Return the run's folder; before this folder exists, return the job folder."""
        return str(own_run(ticket) or ticket.folder)


# -- Slurm -----------------------------------------------------------------------------------------

_SLURM_ENDS: dict[str, Word] = {
    "COMPLETED": "finished", "CANCELLED": "cancelled", "FAILED": "failed", "TIMEOUT": "failed",
    "NODE_FAIL": "failed", "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "DEADLINE": "failed",
    "PREEMPTED": "failed", "LAUNCH_FAILED": "failed", "REVOKED": "failed",
}  # fmt: skip
_SLURM_RUNS = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED"})


class _Nodes(NamedTuple):
    """Nodes of one kind in a partition."""

    nodes: int
    cpus: int
    gpus: int
    limit_s: float | None
    limit: str

    @property
    def words(self) -> str:
        """Return the nodes in words."""
        gpus = f", GPUs per node: {self.gpus}" if self.gpus else ""
        return f"nodes: {self.nodes}, CPUs per node: {self.cpus}{gpus}, time limit: {self.limit}"


@dataclass(frozen=True)
class Slurm:
    """A batch job: `sbatch job.sbatch`.

    Attributes:
        venv: An environment that all nodes see; it replaces the one that the job would make.
    """

    name = envelope = "slurm"
    venv: str = ""

    def check(self, folder: Path, resources: Resources) -> None:
        """Check that the partition has the requested resources, and let sbatch test the job."""
        job = read_job(folder)
        needed(folder, "job.sbatch", self.name)
        partitions, default = self._partitions()
        wanted = resources.partition or default
        if wanted and wanted not in partitions:
            raise ClusterError(
                "Slurm has no such partition.",
                seen=wanted,
                allowed=", ".join(sorted(partitions)) or "none: `sinfo` shows no partition",
                next_step="choose a partition with partition=NAME; `sinfo` shows all partitions",
                code="WB-CLUSTER-086",
            )
        kinds = partitions.get(wanted, [])
        each = resources.workers_per_node or job.launch["processes"] // max(1, resources.nodes)
        cpus = resources.cpus_per_worker * each
        fit = [
            one for one in kinds
            if one.gpus >= resources.gpus_per_node and one.cpus >= cpus
            and (one.limit_s is None or (resources.time_s or 0) <= one.limit_s)
        ]  # fmt: skip
        if kinds and sum(one.nodes for one in fit) < resources.nodes:
            time_words = f", time: {resources.time_s:g} s" if resources.time_s else ""
            others = ", ".join(sorted(set(partitions) - {wanted}))
            raise ClusterError(
                f"Partition {wanted} cannot provide these resources.",
                seen=f"nodes: {resources.nodes}, CPUs per node: {cpus or 1}, "
                f"GPUs per node: {resources.gpus_per_node}{time_words}",
                allowed="; ".join(one.words for one in kinds),
                next_step=f"request less{', or use another partition: ' * bool(others)}{others}",
                code="WB-CLUSTER-087",
            )
        must(
            ["sbatch", "--test-only", "job.sbatch"], "Slurm would refuse this job.",
            "solve the problem that Slurm reports; `sinfo` shows partitions and limits", cwd=folder,
        )  # fmt: skip

    def _partitions(self) -> tuple[dict[str, list[_Nodes]], str]:
        """Return the nodes of each partition, and the name of the default partition."""
        found: dict[str, list[_Nodes]] = {}
        default = ""
        said = must(
            ["sinfo", "--noheader", "--format=%P|%D|%c|%G|%l"], "Slurm does not answer.",
            "make sure that `sinfo` works in a terminal",
        )  # fmt: skip
        for line in said.splitlines():
            name, nodes, cpus, gres, limit = ([*line.split("|"), "", "", "", ""])[:5]
            default = name.rstrip("*") if name.endswith("*") else default
            gpus = sum(int(n) for n in re.findall(r"(?:^|,)gpu:(?:[^:,(]+:)?(\d+)", gres))
            kind = _Nodes(_digits(nodes), _digits(cpus), gpus, _slurm_seconds(limit), limit)
            found.setdefault(name.rstrip("*"), []).append(kind)
        return found, default

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Submit the job to Slurm."""
        folder = folder.resolve()
        needed(folder, "job.sbatch", self.name)
        runs_before(folder)
        venv = ["--venv", self.venv] if self.venv else []
        said = must(
            ["sbatch", "--parsable", "job.sbatch", *venv], "Slurm refused the job.",
            "solve the problem that Slurm reports; `sinfo` shows partitions and limits", cwd=folder,
        )  # fmt: skip
        job = said.strip().splitlines()[-1].partition(";")[0] if said.strip() else ""
        return Ticket(
            self.name, checked_id(job, said), str(folder), time.time(), runs_before(folder)
        )

    def state(self, ticket: Ticket) -> JobState:
        """Read the queue, then the accounts, then the run's folder."""
        said = say(["squeue", "--noheader", f"--jobs={ticket.id}", "--states=all",
                     "--format=%T|%r|%S"])  # fmt: skip
        word, reason, began = [*said.out.strip().partition("\n")[0].split("|"), "", ""][:3]
        if said.code and "Invalid job id" not in said.err:
            raise ClusterError(
                "Slurm does not answer.",
                seen=said.words,
                next_step="make sure that `squeue` works in a terminal",
                code="WB-CLUSTER-088",
            )
        if not word:
            word, began = self._accounts(ticket)
        return self._read(ticket, word, reason, began) if word else self._forgotten(ticket)

    def _accounts(self, ticket: Ticket) -> tuple[str, str]:
        """Return the state and start time of a job that is not in the queue any more."""
        if shutil.which("sacct") is None:
            return "", ""
        said = say(["sacct", "-n", "-X", "-P", "-j", ticket.id, "--format=State,Start"])
        word, _, began = said.out.strip().partition("\n")[0].partition("|")
        return word.partition(" ")[0], began  # CANCELLED by 1000

    def _read(self, ticket: Ticket, word: str, reason: str, began: str) -> JobState:
        told = reason if reason not in ("", "None") else ""
        words = f"{word} ({told})" if told else word
        state = _SLURM_ENDS.get(word)
        if state is None:
            if word in _SLURM_RUNS:
                return JobState("running", words, _slurm_time(began))
            expected = f", expected to begin {began}" if _slurm_time(began) else ""
            return JobState("pending", words + expected)
        code = job_facts(ticket.id).get("ExitCode", "") if state == "failed" else ""
        words += f", exit code {code}" if code not in ("", "0:0") else ""
        stepped = has_stepped(ticket) if state == "failed" else None
        return JobState(state, words, _slurm_time(began), stepped=stepped)

    def _forgotten(self, ticket: Ticket) -> JobState:
        """Return the state in the run's folder: without accounts Slurm forgets jobs in minutes."""
        words = f"Slurm no longer knows job {ticket.id}"
        run = own_run(ticket)
        meta = parsed(read_end(run / "run.json")) if run is not None else None
        told = str(meta.get("state", "")) if isinstance(meta, dict) else ""
        if told in ("finished", "stopped"):
            return JobState("finished", f"{words}; the job's run is {told}")
        if told == "failed":
            return JobState("failed", f"{words}; the job's run failed", stepped=has_stepped(ticket))
        return JobState("unknown", words, gone=True)

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Read the job's output file."""
        path = Path(ticket.folder) / f"slurm-{ticket.id}.out"
        if not path.exists():
            path = Path(job_facts(ticket.id).get("StdOut", path))
        return last_lines(read_end(path), last)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel the job."""
        said = say(["scancel", ticket.id])
        if said.code and "Invalid job id" not in said.err:
            raise ClusterError(
                "Slurm did not cancel the job.",
                seen=said.words,
                next_step=f"run `scancel {ticket.id}` in a terminal",
                code="WB-CLUSTER-089",
            )

    def place(self, ticket: Ticket) -> str:
        """Return the run's folder, or the job folder before it exists, if readable from here."""
        return str(own_run(ticket) or ticket.folder)


def _digits(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _slurm_seconds(text: str) -> float | None:
    """Return the seconds of a limit such as `1-00:00:00` or `30:00`; None: no limit."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]):
        return None
    parts = [*parts, "0", "0"][:3] if dash else ["0"] * (3 - len(parts)) + parts
    hours, minutes, seconds = (int(part) for part in parts)
    return int(days or 0) * 86400.0 + hours * 3600 + minutes * 60 + seconds


def _slurm_time(text: str) -> float | None:
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


# -- ssh -------------------------------------------------------------------------------------------

_LEFT_OUT = frozenset(("runs", ".venv", ".venv.lock", "job.log", "job.exit"))
# Words in capitals are replaced by quoted values. A script is for sh and travels as base64, so that
# the login shell of the host may be any shell. Small images have no ps, macOS has no /proc.
_PROCESSES = r"""
words_of() {
  if [ -d /proc/self ]; then tr '\0' ' ' < "/proc/$1/cmdline"
  else ps -ww -o args= -p "$1"; fi 2>/dev/null
}
parents() {
  if [ -d /proc/self ]; then
    cat /proc/[0-9]*/status 2>/dev/null | awk '/^Pid:/ { pid = $2 } /^PPid:/ { print pid, $2 }'
  else ps -e -o pid= -o ppid=; fi
}
"""
_COPY = (
    _PROCESSES
    + """
umask 077; mkdir -p -- DIR && cd -- DIR || exit 3
read -r pid token 2>/dev/null < .job-0 && words_of "$pid" | grep -q -- "$token" && {
  echo "a job is running in $PWD: cancel it, or give your new job another name" >&2; exit 4; }
tar -xf -
"""
)
_START = """
cd -- DIR || exit 3
read -r WORKBENCH_JOB_KEY
export WORKBENCH_JOB_KEY HOSTS=NAMES
before=$(ls runs 2>/dev/null | grep -x '[0-9][0-9]*' | sort -n | tail -n 1)
rm -f .job-NODE.exit
go=; command -v setsid > /dev/null && go=setsid
$go nohup sh -c 'bash start.sh "$@"; echo "$0 $?" > .job-NODE.new
  mv .job-NODE.new .job-NODE.exit' TOKEN WORDS > job-NODE.log 2>&1 < /dev/null &
echo "$! TOKEN" > .job-NODE
echo "$! ${before:-0}"; pwd -P
"""
_LOOK = (
    _PROCESSES
    + """
cd -- DIR 2>/dev/null || { echo gone; exit 0; }
words_of PID | grep -q -- TOKEN && { echo running; exit 0; }
read -r token code 2>/dev/null < .job-0.exit
if [ "$token" = TOKEN ]; then echo "exit $code"; else echo lost; fi
for one in runs/*/records-rank*.bin; do
  number=${one#runs/}; number=${number%%/*}
  [ -s "$one" ] && [ "$number" -gt BEFORE ] && { echo stepped; exit 0; }
done; exit 0
"""
)
_END = (
    _PROCESSES
    + """
words_of PID | grep -q -- TOKEN || exit 0
all=$(parents | awk -v top=PID '{ up[$1] = $2 } END { for (one in up) {
  at = one; while (at != top && at in up) at = up[at]; if (at == top) print one } }')
kill -s TERM -- -PID 2>/dev/null || kill -s TERM PID
tries=0; while kill -s 0 PID 2>/dev/null && [ $tries -lt 12 ]; do sleep 1; tries=$((tries+1)); done
kill -s KILL $all 2>/dev/null
cd -- DIR && echo "TOKEN cancelled" > .job-NODE.exit
"""
)


def _script(text: str, **words: object) -> str:
    """Return a script with its words filled in: each value is quoted, also each item of a list."""
    for name, value in words.items():
        told = shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))
        text = re.sub(rf"\b{name}\b", lambda _, told=told: told, text)  # type: ignore[misc]
    return text


def _far(host: str, script: str, **options: Any) -> Said:
    """Run a script with sh on a host.

    Raises:
        ClusterError: There is no connection.
    """
    packed = base64.b64encode(script.encode()).decode()
    command = f"exec sh -c 'eval \"$(printf %s {packed} | base64 -d)\"'"
    said = say(["ssh", *SSH_OPTIONS, "--", host, command], **options)
    if said.code == 255:  # ssh's own exit code if ssh itself failed
        raise ClusterError(
            f"ssh cannot connect to {host}.",
            seen=said.words,
            next_step=f"make sure that `ssh {host} true` works in a terminal without a password",
            code="WB-CLUSTER-091",
        )
    return said


def _far_must(host: str, script: str, **options: Any) -> str:
    said = _far(host, script, **options)
    if said.code:
        raise ClusterError(
            f"The job could not be started on {host}.",
            seen=said.words,
            next_step=f"solve the problem that the host reports (log in: ssh {host})",
            code="WB-CLUSTER-092",
        )
    return said.out


@dataclass(frozen=True)
class Ssh:
    """Runs `bash start.sh` on each host in a copy of the folder; it outlives the connection.

    Attributes:
        venv: An environment on the hosts; it replaces the one that the job would make.
    """

    name = envelope = "ssh"
    venv: str = ""

    def check(self, folder: Path, resources: Resources) -> None:
        """Check that each host can be reached."""
        read_job(folder)
        needed(folder, "start.sh", self.name)
        if not resources.hosts:
            raise PlanError(
                "on='ssh' needs the names of the hosts.",
                seen="no host",
                next_step='hosts=["user@node1"]',
                code="WB-PLAN-242",
            )
        for host in resources.hosts:
            _far_must(
                host, "command -v bash > /dev/null || { echo this host has no bash >&2; exit 5; }"
            )

    def submit(self, folder: Path, resources: Resources) -> Ticket:
        """Copy the folder to each host, then start the job on all hosts."""
        folder = folder.resolve()
        there = far_folder(resources, read_job(folder).name)
        token, key = f"wb-{secrets.token_hex(6)}", secrets.token_hex(16)
        hosts = list(resources.hosts)
        names = [host.rpartition("@")[2] for host in hosts]
        with tempfile.TemporaryFile() as packed:
            pack(folder, packed)
            for host in [] if resources.remote_folder else hosts:
                packed.seek(0)
                _far_must(host, _script(_COPY, DIR=there), stdin=packed, timeout_s=COPY_S)
        pids, before, real = [], "0", there
        for node, host in enumerate(hosts):
            words = ["--node", str(node), "--first", names[0] if len(hosts) > 1 else "127.0.0.1"]
            words += ["--venv", self.venv] if self.venv else []
            script = _script(_START, DIR=there, NAMES=",".join(names), NODE=node, TOKEN=token,
                             WORDS=words)  # fmt: skip
            with tempfile.TemporaryFile() as told:
                told.write(f"{key}\n".encode())
                told.seek(0)
                lines = _far_must(host, script, stdin=told).splitlines()
            pid, _, runs = lines[0].partition(" ")
            pids.append(checked_id(pid, "\n".join(lines)))
            if node == 0:
                before, real = runs, lines[1]
        extra = {"hosts": ",".join(hosts), "dir": real, "there": there, "pids": ",".join(pids),
                 "runs_before": before}  # fmt: skip
        return Ticket(self.name, token, str(folder), time.time(), extra)

    def state(self, ticket: Ticket) -> JobState:
        """Look for the job's process, then for the files that it left."""
        host, pid = self._nodes(ticket)[0]
        script = _script(_LOOK, DIR=ticket.extra["dir"], PID=pid, TOKEN=ticket.id,
                         BEFORE=ticket.extra["runs_before"])  # fmt: skip
        said = _far(host, script).out.split()
        word, code = (*said, "", "")[:2]
        where = f"on {host}"
        if word == "running":
            return JobState("running", f"pid {pid} {where}", ticket.submitted_s)
        if word == "exit" and code in ("0", "cancelled"):
            state: Word = "finished" if code == "0" else "cancelled"
            return JobState(state, f"exit code 0 {where}" if code == "0" else "SIGTERM")
        if word == "exit":
            return JobState("failed", f"exit code {code} {where}", stepped="stepped" in said)
        if word == "lost":
            words = f"process {pid} {where} was killed: it ended without an exit code"
            return JobState("failed", words, stepped="stepped" in said)
        words = f"{ticket.extra['dir']} is missing" if word == "gone" else "the job was not found"
        return JobState("unknown", f"{words} {where}", gone=word == "gone")

    def logs(self, ticket: Ticket, last: int = 200) -> str:
        """Read the output on rank 0's host."""
        script = _script("cd -- DIR && tail -c 1000000 job-0.log", DIR=ticket.extra["dir"])
        return last_lines(_far(self._nodes(ticket)[0][0], script).out, last)

    def cancel(self, ticket: Ticket) -> None:
        """Ask the job's processes to end, then kill the processes that do not end."""
        for node, (host, pid) in enumerate(self._nodes(ticket)):
            folder = ticket.extra["there" if node else "dir"]
            _far(host, _script(_END, DIR=folder, PID=pid, TOKEN=ticket.id, NODE=node),
                 timeout_s=ASK_S + 5)  # fmt: skip

    def place(self, ticket: Ticket) -> str:
        """Return the job's folder on rank 0's host."""
        return f"ssh://{self._nodes(ticket)[0][0]}{ticket.extra['dir']}"

    def _nodes(self, ticket: Ticket) -> list[tuple[str, str]]:
        hosts, pids = (ticket.extra[name].split(",") for name in ("hosts", "pids"))
        return list(zip(hosts, pids, strict=True))


def pack(folder: Path, into: IO[bytes]) -> None:
    """Write a folder as a tar archive, without its runs and without user names."""

    def kept(one: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if one.name.removeprefix("./") in _LEFT_OUT:
            return None
        one.uid = one.gid = 0
        one.uname = one.gname = ""
        return one

    with tarfile.open(fileobj=into, mode="w") as archive:
        archive.add(folder, ".", filter=kept)
