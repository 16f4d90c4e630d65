"""Stages of `--gpu-test`: each is a function that runs in a separate process.

Engines run code as a user would write it: cells, and functions that are sent to them. Run by
`children.run`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import gpus
from .children import Child, main

STEP_S = 20.0
"""Time after which an action here counts as hanging."""


ON_ONE = "2 on one GPU"
"""Title of the `Place` in which two workers share a GPU. There gloo sends all messages."""


class Place(NamedTuple):
    """The devices for engines of a stage."""

    title: str
    workers: int
    devices: str


def places(child: Child) -> list[Place]:
    """Return the places of a stage: one subset for one GPU, another for CPUs."""
    device, gpus, quick = child.asked["device"], int(child.asked["gpus"]), child.asked["quick"]
    if device == "cpu":
        return [Place("2 on CPU", 2, "cpu")]
    if gpus >= 2:
        more = [Place("4 GPUs", 4, device)] if gpus >= 4 and not quick else []
        return [Place("2 GPUs", 2, device), *more]
    return [
        Place("1 GPU", 1, device),
        Place(ON_ONE, 2, device),
        Place("2 on CPU", 2, "cpu"),
    ]


@contextlib.contextmanager
def cluster_of(child: Child, place: Place, framework: str = "torch") -> Iterator[Any]:
    """A cluster for a stage; if it is late, the log has its engines' stacks."""
    from ..session.cluster import Cluster

    cluster = Cluster(place.workers, devices=place.devices, framework=framework)
    child.on_late = lambda: print(cluster.stacks(), flush=True)
    try:
        yield cluster
    finally:
        child.on_late = lambda: None
        end(cluster)


def end(cluster: Any) -> None:
    """Stop a cluster; engines that do not end are killed by pid."""
    pids = [engine.pid for engine in cluster.engines]
    stopping = threading.Thread(target=cluster.stop, daemon=True)
    stopping.start()
    stopping.join(10)
    if stopping.is_alive():
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        stopping.join(5)


def cell(cluster: Any, source: str, limit_s: float = STEP_S, **how: Any) -> dict[int, Any]:
    """Run a cell on all engines; return the value of `found` on each.

    Raises:
        TimeoutError: The cell did not end in time.
    """
    task = cluster.execute(source, **how)
    if not task.over.wait(limit_s):
        print(cluster.stacks(), flush=True)
        task.interrupt()
        task.over.wait(limit_s)
        raise TimeoutError(f"the cell did not end within {limit_s:g} s")
    error = task.failure()
    if error is not None:
        raise error
    return {e: values["found"] for e, values in cluster.pull(["found"], task.ids).items()}


# -- what needs no engine --------------------------------------------------------------------------


def surroundings(child: Child) -> None:
    """Record the installed packages and the driver's data."""
    out = Path(child.asked["out"])
    commands = {
        "collect_env.txt": [sys.executable, "-m", "torch.utils.collect_env"],
        "nvidia-smi.xml": ["nvidia-smi", "-q", "-x"],
        "nvidia-topology.txt": ["nvidia-smi", "topo", "-m"],
        "packages.txt": [sys.executable, "-m", "pip", "list", "--format=freeze"],
    }
    for name, command in commands.items():
        said = gpus.said_by(command, 25)
        what = " ".join(Path(part).name for part in command)
        if said:
            (out / name).write_text(said, "utf-8")
            child.say("ok", f"surroundings.{name.partition('.')[0]}", what, f"in {name}")
        else:
            child.say(
                "unknown",
                f"surroundings.{name.partition('.')[0]}",
                what,
                "this command printed nothing",
            )


def devices(child: Child) -> None:
    """Compare products and convolutions on each device with those on the CPU."""
    import torch

    found = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    child.say("ok", "devices.torch", "torch", found, torch=torch.__version__)
    names = [child.asked["device"]]
    if names == ["cuda"]:
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if not names:
            child.say("fail", "devices.count", "torch sees the GPUs", "torch sees no GPU",
                      "run `workbench doctor` to find the cause")  # fmt: skip
    for name in names:
        what = f"matrix products and convolutions on {name}"
        with child.trying(f"devices.computes.{name}", what):
            worst, seconds = compute(torch, name)
            title = torch.cuda.get_device_name(name) if name.startswith("cuda") else name
            child.say(
                "ok" if worst < 1e-9 else "fail", f"devices.computes.{name}",
                f"matrix products and convolutions on {title}",
                f"largest relative difference from the CPU's results: {worst:.1e}; the computation "
                f"took {seconds:.2f} s, including the time to initialise the device",
                difference=worst,
            )  # fmt: skip


