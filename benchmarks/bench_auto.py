"""Compares the choice of `%%distributed auto` with the fastest measured strategy.

    python benchmarks/bench_auto.py [--workers 2] [--turns 2] [--to docs/measured/auto.jsonl]
    python benchmarks/bench_auto.py --quick     one recipe, one short turn

For each of ten recipes (built-in recipes, and models and links of other sizes) a strategy is
chosen. Then every considered strategy is measured in separate runs, alternately, so that other work
on the machine disturbs all of them equally. The script asserts the rate of the chosen strategy,
divided by the rate of the fastest one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench.history.analysis.steady import rate_of

os.environ["WORKBENCH_PREWARM"] = "off"
GOAL = 0.9
LEAST_S = 3.0

MLP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear({features}, {width}), nn.ReLU(), nn.Linear({width}, {width}),
                      nn.ReLU(), nn.Linear({width}, 10))
wb.fit(model, wb.data.synthetic(8192, shape=({features},), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.Adam(p, 1e-3), batch_size={batch})
"""
ENCODER = """
import torch
from torch import nn
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.Sequential(nn.Unflatten(1, (16, 64)), nn.TransformerEncoder(layer, 2), nn.Flatten(),
                      nn.Linear(1024, 10))
wb.fit(model, wb.data.synthetic(2048, shape=(1024,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""
ASLEEP = """
import time, torch
from torch import nn

class Asleep(nn.Module):
    \"\"\"Stands for a device: its work takes time, but no core of this machine.\"\"\"

    def __init__(self, size, each_s):
        super().__init__()
        self.weight, self.each_s = nn.Parameter(torch.zeros(size)), each_s

    def forward(self, x):
        time.sleep(self.each_s * len(x))
        return x + self.weight.sum() * 1e-6

model = nn.Sequential(*(Asleep({size}, 0.0005) for _ in range(4)), nn.Linear(4, 2))
wb.fit(model, wb.data.synthetic(4096, shape=(4,), classes=2), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32)
"""
LINK = ("bandwidth=40MB/s", "latency=1ms")
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits_mlp": ("digits_mlp", {}),
    "digits_cnn": ("digits_cnn", {}),
    "char_transformer": ("char_transformer", {}),
    "char_transformer, 4 layers": (
        "char_transformer", {"parameters": {"layers": 4, "width": 128}, "batch_size": 32},
    ),
    "recommender": ("recommender", {}),
    "wide MLP": (MLP.format(features=256, width=1024, batch=64), {}),
    "wide MLP, large batch": (MLP.format(features=256, width=1024, batch=1024), {}),
    "encoder, 40 MB/s": (ENCODER, {"inject": LINK}),
    "asleep, 0.4 MB of weights, 40 MB/s": (ASLEEP.format(size=25_000), {"inject": LINK}),
    "asleep, 8 MB of weights, 40 MB/s": (ASLEEP.format(size=500_000), {"inject": LINK}),
}  # fmt: skip
"""What is trained: a source or the name of a recipe, and settings of its runs."""


def measured(cluster: wb.Cluster, source: str, row: Any, settings: dict[str, Any],
             seconds: float) -> float:  # fmt: skip
    """Return samples per second of a separate run; NaN if the strategy refuses."""
    from workbench.cookbook.recipe import Recipe
    from workbench.notebook.sweep import recipe_of

    one = row.candidate
    recipe: Recipe = recipe_of(source, "torch")
    given = {**settings, "options": dict(one.options), "workers": one.workers}
    if one.workers == 1:
        given.pop("inject", None)
    run = cluster.run(recipe, strategy=one.entry.name, steps=20_000, name="measured", **given)
    ends = 0.0
    while not run.over.wait(0.05):
        if not ends and run.snapshot().step:
            ends = time.monotonic() + seconds
        if ends and time.monotonic() > ends:
            run.stop()
            break
    try:
        run.wait(60)
    except wb.WorkbenchError:
        return float("nan")
    rate = rate_of(run.history)
    return float("nan") if rate is None else rate.mean


def compared(cluster: wb.Cluster, name: str, workers: int, turns: int,
             seconds: float) -> dict[str, Any]:  # fmt: skip
    """Choose a strategy for a recipe, then measure all considered strategies."""
    source, settings = RECIPES[name]
    found = wb.choose(source, cluster=cluster, workers=workers, **settings)
    field = [row for row in found.rows if row.known != "out"]
    rates: dict[str, list[float]] = {row.candidate.name: [] for row in field}
    for _ in range(turns):
        for row in field:
            rates[row.candidate.name].append(measured(cluster, source, row, settings, seconds))
    means = {key: float(np.mean(some)) for key, some in rates.items()}
    known = {key: rate for key, rate in means.items() if rate == rate}
    best = max(known, key=lambda key: known[key])
    assert found.winner is not None
    chosen = found.winner.candidate.name
    return {
        "recipe": name, "workers": workers, "chosen": chosen, "best": best,
        "ratio": known.get(chosen, float("nan")) / known[best], "seconds": found.seconds,
        "reason": found.reason, "short_runs": sum(row.known == "measured" for row in field),
        "samples_per_s": rates, "told": {r.candidate.name: r.samples_per_s for r in field},
        "known": {r.candidate.name: r.known for r in field},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=LEAST_S, help="of each measured run")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--quick", action="store_true", help="one recipe, one short turn")
    parser.add_argument("--to", type=Path, help="where every comparison is written")
    given = parser.parse_args()
    if given.quick:
        given.only, given.turns, given.seconds = ["asleep, 8 MB of weights, 40 MB/s"], 1, 1.0
    rows = []
    with wb.Cluster(given.workers, devices="cpu") as cluster:
        for name in given.only:
            row = compared(cluster, name, given.workers, given.turns, given.seconds)
            rows.append(row)
            print(f"{name:<36} {row['chosen']:<26} best {row['best']:<26} {row['ratio']:.2f} "
                  f"{row['seconds']:.0f} s", flush=True)  # fmt: skip
            if given.to:
                given.to.write_text("\n".join(json.dumps(one) for one in rows) + "\n")
    ratios = [row["ratio"] for row in rows]
    print(json.dumps({
        "what": "chosen over best", "recipes": len(rows), "least": min(ratios),
        "median": float(np.median(ratios)), "goal": GOAL, "reached": min(ratios) >= GOAL,
        "within_goal": sum(ratio >= GOAL for ratio in ratios),
        "longest_choice_s": max(row["seconds"] for row in rows),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
