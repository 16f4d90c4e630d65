"""Job folders for tests, and their processes, started without torchrun's slow agent.

folder = job_folder(tmp_path, plan)
with started(folder, 2) as processes:
    ...
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workbench.cookbook.recipe import Recipe
from workbench.export.folder import Pins, write_job
from workbench.shared.plan import Plan, make_plan

PINS = Pins(threads=1, allreduce="backend")
WAIT_S = 120.0

CELL = """
import torch, torch.nn as nn
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
x, y = wb.data.digits("train", arrays=True)
wb.fit(model, (x[:512].astype("float64"), y[:512]), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), batch_size=64, steps=12)
"""
SLOW = """
import time, torch, torch.nn as nn
def slowly(model, batch):
    time.sleep(0.02)
    return nn.functional.cross_entropy(model(batch[0].flatten(1)), batch[1])
wb.fit(nn.Linear(64, 10), wb.data.digits("train"), step_fn=slowly,
       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=64, steps=2000)
"""


def job_folder(where: Path, cell: str, strategy: str, workers: int, **asked: object) -> Path:
    """Write a job below `where`."""
    plan = make_plan(Recipe(cell), strategy, workers=workers, **asked)
    return write_job(plan, where / "job", pins=PINS)


def processes_of(plan: Plan) -> int:
    """How many processes a plan's job has."""
    return plan.engines + len(plan.helpers)


def environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """The environment that torchrun's agent gives a rank, except that rank 0 hosts the store."""
    ours = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{k: str(v) for k, v in ours.items()}, "OMP_NUM_THREADS": "1", **more}


@contextlib.contextmanager
def started(
    folder: Path,
    world_size: int,
    command: tuple[str, ...] = ("train.py",),
    each: Sequence[Mapping[str, str]] = (),
    **more: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a job's processes; at the end, remaining processes are ended.

    Args:
        each: Additional environment variables of each rank.
        more: Variables of all ranks; empty ones are removed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    try:
        for rank in range(world_size):
            told = environment(rank, world_size, port, **more)
            told |= each[rank] if each else {}
            log = (folder / f"out-{rank}.txt").open("w")
            with log:
                found.append(
                    subprocess.Popen(
                        [sys.executable, *command], cwd=folder, stdout=log, stderr=log, text=True,
                        env={name: text for name, text in told.items() if text},
                    )
                )  # fmt: skip
        yield found
    finally:
        for process in found:
            if process.poll() is None:
                process.kill()
            process.wait()


def done(processes: list[subprocess.Popen[str]]) -> list[int]:
    """Return the processes' exit codes, once all have ended."""
    return [process.wait(WAIT_S) for process in processes]


def run_of(folder: Path, number: int = 1) -> Path:
    """Return a job's run folder."""
    return folder / "runs" / str(number)
