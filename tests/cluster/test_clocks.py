"""A run whose workers read clocks that are nine days apart."""

import shutil
import subprocess

import numpy as np
import pytest
from ipyparallel.cluster.launcher import LocalEngineLauncher
from needs import need
from notebook_shell import WAIT_S

import workbench as wb
from workbench.cluster.processes import FORK

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(4096, shape=(64,), classes=10), batch_size=64,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=60)
"""
APART = ["unshare", "--time", "--monotonic", "777600", "--fork", "--kill-child"]


@pytest.fixture(scope="module")
def cluster():
    if shutil.which("unshare") is None or subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("this user may not make a time namespace")
    as_ever = LocalEngineLauncher.find_args

    def apart(launcher):
        return [*(APART if launcher.identifier == "1" else ()), *as_ever(launcher)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK, "off")
        patch.setattr(LocalEngineLauncher, "find_args", apart)
        with wb.Cluster(2) as cluster:
            yield cluster


@pytest.mark.parametrize(
    ("strategy", "faults"), [("mirrored", ()), ("parameter_server", ("slow=0:10ms", "slow=1:10ms"))]
)
def test_curves_begin_at_0_and_rates_are_of_all_workers(cluster, tmp_path, strategy, faults):
    run = cluster.run(FIT, strategy=strategy, inject=faults).wait(WAIT_S)
    history, shot = run.history, run.snapshot()
    bounds = run.meta()["clock_bound_s"]
    assert sorted(bound > 0 for bound in bounds) == [False, True]
    assert max(bounds) < 0.1
    span_s = history.totals.wall_s
    assert 0 <= shot.loss_curve.t_s.min() <= shot.loss_curve.t_s.max() <= span_s < WAIT_S
    starts = [history["start_s"][history["rank"] == rank] for rank in (0, 1)]
    assert all((np.diff(own) >= 0).all() for own in starts)
    assert max(own[0] for own in starts) < span_s
    # Over the time of all: where one begins later, the sum of their own rates would be too much.
    rate = history["samples"].sum() / np.ptp(history["start_s"])
    assert shot.samples_per_s == pytest.approx(rate, rel=0.25)
    run.save(tmp_path / "run")
    saved = wb.load(tmp_path / "run")
    assert saved.history["start_s"] == pytest.approx(history["start_s"], abs=1e-6)
    assert saved.meta()["clock_bound_s"] == bounds
