"""Compares every strategy with one device: parameters after 20 steps, a delay, speed, bytes.

    python benchmarks/bench_parity.py [--workers 1,2,3,4] [--strategies sharded,hybrid]

It uses float64, SGD with momentum and AdamW, an MLP and a CNN. The catalog says which strategies
are compared, and with which options they are exact.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

import workbench as wb
from workbench import catalog

os.environ["WORKBENCH_PREWARM"] = "off"

PARITY = """
import torch
from torch import nn
torch.manual_seed(3)
x, y = torch.randn(100, 1, 8, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
mlp = [nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)]
cnn = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)]
model = nn.Sequential(*{"mlp": mlp, "cnn": cnn}["NETWORK"]).double()
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=20,
       optimizer=lambda p: {"SGD": lambda: torch.optim.SGD(p, 0.1, momentum=0.9),
                            "AdamW": lambda: torch.optim.AdamW(p, 1e-2)}["OPTIMIZER"]())
"""

SPEED = """
import torch, time
from torch import nn
class Work(nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)
torch.manual_seed(0)
model = nn.Sequential(Work(64, 256), nn.Tanh(), Work(256, 256), nn.Tanh(), Work(256, 256),
                      nn.Tanh(), Work(256, 10))
x, y = torch.randn(960, 64), torch.randint(0, 10, (960,))
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=48, steps=STEPS,
       optimizer=lambda p: torch.optim.SGD(p, 0.01))
"""


def exact_options(entry: catalog.Strategy) -> dict[str, Any] | None:
    """Return the options with which a strategy equals one device; None if there are none."""
    if entry.exact_with is None:
        return None
    return {**dict(entry.exact_with), **({entry.sync_option: True} if entry.sync_option else {})}


def parity(cluster: Any, entry: catalog.Strategy, counts: list[int]) -> dict[str, float]:
    """Return the greatest difference of any parameter to one device, by number of workers."""
    worst: dict[str, float] = {}
    for network in ("mlp", "cnn"):
        for optimizer in ("SGD", "AdamW"):
            if entry.linear_only and optimizer != "SGD":
                continue
            recipe = PARITY.replace("NETWORK", network).replace("OPTIMIZER", optimizer)
            truth = cluster.run(recipe, strategy="one_device").wait().weights()
            for workers in counts:
                options = exact_options(entry)
                run = cluster.run(recipe, strategy=entry.name, workers=workers, options=options)
                weights = run.wait().weights()
                off = max(float(abs(weights[name] - truth[name]).max()) for name in truth)
                worst[str(workers)] = max(worst.get(str(workers), 0.0), off)
    return worst


def reading(cluster: Any, entry: catalog.Strategy, workers: int, steps: int) -> dict[str, Any]:
    """Return speed and bytes of plain steps, and the measured wait for 50 ms in worker 1."""
    recipe = SPEED.replace("STEPS", str(steps))
    plain = cluster.run(recipe, strategy=entry.name, workers=workers, options=exact_options(entry))
    history = plain.wait().history
    late = history["step"] >= 5
    run = cluster.run(
        recipe, strategy=entry.name, workers=workers, options=exact_options(entry),
        inject=["slow=1:50ms"],
    ).wait()  # fmt: skip
    slow = run.history
    others = (slow["step"] >= 5) & (slow["rank"] != 1)
    own = (slow["step"] >= 5) & (slow["rank"] == 1)
    return {
        "steps_per_s": float(1 / np.median(history["step_s"][late])),
        "sent_kb": float(np.nanmean(history["sent_bytes"][late]) / 1e3),
        "wait_read_ms": 1e3 * float(np.nanmedian(slow["sync_wait_s"][others])),
        "own_wait_ms": 1e3 * float(np.nanmedian(slow["sync_wait_s"][own])),
        "named": float(np.mean(slow["blamed_rank"][others] == 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--strategies", default="")
    given = parser.parse_args()
    counts = [int(count) for count in given.workers.split(",")]
    asked = given.strategies.split(",") if given.strategies else catalog.names("torch")
    with wb.Cluster(max(counts), devices="cpu") as cluster:
        for name in asked:
            entry = catalog.lookup(name)
            if entry.max_workers == 1:
                continue
            result: dict[str, Any] = {"what": f"{name} against one device", "strategy": name}
            if exact_options(entry) is not None:
                result["off"] = parity(cluster, entry, counts)
                result["off_most"] = max(result["off"].values())
            result |= reading(cluster, entry, min(3, max(counts)), given.steps)
            off = result.get("off_most", float("nan"))
            print(
                f"{name:<16} off by {off:.1e}  {result['steps_per_s']:6.1f} steps/s  "
                f"{result['sent_kb']:8.1f} kB/step  50 ms read as {result['wait_read_ms']:.1f} "
                f"(own {result['own_wait_ms']:.1f}), named {result['named']:.0%}"
            )
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
