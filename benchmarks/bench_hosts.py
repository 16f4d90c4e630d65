"""Two hosts: the time until they train together, and their speed, compared with torchrun.

The hosts are simulated on this machine, and Slurm spans them (tests/hosts): needs root, ssh and
Slurm. Both sides use gloo on the CPU, a small model and the same loop, and run alternately. Two
figures:

first_step_s  from the start to the end of the first averaged step, as rank 0 wrote the time down:
              `sbatch` of a job on two nodes with torchrun, against `wb.Cluster(launcher="slurm")`
              and a run under `mirrored`; `imports_s` of them is the slowest import of torch
steps_per_s   over both hosts by ssh: DistributedDataParallel under torchrun, against `mirrored`
              with telemetry on: the median of several series of steps, the smallest and the largest

Each pair is followed by a line with Workbench's share of torchrun (`ratio`).

    python benchmarks/bench_hosts.py            5 rounds
    python benchmarks/bench_hosts.py --short    one, of few steps
    python benchmarks/bench_hosts.py --delay-ms 5 --mbit 100    the second host behind a slow link
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import workbench as wb

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from hosts.local_slurm import SLURM_NEEDS, LocalSlurm  # noqa: E402
from hosts.simulated_hosts import ADDRESSES, SimulatedHosts, missing  # noqa: E402

FIRST, SECOND = ADDRESSES
PORT = 29511
LIMIT_S = 60.0
JOB = """
import json, os, sys, time
began = time.time()
import torch
import torch.distributed as dist
from torch import nn
imported = time.time()
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
width, batch, stretches, steps = map(int, sys.argv[2:])
model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model = nn.parallel.DistributedDataParallel(model)
inputs = torch.randn(batch // size, 64)
labels = torch.randint(0, 10, (batch // size,))
def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
step()
first, times = time.time(), []
for _ in range(stretches):
    start = time.perf_counter()
    for _ in range(steps):
        step()
    times.append(time.perf_counter() - start)
total = sum(p.detach().sum() for p in model.parameters()).reshape(1)
alike = [torch.zeros(1) for _ in range(size)]
dist.all_gather(alike, total)
spent = [torch.zeros(1) for _ in range(size)]
dist.all_gather(spent, torch.tensor([imported - began]))
if rank == 0:
    about = {"first": first, "imports_s": float(max(spent)), "times": times, "workers": size,
             "alike": all(torch.equal(alike[0], one) for one in alike)}
    with open(sys.argv[1] + ".part", "w") as file:
        json.dump(about, file)
    os.rename(sys.argv[1] + ".part", sys.argv[1])
dist.destroy_process_group()
"""
BATCH = """#!/bin/sh
export OMP_NUM_THREADS=1
srun --ntasks-per-node=1 sh -c '{torchrun} --node-rank=$SLURM_NODEID {job}'
"""


CELL = """
import json, os, time
import torch
from torch import nn
torch.manual_seed(0)
width, batch, stretches, steps = {sizes}
model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = wb.prepare(model, optimizer)
inputs = torch.randn(batch // world_size, 64)
labels = torch.randint(0, 10, (batch // world_size,))
def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
step()
first, times = time.time(), []
for _ in range(stretches):
    start = time.perf_counter()
    for _ in range(steps):
        step()
    times.append(time.perf_counter() - start)
total = sum(p.detach().sum() for p in model.parameters()).reshape(1)
alike = [torch.zeros(1) for _ in range(world_size)]
torch.distributed.all_gather(alike, total)
if rank == 0:
    about = {{"first": first, "times": times,
              "alike": all(torch.equal(alike[0], one) for one in alike)}}
    with open({answer!r} + ".part", "w") as file:
        json.dump(about, file)
    os.rename({answer!r} + ".part", {answer!r})
"""


def torchrun(workers: int, node: str = "") -> str:
    """Return the start of torchrun's line on a host of two."""
    return (
        f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node={workers} {node} "
        f"--master-addr={ADDRESSES[FIRST]} --master-port={PORT}"
    )


def awaited(answer: Path, over: Any) -> dict[str, Any]:
    """Wait for what a job's rank 0 writes.

    Args:
        over: Returns how a job has ended; "" while it runs.
    """
    end = time.monotonic() + LIMIT_S
    while not answer.exists():
        why = over()
        if why and not answer.exists():
            raise SystemExit(f"The job ended without an answer: {why}")
        if time.monotonic() > end:
            raise SystemExit(f"The job gave no answer within {LIMIT_S:g} s.")
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(answer.read_text())
    if not found["alike"]:
        raise SystemExit("The workers' models differ: their gradients were not averaged.")
    return found


def by_slurm(slurm: LocalSlurm, shared: Path, job: str, workers: int) -> dict[str, float]:
    """Submit a job and return the seconds until its first step is over."""
    answer = shared / f"slurm-{time.time_ns()}.json"
    log = answer.with_suffix(".log")
    script = BATCH.format(torchrun=torchrun(workers), job=f"{job} {answer} 64 64 0 0")
    began = time.time()
    number = slurm.submit(script, "--nodes=2", f"--cpus-per-task={workers}", f"--output={log}")

    def over() -> str:
        state = slurm.state(number)
        return "" if state in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED") else (
            f"{state}\n{log.read_text() if log.exists() else ''}"
        )  # fmt: skip

    found = awaited(answer, over)
    end = time.monotonic() + LIMIT_S
    while slurm.jobs() and time.monotonic() < end:  # the nodes are free for the next round
        time.sleep(0.05)
    return {"first_step_s": found["first"] - began, "imports_s": found["imports_s"]}


def by_ssh(
    hosts: SimulatedHosts, job: str, workers: int, stretches: int, steps: int
) -> dict[str, Any]:
    """Train on both hosts and return the steps per second of each stretch."""
    answer = hosts.shared / f"ssh-{time.time_ns()}.json"
    with contextlib.ExitStack() as stack:
        running = []
        for number, host in enumerate(ADDRESSES):
            line = torchrun(workers, f"--node-rank={number}")
            line = f"OMP_NUM_THREADS=1 {line} {job} {answer} 64 64 {stretches} {steps}"
            log = stack.enter_context(open(hosts.shared / f"ssh-{host}.log", "w+"))
            ssh = subprocess.Popen(
                [str(hosts.bin / "ssh"), host, line],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=hosts.environment,
            )
            stack.callback(ssh.wait)
            running.append((ssh, log.name))

        def over() -> str:
            failed = [Path(log).read_text() for ssh, log in running if ssh.poll()]
            return "\n".join(failed)

        try:
            found = awaited(answer, over)
        except BaseException:
            for ssh, _ in running:
                ssh.kill()
            raise
    return {"workers": found["workers"], "rates": [steps / one for one in found["times"]]}


@contextlib.contextmanager
def surroundings(values: Mapping[str, str]) -> Iterator[None]:
    """Have ssh and Slurm mean the simulated hosts."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def by_workbench(
    shared: Path, launch: Mapping[str, Any], workers: int, stretches: int, steps: int
) -> dict[str, Any]:
    """Start a cluster on both hosts and train: seconds to the first step, and steps per second."""
    answer = shared / f"workbench-{time.time_ns()}.json"
    cell = CELL.format(sizes=f"64, 64, {stretches}, {steps}", answer=str(answer))
    began = time.time()
    with wb.Cluster(2 * workers, **launch) as cluster:
        ready = time.time()
        cluster.run(cell, strategy="mirrored").wait(LIMIT_S)
    found = awaited(answer, lambda: "the run wrote no answer")
    return {
        "first_step_s": found["first"] - began,
        "ready_s": ready - began,
        "workers": 2 * workers,
        "rates": [steps / one for one in found["times"]],
    }


def told(what: str, figure: str, values: Sequence[float], **more: Any) -> float:
    """Print a figure as a line of JSON; return its median."""
    median = statistics.median(values)
    spread = {"least": round(min(values), 3), "most": round(max(values), 3)}
    print(json.dumps({"what": what, figure: round(median, 3), **spread, **more}), flush=True)
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="one round of few steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="per host")
    parser.add_argument("--steps", type=int, default=200, help="of a stretch")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way, of the second host")
    parser.add_argument("--mbit", type=float, default=1000.0, help="of a delayed link")
    given = parser.parse_args()
    rounds, workers, steps = given.rounds, given.workers, given.steps
    if given.short:
        rounds, workers, steps = 1, 1, 20
    if why := missing(SLURM_NEEDS):
        raise SystemExit(why)
    with SimulatedHosts() as hosts, LocalSlurm(hosts) as slurm:
        job = hosts.shared / "job.py"
        job.write_text(JOB)
        torch_starts, our_starts = [], []
        for _ in range(rounds):  # in turns: the machine is not as quiet all the time
            torch_starts.append(by_slurm(slurm, hosts.shared, str(job), workers))
            with surroundings(slurm.environment):
                launch = {"launcher": "slurm", "nodes": 2}
                our_starts.append(by_workbench(hosts.shared, launch, workers, 0, 0))
        where = f"2 hosts x {workers}, gloo"
        imports = round(statistics.median(one["imports_s"] for one in torch_starts), 3)
        firsts = [one["first_step_s"] for one in torch_starts]
        theirs = told(
            f"sbatch to the first averaged step, torchrun, {where}", "first_step_s", firsts,
            imports_s=imports, rounds=rounds,
        )  # fmt: skip
        firsts = [one["first_step_s"] for one in our_starts]
        ours = told(
            f"Slurm to the first averaged step, Workbench, {where}", "first_step_s", firsts,
            ready_s=round(statistics.median(one["ready_s"] for one in our_starts), 3),
        )  # fmt: skip
        ratios = [
            b["first_step_s"] / a["first_step_s"]
            for a, b in zip(torch_starts, our_starts, strict=True)
        ]
        told(
            f"first step, Workbench / torchrun, {where}", "ratio", ratios, of_medians=ours / theirs
        )
        rates: dict[str, list[float]] = {"torchrun": [], "Workbench": []}
        with contextlib.ExitStack() as stack:
            if given.delay_ms:
                stack.enter_context(hosts.delayed(SECOND, given.delay_ms, given.mbit))
            launch = {"launcher": "ssh", "on": ",".join(f"{host}:{workers}" for host in ADDRESSES)}
            pairs = []
            for _ in range(rounds):
                found = by_ssh(hosts, str(job), workers, 3, steps)["rates"]
                with surroundings(hosts.environment):
                    mine = by_workbench(hosts.shared, launch, workers, 3, steps)["rates"]
                rates["torchrun"] += found
                rates["Workbench"] += mine
                pairs.append(statistics.median(mine) / statistics.median(found))
        link = f", {given.delay_ms:g} ms and {given.mbit:g} Mbit/s" if given.delay_ms else ""
        for who, values in rates.items():
            told(f"steps over two hosts by ssh, {who}, {where}{link}", "steps_per_s", values)
        told(f"steps/s, Workbench / torchrun, {where}{link}", "ratio", pairs, steps=steps)


if __name__ == "__main__":
    main()
