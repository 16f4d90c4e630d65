"""What tests of clusters over two hosts share: cells, kernels that die, what is left of either."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from hosts.simulated_hosts import ADDRESSES, ROOT, SimulatedHosts
from notebook_shell import Notebook, notebook, soon

from workbench.errors import RunError
from workbench.execution.run import Run
from workbench.notebook.session import session
from workbench.session.cluster import Cluster

BOTH = "xh1:2,xh2:2"
WAIT_S = 60.0
MODEL = """
import torch
torch.manual_seed(3)
x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Tanh()
model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3)).double()
"""
FIT = (
    MODEL
    + """
wb.fit(model, (x, y), loss=torch.nn.CrossEntropyLoss(), steps=STEPS, batch_size=23,
       optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9), eval_data=(x, y), eval_every=20)
"""
)
"""100 samples in 23s: each epoch ends with an uneven batch."""
SHORT, ENDLESS = FIT.replace("STEPS", "20"), FIT.replace("STEPS", "10**7")
MET = "[ranks 0-3] sum 4"
SUM = "\nimport torch\nx = torch.ones(1); dist.all_reduce(x); print('sum', int(x))"


def met(book: Notebook) -> bool:
    """Whether four ranks can add something up."""
    return MET in book.ok("%%distributed" + SUM).text


@contextlib.contextmanager
def started(line: str) -> Iterator[Notebook]:
    """A notebook whose cluster was started by `%cluster start LINE`."""
    with notebook(fresh=True) as book:
        book.ok(f"%cluster start {line}")
        yield book


def cluster_of(book: Notebook) -> Cluster:
    """Return a notebook's cluster."""
    assert book is not None
    cluster = session.cluster
    assert cluster is not None
    return cluster


def hosts_of(cluster: Cluster) -> dict[int, str]:
    """Return where each engine is."""
    return {engine.id: engine.host for engine in cluster.engines}


def pids(cluster: Cluster) -> dict[int, int]:
    """Return each engine's pid: those of the simulated hosts are the same here."""
    return {engine.id: engine.pid for engine in cluster.engines}


def kill(cluster: Cluster, engine: int) -> None:
    """Kill an engine where it is."""
    os.kill(pids(cluster)[engine], signal.SIGKILL)


def settled(cluster: Cluster) -> None:
    """End what a test left, and replace what it killed."""
    busy = cluster.busy
    if busy is not None and not busy.is_over:
        busy.stop() if hasattr(busy, "stop") else busy.interrupt()
        assert soon(lambda: busy.is_over)
    if dead := [engine.id for engine in cluster.engines if engine.state == "dead"]:
        cluster.restart(dead)


def going(cluster: Cluster, steps: int = 10, **settings: Any) -> Run:
    """Return a run without end that has done some steps."""
    run = cluster.run(ENDLESS, **{"strategy": "mirrored", **settings})
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps, WAIT_S), run
    assert not run.is_over, run.error
    return run


def failed(run: Run, within_s: float) -> str:
    """Return what a run failed with, which must be within so many seconds from now."""
    began = time.monotonic()
    assert run.over.wait(WAIT_S), run
    took_s = time.monotonic() - began
    assert isinstance(run.error, RunError), run
    assert took_s < within_s, f"{took_s:.1f} s: {run.error}"
    return str(run.error)


def losses(run: Run) -> np.ndarray[Any, Any]:
    """Return each step's loss of all workers, and last that of all samples, which weights make.

    A step's is NaN where a worker died before its row was sent.
    """
    step, loss = run.history.together("step", "loss").values()
    _, first = np.unique(step, return_index=True)
    assert len(first) == 20, run
    return np.array([*loss[first], run.evals[-1]["loss"]])


# -- kernels that die ------------------------------------------------------------------------------


@contextlib.contextmanager
def kernel(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another kernel, from when it prints `up`; it is killed at the end, if it still lives."""
    head = "import os, sys, time\nimport workbench as wb\n"
    tail = "\nprint('up', flush=True)\ntime.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", head + source + tail]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def family(pid: int) -> list[psutil.Process]:
    """Return what a process has started and what that started, as of now."""
    return psutil.Process(pid).children(recursive=True)


def left(hosts: SimulatedHosts, *names: str) -> list[str]:
    """Return what is there of Workbench on hosts (all): processes and folders."""
    found = []
    for host in names or ADDRESSES:
        for process in hosts.processes(host):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "workbench.cluster" in command:
                    found.append(f"{host}: {process.pid} {command[:200]}")
        found += [f"{host}: {path}" for path in hosts.path(host, "/tmp").glob("workbench-*")]
    return found
