"""Slurm over the simulated hosts: a controller here, a slurmd on each host, two made-up GPUs each.

Real daemons with a configuration, ports and keys of their own: nothing of /etc/slurm is touched.
They share `SimulatedHosts.shared`, nothing else. Partitions: `small` (the default) and `tiny`,
whose jobs may take a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from pathlib import Path

import psutil
from hosts.simulated_hosts import (
    ADDRESSES,
    FOLDER,
    KERNEL,
    MARK,
    MARK_VALUE,
    NEEDS,
    NETWORK,
    SimulatedHosts,
    end_all,
    marked,
)

SLURM_NEEDS = {
    **NEEDS, "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client",
    "munged": "munge",
}  # fmt: skip
CPUS, GPUS = 4, 2
PORT = 6000 + 10 * NETWORK
WAIT_S = 40.0


class LocalSlurm:
    """A context manager; `environment` is what clients (`sbatch`, `squeue`) need.

    Attributes:
        folder: Configuration, logs and state.
    """

    def __init__(self, hosts: SimulatedHosts) -> None:
        self._hosts = hosts
        self.folder = FOLDER / "slurm"

    def __enter__(self) -> LocalSlurm:
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of Slurm's clients, which know the hosts by ssh as well."""
        return {**self._hosts.environment, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def up(self) -> None:
        """Start the daemons and wait until both nodes are idle.

        Raises:
            RuntimeError: They do not come up; what they wrote is in the message.
        """
        for name in ("munge", "state", "log", *(f"spool.{host}" for host in ADDRESSES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        munge = self.folder / "munge"
        munge.chmod(0o700)
        key = munge / "key"
        if not key.exists():
            key.write_bytes(os.urandom(1024))
            key.chmod(0o400)
        for number in range(GPUS):
            device = self.folder / f"gpu{number}"
            if not device.exists():  # takes what /dev/null takes
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.folder / "slurm.conf").write_text(self._configuration())
        (self.folder / "gres.conf").write_text(
            f"NodeName={','.join(ADDRESSES)} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n"
        )
        self._start(
            "munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        self._start("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for host in ADDRESSES:
            daemon = self._hosts.enter(
                host,
                ["slurmd", "-f", str(self.folder / "slurm.conf"), "-N", host],
                cwd="/",
                env=self._bare(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            daemon.wait()  # it goes on as a daemon
        end = time.monotonic() + WAIT_S
        while not self.is_ready():
            if time.monotonic() > end:
                raise RuntimeError(f"Slurm did not come up.\n{self.logs()}")
            time.sleep(0.1)

    def down(self) -> None:
        """Cancel all jobs and end the daemons."""
        if self.is_ready():
            self.cancel_all()
        ours = {"munged", "slurmctld", "slurmd", "slurmstepd", "slurmscriptd"}
        end_all(lambda: [one for one in marked() if _name(one) in ours])
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_ready(self) -> bool:
        """Whether the controller answers and all nodes take jobs."""
        if not (self.folder / "slurm.conf").exists():
            return False
        said = self.call("sinfo", "--noheader", "--Node", "--format=%t", check=False).split()
        return len(said) >= len(ADDRESSES) and set(said) <= {"idle", "mix", "alloc"}

    def call(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run a client of Slurm in the shared folder and return what it wrote.

        Raises:
            RuntimeError: It failed, and `check` is set.
        """
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self._hosts.shared,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode and check:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{self.logs()}")
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Hand in a job script and return the job's number."""
        path = self._hosts.shared / f"job-{time.time_ns()}.sh"
        path.write_text(script)
        return int(self.call("sbatch", "--parsable", *options, str(path)))

    def state(self, job: int) -> str:
        """Return a job's state, as `RUNNING` or `TIMEOUT`."""
        said = self.call("scontrol", "show", "job", str(job), check=False)
        found = re.search(r"JobState=(\w+)", said)
        return found.group(1) if found else ""

    def jobs(self) -> list[int]:
        """Return the numbers of all jobs that wait or run."""
        return [int(one) for one in self.call("squeue", "--noheader", "--format=%A").split()]

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until they are gone.

        Raises:
            RuntimeError: Some go on.
        """
        end = time.monotonic() + WAIT_S
        while jobs := self.jobs():
            self.call("scancel", "--full", *map(str, jobs), check=False)
            if time.monotonic() > end:
                raise RuntimeError(f"Slurm's jobs {jobs} do not end.\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the last lines of what the daemons wrote."""
        parts = []
        for path in sorted((self.folder / "log").glob("*")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"-- {path.name}", *lines]))
        return "\n".join(parts)

    def _start(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env=self._bare(), cwd="/")
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")

    def _bare(self) -> dict[str, str]:
        path = f"{os.defpath}:/usr/local/bin:/usr/bin:/usr/sbin:/sbin"
        return {"PATH": path, MARK: MARK_VALUE, "LANG": "C.UTF-8"}

    def _configuration(self) -> str:
        """Return slurm.conf: processes are found by /proc, nodes may have more CPUs than here."""
        folder: Path = self.folder
        names = ",".join(ADDRESSES)
        nodes = "".join(
            f"NodeName={host} NodeAddr={address} CPUs={CPUS} Gres=gpu:{GPUS} State=UNKNOWN\n"
            for host, address in ADDRESSES.items()
        )
        return f"""ClusterName=workbench
SlurmctldHost={socket.gethostname()}({KERNEL})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={PORT}
SlurmdPort={PORT + 1}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=300
SchedulerParameters=sched_interval=2
MpiDefault=none
{nodes}PartitionName=small Nodes={names} Default=YES MaxTime=60 DefaultTime=10 State=UP
PartitionName=tiny Nodes={names} MaxTime=1 DefaultTime=1 State=UP
"""


def _name(process: psutil.Process) -> str:
    """Return a process's name; of one that has just ended nothing."""
    try:
        return process.name()
    except psutil.Error:
        return ""
