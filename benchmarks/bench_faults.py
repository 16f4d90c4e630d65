"""How long faults take: each fault is really caused, several times, on engines of one cluster.

There is one row for each fault: the promise, the median and the worst repeat. Scenarios are
functions in `benchmarks/fault_scenarios_*.py` that provoke the fault once and return the seconds it
took; `fault_scenarios.scenario` says what is promised.

    python benchmarks/bench_faults.py [--only NAME ...] [--repeats 10] [--json FILE] [--list]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fault_scenarios import SCENARIOS, Scenario, Stage


def main() -> None:
    for file in sorted(Path(__file__).parent.glob("fault_scenarios_*.py")):
        importlib.import_module(file.stem)
    given = parse()
    chosen = [s for s in SCENARIOS.values() if not given.only or s.name in given.only]
    if given.list:
        for one in chosen:
            print(f"{one.name:<28} {one.fault} (promise: {one.promise_s:g} s)")
        return
    rows = []
    stage = Stage()
    try:
        for one in chosen:
            rows.append(measure(one, stage, given.repeats))
            print(line(rows[-1]), flush=True)
            if given.json:  # after each, so that a crash loses no row
                write(Path(given.json), rows)
    finally:
        stage.close()
    for row in rows:
        print(json.dumps(row))
    sys.exit(any(row["failed"] for row in rows))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", choices=sorted(SCENARIOS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def measure(one: Scenario, stage: Stage, repeats: int) -> dict[str, Any]:
    """Return a row of the table; an attempt that fails is counted, and its reason is kept."""
    taken_s: list[float] = []
    failed: list[str] = []
    for _ in range(min(repeats, one.most)):
        try:
            taken_s.append(one.provoke(stage))
        except Exception as error:  # noqa: PERF203 - a bad attempt is counted, not the end
            failed.append(f"{type(error).__name__}: {error}")
            stage.close()
    return {
        "what": "fault",
        "name": one.name,
        "fault": one.fault,
        "command": one.command,
        "promise_s": one.promise_s,
        "median_s": statistics.median(taken_s) if taken_s else None,
        "worst_s": max(taken_s, default=None),
        "repeats": len(taken_s),
        "failed": failed,
        "seconds": [round(s, 4) for s in taken_s],
    }


def line(row: dict[str, Any]) -> str:
    figures = "no attempt succeeded"
    if row["repeats"]:
        figures = f"median {row['median_s']:.2f} s, worst {row['worst_s']:.2f} s"
    text = f"{row['name']:<28} promise {row['promise_s']:g} s, {figures} of {row['repeats']}"
    return text + "".join(f"\n    failed: {reason}" for reason in row["failed"][:3])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows; existing rows of other scenarios stay in the file."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = {row["name"]: row for row in rows}
    kept = [fresh.pop(row["name"], row) for row in known]
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    report = {
        "what": "faults",
        "date": time.strftime("%Y-%m-%d"),
        **machine,
        "rows": [*kept, *fresh.values()],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
