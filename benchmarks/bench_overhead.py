"""Cost of telemetry: `mirrored` on 2 workers with the dashboard on, against the same loop without.

Three ways train alternately, so other work disturbs all of them equally. The loop, the model, the
data and (with `--allreduce backend`) the all-reduce are the same:

on        `wb.prepare` under `%%distributed mirrored`, recorded and drawn
off       DistributedDataParallel over gloo, in a plain cell on the same engines, without recording
torchrun  DistributedDataParallel over gloo, in a separate torchrun job

Prints the ratios of steps/s, on / off and on / torchrun: median and 90 % interval over the rounds.
It also prints the CPU time of the training thread per step. This time shows the cost of recording
if other work disturbs the wall time too much. `--allreduce auto` is the default for users. With it,
the gain of the faster all-reduce is part of the ratio.

    python benchmarks/bench_overhead.py --step-ms 2 --pairs 15
    python benchmarks/bench_overhead.py --step-ms 20 --pairs 15
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from jupyter_client.manager import start_new_kernel

# What on / off must reach, by the length of a step in milliseconds.
GOALS = {2: 0.98, 20: 0.995}
# Hidden width and global batch that make a step of about so many milliseconds on two slow cores.
SIZES = {2: (64, 64), 20: (1024, 256)}

LOOP = """
import time, torch
from torch import nn
# As the strategy sets them.
OPTIONS = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
def build(width):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16384, 64, generator=g)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 10, (16384,), generator=g))
class Batches:
    # A DataLoader collates sample by sample, which `wb.prepare` does not for plain tensors;
    # indexing them directly keeps that difference out of the comparison.
    def __init__(self, tensors, batch, rank):
        self.tensors, self.batch, self.rank = tensors, batch, rank
    def __iter__(self):
        x, y = self.tensors
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        for i in range(0, len(x), self.batch):
            mine = order[i + self.rank : i + self.batch : 2]
            yield x[mine], y[mine]
def cycle(loader):
    while True:
        yield from loader
def train(model, optimizer, loss_fn, loader, steps, warm_up=20):
    batches = cycle(loader)
    for i in range(steps + warm_up):
        if i == warm_up:
            began, worked = time.perf_counter(), time.thread_time()
        x, y = next(batches)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    worked = time.thread_time() - worked
    return steps / (time.perf_counter() - began), 1e6 * worked / steps
"""

RIVAL = """
import json, os, pathlib, sys, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
folder, width, batch, steps = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
rank, dataset = dist.get_rank(), data()
for turn in range(10_000):
    while not (folder / f"go-{turn}").exists():
        if (folder / "end").exists():
            dist.destroy_process_group()
            sys.exit()
        time.sleep(0.02)
    model, optimizer, loss_fn = build(width)
    model = DistributedDataParallel(model, **OPTIONS)
    loader = Batches(dataset.tensors, batch, rank)
    speed = train(model, optimizer, loss_fn, loader, steps)
    del model
    if rank == 0:
        (folder / "part").write_text(json.dumps(speed))
        (folder / "part").rename(folder / f"done-{turn}")
