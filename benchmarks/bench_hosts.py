"""Two hosts: how long until they train together, and how fast, with torchrun alone.

The hosts are simulated on this machine, and Slurm spans them (tests/hosts): needs root, ssh and
Slurm. gloo on the CPU, a small model. Two figures, each a line of JSON:

first_step_s  from `sbatch` of a job on two nodes to the end of its first averaged step, as the
              job's rank 0 wrote the time down; `imports_s` of them is the slowest import of torch
steps_per_s   DistributedDataParallel over both hosts, torchrun started on each by ssh: the median
              of several stretches of steps, with the least and the most

    python benchmarks/bench_hosts.py            5 rounds
    python benchmarks/bench_hosts.py --short    one, of few steps
    python benchmarks/bench_hosts.py --delay-ms 5 --mbit 100    the second host behind a slow link
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def torchrun(workers: int, node: str = "") -> str:
    """Return the start of torchrun's line on a host of two."""
    return (
        f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node={workers} {node} "
        f"--master-addr={ADDRESSES[FIRST]} --master-port={PORT}"
    )


def awaited(answer: Path, over: Any) -> dict[str, Any]:
    """Wait for what a job's rank 0 writes.

    Args:
        over: Says with what a job has ended; "" while it goes on.
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
    """Hand in a job and return the seconds until its first step is over."""
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
        starts = [by_slurm(slurm, hosts.shared, str(job), workers) for _ in range(rounds)]
        times = [one["first_step_s"] for one in starts]
        print(json.dumps({
            "what": f"sbatch to the first averaged step, torchrun, 2 hosts x {workers}, gloo",
            "first_step_s": round(statistics.median(times), 3),
            "least_s": round(min(times), 3), "most_s": round(max(times), 3),
            "imports_s": round(statistics.median(one["imports_s"] for one in starts), 3),
            "rounds": rounds,
        }), flush=True)  # fmt: skip
        with contextlib.ExitStack() as stack:
            if given.delay_ms:
                stack.enter_context(hosts.delayed(SECOND, given.delay_ms, given.mbit))
            found = by_ssh(hosts, str(job), workers, max(3, rounds), steps)
        link = f", {given.delay_ms:g} ms and {given.mbit:g} Mbit/s" if given.delay_ms else ""
        print(json.dumps({
            "what": f"DDP over two hosts by ssh, torchrun, 2 hosts x {workers}, gloo{link}",
            "steps_per_s": round(statistics.median(found["rates"]), 2),
            "least": round(min(found["rates"]), 2), "most": round(max(found["rates"]), 2),
            "workers": found["workers"], "steps": steps,
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
