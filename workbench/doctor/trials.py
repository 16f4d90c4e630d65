"""Stages of `--gpu-test` on measurements, checkpoints and memory; each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .children import Child, main
from .stages import ON_ONE, STEP_S, Place, cell, cluster_of, losses_of, places, slug, train

FAULT_MS, NEAR_MS = 50.0, 5.0
FALSE_WAIT_MS = 0.5
WARM_STEPS = 4


def several(child: Child) -> list[Place]:
    """Return the places with more than one worker; a quick test has one."""
    found = [place for place in places(child) if place.workers > 1]
    return found[:1] if child.asked["quick"] else found


# -- what is measured ------------------------------------------------------------------------------


def telemetry(child: Child) -> None:
    """Check that an injected delay is measured: its rank, its place and its length."""
    for place in several(child):
        with (
            child.trying(f"telemetry.{slug(place)}", f"telemetry on {place.title}"),
            cluster_of(child, place) as cluster,
        ):
            _telemetry(child, place, cluster)


def _telemetry(child: Child, place: Place, cluster: Any) -> None:
    def measured(*faults: str, steps: int = 20) -> dict[str, Any]:
        run = cluster.run(train, (steps, "float32"), strategy="mirrored", workers=place.workers,
                          inject=faults).wait(STEP_S)  # fmt: skip
        history = run.history
        late = history["step"] >= WARM_STEPS
        of = {r: late & (history["rank"] == r) for r in range(2)}
        ms = {
            part: [1e3 * float(statistics.median(history[part][of[r]])) for r in range(2)]
            for part in ("sync_wait_s", "data_wait_s", "compute_s", "transfer_s", "step_s")
        }
        blamed = history["blamed_rank"][of[0]]
        return {**ms, "blamed": float((blamed == 1).mean())}

    quiet = measured(steps=20 if child.asked["quick"] else 200)
    wait_ms = max(quiet["sync_wait_s"])
    exact = place.title.endswith("GPUs")  # workers that share cores or a GPU really wait
    id, what = f"telemetry.{slug(place)}", f"{place.title}: "
    child.say("ok" if wait_ms < FALSE_WAIT_MS or not exact else "fail", f"{id}.quiet",
              f"{what}sync wait without an added delay",
              f"{wait_ms:.2f} ms in a step of {quiet['step_s'][0]:.2f} ms",
              wait_ms=wait_ms)  # fmt: skip
    for where in ("forward",) if child.asked["quick"] else ("data", "forward", "backward"):
        with child.trying(f"{id}.{where}", f"{what}50 ms of delay added on rank 1 in `{where}`"):
            seen = measured(f"slow=1:{FAULT_MS:.0f}ms/{where}")
            wait = seen["sync_wait_s"][0] - quiet["sync_wait_s"][0]
            part = "data_wait_s" if where == "data" else "compute_s"
            own = seen[part][1] - quiet[part][1]
            near = NEAR_MS if exact else 0.3 * FAULT_MS
            right = (
                abs(wait - FAULT_MS) < near and abs(own - FAULT_MS) < near and seen["blamed"] > 0.9
            )
            child.say("ok" if right else "fail", f"{id}.{where}",
                      f"{what}50 ms of delay added on rank 1 in `{where}`",
                      f"with the delay, rank 0 waits {wait:.1f} ms longer, and rank 1 takes "
                      f"{own:.1f} ms longer. Rank 1 is the straggler in "
                      f"{seen['blamed']:.0%} of the steps",
                      wait_ms=wait, own_ms=own, blamed=seen["blamed"])  # fmt: skip
    if not child.asked["quick"]:
        with child.trying(f"{id}.link", f"{what}20 ms of delay added on every link"):
            seen = measured("latency=20ms")
            more = seen["step_s"][0] - quiet["step_s"][0]
            moved = seen["transfer_s"][0] - quiet["transfer_s"][0]
            child.say("ok" if more > 15 and moved > 0.5 * more else "fail", f"{id}.link",
                      f"{what}20 ms of delay added on every link",
                      f"a step takes {more:.1f} ms longer, a transfer {moved:.1f} ms longer",
                      step_ms=more, transfer_ms=moved)  # fmt: skip


# -- ways to train ---------------------------------------------------------------------------------


wb: Any = None
device: Any = None  # both of the engine on which the function runs


def train_with(steps=8, precision=None, compiled=False, accumulate=1, processes=0, norm=False):  # type: ignore[no-untyped-def,unused-ignore]
    """Train in a special way; its source is sent to the engines."""
    import torch

    torch.manual_seed(3)
    x, y = torch.randn(128, 8), torch.randint(0, 3, (128,))
    middle = [torch.nn.BatchNorm1d(16)] if norm else []
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), *middle, torch.nn.Tanh(), torch.nn.Linear(16, 3)
    )
    data: Any = torch.utils.data.TensorDataset(x, y)
    if processes:
        data = torch.utils.data.DataLoader(
            data,
            batch_size=32,
            num_workers=processes,
            pin_memory=torch.device(device).type == "cuda",
        )
    more: Any = {} if processes else {"batch_size": 32}
    if precision:
        more["precision"] = precision
    if compiled:
        more["compile"] = True
    result = wb.fit(
        model, data, loss=torch.nn.CrossEntropyLoss(), steps=steps, accumulate=accumulate,
        optimizer=lambda p: torch.optim.SGD(p, 0.1), **more,
    )  # fmt: skip
    return float(result.loss)


WAYS: dict[str, tuple[tuple[Any, ...], dict[str, str]]] = {
    "bf16": ((8, "bf16"), {}),
    "fp16": ((8, "fp16"), {}),
    "accumulate": ((8, None, False, 2), {}),
    "loader": ((8, None, False, 1, 2), {}),
    "sync_batchnorm": ((8, None, False, 1, 0, True), {"sync_batchnorm": "true"}),
    "compile": ((8, None, True), {}),
}


def ways(child: Child) -> None:
    """Check that the loss stays a number: mixed precision, compile, accumulation, loaders."""
    import math

    from ..errors import WorkbenchError

    fitting = [p for p in places(child) if p.devices == child.asked["device"]]
    for place in fitting[:1] if child.asked["quick"] else fitting:
        with (
            child.trying(f"ways.{slug(place)}", f"ways to train on {place.title}"),
            cluster_of(child, place) as cluster,
        ):
            for name, (args, options) in WAYS.items():
                if child.asked["quick"] and name not in ("bf16", "accumulate"):
                    continue
                id, what = f"ways.{slug(place)}.{name}", f"{place.title}: {name}"
                if place.devices == "cpu" and name in ("fp16", "sync_batchnorm"):
                    child.say("unknown", id, what, "needs a GPU")
                    continue
                if place.title == ON_ONE and name == "sync_batchnorm":
                    child.say("unknown", id, what, "needs a GPU for each worker")
                    continue
                with child.trying(id, what):
                    limit_s = 3 * STEP_S if name == "compile" else STEP_S
                    try:
                        run = cluster.run(train_with, args, strategy="mirrored", options=options,
                                          workers=place.workers).wait(limit_s)  # fmt: skip
                    except WorkbenchError as error:
                        child.say("fail", id, what, str(error)[:300])
                        continue
                    losses = run.results
                    fine = all(math.isfinite(float(loss)) for loss in losses)
                    child.say("ok" if fine else "fail", id, what, f"loss {losses[0]:.3f}")


def checkpoints(child: Child) -> None:
    """Check that a resumed run ends with the same weights as an uninterrupted run."""
    import numpy as np

    from ..notebook.session import resume

    place = places(child)[0]
    what = f"{place.title}: a run ends after 10 steps, and continues from its checkpoint to step 20"
    with (
        child.trying("checkpoints.resume", what),
        tempfile.TemporaryDirectory() as folder,
        cluster_of(child, place) as cluster,
    ):
        about = {"strategy": "mirrored", "workers": place.workers}
        whole = cluster.run(train, (20,), **about).wait(STEP_S).weights()
        cluster.run(train, (10,), checkpoint=folder, checkpoint_every=10, **about).wait(STEP_S)
        path = sorted(Path(folder).glob("step-*"))[-1]
        resumed = resume(path, args=(20,), cluster=cluster, checkpoint=f"{folder}/more")
        again = resumed.wait(STEP_S).weights()
        worst = max(float(np.abs(whole[name] - again[name]).max()) for name in whole)
        child.say("ok" if worst <= 1e-12 else "fail", "checkpoints.resume", what,
                  f"weights differ by {worst:.1e} from those of an uninterrupted run",
                  difference=worst)  # fmt: skip


# -- memory ----------------------------------------------------------------------------------------

ALLOCATE = "import torch\nbig = torch.ones(64 << 20, device=device)\nfound = True\n"
HELD = """
import torch
found = {}
if torch.device(device).type == "cuda":
    found = {"reserved": torch.cuda.memory_reserved(device)}
