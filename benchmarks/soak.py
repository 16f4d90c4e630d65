"""Many runs in one kernel: what grows? Strategies, world sizes and faults vary.

After each run the script counts the resources of the kernel and of all processes that it started:
memory, file descriptors, threads, processes, shared memory, temporary files. It prints the slopes
per 100 runs after the warm-up, by least squares: over all runs, and over the earlier and the later
half. The halves show whether a growth ends or is a leak. It also prints how the runs ended. With
`--json` the results are written after every run.

    python benchmarks/soak.py [--runs 200] [--seed 0] [--json docs/measured/soak.json]

A fresh engine, which is smaller, replaces a killed one. So measure the growth of engines without
kills:

    python benchmarks/soak.py --faults interrupt raise --json docs/measured/soak-no-kills.json

Restarts are measured separately. The script alternates among these kinds: single engines, all
engines, a killed controller or warm parent with the restart that follows, and a cluster that is
stopped and started again. A small run follows each restart. The script counts the kernel's threads,
open files by kind, and memory. The last line is JSON: the figures.

    python benchmarks/soak.py --restarts 150 --json docs/measured/restarts.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
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
RESTARTS = ("engine", "all", "engine", "controller", "warm parent", "stop and start")
"""What is restarted, in turn."""
KINDS = {"socket:": "sockets", "pipe:": "pipes", "anon_inode:": "events", "/": "paths"}


@dataclass
class Count:
    """The resources after a run."""

    run: int
    kernel_mb: float
    engines_mb: float
    files: int
    threads: int
    processes: int
    engine_files: int
    shared_memory: int
    temporary: int


@dataclass
class Held:
    """The kernel's resources after a restart and the run that followed.

    Attributes:
        files: Open files; `sockets`, `pipes`, `events` (of polls) and `paths` are the kinds.
        seconds: Time of the restart and the run.
        end: How the run ended.
    """

    run: int
    kind: str
    threads: int
    files: int
    sockets: int
    pipes: int
    events: int
    paths: int
    rss_mb: float
    pss_mb: float
    uss_mb: float
    processes: int
    seconds: float
    end: str


FIGURES = tuple(one.name for one in fields(Count))[1:]
HELD = ("threads", "files", "sockets", "pipes", "events", "paths", "rss_mb", "pss_mb", "uss_mb",
        "processes")  # fmt: skip


def count(run: int) -> Count:
    """Count the resources of this kernel."""
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
    """One run, and its fault."""

    strategy: str
    workers: int
    fault: str

    @staticmethod
    def draw(dice: random.Random, faults: Sequence[str] = FAULTS) -> Round:
        """Return a random strategy that this machine can run, with a fault or without one."""
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


def slopes(counts: Sequence[Count | Held], figures: Sequence[str] = FIGURES) -> dict[str, float]:
    """Return the growth of each figure per 100 runs; NaN where there are fewer than two runs."""
    if len(counts) < 2:
        return dict.fromkeys(figures, float("nan"))
    at = [one.run for one in counts]
    return {
        name: float(np.polyfit(at, [getattr(one, name) for one in counts], 1)[0] * 100)
        for name in figures
    }


@dataclass
class Soaked:
    """The results so far: a count, an end and a time for each run."""

    counts: list[Count]
    ends: Counter[str]
    seconds: list[float]

    def found(self) -> dict[str, Any]:
        """Return the results with the slopes after the warm-up: of all runs and of each half."""
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
        """Write all results, with figures rounded to useful digits."""
        found = {**self.found(), "counts": [list(asdict(one).values()) for one in self.counts]}
        path.write_text(json.dumps(_rounded(found)) + "\n")


def soak(runs: int, seed: int, faults: Sequence[str] = FAULTS, path: Path | None = None) -> Soaked:
    """Do the runs, and write the results to `path` after each run."""
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


def open_files() -> Counter[str]:
    """Return how many files of each kind this process has open."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            target = os.readlink(f"/proc/self/fd/{number}")
            kind = next((name for start, name in KINDS.items() if target.startswith(start)), "")
            found[kind] += 1
    return found


def thread_names() -> dict[str, int]:
    """Return how many threads this process has by name, those of libraries too."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found[(task / "comm").read_text().strip()] += 1
    return dict(sorted(found.items()))


def held(number: int, kind: str, seconds: float, end: str) -> Held:
    """Count the resources of this kernel, after a garbage collection."""
    gc.collect()
    me, files = psutil.Process(), open_files()
    memory = me.memory_full_info()
    return Held(
        number, kind, me.num_threads(), files.total(), files["sockets"], files["pipes"],
        files["events"], files["paths"], memory.rss / 1e6, memory.pss / 1e6, memory.uss / 1e6,
        len(me.children(recursive=True)), seconds, end,
    )  # fmt: skip


def restarted(cluster: wb.Cluster, kind: str, number: int) -> wb.Cluster:
    """Restart a part of the cluster, or all of it; return the cluster to continue with."""
    if kind == "stop and start":
        cluster.stop()
        return wb.Cluster(2)
    ground = cluster.engine_set._ground
    killed = {"controller": ground.hub.controller, "warm parent": ground.warm}.get(kind)
    if killed is not None:
        os.kill(killed.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while cluster.ids and time.monotonic() < end:
            time.sleep(0.01)
    cluster.restart([cluster.ids[number % len(cluster.ids)]] if kind == "engine" else None)
    return cluster


async def restarts(count: int, path: Path | None = None) -> dict[str, Any]:
    """Restart so many times, in a running event loop as a kernel has one; return what was held.

    What is known is written to `path` after each.
    """
    seen: list[Held] = []
    names: dict[str, dict[str, int]] = {}
    cluster = wb.Cluster(2)
    try:
        for number in range(count):
            kind, began = RESTARTS[number % len(RESTARTS)], time.perf_counter()
            cluster = restarted(cluster, kind, number)
            end = one(cluster, Round("mirrored", 2, "none"), random.Random(number))
            seen.append(held(number, kind, time.perf_counter() - began, end))
            kept = seen[int(len(seen) * WARM_UP) :]
            half = len(kept) // 2
            names.setdefault("first", thread_names())
            names["last"] = thread_names()
            found = {
                "what": "what a kernel holds after restarts", "restarts": len(seen),
                "behind": len(seen) - len(kept),
                "kinds": dict(Counter(each.kind for each in seen)),
                "ends": dict(Counter(each.end for each in seen)),
                "median_s": statistics.median(each.seconds for each in seen),
                "worst_s": max(each.seconds for each in seen),
                "slopes": slopes(kept, HELD), "earlier": slopes(kept[:half], HELD),
                "later": slopes(kept[half:], HELD),
                **{f"{name}_then": getattr(kept[0], name) for name in HELD},
                **{f"{name}_now": getattr(kept[-1], name) for name in HELD},
            }  # fmt: skip
            print(*(f"{value:.4g}" if isinstance(value, float) else value
                    for value in asdict(seen[-1]).values()), flush=True)  # fmt: skip
            if path is not None:
                each = [list(asdict(this).values()) for this in seen]
                path.write_text(
                    json.dumps(_rounded({**found, "thread_names": names, "each": each})) + "\n"
                )
    finally:
        cluster.stop()
    return found


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
    parser.add_argument("--restarts", type=int, default=0, help="so many restarts instead")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # A place of our own, so that other clusters' files are not counted.
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        os.environ["TMPDIR"] = tempfile.tempdir = place
        if given.restarts:
            print(json.dumps(_rounded(asyncio.run(restarts(given.restarts, given.json)))))
            return
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
