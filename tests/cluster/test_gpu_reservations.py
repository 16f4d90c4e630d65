"""A cluster's engines hold its GPUs as well, and give them back; the GPUs are made up.

Their kind computes on the CPU (`cpu:0`), so real engines run on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench as wb
from workbench.devices import discovery, leases, mask, reservations
from workbench.devices.discovery import Device
from workbench.errors import PlanError

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.leaks("the cluster of all tests holds its GPUs"),
]
GPUS = [Device(i, "Fake", 80 << 30, 0, f"FAKE-{i}", number=i, kind="fake") for i in range(3)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "FINDERS", {"fake": lambda framework: (GPUS, [])})
        patch.setitem(mask.KINDS, "fake", mask.Kind("fake", "cpu", "FAKE_VISIBLE_DEVICES"))
        patch.setenv(reservations.VARIABLE, str(tmp_path_factory.mktemp("g") / "gpus"))
        patch.setattr(leases, "_said", set())
        with wb.Cluster(2) as cluster:
            yield cluster
        assert reservations.holders() == {}


def run(cluster: wb.Cluster, source: str) -> str:
    """Run a cell on all engines; return what it came to."""
    task = cluster.execute(source)
    assert task.over.wait(30)
    error = task.failure()
    return "" if error is None else str(error)


def test_engines_hold_the_gpus_of_their_cells_and_free_gives_them_back(cluster):
    assert reservations.holders() == {}  # nothing has run yet
    assert run(cluster, "where = str(device)") == ""
    assert cluster.pull(["where"]) == {0: {"where": "cpu:0"}, 1: {"where": "cpu:1"}}
    assert set(reservations.holders()) == {"FAKE-0", "FAKE-1"}
    assert [row.device for row in cluster.vitals.now()] == [
        "cpu:0 Fake (GPU 0)", "cpu:1 Fake (GPU 1)",
    ]  # fmt: skip
    files = {gpu: str(path) for gpu, path in cluster.pool.devices.reservations.files.items()}
    cluster.pool.devices.reservations.leave()  # as when the kernel of a kept cluster ends
    assert set(reservations.holders()) == {"FAKE-0", "FAKE-1"}
    cluster.pool.devices.reservations.take_over(files)

    other = leases.DevicePool("auto")
    assert other.lease(1).gpus == ("FAKE-2",)
    words = other.lease(2).warning
    assert "3 GPUs" in words
    assert "GPU 0" in words

    cluster.free()
    assert reservations.holders() == {}
    assert [list(Path(path).parent.iterdir()) for path in files.values()] == [[], []]
    assert other.lease(3).gpus == ("FAKE-0", "FAKE-1", "FAKE-2")
    assert run(cluster, "x = 1") == ""
    assert set(reservations.holders()) == {"FAKE-0", "FAKE-1"}


def test_the_table_says_who_holds_which(cluster):
    assert run(cluster, "x = 1") == ""
    told = " ".join(str(note) for note in cluster.status().notes)
    assert "GPU 0, GPU 1: this cluster; GPU 2: free." in told


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("7", r"WB-PLAN-024[\s\S]*0, 1, 2"),
        ("0,7", r"WB-PLAN-024[\s\S]*0, 1, 2"),
        ("1,1", "WB-PLAN-344"),
    ],
)
def test_gpus_that_are_not_there_are_refused_and_the_cluster_goes_on(cluster, asked, words):
    with pytest.raises(PlanError, match=words):
        wb.Cluster(1, devices=asked)
    assert run(cluster, "x = 1") == ""


def test_more_workers_than_gpus_would_compute_on_the_cpu(cluster):
    given = cluster.pool.lease(4)
    assert [one.device for one in given.leases] == ["cpu"] * 4
    assert given.gpus == ("FAKE-0", "FAKE-1")  # what its engines see does not change
    assert "4 workers" in given.warning
    assert "3 GPUs" in given.warning


TRAIN = """
import torch
from torch import nn
wb.fit(nn.Linear(8, 2), wb.data.synthetic(64, shape=(8,), classes=2), batch_size=8,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), steps=3)
"""


def test_a_named_gpu_is_shared_by_strategies_that_can_and_others_are_refused(cluster):
    assert run(cluster, "x = 1") == ""  # it holds the GPU that the other one names
    with wb.Cluster(2, devices="0") as other:
        with pytest.raises(PlanError, match=r"WB-PLAN-162[\s\S]*2 workers, 1 GPU[\s\S]*-n 1"):
            other.run(TRAIN, strategy="sharded")
        trained = other.run(TRAIN, strategy="mirrored").wait(60)
        assert (trained.state, trained.devices) == ("finished", ("cpu:0 Fake (GPU 0)",) * 2)
        assert trained.history.story.devices[1] == "cpu:0 Fake (GPU 0)"  # as engines tell it
        notes = " ".join(map(str, trained.history.story.notes))
        assert "cpu:0 Fake (GPU 0)" in notes
        assert "2 workers share 1 GPU" in notes
        task = other.execute("both = str(device)")
        assert task.over.wait(30)
        assert "2 workers share 1 GPU" in task.board.text()
        assert other.pull(["both"]) == {0: {"both": "cpu:0"}, 1: {"both": "cpu:0"}}
    assert set(reservations.holders()) == {"FAKE-0", "FAKE-1"}
