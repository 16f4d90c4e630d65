"""DiLoCo against an all-reduce in every step: loss for as many samples, and bytes.

    python benchmarks/bench_diloco.py [--steps 2000] [--every 50] [--seeds 3] [--workers 2]

The recipe `char_transformer` (AdamW) trains under `mirrored`, and under `local_sgd` in three forms:
with averages, with outer steps (`outer=nesterov`), and with outer steps in fragments. For each seed
the samples, their order and the initial weights are the same. The script compares the loss of the
mean of the replicas over the recipe's test set, after the last step. Each way uses the best of the
`--lr` values, `mirrored` too, so that all are tuned equally.

The last lines are JSON: one line for each way. Goal of `outer=nesterov`: a loss within 1 % of that
of `mirrored` at 1/50 of the bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import workbench as wb

GOAL = 1.01
TAIL = 100
"""Steps at the end over which the training loss is averaged."""


@dataclass(frozen=True)
class Way:
    """How the recipe is trained."""

    name: str
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)


def ways(given: Any) -> list[Way]:
    """Return `mirrored` first, then the ways that are compared with it."""
    outer = {"outer": "nesterov", "outer_lr": given.outer_lr, "outer_momentum": given.momentum}
    return [
        Way("mirrored", "mirrored"),
        Way("average", "local_sgd", {"every": given.every}),
        Way("nesterov", "local_sgd", {"every": given.every, **outer}),
        Way(
            f"nesterov, {given.fragments} fragments", "local_sgd",
            {"every": given.every, "fragments": given.fragments, **outer},
        ),
    ]  # fmt: skip


def train(cluster: Any, way: Way, lr: float, seed: int, given: Any) -> dict[str, float]:
    """Train once; return losses and bytes."""
    recipe = wb.recipes["char_transformer"].with_parameters(lr=lr, **SIZES[given.quick])
    run = cluster.run(
        recipe, strategy=way.strategy, options=way.options, workers=given.workers,
        steps=given.steps, seed=seed,
    ).wait()  # fmt: skip
    history = run.history
    sent = history["sent_bytes"]
    late = history["step"] >= given.steps - TAIL
    found = {
        "lr": lr,
        "seed": seed,
        "loss": float(run.evals[-1]["loss"]),
        "training_loss": float(np.nanmean(history["loss"][late])),
        "bytes_per_step": float(sent.sum() / given.steps / given.workers),
        "most_bytes": float(sent.max()),
    }
    print(
        f"{way.name:24} lr {lr:<7g} seed {seed}  loss {found['loss']:.4f} "
        f"(training {found['training_loss']:.4f})  {found['bytes_per_step']:,.0f} bytes a step",
        flush=True,
    )
    return found


SIZES: dict[bool, dict[str, int]] = {
    False: {},  # as the recipe has them
    True: {"layers": 1, "width": 16, "heads": 2, "context": 16},
}


def best(runs: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the runs with the learning rate that has the smallest mean loss."""
    rates = sorted({run["lr"] for run in runs})
    means = {lr: statistics.mean(run["loss"] for run in runs if run["lr"] == lr) for lr in rates}
    chosen = min(rates, key=lambda lr: means[lr])
    return sorted((run for run in runs if run["lr"] == chosen), key=lambda run: run["seed"])


def result(way: Way, runs: list[dict[str, float]], mirrored: list[dict[str, float]]) -> Any:
    """Return a way's figures next to those of `mirrored`, for each seed."""
    mine, theirs = best(runs), best(mirrored)

    def ratios(column: str) -> list[float]:
        return [a[column] / b[column] for a, b in zip(mine, theirs, strict=True)]

    return {
        "what": f"char_transformer under {way.name}",
        "options": way.options,
        "lr": mine[0]["lr"],
        "loss": statistics.mean(run["loss"] for run in mine),
        "training_loss": statistics.mean(run["training_loss"] for run in mine),
        "loss_ratio": statistics.mean(ratios("loss")),
        "loss_ratio_worst": max(ratios("loss")),
        "training_loss_ratio": statistics.mean(ratios("training_loss")),
        "bytes_per_step": mine[0]["bytes_per_step"],
        "bytes_ratio": statistics.mean(ratios("bytes_per_step")),
        "most_bytes": mine[0]["most_bytes"],
        "runs": runs,
    }


def main() -> None:
    """Print a line for each run, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=5)
    parser.add_argument("--lr", default="3e-3", help="learning rates to choose from: 2e-3,3e-3")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose names have it")
    parser.add_argument("--quick", action="store_true", help="a small model, 20 steps, one seed")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.every, given.seeds = 20, 5, 1
    rates = [float(lr) for lr in given.lr.split(",")]
    asked = [way for way in ways(given) if given.only in way.name or way.name == "mirrored"]
    runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in asked}
    with wb.Cluster(given.workers, devices="cpu") as cluster:
        for seed in range(given.seeds):
            for lr in rates:
                for way in asked:
                    runs[way.name].append(train(cluster, way, lr, seed, given))
    results = [result(way, runs[way.name], runs["mirrored"]) for way in asked]
    for one in results:
        print(
            f"{one['what']:48} lr {one['lr']:<7g} loss {one['loss']:.4f}, "
            f"{one['loss_ratio']:.4f} of mirrored's (worst {one['loss_ratio_worst']:.4f}); "
            f"bytes {one['bytes_ratio']:.4f}"
        )
    if not given.quick:
        reached = next((one for one in results if one["what"].endswith("nesterov")), None)
        if reached is not None:
            print("goal", "reached" if reached["loss_ratio"] <= GOAL else "missed")
    for one in results:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