def compute(torch: Any, name: str) -> tuple[float, float]:
    """Return the largest relative difference from the CPU's results, and the seconds."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 256, generator=generator, dtype=torch.float64)
    image = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    kernel = torch.randn(8, 3, 3, 3, generator=generator, dtype=torch.float64)
    began = time.perf_counter()
    pairs = [
        (a @ a, (a.to(name) @ a.to(name)).cpu()),
        (
            torch.nn.functional.conv2d(image, kernel),
            torch.nn.functional.conv2d(image.to(name), kernel.to(name)).cpu(),
        ),
    ]
    seconds = time.perf_counter() - began
    worst = max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)
    return worst, seconds


GROUP = """
import os, sys, time, torch, torch.distributed as dist
rank, world, device, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world))
backend = "nccl" if device == "cuda" else "gloo"
if device == "cuda":
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
elif device != "cpu":
    device = "cpu"
dist.init_process_group(backend)
x = torch.full((1 << 20,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x[0].item() == sum(range(1, world + 1)), x[0]
times = []
for _ in range(10):
    x.fill_(1.0)
    if device != "cpu": torch.cuda.synchronize()
    began = time.perf_counter()
    dist.all_reduce(x)
    if device != "cpu": torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
assert x[-1].item() == world
if rank == 0:
    print("MEDIAN_S", sorted(times)[5], flush=True)
dist.destroy_process_group()
"""


def group(child: Child) -> None:
    """Two processes (one, on one GPU) create a group and sum, without Workbench."""
    device, gpus = child.asked["device"], int(child.asked["gpus"])
    world = min(2, gpus) if device == "cuda" else 2
    out = Path(child.asked["out"])
    port = str(free_port())
    env = {**os.environ, "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    log = out / "nccl-debug.txt" if device == "cuda" else out / "group.txt"
    with log.open("w") as file:
        workers = [
            subprocess.Popen([sys.executable, "-c", GROUP, str(rank), str(world), device, port],
                             stdout=file, stderr=file, env=env)
            for rank in range(world)
        ]  # fmt: skip
        codes = [worker.wait() for worker in workers]
    said = log.read_text("utf-8", "replace")
    what = f"all-reduce of {world} worker{'s' if world > 1 else ''} on {device}, 4 MB"
    if any(codes):
        last = " ".join(said[-300:].split())
        child.say("fail", "group.all_reduce", what, f"exit statuses {codes}: {last}",
                  f"read {log.name} in the report's folder")  # fmt: skip
        return
    median_s = float(said.partition("MEDIAN_S ")[2].split()[0])
    child.say("ok", "group.all_reduce", what, f"correct sums, {1e3 * median_s:.2f} ms",
              f"{log.name} shows the transport that NCCL used" if device == "cuda" else "",
              median_ms=1e3 * median_s, workers=world)  # fmt: skip


def free_port() -> int:
    """Return a port that is free at this moment."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# -- collectives in cells --------------------------------------------------------------------------

WHERE = """
import torch, torch.distributed as dist
found = {"device": str(device), "local_rank": __import__("os").environ.get("LOCAL_RANK", "")}
found["which"] = (str(torch.cuda.get_device_properties(device).uuid)
                  if torch.device(device).type == "cuda" else found["device"])
if torch.device(device).type == "cuda":
    found["count"] = torch.cuda.device_count()
"""
ON_TENSORS = """
import torch, torch.distributed as dist
x = torch.full((4,), float(rank + 1), device={device})
dist.all_reduce(x)
y = torch.full((2,), float(rank), device={device})
dist.broadcast(y, src=world_size - 1)
found = x.tolist() == [world_size * (world_size + 1) / 2] * 4
found = found and y.tolist() == [world_size - 1.0] * 2
"""
SEND = """
import torch, torch.distributed as dist
found = True
if rank == 0 and world_size > 1:
    dist.send(torch.arange(5.0, device={device}), dst=1)
elif rank == 1:
    y = torch.zeros(5, device={device})
    dist.recv(y, src=0)
    found = y.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
"""
OBJECTS = """
import torch.distributed as dist
gathered = [None] * world_size
dist.all_gather_object(gathered, {"rank": rank})
found = [one["rank"] for one in gathered] == list(range(world_size))
"""


def collectives(child: Child) -> None:
    """Cells without a strategy: collectives of CPU and of device tensors."""
    for place in places(child):
        trying = child.trying(f"collectives.{slug(place)}", f"cells on {place.title}")
        with trying, cluster_of(child, place) as cluster:
            _collectives(child, place, cluster)


def _collectives(child: Child, place: Place, cluster: Any) -> None:
    named = slug(place)
    with child.trying(f"collectives.{named}.where", f"{place.title}: device of each rank"):
        seen = cell(cluster, WHERE)
        right = place.devices == "cpu" or all(
            one["device"] == f"{place.devices}:{one['local_rank']}" or place.title == ON_ONE
            for one in seen.values()
        )
        if place.title.endswith("GPUs"):
            right = right and len({one["which"] for one in seen.values()}) == place.workers
        child.say("ok" if right else "fail", f"collectives.{named}.where",
                  f"{place.title}: device of each rank", str(list(seen.values())))  # fmt: skip
    kinds = ["'cpu'"] if place.devices == "cpu" else ["'cpu'", "device"]
    cells = [(f"tensors on {kind}", ON_TENSORS.format(device=kind)) for kind in kinds]
    able = kinds[:1] if place.title == ON_ONE else kinds  # gloo sends from the CPU only
    cells += [(f"send and recv on {kind}", SEND.format(device=kind)) for kind in able]
    cells += [("gathered objects", OBJECTS)]
    for title, source in cells:
        id = f"collectives.{named}.{title.replace(' ', '_').replace(chr(39), '')}"
        with child.trying(id, f"{place.title}: {title}"):
            found = cell(cluster, source)
            child.say("ok" if all(found.values()) else "fail", id, f"{place.title}: {title}",
                      "right" if all(found.values()) else f"wrong: {found}")  # fmt: skip


def slug(place: Place) -> str:
    """Return the name of a place in ids."""
    return place.title.lower().replace(" ", "_")


# -- strategies ------------------------------------------------------------------------------------


wb: Any = None  # of the engine on which the function runs


def train(steps=20, kind="float64", **more):  # type: ignore[no-untyped-def,unused-ignore]
    """Train a small network; its source is sent to the engines, without names of this module."""
    import torch

    torch.manual_seed(3)
    dtype = getattr(torch, kind)
    x = torch.randn(96, 8, dtype=dtype)
    y = x[:, :3].argmax(1)  # learnable, so that the loss falls even with stale steps
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers).to(dtype)
    result = wb.fit(
        model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=24, steps=steps,
        optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9), **more,
    )  # fmt: skip
    return result.loss


