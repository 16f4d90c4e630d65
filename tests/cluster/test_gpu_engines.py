"""A cluster whose engines have GPUs of the tests' own: ends of all kinds cost what they must.

Their collectives are ended by nothing but an abort, as NCCL's are (tests/fakes/gpu).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import gpu
from notebook_shell import soon

import workbench as wb
from workbench.devices import discovery, leases, mask, reservations
from workbench.devices.discovery import Device
from workbench.errors import RunError

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.leaks("the cluster of all tests holds its GPUs"),
]
WORKERS = 3
LABS = Path(__file__).parents[2] / "notebooks" / "solutions"
PLAIN = "%%distributed"
WAIT_S = 60
AT_THE_PROMPT_S = 15.0
"""How long it may take until the notebook can be used again."""
GPUS = [Device(i, "Fake", 8 << 30, 0, f"FAKE-{i}", number=i, kind="fakegpu") for i in range(3)]
KIND = mask.Kind("fakegpu", "fakegpu", "FAKEGPU_VISIBLE_DEVICES", collectives="fakenccl")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Cluster]:
    if lacking := gpu.missing():
        pytest.skip(f"a GPU for tests cannot be built: {lacking} is missing")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gpu.install(tmp_path_factory.mktemp("backend"), 3).items():
            patch.setenv(name, value)
        patch.setattr(discovery, "FINDERS", {"fakegpu": lambda framework: (GPUS, [])})
        patch.setitem(mask.KINDS, "fakegpu", KIND)
        patch.setenv(reservations.VARIABLE, str(tmp_path_factory.mktemp("g") / "gpus"))
        patch.setattr(leases, "_said", set())
        with wb.Cluster(WORKERS) as cluster:
            yield cluster


def run(cluster: wb.Cluster, source: str, then: Callable[[Any], object] | None = None) -> str:
    """Run a cell on all engines; return what it came to."""
    task = cluster.execute(source)
    if then is not None:
        then(task)
    assert task.over.wait(WAIT_S)
    error = task.failure()
    return "" if error is None else str(error)


def pids(cluster: wb.Cluster) -> dict[int, int]:
    return {engine.id: engine.pid for engine in cluster.engines if engine.state != "dead"}


PROOF = """
import contextlib
import json
import os
import torch
mine = torch.full((2,), float(rank + 1), device=device)
dist.all_reduce(mine)
also = torch.full((2,), float(rank + 1))
dist.all_reduce(also)
proof = [mine.tolist(), also.tolist(), str(device), os.environ["LOCAL_RANK"],
         torch.fakegpu.identity(mine.device.index),
         torch.fakegpu.has_context((rank + 1) % world_size)]
"""


def check_all_is_well(cluster: wb.Cluster) -> None:
    assert run(cluster, PROOF) == ""
    found = cluster.pull(["proof"])
    assert [found[engine]["proof"] for engine in sorted(found)] == [
        [[6.0, 6.0], [6.0, 6.0], f"fakegpu:{rank}", str(rank), f"FAKE-{rank}", False]
        for rank in range(WORKERS)
    ]


def kept(cluster: wb.Cluster) -> list[Any]:
    found = cluster.pull(["kept"])
    return [found[engine].get("kept") for engine in sorted(found)]


@pytest.fixture
def unharmed(cluster: wb.Cluster) -> Iterator[None]:
    """The engines of before with what they held, and collectives that are right."""
    assert run(cluster, "kept = rank") == ""
    before = pids(cluster)
    yield
    assert pids(cluster) == before
    assert kept(cluster) == [0, 1, 2]
    check_all_is_well(cluster)


def test_each_engine_has_its_gpu_under_its_local_rank_and_a_context_nowhere_else(cluster):
    check_all_is_well(cluster)


@pytest.mark.parametrize("lab", [1, 2, 3, 4])
def test_the_cells_of_a_lab_that_run_on_all_ranks(cluster, lab):
    notebook = json.loads((LABS / f"lab_{lab}_solved.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    cells = [body for line, _, body in (s.partition("\n") for s in sources) if line == PLAIN]
    assert cells
    for cell in cells:
        right = ["2.2", "2.5"] if '"2.5"]:' in cell else ["2.1", "2.2", "2.3"]
        cluster.push({"right": right})  # what the notebook's own checks would have found
        assert run(cluster, cell) == ""


HANGS = """
import time
if rank == 1:
    EVENT
