"""Copies between a device and the host: by chunks, none before its size is known."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from workbench.engine import runtime
from workbench.engine.contract import WeightsTooLargeError, weights_up_to
from workbench.engine.torch import accelerator, data
from workbench.engine.torch.accelerator import Memory, Staged
from workbench.engine.torch.data import make_source
from workbench.strategies.torch.parts.replica import to_numpy
from workbench.strategies.torch.servers.links import Staging

pytestmark = pytest.mark.torch


class Crossing:
    """An event: a copy is said to be over only when it has been waited for."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._event = self

    def wait(self, within_s: float | None = None) -> bool:
        self._log.append("wait")
        return True


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self._name} follows")


class Device:
    """Stands for `Accelerator`, with memory that is the host's."""

    is_cpu, pins = False, False

    def __init__(self, free_bytes: int = 10**6) -> None:
        self.log: list[str] = []
        self.device = torch.device("cpu")
        self._free_bytes = free_bytes

    def memory(self) -> Memory:
        return Memory(self._free_bytes, 10**9)

    def side_stream(self) -> Stream:
        return Stream(self.log, "copies")

    def current_stream(self) -> Stream:
        return Stream(self.log, "work")

    def on(self, stream: Any) -> Any:
        self.log.append("chunk")
        return contextlib.nullcontext()

    def event(self, *, timed: bool = True) -> Crossing:
        return Crossing(self.log)


TENSORS = [
    torch.arange(1000.0), torch.zeros(0), torch.tensor(7), torch.ones(3, 5, dtype=torch.bool),
    torch.randn(100, 33).bfloat16(),
]  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", [512, 1024, 1 << 16])
@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_tensors_cross_whole_whatever_the_chunks(chunk_bytes: int, way: str) -> None:
    device = Device()
    copies = [torch.zeros_like(tensor) for tensor in TENSORS]
    staged = Staged(device, chunk_bytes)  # type: ignore[arg-type]
    for _ in range(2):  # the chunks are used again
        getattr(staged, way)(zip(TENSORS, copies, strict=True))
        assert all(map(torch.equal, TENSORS, copies))
    assert device.log[0] == "copies follows"
    chunks, waits = device.log.count("chunk"), device.log.count("wait")
    if chunk_bytes == 1 << 16:
        assert chunks == 2  # small tensors share one
    assert waits >= chunks - 2  # no chunk is filled before it has crossed
    assert ("work follows" in device.log) == (way == "to_device")


def test_parameters_on_a_device_are_staged_through_two_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **about: Any) -> torch.Tensor:
        asked.extend([1] * pin_memory)
        return empty(*shape, **about)

    monkeypatch.setattr(torch, "empty", unpinned)
    device = Device()
    device.pins = True
    monkeypatch.setattr(accelerator, "of", lambda name: device)
    parameters = [torch.randn(8, 8, device="meta") for _ in range(5)]
    staging = Staging(parameters)
    assert len(asked) == 2  # whatever the number of parameters, and their sizes
    assert [len(place) for place in staging.landing()] == [256] * 5


def test_sizes_are_known_before_anything_is_copied(tmp_path: Path) -> None:
    large = {"a": torch.empty(1 << 30, device="meta"), "b": torch.ones(2)}
    with weights_up_to(1000), pytest.raises(WeightsTooLargeError) as caught:
        to_numpy(large)  # a copy of what has no memory would raise something else
    assert caught.value.size_bytes == (1 << 32) + 8
    said: list[str] = []
    run: Any = SimpleNamespace(
        weights=lambda: to_numpy(large),
        spec=SimpleNamespace(run_dir=str(tmp_path), run_id="r", rank=0),
        emit=lambda event: said.append(event.text),
    )  # fmt: skip
    assert runtime._save_weights(run, None) is None
    assert "(4.3 GB)" in said[0]


def test_weights_are_copies_also_of_half_precision() -> None:
    tensors = {"a": torch.ones(3), "b": torch.full((2, 2), 1.5).bfloat16(), "c": torch.tensor(4)}
    arrays = to_numpy(tensors)
    tensors["a"].zero_()
    assert arrays["a"].tolist() == [1, 1, 1]
    assert arrays["b"].dtype == np.float32
    assert arrays["b"].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert arrays["c"] == 4


@pytest.mark.parametrize(("free_bytes", "stays"), [(10**6, True), (1000, False)])
def test_data_that_takes_little_of_the_device_stays_there(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, stays: bool
) -> None:
    device = Device(free_bytes)
    device.device = torch.device("meta")  # any but the CPU
    monkeypatch.setattr(accelerator, "of", lambda name: device)
    x, y = torch.randn(64, 8), torch.arange(64)
    source: Any = make_source((x, y), 16, seed=0, shuffle=True)
    source.stay_on("cuda:0")
    share = next(source.epoch(0, 0, 2))
    assert {tensor.is_meta for tensor in share.data} == {stays}
    assert (share.samples, share.global_samples) == (8, 16)


def test_data_stays_where_it_is_on_a_cpu() -> None:
    source: Any = make_source((torch.randn(64, 8), torch.arange(64)), 16, seed=0, shuffle=True)
    before = source.tensors
    source.stay_on("cpu")
    assert source.tensors is before


class Squares(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return torch.tensor(float(place**2))


@pytest.mark.parametrize("asked", [True, False])
def test_a_loader_that_pins_is_taken_at_its_word(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(data, "_can_pin", lambda: True)
    monkeypatch.setattr(data, "pin_memory", lambda batch: pinned.append(batch) or batch)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, pin_memory=asked)
    source = make_source(loader, None, seed=0, shuffle=False)
    shares = list(source.epoch(0, 0, 1))
    assert len(pinned) == (2 if asked else 0)
    assert shares[1].data.tolist() == [16.0, 25.0, 36.0, 49.0]
