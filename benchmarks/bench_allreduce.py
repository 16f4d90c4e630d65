"""Steps/s of `mirrored` by all-reduce algorithm, against DistributedDataParallel over gloo.

The rival is a plain loop with DDP, without a strategy and without telemetry, on the same engines.
Ours is the same loop with one additional line, `wb.prepare`. The two train alternately, so both are
disturbed equally by other work. The result is the median ratio of the pairs.

    python benchmarks/bench_allreduce.py [--pairs 7] [--every] [--models "0.1 MB"]
                                         [--steps N]

The last lines are JSON: one line for each model and all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

import workbench as wb

os.environ["WORKBENCH_PREWARM"] = "off"

# Hidden widths, steps of one turn, and the ratio `auto` must reach.
MODELS = {"0.1 MB": ((160, 80), 300, 2.0), "10 MB": ((1536, 1536), 20, 1.0)}
GLOBAL_BATCH = 64

LOOP = """
import time, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
a, b = {widths}
model = nn.Sequential(nn.Linear(64, a), nn.Tanh(), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 10))
optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
x, y = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
def batches(size):
    while True:
        for i in range(0, len(x), size):
            yield x[i : i + size], y[i : i + size]
def train(model, loader, warm_up=5):
    for i, (inputs, targets) in enumerate(loader):
        if i == warm_up:
            began = time.perf_counter()
        if i == {steps} + warm_up:
            return {steps} / (time.perf_counter() - began)
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
"""
RIVAL = """
ddp = nn.parallel.DistributedDataParallel(model)
speed = train(ddp, batches({batch} // world_size))
del ddp
"""
OURS = """
wb.prepare(model, optimizer)
speed = train(model, batches({batch} // world_size))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--every", action="store_true", help="each algorithm, not only auto")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--steps", type=int, help="steps of one turn; each model has its own number"
    )
    given = parser.parse_args()
    ways = ["auto", "backend"]
    if given.every:
        ways = list(wb_choices())
    results = []
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with wb.Cluster(given.workers, devices="cpu") as cluster:
        for size in given.models:
            widths, steps, goal = MODELS[size]
            rows = race(cluster, widths, given.steps or steps, ways, given.pairs)
            for way, row in rows.items():
                row |= {"what": f"mirrored -o allreduce={way}, {size}", "workers": given.workers}
                row |= {"model": size, "allreduce": way}
                if way == "auto" and given.workers == 4:
                    row |= {"goal": goal, "met": row["ratio"] >= goal}
                results.append(row)
                print(
                    f"{size:<7} {way:<20} {row['steps_per_s']:8.1f} steps/s, "
                    f"DDP over gloo {row['rival_steps_per_s']:8.1f}: {row['ratio']:.2f}x "
                    f"({row['least']:.2f} .. {row['most']:.2f})"
                    + (f"  goal {goal}x" if "goal" in row else "")
                )
    for result in results:
        print(json.dumps(result))


def wb_choices() -> tuple[str, ...]:
    from workbench import catalog

    return catalog.lookup("mirrored").option("allreduce").choices


def race(
    cluster: wb.Cluster, widths: tuple[int, int], steps: int, ways: list[str], pairs: int
) -> dict[str, dict[str, Any]]:
    """Return the ratio of steps/s, ours / rival, by all-reduce."""
    words = {"widths": widths, "steps": steps, "batch": GLOBAL_BATCH}
    rival, ours = (LOOP + RIVAL).format(**words), (LOOP + OURS).format(**words)

    def speed() -> float:
        return float(cluster.pull(["speed"], [cluster.ids[0]])[cluster.ids[0]]["speed"])

    def theirs() -> float:
        execute(cluster, rival)
        return speed()

    def turn(way: str) -> float:
        run = cluster.run(ours, strategy="mirrored", options={"allreduce": way}).wait()
        notes.update(text for text in run.summary().notes if text.startswith("Gradients"))
        return speed()

    notes: set[str] = set()
    theirs()
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for pair in range(pairs):
        for way in ways:
            one, other = (theirs(), turn(way)) if pair % 2 else (turn(way), theirs())
            turns[way].append((other, one) if pair % 2 else (one, other))
    for note in notes:
        print(note)
    return {way: summary(values) for way, values in turns.items()}


def execute(cluster: wb.Cluster, source: str) -> None:
    task = cluster.execute(source)
    if not task.over.wait(300) or task.failure() is not None:
        raise RuntimeError(task.failure() or "the rival does not end")


def summary(turns: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(ours / rival for ours, rival in turns)
    return {
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "steps_per_s": statistics.median(ours for ours, _ in turns),
        "rival_steps_per_s": statistics.median(rival for _, rival in turns),
        "pairs": len(ratios),
        "steps_per_s_of_pairs": turns,
    }


if __name__ == "__main__":
    main()
