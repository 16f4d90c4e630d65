"""Memory of N torch engines after one training step: forked from a warm parent, and fresh.

The script compares the proportional set size (PSS: shared pages are divided among the processes
that share them). Ours includes the warm parent, ipyparallel's includes its nannies. Controllers are
not counted.

    python benchmarks/bench_memory.py [--engines 8]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

GOAL = 0.35
MB = 1e6


def train_one_step():
    """Do one optimizer step (runs on the engine): allocates the memory of a training."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.nn.functional.cross_entropy(model(torch.ones(32, 64)), torch.zeros(32).long())
    loss.backward()
    optimizer.step()
    return loss.item()


def pss_bytes(roots):
    """Return the PSS of processes and all their descendants."""
    family = {}
    for root in roots:
        process = psutil.Process(root)
        for member in (process, *process.children(recursive=True)):
            family[member.pid] = member
    return sum(member.memory_full_info().pss for member in family.values())


def ours(n):
    from workbench.cluster.engines import Engines, Listeners

    sys.path.append(str(Path(__file__).parent))
    engines = Engines(Listeners(message=lambda *_: None, death=lambda *_: None))
    try:
        engines.prewarm()
        engines._ground.ensure()
        engines._ground.warm.warmed.wait(60)
        began = time.perf_counter()
        ids = engines.start(n)
        engines.call(ids, "bench_memory:train_one_step", timeout_s=120)
        seconds = time.perf_counter() - began
        total = pss_bytes([engines._ground.warm.pid])  # engines are its children
    finally:
        engines.stop()
    return {"pss_bytes": total, "start_and_step_s": round(seconds, 2)}


def fresh(n):
    import ipyparallel

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        cluster = ipyparallel.Cluster(n=n, profile_dir=folder, log_level=50, engine_timeout=120)
        client = cluster.start_and_connect_sync()
        try:
            client[:].apply_sync(train_one_step)
            seconds = time.perf_counter() - began
            total = pss_bytes([one.pid for one in cluster.engine_set.launchers.values()])
        finally:
            client.close()
            cluster.stop_cluster_sync()
    return {"pss_bytes": total, "start_and_step_s": round(seconds, 2)}


def measure(way, n):
    command = [sys.executable, __file__, "--one", way, "--engines", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--one", choices=["ours", "fresh"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(globals()[options.one](options.engines)))
        return
    found = {way: measure(way, options.engines) for way in ("fresh", "ours")}
    ratio = round(found["ours"]["pss_bytes"] / found["fresh"]["pss_bytes"], 3)
    for way, one in found.items():
        each = one["pss_bytes"] / options.engines / MB
        print(f"{way:6s} {one['pss_bytes'] / MB:7.0f} MB in all, {each:5.0f} MB an engine")
    verdict = "met" if ratio <= GOAL else "MISSED"
    print(f"ours/fresh = {ratio:.3f}  (goal {GOAL:.2f}: {verdict})")
    result = {"what": f"memory of {options.engines} torch engines", "ratio": ratio, "goal": GOAL}
    sizes = {f"{way}_pss_mb": one["pss_bytes"] / MB for way, one in found.items()}
    print(json.dumps({**result, **sizes, "runs": found}))


if __name__ == "__main__":
    main()