def strategies(child: Child) -> None:
    """Check that each strategy of torch trains like one device."""
    for place in places(child):
        with child.trying(f"strategies.{slug(place)}", f"strategies on {place.title}"):
            _strategies(child, place)


def _strategies(child: Child, place: Place) -> None:
    from .. import catalog
    from ..errors import RunError, WorkbenchError

    steps = 5 if child.asked["quick"] else 20
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(child, place))
        alone = cluster.run(train, (steps,), strategy="one_device", workers=1).wait(STEP_S)
        wanted = alone.weights()
        fitting = [
            entry for entry in catalog.strategies("torch")
            if entry.anywhere and (entry.max_workers or place.workers) >= place.workers
        ]  # fmt: skip
        if child.asked["quick"]:
            fitting = [entry for entry in fitting if entry.name in ("mirrored", "model_split")]
        for name, entry, asked, exact in variants(fitting):
            id, count = f"strategies.{slug(place)}.{name}", steps if exact else 3 * steps
            what = f"{place.title}: {name}, {count} steps"
            began = time.perf_counter()
            try:
                run = cluster.run(
                    train, (count,), strategy=entry.name, workers=place.workers,
                    options={k: str(v) for k, v in asked.items()},
                )  # fmt: skip
                run.wait(STEP_S)
            except TimeoutError:
                print(cluster.stacks(), flush=True)
                child.say("fail", id, what, f"hangs: not finished within {STEP_S:g} s",
                          "the log of this check shows where each engine hangs")  # fmt: skip
                end(cluster)
                cluster = stack.enter_context(cluster_of(child, place))
                continue
            except WorkbenchError as error:
                refused = place.title == ON_ONE and not isinstance(error, RunError)
                said = "refused by Workbench" if refused else "failed"
                child.say("ok" if refused else "fail", id, what, f"{said}: {error}")
                continue
            _compare(child, id, what, run, wanted if exact else None, time.perf_counter() - began)


def variants(entries: Sequence[Any]) -> Iterator[tuple[str, Any, dict[str, Any], bool]]:
    """Yield each strategy with the options that make it exact, or without options if there are
    none.

    Yields:
        A name, the entry, the options, whether it must equal one device.
    """
    for entry in entries:
        asked = dict(entry.exact_with or ())
        if entry.sync_option:
            yield f"{entry.name}_async", entry, {}, False
            asked[entry.sync_option] = True
        yield entry.name, entry, asked, entry.exact_with is not None


def _compare(child: Child, id: str, what: str, run: Any, wanted: Any, seconds: float) -> None:
    import numpy as np

    if wanted is None:
        first, last = losses_of(run)
        fell = "fell" if last < first else "did not fall:"
        child.say("ok" if last < first else "fail", id, what, f"the loss {fell} from {first:.3f} "
                  f"to {last:.3f}; the run took {seconds:.1f} s")  # fmt: skip
        return
    got = run.weights()
    worst = max(float(np.abs(got[name] - wanted[name]).max()) for name in wanted)
    child.say("ok" if worst <= 1e-9 else "fail", id, what,
              f"weights differ from those of `one_device` by {worst:.1e}; the run "
              f"took {seconds:.1f} s",
              difference=worst, run_s=round(seconds, 2))  # fmt: skip


def losses_of(run: Any) -> tuple[float, float]:
    """Return the mean loss of a run's first quarter and of its last."""
    losses = [float(loss) for loss in run.snapshot().loss_curve.mean]
    part = max(1, len(losses) // 4)
    return sum(losses[:part]) / part, sum(losses[-part:]) / part


STAGES = {
    one.__name__: one for one in (surroundings, devices, group, collectives, strategies)
}  # fmt: skip

if __name__ == "__main__":
    main(STAGES)
