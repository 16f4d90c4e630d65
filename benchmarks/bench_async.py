"""How many samples asynchronous and decentralised training need to reach one device's loss.

One device trains on digits for some epochs. Its loss over the training set is the target. Each
strategy then gets 1, 1.05 and 1.5 times the samples. The smallest of these budgets that reaches the
target is the strategy's price. Model, data and global batch are the same. A push of an asynchronous
worker takes batch/n samples and is a separate step. If the learning rate is divided by n (`lr/n`),
n pushes move the parameters as far as one step of one device. With the recipe's own learning rate
(`lr`), pushes learn more from each sample, as smaller batches do.

    python benchmarks/bench_async.py --epochs 10 --seeds 3

Ends in an error if a strategy with a mean staleness of 4 or less does not reach the target with 1.5
times the samples. The last lines are JSON, one for each strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

from worker_reports import Report, failures
from workers import Workers

BUDGETS = (1.0, 1.05, 1.5)
MOST_STALENESS = 4.0


def digits(epochs, lr, seed, mean_ms):
    """Train on digits; return the loss over the training set with the final weights.

    Each step takes a random additional time, `mean_ms` on average. So workers are equally busy and
    push in a random order; with fewer cores than workers they would push in a fixed order.
    """
    import random
    import time

    import torch

    from workbench import data
    from workbench.engine.training.fit import fit

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(),
                                torch.nn.Linear(32, 10))  # fmt: skip
    cross_entropy = torch.nn.CrossEntropyLoss()
    train = data.digits("train")
    pace = random.Random(1000 * seed + rank)  # noqa: F821 - the running worker's

    def loss(output, target):
        time.sleep(pace.uniform(0, 2 * mean_ms) / 1e3)
        return cross_entropy(output, target)

    fit(model, train, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr), batch_size=64,
        epochs=1, steps=round(epochs * -(-len(train) // 64)), seed=seed)  # fmt: skip
    x, y = zip(*(train[i] for i in range(len(train))), strict=True)
    with torch.no_grad():
        output = model(torch.stack([torch.as_tensor(v) for v in x]))
        return cross_entropy(output, torch.tensor(y)).item()


@dataclass(frozen=True)
class Case:
    """One strategy under test; `divided`: the learning rate is divided by the workers."""

    strategy: str
    workers: int
    options: dict[str, Any]
    divided: bool = False

    @property
    def name(self) -> str:
        given = " ".join(f"{key}={value}" for key, value in self.options.items())
        rate = "lr/n" if self.divided else "lr"
        return f"{self.strategy} n={self.workers} {rate} {given}".strip()


CASES = (
    Case("parameter_server", 3, {}),
    Case("parameter_server", 5, {}),
    Case("parameter_server", 3, {}, divided=True),
    Case("parameter_server", 5, {}, divided=True),
    Case("parameter_server", 3, {"max_staleness": 4}, divided=True),
    Case("parameter_server", 5, {"max_staleness": 4}, divided=True),
    Case("parameter_server", 5, {"staleness_aware_lr": True}),
    Case("local_sgd", 3, {"every": 8}),
    Case("gossip", 3, {}),
    Case("gossip", 3, {"graph": "exponential"}),
)


def train(pool: Workers, case: Case, epochs: float, seed: int, args: Any) -> list[Report]:
    """Run a case; its reports."""
    lr = args.lr / case.workers if case.divided else args.lr
    reports = pool.run(
        case.strategy, digits, epochs, lr, seed, args.mean_ms,
        workers=case.workers, options=case.options,
    )  # fmt: skip
    if failed := failures(reports):
        raise SystemExit(failed[0])
    return reports


def staleness_of(reports: list[Report]) -> float:
    """Return the mean staleness over all pushes; NaN where none is recorded."""
    values = np.concatenate([report.rows["staleness"] for report in reports])
    return float(values.mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--mean-ms", type=float, default=1.0, help="mean pause in a worker's step")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose names have it")
    parser.add_argument("--no-goals", action="store_true", help="a missed mark is no error")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.only in case.name]
    if not chosen:
        parser.error(f"no case has {args.only!r} in its name: {[case.name for case in CASES]}")
    os.environ["OMP_NUM_THREADS"] = "1"
    pool, rows = Workers(1), []
    try:
        one = Case("one_device", 1, {})
        marks = [train(pool, one, args.epochs, s, args)[0].value for s in range(args.seeds)]
        print(f"one device, {args.epochs:g} epochs: loss {statistics.mean(marks):.4f}")
        heads = [f"loss at {budget:g}x" for budget in BUDGETS]
        print(
            f"{'strategy':44}{'staleness':>10}" + "".join(f"{h:>16}" for h in heads) + "  reached"
        )
        rows = [measure(pool, case, marks, args) for case in chosen]
    finally:
        pool.close()
    for row in rows:
        print(json.dumps(row))
    missed = [str(row["what"]) for row in rows if row["missed"]]
    if missed and not args.no_goals:
        raise SystemExit("not reached with 1.5x the samples: " + "; ".join(missed))


def measure(pool: Workers, case: Case, marks: list[float], args: Any) -> dict[str, Any]:
    """Print a row and return it; `price`: the smallest budget that reaches the target."""
    losses, staleness, reached = [], [], []
    for budget in BUDGETS:
        found = []
        for seed in range(len(marks)):
            reports = train(pool, case, budget * args.epochs, seed, args)
            staleness.append(staleness_of(reports))
            found.append(reports[0].value)
        losses.append(statistics.mean(found))
        reached.append(all(loss <= mark for loss, mark in zip(found, marks, strict=True)))
    stale = statistics.mean(staleness)
    price = next((f"{b:g}x" for b, ok in zip(BUDGETS, reached, strict=True) if ok), "no")
    shown = "".join(f"{loss:16.4f}" for loss in losses)
    print(f"{case.name:44}{stale:10.2f}{shown}  {price}", flush=True)
    return {
        "what": case.name,
        "staleness": stale,
        "one_device_loss": statistics.mean(marks),
        **{f"loss_at_{budget:g}x": loss for budget, loss in zip(BUDGETS, losses, strict=True)},
        "price": None if price == "no" else float(price.removesuffix("x")),
        "missed": price == "no" and not stale > MOST_STALENESS + 0.1,
    }


if __name__ == "__main__":
    main()
