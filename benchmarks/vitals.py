"""What live figures of many engines cost the notebook's kernel.

    python benchmarks/vitals.py [--engines 64] [--turns 12]

Starts the given number of sleeping processes, as large as a new engine. It takes samples of them as
`%cluster`'s table and the panel do, and prints the CPU time of this thread for each sample.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

from workbench.cluster.engines import EngineInfo
from workbench.session.status import Vitals

SLEEPER = "import numpy, psutil, sys, time; print(1, flush=True); time.sleep(600)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    count = given.engines
    folder = Path(tempfile.mkdtemp(prefix="workbench-vitals-"))
    started = [
        subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in started:
            process.stdout.readline()
        infos = [
            EngineInfo(
                i, "u", p.pid, socket.gethostname(), began=psutil.Process(p.pid).create_time()
            )
            for i, p in enumerate(started)
        ]
        ids = list(range(count))
        lease = SimpleNamespace(leases=[SimpleNamespace(label="cpu", gpu="")] * count)
        cluster = SimpleNamespace(
            engines=infos, ids=ids, worker_ids=ids, lease=lambda n: lease, last_task=None,
            busy=None, pool=SimpleNamespace(given={}, hosted=None),
            engine_set=SimpleNamespace(starting=(), log_path=lambda i: folder / f"{i}.log"),
        )  # fmt: skip
        vitals, costs_ms = Vitals(cluster), []
        for turn in range(max(2, given.turns)):
            for i in ids:
                with (folder / f"{i}.log").open("a") as file:
                    file.write(f"line {turn}\n")
            begins = time.thread_time()
            vitals._take()
            costs_ms.append((time.thread_time() - begins) * 1e3)
        full = []
        for process in started[:8]:
            handle, begins = psutil.Process(process.pid), time.thread_time()
            handle.memory_full_info()
            full.append((time.thread_time() - begins) * 1e3)
        print(f"{count} engines, {len(psutil.pids())} processes on this machine")
        print(
            f"first sample {costs_ms[0]:.1f} ms of CPU, then {statistics.median(costs_ms[1:]):.1f}"
            f" (most {max(costs_ms[1:]):.1f}); PSS of one {statistics.median(full):.2f} ms"
        )
        result = {"what": "CPU of a sample of all engines in the kernel", "engines": count}
        result |= {"first_ms": costs_ms[0], "median_ms": statistics.median(costs_ms[1:])}
        result |= {"most_ms": max(costs_ms[1:]), "pss_ms": statistics.median(full)}
        print(json.dumps(result))
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


if __name__ == "__main__":
    main()