x = torch.ones(4, device=device)
dist.all_reduce(x)
print(x.sum().item())
"""


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("raise ValueError('rank 1 has had enough')", "rank 1 has had enough"),
        ("torch.empty(1 << 40, device=device)", "OutOfMemoryError"),
    ],
    ids=["an error", "out of memory"],
)
def test_a_rank_that_fails_in_a_cell_ends_it_alone(cluster, unharmed, event, words):
    began = time.monotonic()
    assert words in run(cluster, HANGS.replace("EVENT", event))
    assert time.monotonic() - began < AT_THE_PROMPT_S


@pytest.mark.parametrize("place", ["device", "'cpu'"])
def test_an_interrupt_while_a_collective_waits(cluster, unharmed, place):
    began = time.monotonic()
    pressed = threading.Event()

    def press(task: Any) -> None:
        pressed.wait(1.5)
        task.interrupt()

    source = HANGS.replace("device=device", f"device={place}")
    run(cluster, source.replace("EVENT", "time.sleep(1000)"), press)
    assert time.monotonic() - began < AT_THE_PROMPT_S


TRAIN = """
import torch
from torch import nn
torch.manual_seed(1)
def on_step_end(step, logs):
    EVENT
result = wb.fit(nn.Linear(8, 2), wb.data.synthetic(64, shape=(8,), classes=2), batch_size=8,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), steps=STEPS,
       callbacks=[on_step_end])
"""


DEEP = "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))"


def trained(cluster: wb.Cluster, event: str = "pass", steps: int = 12, **how: Any) -> Any:
    source = TRAIN.replace("EVENT", event).replace("STEPS", str(steps))
    run = cluster.run(source, strategy="mirrored", workers=WORKERS, **how)
    with contextlib.suppress(RunError):
        run.wait(WAIT_S)
    return run


def test_a_run_that_fails_in_mid_step_costs_no_engine(cluster, unharmed):
    run = trained(cluster, "if step == 5 and rank == 1: raise ValueError('enough')")
    assert run.state == "failed"
    assert "enough" in str(run.error)
    assert trained(cluster).state == "finished"


def test_a_device_that_failed_costs_its_own_engine(cluster):
    assert run(cluster, "kept = rank") == ""
    before = pids(cluster)
    said = run(cluster, HANGS.replace("EVENT", "torch.fakegpu.fail(710)"))
    assert "device-side assert" in said
    deadline = time.monotonic() + WAIT_S
    while pids(cluster).get(1) in (before[1], None) and time.monotonic() < deadline:
        time.sleep(0.05)
    check_all_is_well(cluster)
    assert kept(cluster) == [0, None, 2]
    assert pids(cluster)[0] == before[0]


def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on_from_whole_weights(
    cluster, tmp_path
):
    truth = trained(cluster)
    event = "import time; time.sleep(0.05)"
    source = TRAIN.replace("EVENT", event).replace("STEPS", "12")
    before = pids(cluster)
    run = cluster.run(
        source, strategy="mirrored", workers=WORKERS, on_failure="replace", checkpoint=str(tmp_path)
    )
    deadline = time.monotonic() + WAIT_S
    while run.history.totals.steps < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(before[1], signal.SIGKILL)
    run.wait(WAIT_S)
    assert run.state == "finished", run.error
    assert pids(cluster)[0] == before[0]
    weights, same = run.weights(), truth.weights()
    assert all(abs(weights[name] - same[name]).max() < 1e-6 for name in same)
    check_all_is_well(cluster)


def test_a_run_that_made_groups_of_some_ranks_leaves_a_whole_one_for_the_next(cluster):
    for strategy in ("hybrid", "tensor_parallel"):
        source = TRAIN.replace("nn.Linear(8, 2)", DEEP).replace("EVENT", "pass")
        run = cluster.run(source.replace("STEPS", "4"), strategy=strategy, workers=2)
        run.wait(WAIT_S)
        assert run.state == "finished"


def test_runs_and_cells_keep_their_group_while_all_goes_well(cluster):
    same = "import torch.distributed as dist\nmade = id(dist.group.WORLD)"
    found = []
    for _ in range(2):
        assert trained(cluster).state == "finished"
        assert run(cluster, same) == ""
        found.append(cluster.pull(["made"]))
    assert found[0] == found[1]
    assert run(cluster, "raise ValueError('enough')") != ""
    assert run(cluster, same) == ""
    assert cluster.pull(["made"]) != found[0]
    check_all_is_well(cluster)


def test_a_run_heals_and_takes_more_gpus_while_it_trains(cluster):
    truth = trained(cluster, steps=120)
    source = TRAIN.replace("EVENT", "import time; time.sleep(0.02 if step < 100 else 0)")
    run = cluster.run(
        source.replace("STEPS", "120"), strategy="mirrored", workers=2, on_failure="heal"
    )
    assert soon(lambda: run.history.totals.steps >= 5, WAIT_S), run.error
    run.scale(3)
    assert [one.split()[0] for one in run.devices] == ["fakegpu:0", "fakegpu:1", "fakegpu:2"]

    os.kill(pids(cluster)[1], signal.SIGKILL)
    run.wait(WAIT_S)
    assert run.state == "finished", run.error
    assert [one["event"] for one in run.events][:2] == ["joined", "healed"]
    weights, same = run.weights(), truth.weights()
    assert all(abs(weights[name] - same[name]).max() < 1e-6 for name in same)
    check_all_is_well(cluster)
