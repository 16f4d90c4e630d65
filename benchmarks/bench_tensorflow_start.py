"""The time until N engines have imported TensorFlow and Keras, and the memory that each adds.

Two ways, alternating, each in a separate process:

fresh  N Python processes, started together, that import TensorFlow and Keras
warm   N engines, forked from a running warm parent, registered and answering a call

Memory is the proportional set size (PSS: shared pages are divided among the processes that share
them) of the warm parent with its engines, minus that of the parent alone. So it is the memory that
the engines add before their first step.

    python benchmarks/bench_tensorflow_start.py [--engines 2] [--rounds 3]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

RATIO_GOAL = 0.15
ADDED_GOAL_MIB = 100
MIB = 2**20
IMPORT = "import tensorflow, keras; print(tensorflow.__version__, flush=True)"


def version():
    """Say what is imported (runs on the engine)."""
    import sys

    return sys.modules["tensorflow"].__version__, sys.modules["keras"].backend.backend()


def pss_mib(root):
    """Return the PSS of a process and all its descendants."""
    process = psutil.Process(root)
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_full_info().pss for member in family) / MIB


def fresh(n):
    began = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(n)
    ]
    try:
        assert all(process.stdout.readline() for process in processes)
        seconds = time.perf_counter() - began
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {"ready_s": seconds}


def warm(n):
    from workbench.cluster.engines import Engines, Listeners

    sys.path.append(str(Path(__file__).parent))
    nobody = Listeners(message=lambda *_: None, death=lambda *_: None)
    engines = Engines(nobody, framework="tensorflow")
    try:
        engines.prewarm()
        engines._ground.ensure()
        parent = engines._ground.parents.ready("tensorflow")
        parent.warmed.wait(120)
        alone_mib = pss_mib(parent.pid)
        began = time.perf_counter()
        ids = engines.start(n)
        found = engines.call(ids, "bench_tensorflow_start:version")
        seconds = time.perf_counter() - began
        assert {backend for _, backend in found.values()} == {"tensorflow"}
        added_mib = (pss_mib(parent.pid) - alone_mib) / n
    finally:
        engines.stop()
    return {"ready_s": seconds, "added_mib": added_mib, "parent_mib": alone_mib}


def measure(way, n):
    command = [sys.executable, __file__, "--one", way, "--engines", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["fresh", "warm"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(globals()[options.one](options.engines)))
        return
    runs = {"fresh": [], "warm": []}
    for _ in range(options.rounds):
        for way, found in runs.items():
            found.append(measure(way, options.engines))
    report(options, runs)


def report(options, runs):
    ready_s = {way: statistics.median(r["ready_s"] for r in found) for way, found in runs.items()}
    added_mib = statistics.median(r["added_mib"] for r in runs["warm"])
    ratio = round(ready_s["warm"] / ready_s["fresh"], 3)
    for way, seconds in ready_s.items():
        print(f"{way:6s} {options.engines} ready after {seconds:.2f} s")
    print(f"warm/fresh = {ratio:.3f}  (goal {RATIO_GOAL}: {verdict(ratio <= RATIO_GOAL)})")
    met = verdict(added_mib <= ADDED_GOAL_MIB)
    print(f"each engine adds {added_mib:.0f} MiB  (goal {ADDED_GOAL_MIB}: {met})")
    goals = {"ratio": RATIO_GOAL, "added_mib": ADDED_GOAL_MIB}
    result = {"what": "TensorFlow engines ready, warm / fresh", "engines": options.engines}
    result |= {"ratio": ratio, "added_mib": round(added_mib, 1)}
    result |= {f"{way}_s": seconds for way, seconds in ready_s.items()}
    print(json.dumps({**result, "goals": goals, "runs": runs}))


def verdict(met):
    return "met" if met else "MISSED"


if __name__ == "__main__":
    main()
