"""Settings for engines on other machines: where, how many, for how long, with what setup."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

LOCAL, SSH, SLURM, MPI = "local", "ssh", "slurm", "mpi"
OURS = (SSH, SLURM, MPI)
"""Launchers that start agents; any other name is one of ipyparallel's."""
START_TIMEOUT_S = 120.0
MPI_HOSTS = frozenset((
    "host", "hosts", "H", "machine", "f", "hostfile", "machinefile", "default-hostfile",
))  # fmt: skip
"""Options of mpiexec that name other hosts; inside an allocation of Slurm it uses its nodes."""
QUEUE_TIMEOUT_S = 24 * 3600.0
"""A job can wait a long time in the queue; Interrupt cancels it."""


@dataclass(frozen=True)
class HostSlots:
    """A named host, as `user@name:slots`; 0 slots: as many as are needed."""

    name: str
    slots: int = 0


@dataclass(frozen=True)
class LaunchSettings:
    """Where engines are started, checked.

    Attributes:
        launcher: `local`, `ssh`, `slurm`, `mpi`, or the name of one of ipyparallel's launchers.
        on: The hosts, for ssh.
        nodes: How many nodes a job takes; 0: the scheduler decides.
        gpus_per_node: GPUs of each node; 0: none are requested.
        time: The job's time limit as Slurm writes it; empty: the partition's.
        setup: Lines of a shell before the agent starts; those that begin with `#SBATCH` are the
            job's options.
        options: Further options of the launcher: of `sbatch`, `ssh` or `mpiexec` by their long
            names, one with an empty value being a flag alone; `python`, the interpreter on the
            hosts; `profile`, ipyparallel's.
        listen: Address on which the notebook listens for the hosts; empty: the one from which they
            are reached.
        ports: First and last port that may be listened on; None: any.
        start_timeout_s: How long a start may take, the queue included.
    """

    launcher: str = LOCAL
    on: tuple[HostSlots, ...] = ()
    nodes: int = 0
    gpus_per_node: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    setup: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    listen: str = ""
    ports: tuple[int, int] | None = None
    start_timeout_s: float = START_TIMEOUT_S

    @property
    def has_agents(self) -> bool:
        """Whether engines are forked by agents on other hosts."""
        return self.launcher in OURS

    @property
    def leaves_machine(self) -> bool:
        """Whether engines may run on other machines.

        Mpiexec uses this machine unless hosts are named.
        """
        if self.launcher == MPI:
            return bool(MPI_HOSTS & set(self.options)) or "SLURM_JOB_ID" in os.environ
        return self.launcher != LOCAL


HERE = LaunchSettings()
"""Engines of this machine."""
