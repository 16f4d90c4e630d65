"""benchmarks/bench_hosts.py runs, on hosts of its own, and ends in both of its figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hosts.local_slurm import SLURM_NEEDS
from hosts.simulated_hosts import ROOT, missing

OTHER = "202"
LIMIT_S = 150.0


@pytest.mark.torch
def test_the_benchmark_of_two_hosts_runs() -> None:
    if why := missing(SLURM_NEEDS):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bench_hosts.py"), "--short"],
        env={**os.environ, "WORKBENCH_TEST_NETWORK": OTHER},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    start, steps = map(json.loads, done.stdout.splitlines())
    assert 0 < start["imports_s"] < start["first_step_s"] < LIMIT_S
    assert 0 < steps["least"] <= steps["steps_per_s"] <= steps["most"] < 1e5
    assert steps["workers"] == 2