"""


def memory(child: Child) -> None:
    """Measure the memory of idle engines, and check whether `%cluster free` releases it."""
    import psutil

    place = places(child)[-1 if child.asked["device"] == "cpu" else 0]
    used = gpu_used()
    with (
        child.trying("memory", f"memory on {place.title}"),
        cluster_of(child, place) as cluster,
    ):
        cell(cluster, "found = True")
        idle = [psutil.Process(engine.pid).memory_full_info() for engine in cluster.engines]
        own = [getattr(one, "pss", one.uss) / 1e6 for one in idle]
        child.say("ok", "memory.idle", "memory of an idle engine",
                  f"{statistics.mean(own):.0f} MB on average",
                  pss_mb=list(map(round, own)))  # fmt: skip
        cell(cluster, ALLOCATE)
        cluster.free()
        held = cell(cluster, HELD)
        cluster.free()
        now = gpu_used()
        what = "`%cluster free` releases 256 MB"
        if place.devices == "cpu":
            rss = [psutil.Process(e.pid).memory_info().rss / 1e6 for e in cluster.engines]
            before = [one.rss / 1e6 for one in idle]
            more = max(b - a for a, b in zip(before, rss, strict=True))
            child.say("ok" if more < 128 else "fail", "memory.free", what,
                      "each engine allocated 256 MB, then `%cluster free` ran. In total, an "
                      f"engine's memory changed by {more:+.0f} MB (the largest value of all "
                      "engines)",
                      more_mb=round(more, 1))  # fmt: skip
            return
        left = max((one.get("reserved", 0) for one in held.values()), default=0)
        child.say("ok" if left < 32 << 20 else "fail", "memory.free", what,
                  "memory that an engine still reserves after `%cluster free`: "
                  f"{left >> 20} MB (the largest value of all engines; allowed: less than 32 MB)",
                  reserved_bytes=left)  # fmt: skip
        grown = {i: (now[i] - used.get(i, 0)) >> 20 for i in now}
        child.say("ok", "memory.gpu", "memory of engines on each GPU", f"{grown} MB",
                  grown_mb=grown)  # fmt: skip


def gpu_used() -> dict[int, int]:
    """Return the bytes in use on each GPU, from NVML."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return {i: int(pynvml.nvmlDeviceGetMemoryInfo(h).used) for i, h in enumerate(handles)}
    return {}


