"""What engines hold of a device: given back, left behind in packing, and no other's touched.

No device is at hand here: tensors of float16 stand for those that lie on one.
"""

from __future__ import annotations

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.engine import entry, runtime
from workbench.engine.debugging.tracebacks import advice
from workbench.engine.torch import accelerator, checkpoints, support
from workbench.engine.torch.data import make_source

pytestmark = pytest.mark.torch


class Device:
    """Stands for `Accelerator`."""

    def __init__(self) -> None:
        self.given_back = 0
        self.state = torch.tensor([1, 2, 3], dtype=torch.uint8)

    def give_back(self) -> None:
        self.given_back += 1

    def random_state(self) -> torch.Tensor:
        return self.state

    def set_random_state(self, state: torch.Tensor) -> None:
        self.state = state


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(accelerator, "in_use", lambda: found)
    monkeypatch.setattr(
        accelerator,
        "_is_away",
        lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.float16,
    )
    monkeypatch.setattr(accelerator, "_on_cpu", _came)
    return found


def _came(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().float()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2).half()
    model.tied = model.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def _types(value: Any) -> set[torch.dtype]:
    model, optimizer = value
    state = [s["momentum_buffer"] for s in optimizer.state.values()]
    return {tensor.dtype for tensor in (*model.parameters(), *state)}


def test_what_is_pulled_lies_on_the_cpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, plain = _model(), object()
    space = {"pair": pair, "plain": plain, "one": {"x": torch.ones(2).half()}}
    monkeypatch.setattr(entry, "IPythonShell", lambda: SimpleNamespace(namespace=space))
    found = entry.pull(["pair", "plain", "one", "none"])
    assert _types(found["pair"]) == {torch.float32}
    assert found["one"]["x"].dtype == torch.float32
    model, optimizer = found["pair"]
    assert model.tied is model.weight
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert found["plain"] is plain  # nothing of it is copied
    assert _types(pair) == {torch.float16}  # the engine's own stays where it is
    assert entry.take(["one"])["one"]["x"].dtype == torch.float32
    assert "one" not in space


def test_what_is_lent_comes_to_the_borrowers_device(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {"pair": _model()}
    monkeypatch.setattr(entry, "IPythonShell", lambda: SimpleNamespace(namespace=space))
    monkeypatch.setattr(entry, "variables", lambda: ["pair"])
    packed = entry.lend("pair")
    space.clear()
    assert entry.borrow(packed) == []
    model, optimizer = space["pair"]
    assert _types(space["pair"]) == {torch.float32}  # its device is not known yet
    brought = []
    monkeypatch.setattr(accelerator, "_bring", lambda tensor, to: brought.append((tensor, str(to))))
    accelerator.settle("cuda:1")
    assert {to for _, to in brought} == {"cuda:1"}
    held = [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    assert {id(tensor) for tensor, _ in brought} == {id(tensor) for tensor in held}
    accelerator.settle("cuda:1")
    assert len(brought) == 4  # once


def test_a_borrower_on_the_cpu_keeps_them_there(device: Device) -> None:
    tensor = pickle.loads(accelerator.pack(torch.ones(2).half()))
    accelerator.settle("cpu")
    assert tensor.device.type == "cpu"
    assert not accelerator._arrivals


def test_memory_is_given_back_at_the_end_of_a_run_and_after_an_error(device: Device) -> None:
    shell = SimpleNamespace(execute=lambda source, number: MemoryError("no room"))
    runtime._execute(shell, support, {"source": "", "number": 1})
    assert device.given_back == 1
    engine = SimpleNamespace(link=SimpleNamespace(detach=lambda: True), group="")
    run = SimpleNamespace(
        strategy=None, closers=[], weights=None, copies=None,
        spec=SimpleNamespace(group=""), failed=False,
    )  # fmt: skip
    runtime._undo(engine, run, support)
    assert device.given_back == 2


def test_freeing_gives_memory_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(user_ns_hidden={}, user_ns={"x": 1}, reset=lambda **_: None)
    monkeypatch.setattr(entry, "IPythonShell", lambda: SimpleNamespace(shell=shell))
    assert entry.free() == 1
    assert device.given_back == 1


def test_a_device_that_has_failed_does_not_stop_the_clearing(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(device, "give_back", fail)
    accelerator.give_back()


def test_a_checkpoint_holds_the_own_devices_generator_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def of(name: str) -> Device:
        asked.append(str(name))
        return device

    monkeypatch.setattr(accelerator, "of", of)
    state = checkpoints.random_state("cuda:1")
    assert torch.equal(state["device"], device.state)
    other = Device()
    monkeypatch.setattr(accelerator, "of", lambda name: {"cuda:0": other}[str(name)])
    state["device"] = torch.tensor([9], dtype=torch.uint8)
    checkpoints.set_random_state(state, "cuda:0")  # the rank has another device now
    assert (asked, other.state.tolist()) == (["cuda:1"], [9])


def test_without_a_device_a_checkpoint_holds_no_device() -> None:
    state = checkpoints.random_state("cpu")
    assert "device" not in state
    checkpoints.set_random_state(state, "cpu")


class Pictures(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return torch.zeros(2), 0


def test_looking_at_a_sample_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d=0: touched.append(d) or torch.ones(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, d=0: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_source(Pictures(), 4, seed=0, shuffle=False).peek()
    assert touched == []


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("AcceleratorError: CUDA error: device-side assert triggered", "class label"),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0", "as many workers as"),
        ("CUDA error: no kernel image is available for execution on the device", "build of torch"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.", "NCCL_DEBUG"),
        ("RuntimeError: CUDA error: resource already mapped", "CUDA IPC"),
        ("CUDA_ERROR_ALREADY_MAPPED", "CUDA IPC"),
        ("RuntimeError: CUDA error: invalid device ordinal", "x.to(device)"),
        ("DataLoader worker (pid 7) is killed by signal: Bus error.", "--shm-size"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "until the next cell"),
        ("OutOfMemoryError: XPU out of memory. Tried", "until the next cell"),
        ("RuntimeError: MPS backend out of memory (MPS allocated: 1 GB", "until the next cell"),
    ],
)
def test_errors_of_gpus_come_with_the_next_step(error: str, step: str) -> None:
    assert step in str(advice(error))
