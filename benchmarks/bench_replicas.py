"""The cost of a second copy of a parameter server's parts, and the delay by a server's death.

It measures the steps per second of `parameter_server` with `replicas=1` and `replicas=2`,
alternately, so other work disturbs both equally. Then there is a run in which a worker ends server
s0 by SIGKILL in the middle of the run. The figures of the death are the longest time between two
steps of a worker, and its median step.

    python benchmarks/bench_replicas.py --mb 4 --workers 2 --steps 200 --turns 5

The last lines are JSON, one for each kind of step. If there are few cores, the copy takes computing
time from the workers, so it costs most there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

import numpy as np
from worker_reports import Report, failures
from workers import Workers

KINDS: dict[str, dict[str, Any]] = {"together": {"sync": True}, "alone": {}}


def train(numbers, steps, victims=(), at=0):
    """Take steps of little work on `numbers` numbers; return when each one ended."""
    import os
    import signal
    import time

    import torch

    from workbench.engine.training.fit import fit

    x, y = torch.randn(64, 1), torch.randn(64, numbers // 2)
    ends = []

    def stepped(step, logs):
        ends.append(time.perf_counter())
        if step == at and rank == 0:  # noqa: F821 - the running worker's
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

    fit(torch.nn.Linear(1, numbers // 2), (x, y), loss=torch.nn.MSELoss(), batch_size=4,
        steps=steps, optimizer=lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        callbacks=[stepped])  # fmt: skip
    return ends


def run(pool: Workers, args: Any, options: dict[str, Any], *further: Any) -> list[Report]:
    """Run a case; its reports."""
    reports = pool.run(
        "parameter_server", train, args.mb * 250_000, args.steps, *further,
        workers=args.workers, options={"servers": args.servers, **options},
        doomed=(0,) if further else (),
    )  # fmt: skip
    if failed := failures(reports):
        raise SystemExit(failed[0])
    return reports


def rate(reports: list[Report]) -> float:
    """Return the steps per second of a worker, without the first ones."""
    gaps = [np.median(np.diff(report.value)[5:]) for report in reports]
    return float(1 / np.mean(gaps))


def measured(pool: Workers, args: Any, kind: str) -> dict[str, Any]:
    """Return the figures of one kind of steps."""
    options = KINDS[kind]
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.turns):
        for replicas, values in rates.items():
            values.append(rate(run(pool, args, {**options, "replicas": replicas})))
    victim = pool.processes[args.workers].pid
    killed = run(pool, args, {**options, "replicas": 2}, [victim], args.steps // 2)
    pauses = [float(np.diff(report.value)[5:].max()) for report in killed]
    pairs = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    return {
        "what": f"{args.mb} MB, {args.workers} workers, {args.servers} servers, steps {kind}",
        "steps_per_s": statistics.median(rates[2]),
        "steps_per_s_one_copy": statistics.median(rates[1]),
        "ratio": statistics.median(pairs),
        "least_ratio": min(pairs),
        "most_ratio": max(pairs),
        "median_step_ms": 1e3 / rate(killed),
        "longest_step_at_a_death_ms": 1e3 * max(pauses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    args = parser.parse_args()
    if args.quick:
        args.mb, args.steps, args.turns = 1, 20, 1
    results = []
    pool = Workers(args.workers + max(args.servers, 2))
    try:
        for kind in KINDS:
            results.append(measured(pool, args, kind))
            pool._abandon(0)  # a server has died
    finally:
        pool.close()
    print(f"{'':12}{'replicas=1':>12}{'replicas=2':>12}{'ratio':>8}{'at a death':>14}")
    for kind, figures in zip(KINDS, results, strict=True):
        one, two = figures["steps_per_s_one_copy"], figures["steps_per_s"]
        print(
            f"{kind:12}{one:8.1f} st/s{two:7.1f} st/s"
            f"{figures['ratio']:8.2f}{figures['longest_step_at_a_death_ms']:11.1f} ms"
        )
    for figures in results:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
