"""Measure the rows of docs/performance.md again, one command after the other, and keep the output.

    python benchmarks/rows.py [--only TEXT] [--to docs/measured/performance.json] [--list]

Each command writes one entry: when it ran, the machine's load before it, and every line of JSON
that it printed, which contains the single measurements of its medians. An entry replaces the older
entry of the same command; other entries stay. Run this script when nothing else runs on the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT_S = 1800.0

COMMANDS = (
    "bench_start.py",
    "bench_memory.py",
    "bench_tensorflow_start.py",
    "bench_cells.py --cells 100",
    "bench_overhead.py --step-ms 2",
    "bench_overhead.py --step-ms 20",
    "bench_overhead.py --step-ms 2 --allreduce auto",
    "bench_overhead.py --step-ms 20 --allreduce auto",
    "bench_kernel.py",
    "bench_dashboard.py",
    "bench_history.py",
    "bench_waits.py",
    "bench_checkpoint.py",
    "bench_parity.py",
    "bench_models.py",
    "bench_large_model.py",
    "bench_large_model.py --way all",
    "bench_large_model.py --workers 4",
    "bench_parameter_server.py",
    "bench_central_storage.py",
    "bench_allreduce.py",
    "bench_pipeline.py",
    "bench_auto.py",
    "bench_predict.py --minutes 25",
    "bench_predict.py --what-if --steps 80",
    "bench_predict.py --real",
    "bench_predict.py --hosts 8 --mbit 24",
    "bench_async.py --epochs 8 --seeds 2 --no-goals",
    "bench_diloco.py",
    "bench_replicas.py --mb 4 --workers 2 --steps 200 --turns 9",
    "bench_healing.py --reference-s 12",
    "bench_tensorflow_parameter_server.py",
    "bench_tensorflow_overhead.py",
    "bench_jobs.py --only follow --pairs 20 --seconds 10",
    "bench_jobs.py --only lag computing plain",
    "bench_jobs.py --slurm --pairs 3",
    "bench_hosts.py --rounds 4 --workers 1",
)
"""Every command that docs/performance.md names, but for those of the reliability page."""


def take(command: str) -> dict[str, object]:
    """Run one command; return its entry.

    Raises:
        RuntimeError: The command failed, or printed no figures.
    """
    file, *arguments = command.split()
    load, began = os.getloadavg()[0], time.time()
    done = subprocess.run(
        [sys.executable, str(FOLDER / file), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not results:
        raise RuntimeError(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {
        "taken": time.strftime("%Y-%m-%d %H:%M", time.gmtime(began)),
        "seconds": round(time.time() - began),
        "load_before": round(load, 2),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "results": results,
    }


def main() -> None:
    """Measure the rows; a command that fails is named, and the others still run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that have it")
    parser.add_argument("--to", type=Path, default=FOLDER.parent / "docs/measured/performance.json")
    parser.add_argument("--list", action="store_true", help="name the commands, run none")
    given = parser.parse_args()
    chosen = [command for command in COMMANDS if given.only in command]
    if given.list:
        print("\n".join(chosen))
        return
    rows = json.loads(given.to.read_text()) if given.to.exists() else {}
    failed = []
    for command in chosen:
        try:
            rows[command] = take(command)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(command)
            print(error, flush=True)
            continue
        lines = (f"{json.dumps(one)}: {json.dumps(entry)}" for one, entry in rows.items())
        given.to.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{command}: {rows[command]['seconds']} s", flush=True)
    print(json.dumps({"what": "rows taken", "taken": len(chosen) - len(failed), "failed": failed}))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
