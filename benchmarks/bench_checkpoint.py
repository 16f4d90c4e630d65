"""What checkpoints cost: steps/s with --checkpoint-every 50 and without, in alternating runs.

    python benchmarks/bench_checkpoint.py [--hidden 512] [--steps 400] [--rounds 5] [--workers 2]

The script also prints how long training paused for each copy, how long the write took in the
background, and how much was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import workbench as wb

CELL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, {hidden}), nn.Tanh(), nn.Linear({hidden}, {hidden}), nn.Tanh(),
                      nn.Linear({hidden}, 10))
x, y = torch.randn(2048, 64), torch.randint(0, 10, (2048,))
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, 1e-3),
       batch_size=256, steps={steps})
"""


def written(folder: Path) -> list[dict[str, float]]:
    """Return the events of a run's checkpoints."""
    lines = (folder / "events-rank0.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["name"] == "checkpoint"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="mirrored")
    given = parser.parse_args()
    cell = CELL.format(hidden=given.hidden, steps=given.steps)
    ratios, events = [], []
    with wb.Cluster(given.workers, devices="cpu") as cluster, tempfile.TemporaryDirectory() as kept:
        rate = {}
        for number in range(given.rounds + 1):
            for way in ("none", "every") if number % 2 else ("every", "none"):
                saving = (
                    {"checkpoint": f"{kept}/{number}", "checkpoint_every": given.every}
                    if way == "every"
                    else {}
                )
                run = cluster.run(cell, strategy=given.strategy, **saving).wait()
                # Wall time of the whole of training, stops included: what the user waits for.
                first, last = run.history["start_s"].min(), run.history["start_s"].max()
                rate[way] = (given.steps - 1) / (last - first)
                if way == "every" and number:
                    events += written(run.folder)
            if number:  # the first pair warms up
                ratios.append(rate["every"] / rate["none"])
                print(f"{rate['none']:.1f} steps/s without, {rate['every']:.1f} with")
    stalls = [1e3 * event["stall_s"] for event in events]
    seconds = [event["seconds"] for event in events]
    result = {
        "what": f"a checkpoint every {given.every} steps",
        "ratio": statistics.median(ratios),
        "ratio_worst": min(ratios),
        "stall_ms": statistics.median(stalls),
        "stall_worst_ms": max(stalls),
        "written_s": statistics.median(seconds),
        "size_bytes": events[0]["size_bytes"],
        "checkpoints": len(events),
        "ratios": ratios,
    }
    print(
        f"{given.strategy}, {given.workers} workers, every {given.every} of {given.steps} steps: "
        f"ratio of steps/s median {statistics.median(ratios):.3f}, worst {min(ratios):.3f}; "
        f"stall median {statistics.median(stalls):.2f} ms, worst {max(stalls):.2f} ms; "
        f"on the disk after median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s; "
        f"{events[0]['size_bytes'] / 1e6:.2f} MB each"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
