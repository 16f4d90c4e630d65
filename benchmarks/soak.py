"""Many runs in one kernel: what grows? Strategies and world sizes mixed, with kills and interrupts.

After each run the kernel and everything it started are counted: memory, file descriptors, threads,
processes, shared memory, temporary files. Printed are the slopes per 100 runs behind the warm-up,
by least squares, and how the runs ended.

    python benchmarks/soak.py [--runs 200] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

import workbench as wb
from workbench import catalog
from workbench.errors import WorkbenchError

CELL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
wb.fit(model, wb.data.synthetic(256, shape=(16,), classes=4), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=16, steps=STEPS)
"""
FAULTS = ("none", "none", "none", "interrupt", "kill", "raise")
WARM_UP = 0.25  # of the runs: pools, caches and the first of everything


@dataclass
class Count:
    """What there is after a run."""

    run: int
    kernel_mb: float
    engines_mb: float
    files: int
    threads: int
    processes: int
    engine_files: int
    shared_memory: int
    temporary: int


def count(run: int) -> Count:
    """Count what belongs to this kernel."""
    me = psutil.Process()
    children = me.children(recursive=True)
    engines_mb, engine_files = 0.0, 0
    for child in children:
        with contextlib.suppress(psutil.Error):  # it has just ended
            engines_mb += child.memory_full_info().uss / 1e6
            engine_files += child.num_fds()
    shm = Path("/dev/shm")
    return Count(
        run,
        me.memory_full_info().uss / 1e6,
        engines_mb,
        me.num_fds(),
        me.num_threads(),
        len(children),
        engine_files,
        len(list(shm.iterdir())) if shm.exists() else 0,
        len(list(Path(tempfile.gettempdir()).glob("workbench-*"))),
    )


@dataclass(frozen=True)
class Round:
    """One run, and what befalls it."""

    strategy: str
    workers: int
    fault: str

    @staticmethod
    def draw(dice: random.Random) -> Round:
        """Return any strategy that this machine can run, any fault."""
        entry = dice.choice([e for e in catalog.strategies("torch") if e.anywhere])
        workers = 1 if entry.max_workers == 1 else dice.choice((2, 2, 3))
        return Round(entry.name, 2 if entry.name == "hybrid" else workers, dice.choice(FAULTS))


def one(cluster: wb.Cluster, what: Round, dice: random.Random) -> str:
    """Do one run, maybe with a fault; return how it ended."""
    lasting = what.fault in ("interrupt", "kill")
    source = CELL.replace("STEPS", "100_000" if lasting else "5")
    if what.fault == "raise":
        source += "\nraise ValueError('provoked')\n"
    run = cluster.run(source, strategy=what.strategy, workers=what.workers)
    if lasting:
        end = time.monotonic() + 30
        while run.state == "starting" and not run.is_over and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        if what.fault == "interrupt":
            run.stop()
        else:
            engine = dice.choice(run.members)
            os.kill({one.id: one.pid for one in cluster.engines}[engine], signal.SIGKILL)
            with contextlib.suppress(TimeoutError, WorkbenchError):
                run.wait(3)
            run.stop()  # asynchronous workers do without one that died, and go on
    try:
        run.wait(60)
    except TimeoutError:
        return f"{what.fault}: HUNG ({what.strategy})"
    except WorkbenchError:
        pass
    if dead := [one.id for one in cluster.engines if one.state == "dead"]:
        cluster.restart(dead)
    return f"{what.fault}: {run.state}"


def slopes(counts: list[Count]) -> dict[str, float]:
    """Return what each figure grows by per 100 runs, behind the warm-up."""
    kept = counts[int(len(counts) * WARM_UP) :]
    at = [one.run for one in kept]
    return {
        name: float(np.polyfit(at, [getattr(one, name) for one in kept], 1)[0] * 100)
        for name in list(asdict(kept[0]))[1:]
    }


def soak(runs: int, seed: int) -> tuple[list[Count], Counter[str], list[float]]:
    """Do the runs; return the counts, how runs ended, and how long each took."""
    dice = random.Random(seed)
    counts, ends, seconds = [], Counter[str](), []
    with wb.Cluster(2) as cluster:
        for number in range(runs):
            began = time.perf_counter()
            ends[one(cluster, Round.draw(dice), dice)] += 1
            seconds.append(time.perf_counter() - began)
            counts.append(count(number))
    return counts, ends, seconds


def main() -> None:
    """Soak, and print what grew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    counts, ends, seconds = soak(given.runs, given.seed)
    grown = slopes(counts)
    first, last = counts[int(len(counts) * WARM_UP)], counts[-1]
    print(
        f"{given.runs} runs, median {statistics.median(seconds):.2f} s, most {max(seconds):.1f} s"
    )
    for end, times in sorted(ends.items()):
        print(f"  {times:4d}  {end}")
    print(f"{'':16}{'then':>10}{'now':>10}{'per 100 runs':>14}")
    for name, slope in grown.items():
        print(f"{name:16}{getattr(first, name):10.1f}{getattr(last, name):10.1f}{slope:+14.2f}")
    if given.json:
        found = {"runs": given.runs, "ends": dict(ends), "slopes": grown}
        given.json.write_text(json.dumps({**found, "counts": [asdict(c) for c in counts]}))


if __name__ == "__main__":
    main()
