"""Records the waits of workers: in fault-free runs, and in the same runs with a known slow worker.

python benchmarks/record_waits.py [--steps 300] [--to docs/measured/waits.npz]

`tests/unit/test_culprit.py` uses these rows to count which worker is named as slow, and how often
wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

import workbench as wb
from workbench.history.disk import records_path
from workbench.shared.record import RECORD

os.environ["WORKBENCH_PREWARM"] = "off"

FIT = """
import torch
from torch import nn
model = {model}
wb.fit(model, wb.data.synthetic({samples}, shape={shape}, classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size={batch})
"""


def recipe(model: str, shape: str = "(64,)", batch: int = 48, samples: int = 4096) -> str:
    """Return the source of a cell that trains a model on made-up data."""
    return FIT.format(model=model, shape=shape, batch=batch, samples=samples)


LINEAR = recipe("nn.Linear(64, 10)")
MLP = recipe("nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))")
WIDE = recipe(
    "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), "
    "nn.Linear(512, 10))",
    "(256,)", 96,
)  # fmt: skip
CONVOLUTION = recipe(
    "nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), "
    "nn.Linear(16 * 16, 10))",
    "(1, 8, 8)", 192,
)  # fmt: skip
DEEP = recipe(
    "nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())], "
    "nn.Linear(64, 10))"
)

CALM = {
    "linear-2": (LINEAR, "mirrored", 2),
    "linear-3": (LINEAR, "mirrored", 3),
    "mlp-2": (MLP, "mirrored", 2),
    "mlp-3": (MLP, "mirrored", 3),
    "wide-2": (WIDE, "mirrored", 2),
    "convolution-2": (CONVOLUTION, "mirrored", 2),
    "convolution-3": (CONVOLUTION, "mirrored", 3),
    "central-2": (MLP, "central_storage", 2),
    "sharded-2": (DEEP, "sharded", 2),
    "pipeline-2": (DEEP, "model_split", 2),
}
SLOW = {
    "linear-2-slow-10ms": (LINEAR, "mirrored", 2),
    "mlp-3-slow-10ms": (MLP, "mirrored", 3),
    "wide-2-slow-10ms": (WIDE, "mirrored", 2),
    "convolution-2-slow-10ms": (CONVOLUTION, "mirrored", 2),
}
"""In these worker 1 sleeps 10 ms in each step."""

KEPT = ("step", "rank", "flags", "samples", "start_s", "end_s", "ready_s", "data_wait_s",
        "compute_s", "exposed_s", "wait_s", "bubble_s", "waited_for", "local_loss")  # fmt: skip
SHORT = {"start_s": "<f4", "end_s": "<f4", "ready_s": "<f4", "local_loss": "<f2", "step": "<u2",
         "rank": "u1", "flags": "u1", "samples": "<u2", "waited_for": "i1"}  # fmt: skip
"""Times count from the step's begin on rank 0: four bytes hold them to the nanosecond."""


def packed(folder: Path, workers: int) -> np.ndarray:
    """Return a run's rows as (steps, ranks), of the fields that describe waits."""
    each = [np.fromfile(records_path(folder, rank), RECORD) for rank in range(workers)]
    steps = min(map(len, each))
    rows = np.stack([one[:steps] for one in each], axis=1)
    found = np.zeros(rows.shape, [(n, SHORT.get(n, RECORD[n].str)) for n in KEPT] + [("at", "<f8")])
    origin = rows["start_s"][:, :1]
    for name in KEPT:
        values = rows[name]
        found[name] = values - origin if name in ("start_s", "end_s", "ready_s") else values
    found["at"] = origin - origin[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--to", type=Path, default=Path("docs/measured/waits.npz"))
    given = parser.parse_args()
    found = {}
    with wb.Cluster(3, devices="cpu") as cluster:
        for name, (source, strategy, workers) in {**CALM, **SLOW}.items():
            inject = ["slow=1:10ms"] if name in SLOW else []
            run = cluster.run(
                source, strategy=strategy, workers=workers, steps=given.steps, inject=inject
            ).wait()
            found[name] = rows = packed(run.folder, workers)
            step_ms = 1e3 * np.median(rows["end_s"] - rows["start_s"])
            print(f"{name:<26} {len(rows)} steps of {step_ms:.2f} ms")
    np.savez_compressed(given.to, **found)
    size_bytes = given.to.stat().st_size
    print(f"{given.to}: {size_bytes / 1024:.0f} KiB")
    print(json.dumps({"what": "recorded waits", "runs": len(found), "size_bytes": size_bytes}))


if __name__ == "__main__":
    main()
