"""What an engine does with its device around a cell, whatever kind of device it is."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from fakes.accelerator import FakeAccelerator, HostClock
from torch.profiler import ProfilerActivity

from workbench.engine.debugging import stacks
from workbench.engine.torch import accelerator, group, support
from workbench.shared.protocol import RunSpec

pytestmark = pytest.mark.torch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = FakeAccelerator(HostClock())
    real = accelerator.of
    monkeypatch.setattr(accelerator, "of", lambda d: device if "gpu" in str(d) else real(d))
    monkeypatch.setattr(stacks, "_devices", [])
    yield device
    support._asked.close()


def recorded(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Let NCCL's flight recorder say so."""
    asked: list[tuple[Any, ...]] = []

    def dump(*given: Any) -> bytes:
        asked.append(given)
        return json.dumps({"entries": entries}).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return asked


def test_a_worker_computes_on_its_device_and_takes_its_part_of_a_shared_one(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(device, "limit_memory", limits.append)
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    support._take_device(spec)
    assert device.is_current()
    assert limits == []
    spec = replace(spec, sharers=3)
    support._take_device(spec)
    assert limits == [pytest.approx(0.3)]
    assert len(stacks._devices) == 1


def test_a_device_is_shown_by_its_name(device: Any) -> None:
    assert support.device_label("cpu") == "cpu"
    assert support.device_label("fakegpu:0") == "cuda:0 Fake"


@pytest.mark.parametrize(("kind", "activity"), [("cuda", "CUDA"), ("xpu", "XPU")])
def test_the_profiler_sees_the_work_of_the_kind_of_device(
    device: Any, monkeypatch: pytest.MonkeyPatch, kind: str, activity: str
) -> None:
    device.kind = kind
    own = getattr(ProfilerActivity, activity)
    monkeypatch.setattr(support, "supported_activities", lambda: {ProfilerActivity.CPU, own})
    made: list[Any] = []
    monkeypatch.setattr(support, "profile", lambda **given: made.append(given))
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    profiler = support.TorchProfiler(spec)
    assert made[0]["activities"] == [ProfilerActivity.CPU, own]
    syncs = device.syncs
    profiler._synchronise()
    assert device.syncs == syncs + 1


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_a_collective_that_the_device_is_in_is_named(
    device: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    begun = {"profiling_name": "nccl:all_reduce", "state": state}
    done = {"profiling_name": "nccl:broadcast", "state": "completed"}
    asked = recorded(monkeypatch, done, begun)
    waits, where = support.collective_under_way(device)
    assert waits
    assert "all_reduce" in where
    assert asked == [(True, True)]
    recorded(monkeypatch, done)
    assert support.collective_under_way(device) is None


def test_a_main_thread_that_spins_for_the_device_waits_in_its_collective(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, {"profiling_name": "nccl:all_gather", "state": "started"})
    spec = RunSpec("run", 0, 1, (0,), device="fakegpu:0")
    support._take_device(spec)
    monkeypatch.setattr(stacks, "_main_thread", lambda: [stacks.Place(__file__, 3, "step")])
    found = stacks.where()
    assert found.state == "waits"
    assert "all_gather" in found.waits_in
    support._take_device(replace(spec, device="cpu"))
    assert stacks.where().state == "busy"


def test_without_a_recorder_nothing_is_said(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch._C._distributed_c10d
    monkeypatch.delattr(module, "_dump_nccl_trace_json", raising=False)
    assert support.collective_under_way(device) is None


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """Rank 2 of four on two hosts; this host reaches the store from 10.0.0.2, on eth7."""
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(group.address, "own_address", {"10.0.0.1": "10.0.0.2"}.__getitem__)
    monkeypatch.setattr(group.address, "interface_of", {"10.0.0.2": "eth7"}.__getitem__)
    return RunSpec(
        mode="run", rank=2, world_size=4, ranks=(0, 1, 2, 3), store=("10.0.0.1", 5),
        hosts=("z", "z", "a", "a", "z"), backend="cpu:gloo,cuda:nccl",
    )  # fmt: skip


def test_workers_of_several_hosts_talk_on_the_interface_that_leads_to_the_store(
    two_hosts: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = group.environ(two_hosts)
    assert [found[name] for name in INTERFACES] == ["eth7"] * 3
    assert found["MASTER_ADDR"] == "10.0.0.1"
    ranks = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [found[name] for name in ranks] == ["1", "0", "2"]  # the first rank's host is host 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in group.environ(two_hosts)  # the user's stands


def test_workers_that_are_all_on_one_host_talk_on_its_loopback(two_hosts: RunSpec) -> None:
    found = group.environ(replace(two_hosts, hosts=("a", "a", "a", "a", "z")))
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
    assert "TP_SOCKET_IFNAME" not in found


def test_a_worker_that_knows_no_store_breaks_none_of_its_own_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_store_port", 0)
    monkeypatch.setattr(group, "_kept", {inode for _, inode in group._sockets()})
    one, other = socket.socketpair()
    with one, other:
        assert group.shutdown_group_sockets(store=True) == 0
        one.sendall(b"?")
        assert other.recv(1) == b"?"


@pytest.mark.parametrize("peers", [frozenset(), frozenset({"127.0.0.9"})])
def test_only_connections_to_the_groups_hosts_are_broken(
    peers: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_peers", peers)
    monkeypatch.setattr(group, "_kept", {inode for _, inode in group._sockets()})
    with socket.create_server(("127.0.0.9", 0)) as worker, socket.create_server(("", 0)) as other:
        to_worker = socket.create_connection(worker.getsockname())
        to_other = socket.create_connection(("127.0.0.1", other.getsockname()[1]))
        with to_worker, to_other:
            assert group.shutdown_group_sockets() == (1 if peers else 2)
            with pytest.raises(OSError):
                to_worker.sendall(b"?")
            if peers:
                to_other.sendall(b"?")
