"""Engines that `mpiexec` starts: they train, and one may die or begin anew without the others."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest
from hosts.on_hosts import (
    SHORT,
    WAIT_S,
    cluster_of,
    failed,
    going,
    kill,
    losses,
    pids,
    settled,
    started,
)
from notebook_shell import Notebook

import workbench as wb
from workbench.errors import ClusterError
from workbench.session.cluster import Cluster

AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    if shutil.which("mpiexec") is None:
        pytest.skip("mpiexec is not installed (openmpi-bin)")
    with pytest.MonkeyPatch.context() as patch:
        for name in AS_ROOT:
            patch.setenv(name, "1")
        with started("2 --launcher mpi --launcher-option oversubscribe") as book:
            yield book


@pytest.fixture
def cluster(book: Notebook) -> Iterator[Cluster]:
    cluster = cluster_of(book)
    yield cluster
    settled(cluster)


def test_engines_are_ranks_of_one_mpiexec_and_train_as_one_device_does(
    book: Notebook, cluster: Cluster
) -> None:
    said = book.ok("%%distributed\nimport os\nprint(rank, os.environ['OMPI_COMM_WORLD_RANK'])").text
    assert "0 0" in said
    assert "1 1" in said
    truth = cluster.run(SHORT, strategy="one_device").wait(WAIT_S)
    run = cluster.run(SHORT, strategy="mirrored").wait(WAIT_S)
    assert losses(run) == pytest.approx(losses(truth), abs=1e-6)


@pytest.mark.timing
def test_a_killed_rank_ends_alone_and_begins_anew_alone(book: Notebook, cluster: Cluster) -> None:
    run, before = going(cluster), pids(cluster)
    kill(cluster, 1)
    text = failed(run, within_s=3)
    assert text.startswith(f"Rank 1 is gone: Engine 1 (pid {before[1]}")
    assert "killed by SIGKILL" in text
    assert cluster.ids == [0]
    book.ok("%cluster restart 1")
    after = pids(cluster)
    assert (after[0], after[1] != before[1]) == (before[0], True)
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


def test_mpiexec_says_at_once_that_it_will_not_run_as_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid() != 0 or shutil.which("mpiexec") is None:
        pytest.skip("needs root, and mpiexec")
    for name in AS_ROOT:
        monkeypatch.delenv(name, raising=False)
    began = time.monotonic()
    with pytest.raises(ClusterError) as error:
        wb.Cluster(2, launcher="mpi")
    assert time.monotonic() - began < 5
    assert error.value.code
    assert "root" in str(error.value)
