"""Are sync waits right? 50 ms are injected into worker 1's data, forward or backward, and measured.

python benchmarks/bench_waits.py [--workers 3] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np

import workbench as wb

os.environ["WORKBENCH_PREWARM"] = "off"

RECIPE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
wb.fit(model, wb.data.synthetic(4096, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=48)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with wb.Cluster(given.workers, devices="cpu") as cluster:
        for phase in ("data", "forward", "backward"):
            fault = f"slow=1:50ms/{phase}"
            run = cluster.run(RECIPE, strategy="mirrored", steps=given.steps, inject=[fault]).wait()
            history = run.history
            late = history["step"] >= 5
            others, own = late & (history["rank"] != 1), late & (history["rank"] == 1)
            result = {
                "what": f"50 ms in {phase}",
                "read_ms": 1e3 * float(np.median(history["sync_wait_s"][others])),
                "own_ms": 1e3 * float(np.median(history["sync_wait_s"][own])),
                "named": float(np.mean(history["blamed_rank"][others] == 1)),
                "steps": given.steps - 5,
            }
            print(
                f"50 ms in {phase:<8} others waited {result['read_ms']:.1f} ms, it itself "
                f"{result['own_ms']:.1f} ms, named in {result['named']:.0%} of waits"
            )
            print(json.dumps(result))


if __name__ == "__main__":
    main()
