"""Steps/s of central storage at 4 workers x 10 MB, against the same written with gloo.

The rival is code written by hand: rank 0 holds the variables and the optimizer. In each step it
broadcasts the parameters, all ranks compute a gradient, `reduce` adds up the gradients on rank 0,
and rank 0 steps the optimizer. Ours runs `wb.fit` as a cell does, with all records. Both train the
same model on the same shares with SGD. A step computes almost nothing, so its time is the time of
the strategy. The two run alternately in the same processes, so other work disturbs both equally.

    python benchmarks/bench_central_storage.py --mb 10 --workers 4 --steps 40 --turns 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

from workers import Workers

rank, world_size = 0, 1  # the running worker's


def ours(mb, steps):
    """Train under the strategy; return the seconds per step, without the first ones."""
    import time

    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(0)
    rows = mb * 250_000 // 64
    model = torch.nn.Embedding(rows, 64)  # little to compute, a dense gradient of so many MB
    stamps = []
    x, y = torch.randint(0, rows, (64,)), torch.randn(64, 64)
    fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01),
        batch_size=8, steps=steps + 5,
        callbacks=[lambda step, logs: stamps.append(time.perf_counter())])  # fmt: skip
    return (stamps[-1] - stamps[4]) / steps


def by_hand(mb, steps):
    """The same with broadcast and reduce; rank 0 is the host and a worker too."""
    import time

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    rows = mb * 250_000 // 64
    model = torch.nn.Embedding(rows, 64)  # little to compute, a dense gradient of so many MB
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loss_fn = torch.nn.MSELoss()
    x, y = torch.randint(0, rows, (64,)), torch.randn(64, 64)
    mine = 8 // world_size
    for step in range(steps + 5):
        if step == 5:
            began = time.perf_counter()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        first = (step * 8) % 64 + rank * mine
        optimizer.zero_grad()
        loss = loss_fn(model(x[first : first + mine]), y[first : first + mine])
        (loss * mine / 8).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0)
        if rank == 0:
            optimizer.step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = Workers(args.workers)
    rates: dict[str, list[float]] = {"central_storage": [], "gloo broadcast + reduce": []}
    try:
        for _ in range(args.turns):
            for name, strategy, cell in (
                ("central_storage", "central_storage", ours),
                ("gloo broadcast + reduce", "mirrored", by_hand),
            ):
                reports = pool.run(strategy, cell, args.mb, args.steps, workers=args.workers)
                assert not any(report.error for report in reports), reports[0].error
                rates[name].append(1 / max(report.value for report in reports))
    finally:
        pool.close()
    print(f"{args.workers} workers x {args.mb} MB, {args.turns} turns, steps/s")
    for name, values in rates.items():
        print(
            f"{name:26}{statistics.median(values):8.1f}"
            f"  (least {min(values):.1f}, most {max(values):.1f})"
        )
    pairs = [a / b for a, b in zip(*rates.values(), strict=True)]
    ratio = statistics.median(pairs)
    print(f"ratio, median of pairs {ratio:.2f} ({min(pairs):.2f} to {max(pairs):.2f})")
    print(f"{'reached' if ratio >= 2 else 'MISSED '}  at least 2 x the same by hand")
    ours_per_s, rival_per_s = (statistics.median(values) for values in rates.values())
    result = {"what": f"central_storage, {args.workers} workers x {args.mb} MB", "ratio": ratio}
    result |= {"steps_per_s": ours_per_s, "rival_steps_per_s": rival_per_s, "turns": args.turns}
    result["rates"] = rates
    print(json.dumps(result))


if __name__ == "__main__":
    main()
