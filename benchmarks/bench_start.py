"""How long until N CPU engines are ready: torch imported, gloo group up, one all-reduce done.

Three ways, alternating, each in a separate process:

default  ipyparallel with its defaults: `Cluster(n=N)`, `import torch` on every engine, the group
cold     ours, with nothing started before
warm     ours, after `%load_ext workbench`: controller, client and warm parent are up

    python benchmarks/bench_start.py [--engines 4] [--rounds 3]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOALS = {"cold": 0.30, "warm": 0.08}


def join_group(host, port, rank, world_size, hosting):
    """Join the gloo group and check that it works (runs on the engine)."""
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(host, port, is_master=hosting, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("bench", store), rank=rank, world_size=world_size
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def import_torch():
    import torch

    return torch.__version__


class Clock:
    """Seconds since the start, by stage."""

    def __init__(self):
        self.began, self.stages = time.perf_counter(), {}

    def __call__(self, stage):
        self.stages[stage] = round(time.perf_counter() - self.began, 3)


def ours(n, *, warm):
    from workbench.cluster.engines import Engines, Listeners

    sys.path.append(str(Path(__file__).parent))
    engines = Engines(Listeners(message=lambda *_: None, death=lambda *_: None))
    try:
        if warm:
            engines.prewarm()
            engines._ground.ensure()
            engines._ground.warm.warmed.wait(60)
        clock = Clock()
        ids = engines.start(n)
        clock("engines")
        host, port = engines.store()
        sums = engines.call(ids, "bench_start:join_group", lambda i: (host, port, i, n, False))
        clock("group")
        assert set(sums.values()) == {float(n)}
    finally:
        engines.stop()
    return clock.stages


def default(n):
    import ipyparallel

    with tempfile.TemporaryDirectory() as folder, free_port() as port:
        clock = Clock()
        cluster = ipyparallel.Cluster(n=n, profile_dir=folder, log_level=50)
        client = cluster.start_and_connect_sync()
        try:
            clock("engines")
            client[:].apply_sync(import_torch)
            clock("torch")
            results = [
                client[i].apply_async(join_group, "127.0.0.1", port, i, n, i == 0) for i in range(n)
            ]
            assert {result.get() for result in results} == {float(n)}
            clock("group")
        finally:
            client.close()
            cluster.stop_cluster_sync()
    return clock.stages


class free_port:  # noqa: N801 - used as a function
    def __enter__(self):
        import socket

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]

    def __exit__(self, *_):
        pass


def measure(way, n):
    command = [sys.executable, __file__, "--one", way, "--engines", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["default", "cold", "warm"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way = options.one
        stages = (
            default(options.engines)
            if way == "default"
            else ours(options.engines, warm=way == "warm")
        )
        print(json.dumps(stages))
        return
    runs = {"default": [], "cold": [], "warm": []}
    for _ in range(options.rounds):
        for way, found in runs.items():
            found.append(measure(way, options.engines))
    report(options, runs)


def report(options, runs):
    median = {way: statistics.median(r["group"] for r in found) for way, found in runs.items()}
    ratios = {way: round(median[way] / median["default"], 3) for way in GOALS}
    for way, found in runs.items():
        stages = {k: statistics.median(r[k] for r in found) for k in found[0]}
        text = "  ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
        print(f"{way:8s} {text}")
    for way, goal in GOALS.items():
        verdict = "met" if ratios[way] <= goal else "MISSED"
        print(f"{way}/default = {ratios[way]:.3f}  (goal {goal:.2f}: {verdict})")
    what = f"{options.engines} torch engines ready"
    flat = {f"{way}_s": seconds for way, seconds in median.items()}
    flat |= {f"{way}_ratio": ratio for way, ratio in ratios.items()}
    print(json.dumps({"what": what, **flat, "goals": GOALS, "runs": runs}))


if __name__ == "__main__":
    main()
