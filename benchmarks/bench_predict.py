"""Predictions from two workers, compared with unseen runs of 4 to 64 workers.

    python benchmarks/bench_predict.py --record                 record steps of real models
    python benchmarks/bench_predict.py --what-if                changes to one run, ranked
    python benchmarks/bench_predict.py --real                   workers that compute on these cores
    python benchmarks/bench_predict.py --hosts 8 --mbit 24 [--delay-ms 3]       real links
    python benchmarks/bench_predict.py [--quick] [--workers 4,8,16,32,64] [--turns 1] [--to FILE]

Workers sleep instead of computing. The sleep times are those of real steps, recorded with
`--record` and kept in docs/measured/steps.npz. Each step uses four of them (as of four
micro-batches), drawn in random order and scaled to a median of `SLOWED_S`. So 64 workers fit on two
cores: the other work of a worker must be short compared with its sleep, because all workers do it
at the same moment. Messages are real and delayed by simulated links. With jitter off every step
takes the median.

For each model and jitter there are two short runs of two workers (a ring all-reduce, and the same
in half precision). Only from these runs, every strategy is predicted for every number of workers.
Then it is measured. A run counts only if the machine's CPU use stays below 70 % and the sleeps take
less than 5 % longer than asked. `nearly` says whether the run would count without processes of
lower priority (niced). Models of `TRAINING` may be used to develop the predictions; `HELD_OUT` must
not be used.

With `--hosts` each worker is on its own simulated host. The kernel (tbf) limits the bandwidth of
its link, and an outside process (a TAP device) delays its packets. A prediction knows only those
facts about such a link that the short runs have measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import workbench as wb
from workbench.views.explain.prediction import predict

os.environ["WORKBENCH_PREWARM"] = "off"

FOLDER = Path(__file__).parents[1] / "docs" / "measured"
TRACES = FOLDER / "steps.npz"
SLOWED_S, MICRO_BATCHES = 0.06, 4
MOST_CPU, MOST_OVERSHOOT = 0.70, 0.05

RECORDED = {
    "mlp": (
        "nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), "
        "nn.Linear(1024, 10))",
        "wb.data.synthetic(8192, shape=(256,), classes=10)", 512,
    ),
    "cnn": (
        "nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), "
        "nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10))",
        "wb.data.digits()", 512,
    ),
    "encoder": (
        "nn.Sequential(nn.Unflatten(1, (16, 64)), nn.TransformerEncoder("
        "nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2), nn.Flatten(), "
        "nn.Linear(1024, 10))",
        "wb.data.synthetic(2048, shape=(1024,), classes=10)", 32,
    ),
}  # fmt: skip
"""Models whose steps are recorded: what they are, their data, their batch."""

RECORD = """
import torch
from torch import nn
model = {model}
wb.fit(model, {data}, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01),
       batch_size={batch})
