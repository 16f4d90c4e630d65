"""Engines on simulated hosts: agents on this machine that behave as on another machine.

Each agent is a process with its own name, TMPDIR and HOME. So for the kernel its engines are on
another machine (`EngineInfo.is_here`), and the kernel treats them so, without root, ssh or
namespaces. Disks, clocks and loopback are shared.

    with hosted_cluster(tmp_path, 2) as cluster:
        run = cluster.run(...)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from workbench.cluster.hosts import places, wire
from workbench.cluster.hosts.settings import HostSlots, LaunchSettings
from workbench.errors import ClusterError
from workbench.session.cluster import Cluster

ROOT = Path(__file__).resolve().parents[1]
NAME = "WORKBENCH_TEST_HOST"
SITE = f"""\
import os, platform, socket

if name := os.environ.get({NAME!r}):
    platform.node = socket.gethostname = lambda: name
"""
END_S = 20


class LocalAgents:
    """Starts an agent for each host's name, as a process of this machine."""

    def __init__(self, folder: Path, names: Sequence[str], slots: int) -> None:
        self.folder, self.names, self.slots = folder, names, slots
        self.processes: list[subprocess.Popen[bytes]] = []

    asks = "starting agents"

    def start(self, join: wire.Join, engines: int) -> None:
        site = self.folder / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE)
        for place, name in enumerate(self.names):
            for part in ("tmp", "home"):
                (self.folder / name / part).mkdir(parents=True, exist_ok=True)
            env = {
                **os.environ,
                NAME: name,
                wire.JOIN: join.to_text(),
                wire.PLACE: str(place),
                wire.SLOTS: str(self.slots),
                "TMPDIR": str(self.folder / name / "tmp"),
                "HOME": str(self.folder / name / "home"),
                "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            }
            with (self.folder / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "workbench.cluster.hosts.agent"]
                one = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            self.processes.append(one)

    @property
    def agents(self) -> int:
        return len(self.names)

    def look(self) -> None:
        for name, one in zip(self.names, self.processes, strict=True):
            if one.poll() is not None:
                log = (self.folder / f"{name}.log").read_text()
                raise ClusterError(f"{name} ended: {log}", code="WB-CLUSTER-000")

    def ended(self, place: int) -> str:
        code = self.processes[place].poll()
        return "" if code is None else f"its agent has ended (code {code})"

    def stop(self) -> None:
        for one in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(END_S)
            one.kill()
            one.wait()


@contextlib.contextmanager
def hosted_cluster(
    folder: Path, engines: int = 2, names: Sequence[str] = ("left", "right"), **about: object
) -> Iterator[Cluster]:
    """Yield a cluster with engines on hosts with these names, equally many on each.

    Args:
        folder: For what the hosts have of their own: `<name>/tmp`, `<name>/home`.
        about: Further arguments of the cluster.
    """
    slots = max(1, engines // len(names))
    agents = LocalAgents(folder, names, slots)
    settings = LaunchSettings(launcher="ssh", on=tuple(HostSlots(name, slots) for name in names))
    with (
        mock.patch.object(places, "launcher_of", return_value=agents),
        mock.patch.object(places, "way_to_hosts", return_value="127.0.0.1"),
    ):
        cluster = Cluster(engines, launch=settings, **about)
    try:
        yield cluster
    finally:
        cluster.stop()
