"""What a device holds while a model that is larger than it is put together again.

The backend is PyTorch's fake one: eight workers, of which this process is one. The parts lie on the
CPU, which stands for the device; `meta` stands for the host, so that all of the CPU's bytes count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.engine.torch import accelerator
from workbench.engine.torch.accelerator import Memory
from workbench.strategies.torch.allreduce import auto
from workbench.strategies.torch.parts.layout import Layout, Partitioned, make_mesh
from workbench.strategies.torch.tensor_parallel import TensorParallel

pytestmark = pytest.mark.torch

WORKERS, WIDTH, LAYERS = 8, 128, 32
CPU, HOST = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def eight() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORKERS)
    yield
    dist.destroy_process_group()


class Counted(TorchDispatchMode):
    """Counts the bytes of the CPU's tensors that were made within and are there still."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self._live = {tensor.untyped_storage()._cdata for tensor in there}
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._see, made)
        return made

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device != CPU or storage._cdata in self._live or not storage.nbytes():
            return
        self._live.add(storage._cdata)
        self.now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size_bytes: int) -> None:
        self._live.discard(key)
        self.now_bytes -= size_bytes


def _laid_out() -> tuple[Layout, torch.nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    mesh = make_mesh(CPU, (WORKERS,), ("shard",))

    def divide(model: torch.nn.Module) -> None:
        for module in model:
            for name, whole in module._parameters.items():
                part = torch.zeros(len(whole) // WORKERS, *whole.shape[1:])
                shards = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                module._parameters[name] = torch.nn.Parameter(shards)

    found = Layout(model, optimizer, divide)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return found, model, optimizer


@pytest.mark.parametrize("everywhere", [True, False])
def test_the_whole_is_gathered_tensor_by_tensor(eight: None, everywhere: bool) -> None:
    found, model, optimizer = _laid_out()
    parts = [p.to_local() for p in model.parameters()]
    state = [v.to_local() for s in optimizer.state.values() for v in s.values() if v.dim()]
    shard_bytes = sum(t.nbytes for t in (*parts, *state))
    whole_bytes = found.whole_bytes
    assert whole_bytes == WORKERS * shard_bytes
    largest_bytes = WIDTH * WIDTH * 4
    with Counted([*parts, *state]) as counted:
        found.gather(everywhere=everywhere, to=HOST)
    assert shard_bytes + counted.peak_bytes <= 1.2 * shard_bytes + largest_bytes
    assert counted.peak_bytes < whole_bytes / 10
    assert {p.device for p in model.parameters()} == {HOST}
    assert all(p.shape in ((WIDTH, WIDTH), (WIDTH,)) for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*parts, *state))


class Run:
    """What `Partitioned` asks of its run."""

    def __init__(self, gather: str, device: str) -> None:
        self.said: list[str] = []
        self.spec = SimpleNamespace(
            options={"gather": gather}, rank=0, world_size=WORKERS, device=device,
            hosts=("a",) * WORKERS, overrides={},
        )  # fmt: skip

    def emit(self, event: Any) -> None:
        self.said.append(event.text)


class Room:
    """Stands for the device: `free_bytes` are left on it."""

    is_cpu = False

    def __init__(self, free_bytes: int | None) -> None:
        self._free_bytes = free_bytes

    def memory(self) -> Memory | None:
        return None if self._free_bytes is None else Memory(self._free_bytes, 80 << 30)


GB = 10**9


@pytest.mark.parametrize(
    ("gather", "device_bytes", "host_bytes", "place", "words"),
    [
        ("all", 20 * GB, 999 * GB, (True, None), ""),
        ("all", 9 * GB, 999 * GB, (True, CPU), "on the CPU"),
        ("all", 9 * GB, 70 * GB, (False, CPU), "-o gather=first"),
        ("all", 20 * GB, 1 * GB, (True, None), ""),
        ("first", 9 * GB, 70 * GB, (False, CPU), "on the CPU"),
        ("first", 20 * GB, 70 * GB, (False, None), ""),
    ],
)
def test_the_whole_goes_where_there_is_room(
    eight: None, monkeypatch: pytest.MonkeyPatch, gather: str, device_bytes: int, host_bytes: int,
    place: Any, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(accelerator, "of", lambda device: Room(device_bytes))
    room = SimpleNamespace(available=host_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    run = Run(gather, "cpu")
    strategy = object.__new__(TensorParallel)
    Partitioned.__init__(strategy, run)
    found = strategy._place_of_whole(10 * GB)
    assert (found[0] or gather == "first", found[1]) == (place[0] or gather == "first", place[1])
    assert (words in run.said[0]) if words else not run.said


def test_a_host_without_room_for_every_worker_keeps_one_copy(
    eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=70 * GB))
    run = Run("all", "cpu")
    strategy = object.__new__(TensorParallel)
    Partitioned.__init__(strategy, run)
    assert strategy._place_of_whole(10 * GB) == (False, None)
    assert "-o gather=first" in run.said[0]
    assert strategy._place_of_whole(5 * GB) == (True, None)


def test_a_model_that_no_device_has_room_for_is_not_tried_there(
    eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Module()
    model.fc1, model.fc2 = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    run = Run("all", "cpu")
    run.spec.options["plan"] = "auto"
    strategy = object.__new__(TensorParallel)
    Partitioned.__init__(strategy, run)
    strategy.sample = torch.zeros(1, 16), torch.zeros(1)
    tried: list[Any] = []
    monkeypatch.setattr(strategy, "_trial", lambda model, job: tried.append(model))
    monkeypatch.setattr(accelerator, "of", lambda device: Room(1000))
    plan = strategy._choose(SimpleNamespace(model=model))
    assert tried == []
    assert set(plan.values()) == {"gathered"}
    assert "-o plan=" in run.said[0]


def test_choosing_an_all_reduce_allocates_nothing_on_the_device() -> None:
    links = SimpleNamespace(size=2)
    message = auto.Message(10**12, torch.float32, torch.device("cuda:0"))
    assert auto.choose(message, links, None).name == auto.BACKEND  # type: ignore[arg-type]


def test_objects_travel_on_the_host_where_the_group_has_a_half_for_it() -> None:
    backend = "cpu:gloo,cuda:fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        told: list[Any] = [None]
        dist.all_gather_object(told, "OutOfMemoryError")  # there is no GPU that it could go over
        assert told == ["OutOfMemoryError"]
        assert dist.distributed_c10d._get_object_coll_device() == "cpu"
    finally:
        dist.destroy_process_group()