"""


@dataclass(frozen=True)
class Model:
    """A model as the workers pretend to train it.

    Attributes:
        numbers: How many numbers its gradients have.
        link: Faults that simulate its link.
    """

    trace: str
    numbers: int
    link: tuple[str, ...]


TRAINING = {
    "mlp": Model("mlp", 9_600, ("bandwidth=1.3MB/s", "latency=15ms")),
    "cnn": Model("cnn", 85_000, ("bandwidth=5MB/s", "latency=18ms")),
}
HELD_OUT = {"encoder": Model("encoder", 200_000, ("bandwidth=10MB/s", "latency=24ms"))}
MODELS = {**TRAINING, **HELD_OUT}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("mirrored", {"allreduce": "ring"}),
    "recursive_doubling": ("mirrored", {"allreduce": "recursive_doubling"}),
    "hierarchical": ("mirrored", {"allreduce": "hierarchical"}),
    "reduce_to_one": ("mirrored", {"allreduce": "reduce_to_one"}),
    "ring_fp16": ("mirrored", {"allreduce": "ring", "compress": "fp16"}),
    "central_storage": ("central_storage", {}),
    "server_sync": ("parameter_server", {"sync": True}),
    "server_async": ("parameter_server", {}),
    "local_sgd": ("local_sgd", {"every": 4}),
    "gossip": ("gossip", {"graph": "ring", "spread_every": 1000}),
}

SLOW, BANDWIDTH, LATENCY = "slow=1:120ms", "bandwidth=3MB/s", "latency=18ms"
VARIANTS: tuple[tuple[dict[str, Any], str, dict[str, Any], tuple[str, ...]], ...] = (
    ({"link": "12MB/s"}, "mirrored", {}, (SLOW, "bandwidth=12MB/s", LATENCY)),
    ({"link": "1MB/s"}, "mirrored", {}, (SLOW, "bandwidth=1MB/s", LATENCY)),
    ({"link": "3MB/s", "latency": "1ms"}, "mirrored", {}, (SLOW, BANDWIDTH, "latency=1ms")),
    ({"compress": "fp16"}, "mirrored", {"compress": "fp16"}, (SLOW, BANDWIDTH, LATENCY)),
    ({"allreduce": "hierarchical"}, "mirrored", {"allreduce": "hierarchical"},
     (SLOW, BANDWIDTH, LATENCY)),
    ({"allreduce": "reduce_to_one"}, "mirrored", {"allreduce": "reduce_to_one"},
     (SLOW, BANDWIDTH, LATENCY)),
    ({"allreduce": "recursive_doubling"}, "mirrored", {"allreduce": "recursive_doubling"},
     (SLOW, BANDWIDTH, LATENCY)),
    ({"straggler": None}, "mirrored", {}, (BANDWIDTH, LATENCY)),
    ({"straggler": None, "link": "12MB/s"}, "mirrored", {}, ("bandwidth=12MB/s", LATENCY)),
    ({"straggler": None, "compress": "fp16"}, "mirrored", {"compress": "fp16"},
     (BANDWIDTH, LATENCY)),
    ({"compress": "fp16", "allreduce": "recursive_doubling"}, "mirrored",
     {"compress": "fp16", "allreduce": "recursive_doubling"}, (SLOW, BANDWIDTH, LATENCY)),
    ({"strategy": "central_storage"}, "central_storage", {}, (SLOW, BANDWIDTH, LATENCY)),
    ({"batch_size": 32}, "mirrored", {}, (SLOW, BANDWIDTH, LATENCY)),
    ({"batch_size": 12}, "mirrored", {}, (SLOW, BANDWIDTH, LATENCY)),
)  # fmt: skip
"""Changes to a ring of four workers, one of them slow: as asked, and as they are run."""

SLEEP = """
import os, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank = dist.get_rank() if dist.is_initialized() else 0
pace = np.random.default_rng([{seed}, rank])
times_s = np.array({times_s})

class Asleep(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({numbers}))

    def forward(self, x):
        asked_s = float(pace.choice(times_s, {micro_batches}).sum()) * len(x) / 4
        began = time.perf_counter()
        time.sleep(asked_s)
        wb.log(asked_s=asked_s, slept_s=time.perf_counter() - began)
        return self.weight.sum() * 1e-6 + x.sum(dim=1)

n = {workers}
wb.fit(Asleep(), (torch.zeros(8 * n, 2), torch.zeros(8 * n)), loss=nn.MSELoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size={each} * n, steps={steps}, seed=1)
"""


@dataclass
class Measured:
    """A run of workers that slept."""

    model: str
    jitter: bool
    case: str
    workers: int
    steps: int
    step_s: float
    cpu: float
    cpu_plain: float
    overshoot: float
    seconds: float
    counts: bool = field(init=False)
    nearly: bool = field(init=False)

    def __post_init__(self) -> None:
        slept = self.overshoot < MOST_OVERSHOOT
        self.counts = slept and self.cpu < MOST_CPU
        self.nearly = slept and self.cpu_plain < MOST_CPU


class Busy:
    """How busy the machine has been since this was made."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    def shares(self) -> tuple[float, float]:
        """Return the used share of the CPUs' time, and the same without niced processes."""
        then, now = self._began, psutil.cpu_times()
        spent = {name: getattr(now, name) - getattr(then, name) for name in now._fields}
        whole = sum(spent.values())
        idle = spent["idle"] + spent.get("iowait", 0.0)
        return 1 - idle / whole, 1 - (idle + spent["nice"]) / whole


def record(steps: int, to: Path) -> None:
    """Record the computing times of real steps, with one worker each, on this machine."""
    kept = {}
    with wb.Cluster(2, devices="cpu") as cluster:
        for name, (model, data, batch) in RECORDED.items():
            source = RECORD.format(model=model, data=data, batch=batch)
            run = cluster.run(source, strategy="mirrored", workers=2, steps=steps).wait()
            compute_s = run.history["compute_s"][run.history["step"] >= 10]
            kept[name] = np.sort(compute_s.astype(np.float32))
    to.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(to, **kept)
    spread = {
        name: float(np.quantile(v, 0.99) / np.median(v)) for name, v in kept.items()
    }  # fmt: skip
    print(json.dumps({"what": "recorded steps", "steps": sum(map(len, kept.values())), **spread}))


