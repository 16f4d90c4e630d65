"""Many runs in one kernel: what grows? Strategies and world sizes mixed, with kills and interrupts.

After each run the kernel and everything it started are counted: memory, file descriptors, threads,
processes, shared memory, temporary files. Printed are the slopes per 100 runs behind the warm-up,
by least squares: over all, and over the earlier and the later half, which tells what levels off
from what leaks; and how the runs ended. With `--json` what is known is written after every run.

    python benchmarks/soak.py [--runs 200] [--seed 0] [--json docs/measured/soak.json]

A killed engine gives way to a fresh one, which is smaller; so how engines grow is seen without
kills:

    python benchmarks/soak.py --faults interrupt raise --json docs/measured/soak-no-kills.json
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
FAULTS = ("interrupt", "kill", "raise")
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


FIGURES = tuple(one.name for one in fields(Count))[1:]


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
    def draw(dice: random.Random, faults: Sequence[str] = FAULTS) -> Round:
        """Return any strategy that this machine can run; one of the faults, or as often none."""
        entry = dice.choice([e for e in catalog.strategies("torch") if e.anywhere])
        workers = 1 if entry.max_workers == 1 else dice.choice((2, 2, 3))
        all_of = ("none",) * len(faults) + tuple(faults)
        return Round(entry.name, 2 if entry.name == "hybrid" else workers, dice.choice(all_of))


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
    """Return what each figure grows by per 100 runs; NaN where there are fewer than two runs."""
    if len(counts) < 2:
        return dict.fromkeys(FIGURES, float("nan"))
    at = [one.run for one in counts]
    return {
        name: float(np.polyfit(at, [getattr(one, name) for one in counts], 1)[0] * 100)
        for name in FIGURES
    }


@dataclass
class Soaked:
    """What was seen so far: a count, an end and a time for each run."""

    counts: list[Count]
    ends: Counter[str]
    seconds: list[float]

    def found(self) -> dict[str, Any]:
        """Return it with the slopes behind the warm-up: over all, and over each half."""
        kept = self.counts[int(len(self.counts) * WARM_UP) :]
        half = len(kept) // 2
        return {
            "runs": len(self.counts),
            "behind": len(self.counts) - len(kept),
            "ends": dict(sorted(self.ends.items())),
            "median_s": statistics.median(self.seconds),
            "worst_s": max(self.seconds),
            "slopes": slopes(kept),
            "earlier": slopes(kept[:half]),
            "later": slopes(kept[half:]),
            "then": asdict(kept[0]),
            "now": asdict(kept[-1]),
        }

    def write(self, path: Path) -> None:
        """Write it all, figures rounded to what they are worth."""
        found = {**self.found(), "counts": [list(asdict(one).values()) for one in self.counts]}
        path.write_text(json.dumps(_rounded(found)) + "\n")


def soak(runs: int, seed: int, faults: Sequence[str] = FAULTS, path: Path | None = None) -> Soaked:
    """Do the runs, and write what is known to `path` after each."""
    dice, seen = random.Random(seed), Soaked([], Counter(), [])
    with wb.Cluster(2) as cluster:
        for number in range(runs):
            began = time.perf_counter()
            seen.ends[one(cluster, Round.draw(dice, faults), dice)] += 1
            seen.seconds.append(time.perf_counter() - began)
            seen.counts.append(count(number))
            if path is not None:
                seen.write(path)
    return seen


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def main() -> None:
    """Soak, and print what grew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # A place of our own, so that other clusters' files are not counted.
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        os.environ["TMPDIR"] = tempfile.tempdir = place
        found = soak(given.runs, given.seed, given.faults, given.json).found()
    print(f"{found['runs']} runs, median {found['median_s']:.2f} s, most {found['worst_s']:.1f} s")
    for end, times in found["ends"].items():
        print(f"  {times:4d}  {end}")
    print(f"{'':16}{'then':>10}{'now':>10}{'per 100 runs':>14}{'earlier':>10}{'later':>10}")
    for name in FIGURES:
        print(
            f"{name:16}{found['then'][name]:10.1f}{found['now'][name]:10.1f}"
            f"{found['slopes'][name]:+14.2f}{found['earlier'][name]:+10.2f}"
            f"{found['later'][name]:+10.2f}"
        )


if __name__ == "__main__":
    main()
