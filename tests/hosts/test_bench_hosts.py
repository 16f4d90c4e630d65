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
    found = [json.loads(line) for line in done.stdout.splitlines()]
    start, steps = (one for one in found if "torchrun" in one["what"] and "ratio" not in one)
    assert 0 < start["imports_s"] < start["first_step_s"] < LIMIT_S
    assert 0 < steps["least"] <= steps["steps_per_s"] <= steps["most"] < 1e5
    assert "2 hosts x 1" in steps["what"]