def times_of(model: Model, *, jitter: bool, traces: Path) -> list[float]:
    """Return the seconds that a worker sleeps, one of them per step."""
    with np.load(traces) as kept:
        recorded = kept[model.trace].astype(float)
    if not jitter:
        return [SLOWED_S]
    # Every k-th of the sorted times: the same distribution in few numbers, with its longest.
    thinned = recorded[:: max(1, len(recorded) // 600)]
    longest = np.append(thinned, recorded[-1]) * SLOWED_S / np.median(recorded)
    return [round(float(t), 6) for t in np.minimum(longest, 20 * SLOWED_S)]


def sleeping(
    cluster: wb.Cluster, name: str, case: str, workers: int, steps: int, *, jitter: bool,
    seed: int, traces: Path = TRACES, inject: bool = True,
) -> tuple[Any, Measured]:  # fmt: skip
    """Run workers that sleep; return the run and what was measured."""
    model, (strategy, options) = MODELS[name], CASES[case]
    source = SLEEP.format(
        seed=seed, times_s=times_of(model, jitter=jitter, traces=traces), numbers=model.numbers,
        workers=workers, steps=steps, micro_batches=MICRO_BATCHES, each=4,
    )  # fmt: skip
    began = time.time()
    run = cluster.run(
        source, strategy=strategy, workers=workers, options=options,
        inject=model.link if inject else (), name=f"{name}-{case}-{workers}-{seed}",
    )  # fmt: skip
    while not run.snapshot().step and not run.is_over:
        time.sleep(0.05)
    busy = Busy()
    run.wait()
    cpu, cpu_plain = busy.shares()
    history = run.history
    late = history["step"] >= 1
    overshoot = float(history["slept_s"][late].sum() / history["asked_s"][late].sum() - 1)
    # As `predict` counts: mean over steps and workers, without the first step.
    step_s = float(history["step_s"][late].mean())
    return run, Measured(
        name,
        jitter,
        case,
        workers,
        steps - 1,
        step_s,
        cpu,
        cpu_plain,
        overshoot,
        time.time() - began,
    )


@contextlib.contextmanager
def placed(given: argparse.Namespace) -> Iterator[wb.Cluster]:
    """Yield engines on this machine, or one engine on each of the simulated hosts."""
    if not given.hosts:
        with wb.Cluster(2, devices="cpu") as cluster:
            yield cluster
        return
    os.environ["WORKBENCH_TEST_HOST_COUNT"] = str(given.hosts)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hosts.simulated_hosts import ADDRESSES, SimulatedHosts, missing

    if why := missing():
        raise SystemExit(why)
    names = list(ADDRESSES)
    with SimulatedHosts() as hosts, contextlib.ExitStack() as stack:
        for name in names:
            hosts.shape(name, given.mbit)
            if given.delay_ms:
                stack.enter_context(hosts.delayed(name, given.delay_ms, 1000.0))
        os.environ["PATH"] = hosts.environment["PATH"]
        on = ",".join(f"{name}:1" for name in names)
        with wb.Cluster(given.hosts, launcher="ssh", on=on) as cluster:
            yield cluster


def steps_of(workers: int, steps: int) -> int:
    """Return how many steps to take.

    With many workers the slowest one varies less, so fewer steps are enough.
    The first step is not measured; the others are whole rounds of `local_sgd`.
    """
    many = steps if workers <= 8 else max(12, steps * 2 // 3 if workers <= 32 else steps // 3)
    every = CASES["local_sgd"][1]["every"]
    return 1 + every * max(many // every, 1)


def settle(most_s: float) -> None:
    """Wait until other processes use at most half of the machine."""
    until = time.time() + most_s
    while most_s and psutil.cpu_percent(2.0) > 50 and time.time() < until:
        time.sleep(1.0)


def probes(cluster: wb.Cluster, name: str, steps: int, **given: Any) -> tuple[
    list[Any], list[Measured]
]:  # fmt: skip
    """Return the runs of two workers from which everything is predicted."""
    seed = given.pop("seed")
    made = [
        sleeping(cluster, name, case, 2, steps, seed=seed + k, **given)
        for k, case in enumerate(("ring", "ring_fp16"))
    ]
    return [run for run, _ in made], [measured for _, measured in made]


def compared(runs: list[Any], measured: Measured) -> dict[str, Any]:
    """Return a run together with its prediction."""
    strategy, options = CASES[measured.case]
    found = predict(
        runs, measured.workers, strategy=strategy, options=options, scaling="weak",
        steps=measured.steps,
    )  # fmt: skip
    middle, low, high = found.points[0].step_s
    return {
        **asdict(measured), "predicted_s": middle, "low_s": low, "high_s": high,
        "error": middle / measured.step_s - 1, "inside": low <= measured.step_s <= high,
    }  # fmt: skip


def what_if(cluster: wb.Cluster, workers: int, steps: int, seed: int, traces: Path) -> None:
    """Predict changes to one run, then make them."""
    base = Model("cnn", 85_000, (SLOW, BANDWIDTH, LATENCY))

    def taken(strategy: str, options: dict[str, Any], faults: tuple[str, ...], k: int,
              each: int = 4) -> Any:  # fmt: skip
        if strategy == "mirrored":
            options = {"allreduce": "ring", **options}
        source = SLEEP.format(
            seed=seed + k, times_s=times_of(base, jitter=True, traces=traces), steps=steps,
            numbers=base.numbers, workers=workers, micro_batches=MICRO_BATCHES, each=each,
        )  # fmt: skip
        busy = Busy()
        run = cluster.run(source, strategy=strategy, workers=workers, options=options,
                          inject=faults).wait()  # fmt: skip
        return run, busy.shares()[0]

    first, cpu = taken("mirrored", {}, base.link, 0)
    few, _ = taken("mirrored", {}, base.link, 99, each=2)
    found = first.what_if(variants=[change for change, *_ in VARIANTS], beside=few)
    predicted = {v.text: v.step_s for v in found.variants}
    rows = []
    for k, (change, strategy, options, faults) in enumerate(VARIANTS, 1):
        each = change.get("batch_size", 4 * workers) // workers
        run, busy = taken(strategy, options, faults, k, each)
        step_s = float(run.history["step_s"][run.history["step"] >= 1].mean())
        text = ", ".join(f"{key}={value}" for key, value in change.items())
        middle, low, high = predicted[text]
        rows.append({"change": text, "step_s": step_s, "predicted_s": middle, "cpu": busy,
                     "error": middle / step_s - 1, "inside": low <= step_s <= high})  # fmt: skip
        print(f"{text:<45} measured {step_s:.4f} predicted {middle:.4f} {rows[-1]['error']:+.1%} "
              f"cpu {busy:.0%}", flush=True)  # fmt: skip
    pairs = [(a, b) for k, a in enumerate(rows) for b in rows[k + 1 :]]
    signs = [np.sign((a["step_s"] - b["step_s"]) * (a["predicted_s"] - b["predicted_s"]))
             for a, b in pairs]  # fmt: skip
    print(json.dumps({
        "what": "what if", "changes": len(rows), "kendall_tau": float(np.mean(signs)),
        "largest_error": float(max(abs(row["error"]) for row in rows)),
        "median_error": float(np.median([abs(row["error"]) for row in rows])),
        "within_10_percent": int(sum(abs(row["error"]) <= 0.1 for row in rows)),
        "most_cpu": float(max(cpu, *(row["cpu"] for row in rows))), "rows": rows,
    }))  # fmt: skip


def real(cluster: wb.Cluster, steps: int) -> None:
    """Predict workers that compute on this machine's cores; more workers share the same cores."""
    model, data, batch = RECORDED["mlp"]

    def taken(workers: int) -> Any:
        source = RECORD.format(model=model, data=data, batch=batch // 4 * workers)
        return cluster.run(source, strategy="mirrored", workers=workers, steps=steps,
                           options={"allreduce": "ring"}).wait()  # fmt: skip

    two = taken(2)
    found = two.predict([3, 4], scaling="weak", steps=steps)
    for p in found.points:
        history = taken(p.workers).history
        step_s = float(history["step_s"][history["step"] >= 1].mean())
        print(json.dumps({
            "what": f"real compute, {p.workers} workers", "step_s": step_s,
            "predicted_s": p.step_s[0], "error": p.step_s[0] / step_s - 1,
            "inside": bool(p.step_s[1] <= step_s <= p.step_s[2]), "cores": os.cpu_count(),
        }))  # fmt: skip


def told(what: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over some rows."""
    errors = np.abs([row["error"] for row in rows])
    return {
        "what": what, "runs": len(rows), "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "coverage": float(np.mean([row["inside"] for row in rows])),
        "bias": float(np.median([row["error"] for row in rows])),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="record steps of real models")
    parser.add_argument("--quick", action="store_true", help="a few short runs")
    parser.add_argument("--real", action="store_true", help="workers that compute on these cores")
    parser.add_argument("--what-if", action="store_true", help="changes to one run")
    parser.add_argument("--workers", default="4,8,16,32,64")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--jitter", default="off,on")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--probe-steps", type=int, default=120)
    parser.add_argument("--calm", type=float, default=0.0, metavar="SECONDS",
                        help="wait so long for a machine that is less than half busy")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--hosts", type=int, default=0, help="simulated hosts, a worker on each")
    parser.add_argument("--mbit", type=float, default=24.0, help="of a host's link")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of a host's link, each way")
    parser.add_argument("--keep", type=Path, help="folder for the short runs of two workers")
    parser.add_argument("--to", type=Path, help="where every run is written")
    given = parser.parse_args()
    if given.record:
        record(max(given.steps, 800), given.traces)
        return
    if given.what_if or given.real:
        with wb.Cluster(4, devices="cpu") as cluster:
            settle(given.calm)
            if given.what_if:
                what_if(cluster, 4, given.steps, 1000 * given.seed, given.traces)
            if given.real:
                real(cluster, given.steps)
        return
    if given.quick:
        given.workers, given.cases, given.models = "4", "ring,central_storage", "mlp"
        given.jitter, given.steps, given.probe_steps = "on", 12, 40
    rows: list[dict[str, Any]] = []
    ends = time.time() + 60 * given.minutes
    counts = [int(n) for n in given.workers.split(",")]
    with placed(given) as cluster:
        known: dict[tuple[str, bool], list[Any]] = {}
        plans = []
        for name in given.models.split(","):
            for jitter in (word == "on" for word in given.jitter.split(",")):
                settle(given.calm)
                runs, seen = probes(cluster, name, given.probe_steps, jitter=jitter,
                                    seed=1000 * given.seed, traces=given.traces,
                                    inject=not given.hosts)  # fmt: skip
                known[name, jitter] = runs
                for k, run in enumerate(runs if given.keep else ()):
                    run.save(given.keep / f"{name}-{'jitter' if jitter else 'calm'}-{k}")
                print(name, "jitter" if jitter else "calm", [round(m.step_s, 4) for m in seen],
                      [round(m.cpu, 2) for m in seen], flush=True)  # fmt: skip
                plans += [
                    (n, name, jitter, case, turn)
                    for n in counts
                    for case in given.cases.split(",")
                    for turn in range(given.turns)
                ]
        # Few workers first: engines are added as they are needed. Else in random order, so that
        # what ends early is a fair part.
        shuffled = random.Random(given.seed)
        shuffled.shuffle(plans)
        plans.sort(key=lambda plan: plan[0])
        for k, (workers, name, jitter, case, turn) in enumerate(plans):
            if time.time() > ends:
                break
            seed = 1000 * given.seed + 10 + 7 * k + turn
            settle(given.calm)
            try:
                _, measured = sleeping(cluster, name, case, workers,
                                       steps_of(workers, given.steps), jitter=jitter, seed=seed,
                                       traces=given.traces, inject=not given.hosts)  # fmt: skip
            except wb.WorkbenchError as error:
                print(f"failed: {name} {case} {workers}: {error}", flush=True)
                continue
            row = compared(known[name, jitter], measured)
            rows.append(row)
            print(f"{name} {'jitter' if jitter else 'calm':<6} {case:<19} {workers:>2}: measured "
                  f"{row['step_s']:.4f} predicted {row['predicted_s']:.4f} "
                  f"[{row['low_s']:.4f} {row['high_s']:.4f}] {row['error']:+.1%} "
                  f"cpu {row['cpu']:.0%} {row['cpu_plain']:.0%} overshoot {row['overshoot']:.1%} "
                  f"{row['seconds']:.0f} s{'' if row['counts'] else '  does not count'}",
                  flush=True)  # fmt: skip
            if given.to:
                given.to.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    good = [row for row in rows if row["counts"]]
    nearly = [row for row in rows if row["nearly"]]
    for case in () if given.quick else CASES:
        if some := [row for row in good if row["case"] == case]:
            print(json.dumps(told(f"predicted {case}", some)))
    for word, picked in (
        () if given.quick else (("held-out model", HELD_OUT), ("training models", TRAINING))
    ):
        if some := [row for row in good if row["model"] in picked]:
            print(json.dumps(told(f"predicted, {word}", some)))
    if nearly and not given.quick:
        print(json.dumps(told("predicted, others at lower priority left out of account", nearly)))
    whole = told("predicted", good or rows)
    print(json.dumps({**whole, "left_out": len(rows) - len(good)}))


if __name__ == "__main__":
    main()
