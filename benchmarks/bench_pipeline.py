"""Pipelines: the bubble against its schedule's ideal, and the automatic split against all others.

    python benchmarks/bench_pipeline.py [--steps 12] [--sleep-ms 12]

Stages that sleep stand for stages that compute: two cores cannot compute four stages at once. Two
stages compute for real. Each stage sleeps once in forward and twice in backward. Shares are medians
over steps; an ideal counts equal stages and no communication.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os

import numpy as np

import workbench as wb
from workbench.pipelines import ideal_bubble

os.environ["WORKBENCH_PREWARM"] = "off"

SLEEPING = """
import time, torch
from torch import nn

class Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sleep_s):
        ctx.sleep_s = sleep_s
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.sleep_s)
        return gradient, None

class Sleepy(nn.Linear):
    def __init__(self, sleep_s):
        super().__init__(8, 8)
        self.sleep_s = sleep_s

    def forward(self, x):
        time.sleep(self.sleep_s)
        # One nap on the way of the input's gradient, one on the way of the weight's.
        weight = Nap.apply(self.weight, self.sleep_s)
        return Nap.apply(nn.functional.linear(x, weight, self.bias), self.sleep_s)

x, y = torch.randn(256, 8), torch.randn(256, 8)
wb.fit(nn.Sequential(*map(Sleepy, {sleeps_s})), (x, y), loss=nn.MSELoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=64)
"""

COMPUTING = """
import torch
from torch import nn
x, y = torch.randn(2048, 1024), torch.randn(2048, 1024)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
wb.fit(model, (x, y), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 1e-4),
       batch_size=1024)
"""

UNEVEN_S = (0.004, 0.001, 0.002, 0.006, 0.001, 0.003, 0.002)


def measure(cluster: wb.Cluster, source: str, workers: int, steps: int, options: dict) -> dict:
    run = cluster.run(
        source, strategy="model_split", workers=workers, steps=steps, options=options
    ).wait()
    history = run.history
    late = history["step"] >= 2
    shape = (-1, workers)
    step_s = history["step_s"][late].reshape(shape).mean(axis=1)
    bubble_s = history["bubble_s"][late].reshape(shape).mean(axis=1)
    return {
        "bubble": float(np.median(bubble_s / step_s)),
        "step_ms": float(1e3 * np.median(step_s)),
    }


def bubbles(cluster: wb.Cluster, steps: int, sleep_s: float) -> None:
    print("schedule      p  m   ideal  measured  excess")
    cases = [
        (name, p, 1 if name == "naive" else 8)
        for p in (3, 4)
        for name in ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
    ]
    for name, p, m in cases:
        per_worker = 2 if name == "interleaved" else 1
        source = SLEEPING.format(sleeps_s=[sleep_s / per_worker] * (p * per_worker))
        options = {"schedule": name, "microbatches": m}
        ideal = ideal_bubble(name, p, m, per_worker)
        row("asleep", name, p, m, ideal, measure(cluster, source, p, steps, options)["bubble"])
    for name in ("naive", "gpipe", "1f1b"):
        m = 1 if name == "naive" else 8
        seen = measure(cluster, COMPUTING, 2, steps, {"schedule": name, "microbatches": m})
        row("computing", name, 2, m, ideal_bubble(name, 2, m, 1), seen["bubble"])


def row(kind: str, name: str, p: int, m: int, ideal: float, seen: float) -> None:
    print(f"{name:<12} {p:>2} {m:>2}  {ideal:>6.3f}  {seen:>8.3f}  {seen - ideal:>+6.3f}  {kind}")
    result = {"what": f"bubble {name} p={p} m={m} {kind}", "ideal": ideal, "measured": seen}
    print(json.dumps(result))


def splits(cluster: wb.Cluster, steps: int) -> None:
    """Compare the automatic split with every other one, by the steps they take."""
    source = SLEEPING.format(sleeps_s=UNEVEN_S)
    times = {}
    for cuts in itertools.combinations(range(1, len(UNEVEN_S)), 2):
        options = {"split_at": ",".join(map(str, cuts)), "microbatches": 6}
        times[cuts] = measure(cluster, source, 3, steps, options)["step_ms"]
    own = measure(cluster, source, 3, steps, {"microbatches": 6})["step_ms"]
    best, worst = min(times, key=times.__getitem__), max(times.values())
    print(f"best split at {best}: {times[best]:.1f} ms/step; worst {worst:.1f} ms/step")
    print(f"automatic: {own:.1f} ms/step, {own / times[best] - 1:+.1%} against the best")
    print(json.dumps({"what": "automatic split", "ms": own, "best_ms": times[best]}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sleep-ms", type=float, default=12.0)
    given = parser.parse_args()
    with wb.Cluster(4, devices="cpu") as cluster:
        bubbles(cluster, given.steps, given.sleep_ms / 1e3)
        splits(cluster, given.steps)


if __name__ == "__main__":
    main()
