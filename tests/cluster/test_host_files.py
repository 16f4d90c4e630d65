"""What runs on other hosts read and write: it is here afterwards, and nothing of it stays there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosted import hosted_cluster

import workbench as wb
from workbench.cluster.hosts.agents import HostFiles
from workbench.errors import PlanError, RunError
from workbench.execution import requests
from workbench.session.cluster import Cluster

WAIT_S = 120
CELL = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
x = torch.randn(128, 8)
wb.fit(model, (x, x.sum(1, keepdim=True)), loss=torch.nn.functional.mse_loss, epochs={epochs},
       optimizer=lambda p: torch.optim.SGD(p, {rate}), batch_size=16)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    with hosted_cluster(folder) as cluster:
        yield cluster
    left = [one for name in ("left", "right") for one in (folder / name / "tmp").iterdir()]
    assert not [one for one in left if one.name.startswith("workbench")]


def a_run(cluster: Cluster, epochs: int = 2, rate: float = 0.1, **asked: object) -> wb.Run:
    run = cluster.run(CELL.format(epochs=epochs, rate=rate), strategy="mirrored", **asked)
    return run.wait(WAIT_S)


def below(cluster: Cluster, part: str) -> list[str]:
    """Files that the agents hold in a part of their folders."""
    hosts = {cluster.engine_set.host_of(i).facts.folder for i in cluster.ids}
    return [str(one) for host in hosts for one in (Path(host) / part).rglob("*") if one.is_file()]


@pytest.fixture
def no_shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts do not see the folders of this machine."""
    look = HostFiles.look

    def blind(files, host, path, *, deep=False):
        inside = path.startswith(host.facts.folder)
        return look(files, host, path, deep=deep) if inside else None

    monkeypatch.setattr(HostFiles, "look", blind)


def test_a_run_on_other_hosts_is_whole_in_its_folder(cluster: Cluster) -> None:
    run = a_run(cluster, name="far")
    assert not any(one.is_here for one in cluster.engine_set.engines.values())
    loaded = wb.load(run.folder)  # warns where something is missing
    assert loaded.history.totals.steps == run.history.totals.steps == 16
    assert {path.name for path in run.folder.iterdir()} >= {
        "records-rank0.bin", "records-rank1.bin", "events-rank0.jsonl", "events-rank1.jsonl",
    }  # fmt: skip
    assert run.weights()["weight"].shape == (1, 8)
    assert (run.folder / "weights.pt").is_file()
    assert not below(cluster, "tmp")


def test_weights_go_to_hosts_that_do_not_see_them_once(cluster: Cluster, no_shared_disk) -> None:
    a_run(cluster, name="first")
    # Without a step's length, training leaves the weights as they came.
    second = a_run(cluster, rate=0.0, init_from="first")
    a_run(cluster, rate=0.0, init_from="first")
    assert np.array_equal(second.weights()["weight"], wb.runs["first"].weights()["weight"])
    sent = below(cluster, "sent")
    assert sorted(Path(one).name for one in sent) == ["run.json"] * 2 + ["weights.npz"] * 2


def test_a_run_goes_on_from_what_another_host_held(cluster: Cluster, no_shared_disk) -> None:
    run = a_run(cluster, epochs=4, on_failure="continue", inject=["kill=1@20"])
    (recovery,) = run.recoveries
    assert (recovery.step, recovery.lost_steps, recovery.workers) == (20, 0, 1)
    assert run.history.totals.steps == wb.load(run.folder).history.totals.steps
    assert f"{run.folder}/rescued/step-20" in str(run.history.story.notes)
    assert not (run.folder / "rescued").exists()
    assert not below(cluster, "tmp")
    cluster.restart()


def test_weights_that_do_not_arrive_are_told_as_a_full_disk_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = cluster.engine_set.host_files._agents

    def break_off(host, path, into):
        into.write_bytes(b"half")
        raise RunError("left is gone.", code="WB-RUN-000")

    with monkeypatch.context() as patch:
        patch.setattr(agents, "read_file", break_off)
        run = a_run(cluster)
    assert run.state == "finished"
    (note,) = [text for text in run.history.story.notes if "left is gone" in text]
    assert "disk" in note
    with pytest.raises(RunError, match="WB-RUN-086"):
        run.weights()


def test_a_folder_that_is_not_shared_is_refused_before_a_run_exists(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(requests, "BLIND", "posixpath:join")  # says something, thus why not
    before = list(wb.runs)
    with pytest.raises(PlanError, match="WB-PLAN-188") as caught:
        a_run(cluster, checkpoint=str(tmp_path / "saved"))
    assert "left: " in str(caught.value)
    assert "right: " in str(caught.value)
    assert list(wb.runs) == before
    assert not (tmp_path / "saved").exists()


def test_checkpoints_lie_in_a_shared_folder(cluster: Cluster, tmp_path: Path) -> None:
    a_run(cluster, checkpoint=str(tmp_path / "saved"), checkpoint_every=8)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "run.json", "step-16", "step-8",
    ]  # fmt: skip
    assert (tmp_path / "saved" / "step-16" / "rank-1").is_dir()
    run = wb.resume(tmp_path / "saved" / "step-16", cluster=cluster, epochs=3).wait(WAIT_S)
    assert run.state == "finished"
