"""What failures cost a run that heals: one per minute for 20 minutes, by SIGKILL or SIGSTOP.

Workers sleep for a fixed time per sample instead of computing, so two cores are enough. Undisturbed
runs with all workers, and with one worker fewer, show how long steps take in both cases. With one
worker fewer, steps are longer. In addition, each failure costs time: until it is noticed (at once
for a death; after the time of some steps for a suspended process), until the others are connected
again (`healed`), until a fresh engine has joined (`joined`), and the rest. The rest is a repeated
step, and the processor time that the start of the fresh engine takes from the others.

    python benchmarks/bench_healing.py [--minutes 20] [--every-s 60] [--workers 3] [--seed 0]

The reference runs run before and after, and their means count, because the speed of a shared
machine changes. `drift_share` says how much longer than in the references those steps were that no
failure affects: the steps of the 15 s before each failure.

The last line is JSON: shares of the wall time, seconds of each part, and the difference of the
weights from those of an undisturbed run of as many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from typing import Any

import numpy as np

import workbench as wb
from workbench.execution.run import Run
from workbench.session.cluster import Cluster

SAMPLES = 24
CELL = """
import time, torch
from torch import nn
class Sleeping(nn.Linear):
    def forward(self, x):
        time.sleep(SAMPLE_S * len(x))
        return super().forward(x)
torch.manual_seed(0)
model = nn.Sequential(Sleeping(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
drawn = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 8, generator=drawn).double(), torch.randint(0, 4, (96,), generator=drawn)
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=SAMPLES, steps=STEPS,
       optimizer=lambda p: torch.optim.SGD(p, 0.01, momentum=0.9))
