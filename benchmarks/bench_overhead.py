"""Cost of telemetry: `mirrored` on 2 workers with the dashboard on, against a bare torchrun loop.

One torchrun job and one Jupyter kernel live side by side; they train in turn, so that both meet the
same noise. The loop, the model and the data are the same text; the rival's batches are as cheap as
can be. Prints the ratio of steps/s per
pair: median and 90 % interval.

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

# Hidden width and global batch that make a step of about so many milliseconds on two slow cores.
SIZES = {2: (64, 64), 20: (1024, 256)}

LOOP = """
import time, torch
from torch import nn
def build(width):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16384, 64, generator=g)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 10, (16384,), generator=g))
def cycle(loader):
    while True:
        yield from loader
def train(model, optimizer, loss_fn, loader, steps, warm_up=20):
    batches = cycle(loader)
    for i in range(steps + warm_up):
        if i == warm_up:
            began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return steps / (time.perf_counter() - began)
"""

RIVAL = """
import json, os, pathlib, sys, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
folder, width, batch, steps = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:5])
rank, dataset = dist.get_rank(), data()
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
for turn in range(10_000):
    while not (folder / f"go-{turn}").exists():
        if (folder / "end").exists():
            dist.destroy_process_group()
            sys.exit()
        time.sleep(0.02)
    model, optimizer, loss_fn = build(width)
    model = DistributedDataParallel(model)
    loader = Batches(dataset.tensors, batch, rank)
    speed = train(model, optimizer, loss_fn, loader, steps)
    del model
    if rank == 0:
        (folder / "part").write_text(json.dumps(speed))
        (folder / "part").rename(folder / f"done-{turn}")
"""

PREPARE = """%%distributed mirrored --name bench --plot {plot}
model, optimizer, loss_fn = build({width})
loader = torch.utils.data.DataLoader(dataset, batch_size={batch}, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
speed = train(model, optimizer, loss_fn, loader, {steps})
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

    def turn(self, cell: str) -> float:
        self.run(cell)
        self.run("%pull speed --rank 0")
        return float(self.run("print(speed)"))

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

    def turn(self) -> float:
        done = self.folder / f"done-{self.count}"
        (self.folder / f"go-{self.count}").touch()
        self.count += 1
        while not done.exists():
            if self.process.poll() is not None:
                raise RuntimeError("torchrun ended")
            time.sleep(0.02)
        return float(json.loads(done.read_text()))

    def close(self) -> None:
        (self.folder / "end").touch()
        self.process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("--step-ms", type=int, choices=sorted(SIZES), default=2)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one turn")
    parser.add_argument("--plot", default="widget")
    given = parser.parse_args()
    width, batch = SIZES[given.step_ms]
    steps = int(given.seconds * 1000 / given.step_ms)
    cell = PREPARE.format(width=width, batch=batch, steps=steps, plot=given.plot)
    rival, kernel = Torchrun(width, batch, steps), Kernel()
    ours, theirs = [], []
    try:
        for pair in range(given.pairs + 1):
            order = [lambda: theirs.append(rival.turn()), lambda: ours.append(kernel.turn(cell))]
            for turn in order if pair % 2 else reversed(order):
                turn()
    finally:
        kernel.close()
        rival.close()
    report(given.step_ms, ours[1:], theirs[1:])


def report(step_ms: int, ours: list[float], theirs: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, high = statistics.quantiles(ratios, n=20)[0], statistics.quantiles(ratios, n=20)[-1]
    median = statistics.median(ratios)
    real_ms = 1e3 / statistics.median(theirs)
    print(
        f"steps of {real_ms:.2f} ms: ours / torchrun = {median:.3f} "
        f"(90 % of pairs {low:.3f} .. {high:.3f})"
    )
    result = {"ratio": median, "p5": low, "p95": high, "rival_step_ms": real_ms}
    print(json.dumps({"what": f"overhead at {step_ms} ms steps", "pairs": len(ratios), **result}))


if __name__ == "__main__":
    main()