# -- what must be refused --------------------------------------------------------------------------


def refusals(child: Child) -> None:
    """Check that impossible requests are refused at once, with a sentence and a code."""
    from ..errors import WorkbenchError
    from ..session.cluster import Cluster

    device, gpus = child.asked["device"], int(child.asked["gpus"])
    asks: dict[str, Callable[[], Any]] = {
        "a GPU that does not exist": lambda: Cluster(1, devices="99"),
        "an invalid value of devices": lambda: Cluster(1, devices="fast ones"),
    }
    if device == "cpu" and not gpus:
        asks["GPUs on a machine without GPUs"] = lambda: Cluster(1, devices="cuda")
    for what, ask in asks.items():
        id, what = f"refusals.{what.replace(' ', '_')}", f"Workbench refuses {what}"
        began = time.perf_counter()
        try:
            ask().stop()
        except WorkbenchError as error:
            took = time.perf_counter() - began
            fine = bool(error.code) and took < 5
            child.say("ok" if fine else "fail", id, what,
                      f"{error.what} ({error.code}), after {took:.1f} s")  # fmt: skip
        except Exception as error:
            child.say(
                "fail",
                id,
                what,
                f"Workbench raised {type(error).__name__} without an error code: {error}",
            )
        else:
            child.say("fail", id, what, "Workbench accepted this request")


# -- TensorFlow ------------------------------------------------------------------------------------

KERAS = """
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=2, batch_size=64, verbose=0)
"""


