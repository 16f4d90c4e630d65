"""Slurm: agents as a job's (sbatch), or as a step of the current allocation (srun)."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import ClusterError
from . import wire
from .launchers import (
    Queued,
    Started,
    ask_program,
    environment,
    failed,
    launcher_options,
    nothing,
    options_of,
    refuse_missing,
    script_of,
    spread,
)

if TYPE_CHECKING:
    from .settings import LaunchSettings

ALLOCATION = "SLURM_JOB_ID"
LOOK_S = 1.0
SUBMIT_S = 60.0
AGENTS_END_S = 2.0
"""How long agents may take to end after the order."""
_LASTING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"})


class Sbatch:
    """A job of Slurm's: one agent on each of its nodes, started by srun."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("sbatch", "slurm-client")
        self._settings = settings
        self.on_end: Callable[[], None] = nothing
        self.job = ""
        self._about: dict[str, str] = {}
        self._looked_at, self._place = 0.0, 0

    @property
    def asks(self) -> str:
        """Its first action."""
        return "asking Slurm for a job"

    def start(self, join: wire.Join, engines: int) -> None:
        """Hand the job in.

        Raises:
            ClusterError: sbatch refused it; the error contains its message.
        """
        try:
            done = subprocess.run(
                ["sbatch", "--parsable"], input=self.script(join, engines), capture_output=True,
                text=True, timeout=SUBMIT_S, env=environment(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                "Slurm does not answer.",
                seen=f"sbatch printed nothing for {SUBMIT_S:g} s",
                next_step="run `squeue -u $USER`, and look for a new job named workbench. If none "
                "of your other notebooks has started this job, cancel it with scancel. Then start "
                "the cluster again",
                code="WB-CLUSTER-077",
            ) from error
        if done.returncode:
            raise ClusterError(
                "Slurm refused the job.",
                seen=done.stderr.strip() or f"exit code {done.returncode}",
                next_step="change the option that Slurm names; `sinfo` shows the partitions and "
                "their limits, and `sacctmgr show assoc` shows the accounts",
                code="WB-CLUSTER-065",
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
        for name, value in launcher_options(settings).items():
            head.append(f"--{name}={shlex.quote(value)}" if value else f"--{name}")
        raw = [line.strip() for line in settings.setup if line.lstrip().startswith("#SBATCH")]
        return "\n".join([
            "#!/bin/sh",
            *(f"#SBATCH {one}" for one in head),
            *raw,
            f"export {wire.JOIN}={join.to_text()} {wire.SLOTS}=\"$SLURM_TASKS_PER_NODE\"",
            # The output goes to a file without a name, so that no file remains.
            'said=$(mktemp) && exec 3<>"$said" && rm -f "$said"',
            # One task on each node, which has all that the job has there.
            'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" '
            "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --export=ALL "
            f"sh -c {shlex.quote(script_of(settings))} >&3 2>&1",
            "code=$?",
            # The output of an agent that could not reach its notebook; this is its only way there.
            '[ $code = 0 ] || scontrol update JobId="$SLURM_JOB_ID" '
            "Comment=\"$(grep -v '^srun: ' /dev/fd/3 | uniq | tail -c 600 | tr '\\n=' ' :')\"",
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
        """Ask Slurm for the job's state, at most once a second."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._about = job_facts(self.job) or self._about
            self._place = self._position() if self._state in _LASTING else 0
        if not self._about or self._state in _RUNNING:
            return None
        if self._state in _LASTING:
            reason = self._about.get("Reason", "None")
            return Queued(self._state, "" if reason == "None" else reason, self._place)
        raise self._failed()

    def _position(self) -> int:
        """Return its position among the partition's waiting jobs, by priority."""
        partition = self._about.get("Partition", "")
        waiting = ask_program(
            ["squeue", "-h", "-t", "PD", "-p", partition, "-S", "-p,i", "-o", "%i"]
        )
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
        """Return the job's state, in Slurm's words."""
        reason = self._about.get("Reason", "None")
        end = {
            "TIMEOUT": f"the job's time limit of {self._about.get('TimeLimit', '?')} was reached",
            "CANCELLED": "the job was cancelled (scancel)",
            "PREEMPTED": "another job needed this job's nodes",
            "NODE_FAIL": "one of the job's nodes failed",
            "OUT_OF_MEMORY": "the job needed more memory than Slurm gave it; to get more, "
            "start the cluster with --launcher-option mem=SIZE",
        }.get(self._state, f"reason {reason}" if reason != "None" else "")
        return self._state + (f": {end}" if end else "")

    def ended(self, place: int) -> str:
        """Whether the job is over; asked when a host fell silent."""
        if time.monotonic() - self._looked_at >= LOOK_S / 4:  # asked for each host in turn
            self._looked_at = time.monotonic()
            self._about = job_facts(self.job) or self._about
        over = self._state not in _RUNNING | _LASTING
        return f"Slurm's job {self.job} has ended ({self.words()})" if over else ""

    def stop(self) -> None:
        """Cancel the job."""
        if self.job:
            ask_program(["scancel", self.job])


def job_facts(job: str) -> dict[str, str]:
    """Return what Slurm knows about a job, by the names of `scontrol show job`."""
    found = ask_program(["scontrol", "show", "job", job, "--oneliner"])
    # Names may be AllocNode:Sid, Req/Alloc; values may hold spaces, a comment's for one.
    return dict(re.findall(r"([\w:/]+)=(.*?)(?=\s+[\w:/]+=|\s*$)", found.strip()))


class Srun:
    """A step in the allocation in which this kernel runs (salloc, batchspawner, JupyterHub)."""

    def __init__(self, settings: LaunchSettings) -> None:
        refuse_missing("srun", "slurm-client")
        self._settings = settings
        self.on_end: Callable[[], None] = nothing
        self._nodes = settings.nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        self._started: Started | None = None

    @property
    def asks(self) -> str:
        """Its first action."""
        return f"starting a Slurm job step in allocation {os.environ[ALLOCATION]}"

    def start(self, join: wire.Join, engines: int) -> None:
        """Start the step."""
        nodes = self._nodes
        per_node = ",".join(str(one) for one in spread(engines, [0] * nodes))
        job = os.environ[ALLOCATION]
        command = ["srun", f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}"]
        command += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        if self._settings.gpus_per_node:
            command.append(f"--gpus-per-node={self._settings.gpus_per_node}")
        command += [*options_of(self._settings), "sh", "-c", script_of(self._settings)]
        env = environment(**{wire.JOIN: join.to_text(), wire.SLOTS: per_node})
        for name in ("NTASKS", "NPROCS", "TASKS_PER_NODE", "NTASKS_PER_NODE"):
            env.pop(f"SLURM_{name}", None)  # the allocation's, which srun would take as asked for
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
            # When srun is told to end, it kills the agents; so they are told to clean up first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.process.wait(AGENTS_END_S)
            self._started.stop()
            self._started.wait()
