"""The same runs twice over, with kills and interrupts: nothing has grown the second time."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

import workbench as wb

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
pytest.importorskip("torch")

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"
ROUNDS = [
    ("mirrored", 2, "none"),
    ("parameter_server", 2, "kill"),
    ("model_split", 3, "interrupt"),
    ("one_device", 1, "raise"),
    ("central_storage", 3, "none"),
    ("gossip", 2, "interrupt"),
    ("mirrored", 3, "kill"),
]
SLACK = {"files": 2, "threads": 1, "engine_files": 8, "kernel_mb": 8}


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_nothing_grows_over_mixed_runs_with_faults(soak):
    dice = random.Random(1)
    counts = []
    with wb.Cluster(2) as cluster:
        for _ in range(3):
            ends = [soak.one(cluster, soak.Round(*what), dice) for what in ROUNDS]
            assert not any("HUNG" in end for end in ends)
            assert [end for end in ends if end.startswith("none")] == ["none: finished"] * 2
            counts.append(soak.count(len(counts)))
    _, before, after = counts  # the first time is for pools, caches and servers
    for name in ("files", "threads", "processes", "engine_files", "shared_memory", "kernel_mb"):
        grown = getattr(after, name) - getattr(before, name)
        assert grown <= SLACK.get(name, 0), f"{name}: {before} then {after}"