"""

ON = """%%distributed mirrored --name bench --plot {plot} -o allreduce={allreduce}
model, optimizer, loss_fn = build({width})
loader = torch.utils.data.DataLoader(dataset, batch_size={batch}, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
speed = train(model, optimizer, loss_fn, loader, {steps})
"""
OFF = """%%distributed
torch.set_num_threads(1)
model, optimizer, loss_fn = build({width})
ddp = nn.parallel.DistributedDataParallel(model, **OPTIONS)
speed = train(ddp, optimizer, loss_fn, Batches(dataset.tensors, {batch}, rank), {steps})
del ddp
"""


class Kernel:
    """A Jupyter kernel with a cluster of two engines."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()
        self.run("%load_ext workbench\nimport workbench as wb")
        self.run("%cluster start 2 --devices cpu")
        self.run("%%distributed\n" + LOOP + "\ndataset = data()")

    def run(self, code: str) -> str:
        printed: list[str] = []

        def hear(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                raise RuntimeError("\n".join(content["traceback"]))

        self.client.execute_interactive(code, output_hook=hear, timeout=600)
        return "".join(printed)

    def turn(self, cell: str) -> tuple[float, float]:
        self.run(cell)
        self.run("%pull speed --rank 0")
        steps_per_s, cpu_us = self.run("print(*speed)").split()
        return float(steps_per_s), float(cpu_us)

    def close(self) -> None:
        self.run("%cluster stop")
        self.client.stop_channels()
        self.manager.shutdown_kernel()


class Torchrun:
    """A torchrun job of two workers that trains when told to."""

    def __init__(self, width: int, batch: int, steps: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        script = self.folder / "rival.py"
        script.write_text(LOOP + RIVAL)
        self.count = 0
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--standalone",
        ]
        self.process = subprocess.Popen(
            [*command, str(script), str(self.folder), *map(str, (width, batch, steps))],
            stderr=subprocess.DEVNULL,
        )

    def turn(self) -> tuple[float, float]:
        done = self.folder / f"done-{self.count}"
        (self.folder / f"go-{self.count}").touch()
        self.count += 1
        while not done.exists():
            if self.process.poll() is not None:
                raise RuntimeError("torchrun ended")
            time.sleep(0.02)
        steps_per_s, cpu_us = json.loads(done.read_text())
        return steps_per_s, cpu_us

    def close(self) -> None:
        (self.folder / "end").touch()
        self.process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("--step-ms", type=int, choices=sorted(SIZES), default=2)
    parser.add_argument("--pairs", type=int, default=15, help="rounds of the three ways")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one turn")
    parser.add_argument("--plot", default="widget")
    parser.add_argument("--allreduce", choices=["backend", "auto"], default="backend")
    given = parser.parse_args()
    width, batch = SIZES[given.step_ms]
    steps = int(given.seconds * 1000 / given.step_ms)
    words = {"width": width, "batch": batch, "steps": steps}
    on = ON.format(**words, plot=given.plot, allreduce=given.allreduce)
    off = OFF.format(**words)
    rival, kernel = Torchrun(width, batch, steps), Kernel()
    ways = {
        "on": lambda: kernel.turn(on),
        "off": lambda: kernel.turn(off),
        "torchrun": rival.turn,
    }
    turns: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    names = list(ways)
    try:
        for turn in range(given.pairs + 1):  # the first warms up
            for way in names[turn % 3 :] + names[: turn % 3]:
                turns[way].append(ways[way]())
    finally:
        kernel.close()
        rival.close()
    report(given.step_ms, given.allreduce, {way: found[1:] for way, found in turns.items()})


def report(step_ms: int, allreduce: str, turns: dict[str, list[tuple[float, float]]]) -> None:
    speeds = {way: [speed for speed, _ in found] for way, found in turns.items()}
    cpu_us = {way: [spent for _, spent in found] for way, found in turns.items()}
    step = 1e3 / statistics.median(speeds["off"])
    result: dict[str, object] = {
        "what": f"telemetry at {step_ms} ms steps",
        "allreduce": allreduce,
        "pairs": len(speeds["on"]),
        "off_step_ms": step,
        "goal": GOALS[step_ms],
        "steps_per_s": speeds,
        "cpu_us": cpu_us,
    }
    for base in ("off", "torchrun"):
        ratios = sorted(a / b for a, b in zip(speeds["on"], speeds[base], strict=True))
        median = statistics.median(ratios)
        low, high = ratios[round(0.05 * (len(ratios) - 1))], ratios[round(0.95 * (len(ratios) - 1))]
        name = "ratio" if base == "off" else "torchrun_ratio"
        result |= {name: median, f"{name}_p5": low, f"{name}_p95": high}
        goal = GOALS[step_ms]
        verdict = f", goal {goal}: {'met' if median >= goal else 'MISSED'}" if base == "off" else ""
        print(
            f"steps of {step:.2f} ms: on / {base} = {median:.3f} "
            f"(90 % of rounds {low:.3f} .. {high:.3f}{verdict})"
        )
    median_us = {way: statistics.median(found) for way, found in cpu_us.items()}
    result["cpu_us_more"] = more_us = median_us["on"] - median_us["off"]
    print(
        f"CPU time of rank 0's training thread: {median_us['on']:.0f} us a step on, "
        f"{median_us['off']:.0f} off: {more_us:+.0f} us"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