def tensorflow(child: Child) -> None:
    """Check that TensorFlow's strategies train, and then PyTorch in the same cluster."""
    from importlib.util import find_spec

    from .. import catalog
    from ..errors import WorkbenchError

    if find_spec("tensorflow") is None:
        child.say(
            "unknown", "tensorflow.all", "TensorFlow's strategies", "TensorFlow is not installed"
        )
        return
    place = places(child)[0]
    workers = max(2, place.workers) if place.devices == "cpu" else place.workers
    names = ("one_device", "mirrored", "multi_worker_mirrored", "parameter_server")
    with (
        child.trying("tensorflow", f"TensorFlow on {place.title}"),
        cluster_of(child, place, "tensorflow") as cluster,
    ):
        for entry in catalog.strategies("tensorflow"):
            if entry.name not in names:
                continue
            id, what = f"tensorflow.{entry.name}", f"{place.title}: {entry.name}"
            n = min(workers, entry.max_workers or workers)
            try:
                run = cluster.run(KERAS, strategy=entry.name, workers=n, framework="tensorflow")
                run.wait(2 * STEP_S)
            except TimeoutError:
                print(cluster.stacks(), flush=True)
                child.say("fail", id, what, f"hangs: not finished within {2 * STEP_S:g} s")
                return
            except WorkbenchError as error:
                child.say("fail", id, what, str(error)[:300])
                continue
            first, last = losses_of(run)
            fell = last < first
            child.say("ok" if fell else "fail", id, what,
                      f"the loss {'fell' if fell else 'did not fall:'} from {first:.2f} to "
                      f"{last:.2f}")  # fmt: skip
        found = cell(cluster, "import torch\nfound = float(torch.ones(2, device=device).sum())",
                     3 * STEP_S, framework="torch")  # fmt: skip
        child.say("ok" if set(found.values()) == {2.0} else "fail", "tensorflow.then_torch",
                  "PyTorch computes after TensorFlow, in the same cluster",
                  "right" if set(found.values()) == {2.0} else f"wrong: {found}")  # fmt: skip


# -- speed -----------------------------------------------------------------------------------------

LOOP = """
import time, torch
from torch import nn
def build(width):
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, nn.CrossEntropyLoss()
def steps_per_s(model, optimizer, loss_fn, batches, steps, device, warm_up=10):
    def settle():
        if torch.device(device).type == "cuda": torch.cuda.synchronize()
    done = 0
    while True:
        for x, y in batches:
            if done == warm_up:
                settle(); began = time.perf_counter()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            done += 1
            if done == warm_up + steps:
                settle()
                return steps / (time.perf_counter() - began)
"""
OURS = (
    LOOP
    + """
model, loss_fn = build({width})
g = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn({rows}, 64, generator=g),
                                      torch.randint(0, 10, ({rows},), generator=g))
loader = torch.utils.data.DataLoader(data, batch_size={batch})
model, optimizer, loader = wb.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
found = steps_per_s(model, optimizer, loss_fn, loader, {steps}, device)
"""
)
THEIRS = (
    LOOP
    + """
import os, torch.distributed as dist
local = int(os.environ["LOCAL_RANK"])
device = f"cuda:{{local}}" if {gpu} else "cpu"
if {gpu}: torch.cuda.set_device(local)
else: torch.set_num_threads({threads})
dist.init_process_group("nccl" if {gpu} else "gloo")
model, loss_fn = build({width})
model = nn.parallel.DistributedDataParallel(model.to(device), broadcast_buffers=False,
                                            gradient_as_bucket_view=True)
g = torch.Generator().manual_seed(0)
x, y = torch.randn({rows}, 64, generator=g), torch.randint(0, 10, ({rows},), generator=g)
per = {batch} // dist.get_world_size()
mine = slice(dist.get_rank(), None, dist.get_world_size())
x, y = x[mine], y[mine]
class Batches:
    def __iter__(self):
        for i in range(0, len(x), per):
            yield x[i:i + per].to(device), y[i:i + per].to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
speed = steps_per_s(model, optimizer, loss_fn, Batches(), {steps}, device)
if dist.get_rank() == 0:
    print("STEPS_PER_S", speed, flush=True)
dist.destroy_process_group()
"""
)