"""
KINDS = (signal.SIGKILL, signal.SIGSTOP)
LIMIT_S = 120.0
LOOK_S = 0.01
CALM_S = 15.0


def cell(steps: int, sample_ms: float) -> str:
    """Return the source of the cell that trains."""
    text = CELL.replace("SAMPLES", str(SAMPLES)).replace("STEPS", str(steps))
    return text.replace("SAMPLE_S", str(sample_ms / 1e3))


def ends_s(run: Run) -> np.ndarray[Any, Any]:
    """Return when each step had ended on all workers; NaN if no row says it."""
    step, start, took = (run.history[name] for name in ("step", "start_s", "step_s"))
    ends = np.full(int(step.max()) + 1, -np.inf)
    np.maximum.at(ends, step, start + took)
    return np.where(np.isfinite(ends), ends, np.nan)


def step_s(cluster: Cluster, workers: int, steps: int, sample_ms: float) -> float:
    """Return how long a step takes with this number of workers and no failure."""
    run = cluster.run(cell(steps, sample_ms), strategy="mirrored", workers=workers)
    run.wait(LIMIT_S + steps)
    return float(np.nanmean(np.diff(ends_s(run))[5:]))


def told(run: Run, kind: str) -> list[dict[str, Any]]:
    """Return the events of a run of one kind."""
    return [one for one in run.events if one["event"] == kind]


def fail(cluster: Cluster, run: Run, rank: int, sig: signal.Signals) -> dict[str, Any]:
    """Have a worker fail; return how long each part of the recovery lasted."""
    known = {engine.id: engine.pid for engine in cluster.engines}
    healed, joined = len(told(run, "healed")), len(told(run, "joined"))
    began = time.perf_counter()
    os.kill(known[rank], sig)

    def until(kind: str, count: int) -> float:
        while len(told(run, kind)) <= count:
            if run.is_over or time.perf_counter() - began > LIMIT_S:
                raise SystemExit(f"no {kind} after {sig.name}: {run!r} {run.history.story.notes}")
            time.sleep(LOOK_S)
        return time.perf_counter() - began

    at_s, back_s = until("healed", healed), until("joined", joined)
    met_s = float(told(run, "healed")[-1]["seconds"])
    return {
        "kind": sig.name,
        "rank": rank,
        "noticed_s": max(0.0, at_s - met_s),
        "healed_s": met_s,
        "joined_s": float(told(run, "joined")[-1]["seconds"]),
        "away_s": back_s,
    }


def soak(cluster: Cluster, args: argparse.Namespace) -> dict[str, Any]:
    """Let workers fail for the given time; return the figures."""
    draw = random.Random(args.seed)
    steps = max(20, int(args.reference_s / (SAMPLES * args.sample_ms / 1e3 / args.workers)))

    def references() -> tuple[float, float]:
        whole_s = step_s(cluster, args.workers, steps, args.sample_ms)
        return whole_s, step_s(cluster, args.workers - 1, steps, args.sample_ms)

    before, load = references(), os.getloadavg()[0]
    run = cluster.run(cell(10**7, args.sample_ms), strategy="mirrored", on_failure="heal")
    while run.history.totals.steps < 20:
        time.sleep(LOOK_S)
    began, failures, calm = time.perf_counter(), [], list[int]()
    while time.perf_counter() - began < 60 * args.minutes:
        due_s = began + args.every_s * (len(failures) + 0.5)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        sig = KINDS[len(failures) % len(KINDS)]
        calm.append(run.history.totals.steps - 2)
        failures.append(fail(cluster, run, draw.randrange(args.workers), sig))
        print(json.dumps(failures[-1]).strip("{}"), flush=True)
        time.sleep(max(0.0, due_s + args.every_s / 2 - time.perf_counter()))
    run.stop()
    run.wait(LIMIT_S)
    run.history.finish()
    after = references()
    whole_s, fewer_s = ((one + other) / 2 for one, other in zip(before, after, strict=True))
    ends = ends_s(run)
    there = np.full(len(ends), args.workers)
    for one in run.events:
        there[one["step"] :] = one["workers"]
    wall_s = float(np.nanmax(ends) - ends[20])
    done = there[21:]
    fewer = int((done < args.workers).sum())
    ideal_s = (len(done) - fewer) * whole_s + fewer * fewer_s
    parts = {name: sum(one[name] for one in failures) for name in failures[0] if name[-2:] == "_s"}
    over_s, share_s = wall_s - ideal_s, fewer * (fewer_s - whole_s)
    known = parts["noticed_s"] + parts["healed_s"] + parts["joined_s"]
    few = int(CALM_S / whole_s)
    quiet_s = [float(np.nanmean(np.diff(ends[max(20, last - few) : last]))) for last in calm]
    plain = cluster.run(cell(len(ends), 0.0), strategy="mirrored").wait(60 * args.minutes + LIMIT_S)
    mine, others = run.weights(), plain.weights()
    rows = list(zip(run.history["rank"].tolist(), run.history["step"].tolist(), strict=True))
    noticed = {
        f"noticed_{sig.name.lower()}_s": statistics.median(
            [one["noticed_s"] for one in failures if one["kind"] == sig.name] or [0.0]
        )
        for sig in KINDS
    }
    return {
        "what": f"{len(failures)} failures, {args.workers} workers, one in {args.every_s:g} s",
        "overhead_share": over_s / wall_s,
        "known_share": known / wall_s,
        "lost_workers_share": share_s / wall_s,
        "drift_share": statistics.fmean(quiet_s) / whole_s - 1,
        "wall_s": wall_s,
        "overhead_s": over_s,
        **parts,
        **noticed,
        "rest_s": over_s - known,
        "step_ms": [1e3 * before[0], 1e3 * after[0]],
        "step_one_fewer_ms": [1e3 * before[1], 1e3 * after[1]],
        "step_quiet_ms": [1e3 * one for one in quiet_s],
        "steps": len(ends),
        "rows_twice": len(rows) - len(set(rows)),
        "difference": max(float(np.abs(mine[one] - others[one]).max()) for one in others),
        "load_before": load,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every-s", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--sample-ms", type=float, default=5.0)
    parser.add_argument("--reference-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.every_s, args.reference_s = 0.1, 4.0, 1.0
    with wb.Cluster(args.workers) as cluster:
        print(json.dumps(soak(cluster, args)))


if __name__ == "__main__":
    main()
