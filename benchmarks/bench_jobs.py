"""Jobs: what following costs the job and the notebook, and how soon the notebook sees the steps.

    python benchmarks/bench_jobs.py [--pairs 6] [--seconds 8] [--only follow lag computing plain]
    python benchmarks/bench_jobs.py --slurm     submitted to two simulated nodes, until a step shows

follow     a job of two workers, whose steps sleep for 20 ms, followed by a real kernel that draws
           the dashboard, and not followed, in turns of the same job: the ratio of its steps/s; and
           the share of a core that the kernel takes
lag        from a step's end to its row in `run.history`: through the job's folder, through ssh (a
           stand-in that starts the same reader here), and as marked lines of its output
computing  the same as `follow` if both workers compute, on as many cores as there are workers
plain      steps/s of a recorded job against the script of the same plan without Workbench
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jupyter_client.manager import KernelManager

import workbench as wb
from workbench.jobs.control import Order, give
from workbench.shared.record import RECORD

GOALS = {"ratio": 0.99, "cpu_share": 0.02, "lag_s": 2.0, "after_start_s": 15.0}
"""Of all but workers that compute on every core, and plain jobs: these are for information."""
BEGIN_S = 120.0
SETTLE_S = 1.0
WIDTH, BATCH, WARM_UP = 1024, 256, 20
LOOP = """
import time, torch
from torch import nn
layers = [nn.Linear(64, {width}), nn.Tanh(), nn.Linear({width}, {width}), nn.Tanh()]
model = nn.Sequential(*layers, nn.Linear({width}, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(8192, 64), torch.randint(0, 10, (8192,)))
loader = torch.utils.data.DataLoader(data, batch_size={batch}, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
done, began = 0, 0.0
while done < {steps}:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        time.sleep({sleep_s})
        optimizer.step()
        done += 1
        if done == {warm_up}:
            began = time.perf_counter()
        if done == {steps}:
            break
if rank == 0:
    print("RATE", ({steps} - {warm_up}) / (time.perf_counter() - began), flush=True)
"""
SLEEPS = {"width": 16, "batch": 32, "sleep_s": 0.02}
COMPUTES = {"width": WIDTH, "batch": BATCH, "sleep_s": 0.0}
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
exec sh -c "$*"
"""
FOLLOW = """
import threading, time
import workbench as wb
from ipywidgets.widgets.widget import _instances
from workbench.views.live.frames import Dashboard
lags = []
def follow(place):
    global run, lags, append
    lags = []
    run = wb.follow(place)
    for one in list(_instances.values()):
        if isinstance(one, Dashboard):
            one._receive(None, {"type": "hello"}, [])  # as a browser does
    append = run.history.append
    def heard(rows):
        now = time.perf_counter()  # of the same machine as the job's
        lags.extend(float(now - end_s) for end_s in rows["end_s"])
        append(rows)
    run.history.append = heard
def leave():
    run.close()
    for one in threading.enumerate():
        if one.name == "workbench-follow":
            one.join(60)
"""


class Follower:
    """A Jupyter kernel that follows, as a notebook's does."""

    def __init__(self, folder: Path) -> None:
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        self.manager = KernelManager()
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=BEGIN_S)
        self.run("%load_ext workbench" + FOLLOW)

    def run(self, code: str) -> str:
        """Run code; return what it printed."""
        printed: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                raise RuntimeError("\n".join(content["traceback"]))

        self.client.execute_interactive(code, output_hook=hear, timeout=BEGIN_S)
        return "".join(printed)

    def cpu_s(self) -> float:
        """Return the processor time that the kernel has taken."""
        return float(self.run("print(time.process_time())"))

    def follow(self, place: str | Sequence[str]) -> None:
        """Follow a job; return when all its records have arrived."""
        self.run(f"follow({place!r})")
        end = time.monotonic() + BEGIN_S
        while int(self.run("print(len(lags))")) == 0:
            if time.monotonic() > end:
                raise RuntimeError(f"no row came from {place}")
            time.sleep(0.1)
        time.sleep(SETTLE_S)

    def leave(self) -> None:
        """Stop following; the job continues."""
        self.run("leave()")
        time.sleep(SETTLE_S)

    def lags(self, seconds: float) -> list[float]:
        """Return how late each row came, for the given time."""
        self.run("lags.clear()")
        time.sleep(seconds)
        return json.loads(self.run("print(list(lags))"))

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@contextlib.contextmanager
def job(folder: Path, name: str, **about: Any) -> Iterator[Path]:
    """Start a job under torchrun that trains until it is stopped; yield its run's folder."""
    lines = bool(about.pop("lines", False))
    where = wb.job(LOOP.format(**about, steps=10**9, warm_up=WARM_UP), folder / name,
                   strategy="mirrored", workers=2)  # fmt: skip
    run = where / "runs" / "1"
    with started(where, WORKBENCH_LOG_LINES="1" if lines else "") as process:
        end = time.monotonic() + BEGIN_S
        while len(rows_of(run)) < WARM_UP:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((where / "out.txt").read_text()[-3000:])
            time.sleep(0.1)
        yield run
        give(run, Order("stop"))
        process.wait(60)


@contextlib.contextmanager
def started(folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job folder's processes as its README says; what it prints is in `out.txt`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **{k: v for k, v in more.items() if v}}
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(
            [*command, "--nproc-per-node=2", "train.py"],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=env,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def rows_of(run: Path) -> np.ndarray[Any, Any]:
    """Return the rows of rank 0 that are already written."""
    path = run / "records-rank0.bin"
    if not path.exists():
        return np.zeros(0, RECORD)
    packed = path.read_bytes()
    return np.frombuffer(packed[: len(packed) // RECORD.itemsize * RECORD.itemsize], RECORD)


def rate(run: Path, began_s: float, ended_s: float) -> float:
    """Return a job's steps/s between two moments."""
    end_s = rows_of(run)["end_s"]
    inside = end_s[(end_s > began_s) & (end_s <= ended_s)]
    return float((len(inside) - 1) / (inside[-1] - inside[0]))


def follow_turns(
    run: Path, follower: Follower, pairs: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return steps/s and the kernel's share of a core, followed and not, in turns."""
    spans: dict[str, list[tuple[float, float]]] = {"followed": [], "alone": []}
    shares: dict[str, list[float]] = {"followed": [], "alone": []}
    for pair in range(pairs):
        for way in ("followed", "alone") if pair % 2 else ("alone", "followed"):
            if way == "followed":
                follower.follow(str(run.parents[1]))
            before, began = follower.cpu_s(), time.perf_counter()
            time.sleep(seconds)
            ended, after = time.perf_counter(), follower.cpu_s()
            spans[way].append((began, ended))
            shares[way].append((after - before) / (ended - began))
            if way == "followed":
                follower.leave()
    time.sleep(SETTLE_S)  # the last rows are written
    return {way: [rate(run, *one) for one in found] for way, found in spans.items()}, shares


def tell_follow(what: str, about: dict[str, Any], given: argparse.Namespace, base: Path) -> None:
    """Measure and print what following costs."""
    follower = Follower(base)
    try:
        with job(base, what.split()[0], **about) as run:
            rates, shares = follow_turns(run, follower, given.pairs, given.seconds)
    finally:
        follower.close()
    ratios = [a / b for a, b in zip(rates["followed"], rates["alone"], strict=True)]
    ratio, share = statistics.median(ratios), statistics.median(shares["followed"])
    print(
        f"{what}: {statistics.median(rates['alone']):.1f} steps/s alone; followed / alone "
        f"{ratio:.4f} ({min(ratios):.4f} .. {max(ratios):.4f}); kernel {share:.2%} of a core, "
        f"{statistics.median(shares['alone']):.2%} when it follows nothing"
    )
    idle = statistics.median(shares["alone"])
    goals = ["ratio", "cpu_share"] if about is SLEEPS else []
    tell(what, goals, ratio=ratio, ratio_least=min(ratios), ratio_most=max(ratios), cpu_share=share,
         idle_share=idle, steps_per_s=rates, shares=shares)  # fmt: skip


def tell_lag(given: argparse.Namespace, base: Path) -> None:
    """Measure and print how late rows come, by each kind of place."""
    follower = Follower(base)
    try:
        with job(base, "lag", **SLEEPS, lines=True) as run:
            where = run.parents[1]
            places: dict[str, str | list[str]] = {
                "folder": str(where),
                "ssh": f"ssh://here{where}",
                "lines": ["tail", "-n", "+1", "-f", str(where / "out.txt")],
            }
            for name, place in places.items():
                follower.follow(place)
                lags = sorted(follower.lags(given.seconds))
                follower.leave()
                median, most = statistics.median(lags), lags[-1]
                late = lags[int(0.95 * (len(lags) - 1))]
                print(f"lag, {name}: median {median:.2f} s, 95 % {late:.2f} s, most {most:.2f} s")
                tell(f"lag of a row, {name}", ["lag_s"], lag_s=median, lag_s_p95=late,
                     lag_s_most=most, rows=len(lags))  # fmt: skip
    finally:
        follower.close()


def tell_plain(given: argparse.Namespace, base: Path) -> None:
    """Measure and print recorded jobs against plain ones, in turns."""
    cell = LOOP.format(**COMPUTES, steps=WARM_UP + given.steps, warm_up=WARM_UP)
    for allreduce in ("backend", "auto"):
        rates: dict[str, list[float]] = {"recorded": [], "plain": []}
        folders = {
            way: wb.job(cell, base / f"{way}-{allreduce}", strategy="mirrored", workers=2,
                        options={"allreduce": allreduce}, plain=way == "plain")
            for way in rates
        }  # fmt: skip
        for pair in range(given.pairs):
            for way in list(rates)[:: 1 if pair % 2 else -1]:
                with started(folders[way]) as process:
                    process.wait(600)
                printed = (folders[way] / "out.txt").read_text()
                said = [line for line in printed.splitlines() if "RATE" in line]
                if not said:
                    raise RuntimeError(printed[-3000:])
                rates[way].append(float(said[-1].split()[-1]))
        ratios = [a / b for a, b in zip(rates["recorded"], rates["plain"], strict=True)]
        print(
            f"allreduce={allreduce}: {statistics.median(rates['recorded']):.1f} steps/s recorded, "
            f"{statistics.median(rates['plain']):.1f} plain: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f})"
        )
        tell(f"recorded / plain job, allreduce={allreduce}", ratio=statistics.median(ratios),
             ratio_least=min(ratios), ratio_most=max(ratios), steps_per_s=rates)  # fmt: skip


def tell_slurm(given: argparse.Namespace) -> None:
    """Measure and print how long it takes from `wb.submit` to a step in the notebook's history."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hosts.local_slurm import LocalSlurm
    from hosts.simulated_hosts import SimulatedHosts

    found: dict[str, list[float]] = {"first_step_s": [], "after_start_s": []}
    cell = LOOP.format(**SLEEPS, steps=10**9, warm_up=WARM_UP)
    with SimulatedHosts() as hosts:
        os.environ["PATH"] = hosts.environment["PATH"]
        slurm = LocalSlurm(hosts)
        slurm.up()
        os.environ["SLURM_CONF"] = slurm.environment["SLURM_CONF"]
        for turn in range(given.pairs):
            folder = wb.job(cell, hosts.shared / f"job-{turn}", strategy="mirrored", workers=2)
            began = time.time()
            handed = wb.submit(folder, on="slurm", nodes=2, follow=False)
            run = wb.follow(handed, plot="off")
            while run.snapshot().step < 1:
                if run.is_over:
                    raise RuntimeError(f"{run.error}\n{handed.logs(50)}")
                time.sleep(0.05)
            now = time.time()
            found["first_step_s"].append(now - began)
            found["after_start_s"].append(now - (handed.look().began_s or began))
            run.stop()
            run.wait(60)
            handed.wait(60)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(
        f"Slurm, two nodes: a step shows {medians['first_step_s']:.1f} s after wb.submit, "
        f"{medians['after_start_s']:.1f} s after the job's start"
    )
    tell("submit to first step, Slurm, two nodes", ["after_start_s"], **medians, turns=found)


def tell(what: str, goals: Sequence[str] = (), **figures: Any) -> None:
    """Print a result as JSON."""
    wanted = {name: GOALS[name] for name in goals}
    print(json.dumps({"what": what, **figures, "goals": wanted, "load": os.getloadavg()[0]}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    kinds = ["follow", "lag", "computing", "plain"]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one turn")
    parser.add_argument("--steps", type=int, default=300, help="of a recorded, and a plain, job")
    parser.add_argument("--slurm", action="store_true", help="over two simulated nodes; needs root")
    given = parser.parse_args()
    if given.slurm:
        tell_slurm(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if "follow" in given.only:
            tell_follow("followed job whose steps sleep", SLEEPS, given, base)
        if "lag" in given.only:
            tell_lag(given, base)
        if "computing" in given.only:
            tell_follow("computing job that is followed", COMPUTES, given, base)
        if "plain" in given.only:
            tell_plain(given, base)


if __name__ == "__main__":
    main()
