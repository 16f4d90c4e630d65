"""Compares pipelines' bubbles with the schedule's ideal, and the automatic split with all others.

    python benchmarks/bench_pipeline.py [--only asleep,computing,split] [--steps 12] [--repeats 5]

Stages sleep instead of computing, because two cores cannot compute four stages at once. Each stage
sleeps once in forward and twice in backward. In another case two stages really compute: three equal
matrix products forward and six backward for each microbatch, in both stages, because gpipe needs a
balance in each direction. (A scale comes first; otherwise the first layer would compute no gradient
of its input.) Repeats of all schedules alternate. Shares are medians over steps and repeats. The
ideal assumes equal stages and no communication. `busy` is the working time of each worker in a
step; it shows whether the stages are equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import dataclass

import numpy as np

import workbench as wb
from workbench.catalog.schedules import ideal_bubble

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

class Scale(nn.Module):  # so that the first matrix product needs its input's gradient, as others do
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return x * self.weight

model = nn.Sequential(Scale(), *(nn.Linear(1024, 1024) for _ in range(6)))
wb.fit(model, (x, y), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 1e-4),
       batch_size=1024)
"""

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
UNEVEN_S = (0.004, 0.001, 0.002, 0.006, 0.001, 0.003, 0.002)


@dataclass(frozen=True)
class Seen:
    """Medians over the steps of one or more runs.

    Attributes:
        busy_ms: The working time of each worker in a step.
    """

    bubble: float
    step_ms: float
    busy_ms: tuple[float, ...]


def measure(cluster: wb.Cluster, source: str, workers: int, steps: int, options: dict) -> Seen:
    run = cluster.run(
        source, strategy="model_split", workers=workers, steps=steps, options=options
    ).wait()
    history = run.history
    late = history["step"] >= 2
    step_s, bubble_s = (history[c][late].reshape(-1, workers) for c in ("step_s", "bubble_s"))
    busy_ms = np.median(step_s - bubble_s, axis=0) * 1e3
    return Seen(
        bubble=float(np.median(bubble_s.mean(axis=1) / step_s.mean(axis=1))),
        step_ms=float(1e3 * np.median(step_s.mean(axis=1))),
        busy_ms=tuple(busy_ms.tolist()),
    )


def middle(seen: list[Seen]) -> Seen:
    """Return the medians of repeats."""
    return Seen(
        float(np.median([one.bubble for one in seen])),
        float(np.median([one.step_ms for one in seen])),
        tuple(np.median([one.busy_ms for one in seen], axis=0).tolist()),
    )


def asleep(cluster: wb.Cluster, steps: int, sleep_s: float) -> None:
    for p, name in itertools.product((3, 4), SCHEDULES):
        m = 1 if name == "naive" else 8
        per_worker = 2 if name == "interleaved" else 1
        source = SLEEPING.format(sleeps_s=[sleep_s / per_worker] * (p * per_worker))
        options = {"schedule": name, "microbatches": m}
        ideal = ideal_bubble(name, p, m, per_worker)
        row("asleep", name, p, m, ideal, measure(cluster, source, p, steps, options))


def computing(cluster: wb.Cluster, steps: int, repeats: int) -> None:
    names = ("naive", "gpipe", "1f1b")
    microbatches = {name: 1 if name == "naive" else 8 for name in names}
    runs: dict[str, list[Seen]] = {name: [] for name in names}
    for name in names * repeats:
        options = {"schedule": name, "microbatches": microbatches[name], "split_at": "4"}
        runs[name].append(measure(cluster, COMPUTING, 2, steps, options))
    for name, seen in runs.items():
        m = microbatches[name]
        row("computing", name, 2, m, ideal_bubble(name, 2, m, 1), middle(seen))
        shares = ", ".join(f"{one.bubble:.3f}" for one in seen)
        print(f"{'':<12} repeats: {shares}")


def row(kind: str, name: str, p: int, m: int, ideal: float, seen: Seen) -> None:
    busy = " ".join(f"{busy_ms:.1f}" for busy_ms in seen.busy_ms)
    print(
        f"{name:<12} {p:>2} {m:>2}  {ideal:>6.3f}  {seen.bubble:>8.3f}  "
        f"{seen.bubble - ideal:>+6.3f}  {kind}, step {seen.step_ms:.1f} ms, busy {busy} ms"
    )
    result = {
        "what": f"bubble {name} p={p} m={m} {kind}",
        "ideal": ideal,
        "measured": seen.bubble,
        "busy_ms": seen.busy_ms,
    }
    print(json.dumps(result))


def splits(cluster: wb.Cluster, steps: int) -> None:
    """Compare the automatic split with every other one, by the steps they take."""
    source = SLEEPING.format(sleeps_s=UNEVEN_S)
    times = {}
    for cuts in itertools.combinations(range(1, len(UNEVEN_S)), 2):
        options = {"split_at": ",".join(map(str, cuts)), "microbatches": 6}
        times[cuts] = measure(cluster, source, 3, steps, options).step_ms
    own = measure(cluster, source, 3, steps, {"microbatches": 6}).step_ms
    best, worst = min(times, key=times.__getitem__), max(times.values())
    print(f"best split at {best}: {times[best]:.1f} ms/step; worst {worst:.1f} ms/step")
    print(f"automatic: {own:.1f} ms/step, {own / times[best] - 1:+.1%} against the best")
    every_ms = {",".join(map(str, cuts)): ms for cuts, ms in times.items()}
    found = {"ms": own, "best_ms": times[best], "every_ms": every_ms}
    print(json.dumps({"what": "automatic split", **found}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="asleep,computing,split")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sleep-ms", type=float, default=12.0)
    given = parser.parse_args()
    parts = given.only.split(",")
    with wb.Cluster(4, devices="cpu") as cluster:
        if "asleep" in parts or "computing" in parts:
            print("schedule      p  m   ideal  measured  excess")
        if "asleep" in parts:
            asleep(cluster, given.steps, given.sleep_ms / 1e3)
        if "computing" in parts:
            computing(cluster, given.steps, given.repeats)
        if "split" in parts:
            splits(cluster, given.steps)


if __name__ == "__main__":
    main()