def speed(child: Child) -> None:
    """Measure steps per second against torchrun's plain DDP, and the time to the first step."""
    place = places(child)[0]
    gpu = place.devices != "cpu"
    quick = child.asked["quick"]
    sizes = {"width": 2048 if gpu else 256, "batch": 4096 if gpu else 256,
             "rows": 1 << 15 if gpu else 1 << 12, "steps": 200 if gpu else 60}  # fmt: skip
    rounds = 1 if quick else 3
    with (
        child.trying("speed", f"speed on {place.title}"),
        tempfile.TemporaryDirectory() as folder,
    ):
        began = time.perf_counter()
        with cluster_of(child, place) as cluster:
            start_s = time.perf_counter() - began
            cluster.run(train, (1,), strategy="mirrored", workers=place.workers).wait(2 * STEP_S)
            first_s = time.perf_counter() - began
            child.say("ok" if first_s < 30 else "warn", "speed.first_step",
                      f"{place.title}: time until the first step is done",
                      f"{first_s:.1f} s; the start of the engines took {start_s:.1f} s of this "
                      "time",
                      start_s=round(start_s, 2), first_step_s=round(first_s, 2))  # fmt: skip
            script = Path(folder) / "plain.py"
            threads = max(1, (os.cpu_count() or 1) // place.workers)
            script.write_text(THEIRS.format(gpu=gpu, threads=threads, **sizes))
            ours, theirs = [], []
            for _ in range(rounds):
                run = cluster.run(OURS.format(**sizes), strategy="mirrored", workers=place.workers)
                run.wait(2 * STEP_S)
                ours.append(float(cluster.pull(["found"], [0])[0]["found"]))
                theirs.append(_torchrun(script, place.workers))
        ratio = statistics.median(ours) / statistics.median(theirs)
        # On the CPU the data reaches the model in another way, and two cores are noisy, so this is
        # only a figure.
        status: Any = "ok" if not gpu or ratio >= 0.97 else "warn"
        child.say(status, "speed.mirrored", f"{place.title}: `mirrored` and torchrun's DDP",
                  f"{statistics.median(ours):.0f} steps/s, {ratio:.3f} times as many as with "
                  "torchrun",
                  ratio=round(ratio, 4), ours=ours, theirs=theirs)  # fmt: skip


def _torchrun(script: Path, workers: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={workers}", str(script)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if "STEPS_PER_S" not in done.stdout:
        raise RuntimeError(f"torchrun failed: {done.stderr[-400:]}")
    return float(done.stdout.partition("STEPS_PER_S ")[2].split()[0])


# -- the labs --------------------------------------------------------------------------------------


def labs(child: Child) -> None:
    """Run the cells of the first labs, with their solutions, in an IPython shell."""
    solved = Path(__file__).parents[2] / "notebooks/solutions"
    names = ["lab_1_solved.ipynb"] if child.asked["quick"] else [
        "lab_1_solved.ipynb", "lab_2_solved.ipynb"
    ]  # fmt: skip
    if not (solved / names[0]).exists():
        child.say(
            "unknown", "labs.cells", "cells of the labs", "needs a checkout of the repository"
        )
        return
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(child.asked["out"])  # these cells write the files that students hand in
    shell: Any = InteractiveShell.instance()
    for name in names:
        cells = json.loads((solved / name).read_text("utf-8"))["cells"]
        code = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"]
        failed = []
        began = time.perf_counter()
        for number, source in enumerate(["%load_ext workbench", *code]):
            print(f"-- cell {number} of {name}", flush=True)
            with capture_output() as seen:
                result = shell.run_cell(source, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                print(seen.stdout[-2000:], seen.stderr[-2000:], flush=True)
                failed.append(f"cell {number}: {type(error).__name__}: {str(error)[:150]}")
        shell.run_cell("%cluster stop")
        took = time.perf_counter() - began
        what = f"cells of {name.removesuffix('_solved.ipynb')}"
        child.say("fail" if failed else "ok", f"labs.{name.partition('_solved')[0]}", what,
                  "; ".join(failed[:3])
                  or f"all {len(code)} cells ran without an error, {took:.0f} s")  # fmt: skip


TRIALS = {
    one.__name__: one
    for one in (telemetry, ways, checkpoints, memory, refusals, tensorflow, speed, labs)
}  # fmt: skip

if __name__ == "__main__":
    main(TRIALS)
