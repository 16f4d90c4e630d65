"""Every benchmark runs, in a short form, and ends in lines of JSON with the figures it is for.

Of a figure it is only asserted that it is one: a short run on a shared machine measures little.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from needs import need

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIMIT_S = 240.0
PARTS = {
    "chaos_notebook.py", "fault_scenarios.py", "fault_scenarios_cells.py",
    "fault_scenarios_death.py", "model_zoo.py",
}  # fmt: skip
"""What chaos.py, bench_faults.py and bench_models.py are made of."""
ELSEWHERE = {
    "soak.py": "cluster/test_soak.py",
    "bench_hosts.py": "hosts/test_bench_hosts.py",
}
"""Benchmarks that a test file of their own runs."""

Range = tuple[float, float]
RATIO: Range = (1e-3, 1e3)
MS: Range = (1e-4, 1e5)
SECONDS: Range = (1e-5, LIMIT_S)
RATE: Range = (1e-3, 1e9)
SHARE: Range = (0.0, 1.0)
NONE: Range = (0.0, 0.0)
SIZE: Range = (1e-3, 1e12)


@dataclass(frozen=True)
class Short:
    """How a benchmark is run in seconds.

    Attributes:
        figures: What each line of JSON must hold, and from where to where it is plausible; a list
            where they differ from line to line.
        results: Lines of JSON.
        needs: Modules that must be installed.
    """

    arguments: str
    figures: Mapping[str, Range] | list[Mapping[str, Range]]
    results: int = 1
    needs: tuple[str, ...] = ("torch",)


QUICK = {
    "bench_kernel.py": Short(
        "--seconds 1",
        {"cpu_share": (1e-4, 4.0), "frame_ms": MS, "lost": NONE, "records_per_s": RATE},
        results=2,
        needs=(),
    ),
    "bench_history.py": Short(
        "--quick",
        {
            "core_share_64_workers_100_steps_per_s": (1e-4, 4.0),
            "core_share_2_workers_1000_steps_per_s": (1e-4, 4.0),
            "snapshot_ms_4_workers_10k_steps": MS,
            "snapshot_ms_64_workers_10k_steps": MS,
            "long_run_peak_mb": (1.0, 1e3),
            "long_run_rows_per_cpu_s": RATE,
            "long_run_steps": (100_000, 100_000),
        },
        needs=(),
    ),
    "bench_dashboard.py": Short(
        "--frames 5",
        {
            "delta_2_workers_ms": MS,
            "delta_8_workers_ms": MS,
            "full_4_workers_ms": MS,
            "svg_4_workers_ms": MS,
            "text_line_4_workers_ms": (0.0, 1e3),
            "final_picture_4_workers_ms": MS,
        },
        needs=(),
    ),
    "rows.py": Short("--only bench_dashboard.py --to rows.json", {"taken": (1, 1)}, needs=()),
    "vitals.py": Short(
        "--engines 2 --turns 3",
        {"first_ms": MS, "median_ms": MS, "most_ms": MS, "pss_ms": MS},
        needs=(),
    ),
}
"""Those that start no engine and import no framework."""

ON_WORKERS = {
    "bench_async.py": Short(
        "--epochs 1 --seeds 1 --mean-ms 0.1 --only staleness_aware_lr --no-goals",
        {"staleness": (0.0, 100.0), "one_device_loss": (0.0, 10.0), "loss_at_1x": (0.0, 10.0)},
    ),
    "bench_large_model.py": Short(
        "--quick",
        {"model_bytes": SIZE, "before_bytes": SIZE, "samples": (1, 1e6)},
        needs=("torch", "transformers"),
    ),
    "bench_central_storage.py": Short(
        "--mb 1 --workers 2 --steps 5 --turns 1",
        {"ratio": RATIO, "steps_per_s": RATE, "rival_steps_per_s": RATE},
    ),
    "bench_replicas.py": Short(
        "--quick",
        {"ratio": RATIO, "steps_per_s": RATE, "longest_step_at_a_death_ms": MS},
        results=2,
    ),
    "bench_parameter_server.py": Short(
        "--mb 1 --rounds 2 --turns 1",
        {"ratio_rpc": RATIO, "ratio_gloo": RATIO, "tcp_ratio_gloo": RATIO, "unix_gb_per_s": RATE},
    ),
}
"""Those that start processes of their own, which import PyTorch."""

ON_ENGINES = {
    "bench_allreduce.py": Short(
        "--workers 2 --pairs 1 --steps 10",
        {"ratio": RATIO, "steps_per_s": RATE, "rival_steps_per_s": RATE},
        results=4,
    ),
    "bench_healing.py": Short(
        "--quick",
        {
            "overhead_share": (-1.0, 1.0),
            "lost_workers_share": (-1.0, 1.0),
            "noticed_sigstop_s": SECONDS,
            "healed_s": SECONDS,
            "joined_s": SECONDS,
            "rows_twice": NONE,
            "difference": (0.0, 1e-10),
        },
    ),
    "bench_class.py": Short(
        "--notebooks 2 --engines 1 --seconds 1",
        {
            "last_ready_s": SECONDS,
            "training_pss_mb": SIZE,
            "least_over_most": SHARE,
            "jain": (0.0, 1.0 + 1e-9),
        },
    ),
    "bench_cells.py": Short(
        "--engines 2 --cells 3",
        {"ratio": RATIO, "ours_s": SECONDS, "rival_s": SECONDS, "pair_ratio": RATIO},
    ),
    "record_waits.py": Short("--steps 30 --to waits.npz", {"runs": (14, 14), "size_bytes": SIZE}),
    "chaos.py": Short(
        "--rounds 5 --seed 2763 --kinds cell mirrored continue checkpoints",
        {
            "rounds": (5, 5),
            "hung": NONE,
            "wrong": NONE,
            "ended_worst_s": (0.0, 30.0),
            "after_worst_s": SECONDS,
            "threads_now": (1, 1e3),
            "files_now": (1, 1e4),
            "memory_mb_now": (1.0, 1e5),
        },
    ),
    "bench_checkpoint.py": Short(
        "--hidden 16 --steps 40 --every 20 --rounds 1",
        {
            "ratio": RATIO,
            "stall_ms": MS,
            "written_s": SECONDS,
            "size_bytes": SIZE,
            "checkpoints": (1, 10),
        },
    ),
    "bench_diloco.py": Short(
        "--quick",
        [
            {"loss": (0.0, 10.0), "loss_ratio": (0.5, 2.0), "bytes_ratio": share}
            for share in ((1.0, 1.0), *[(0.2 - 1e-9, 0.2 + 1e-9)] * 3)
        ],
        results=4,
    ),
    "bench_faults.py": Short(
        "--only cell_raises --repeats 1",
        {"median_s": SECONDS, "worst_s": SECONDS, "promise_s": SECONDS, "repeats": (1, 1)},
    ),
    "bench_jobs.py": Short(
        "--pairs 1 --seconds 1 --steps 30 --only follow lag plain",
        [
            {"ratio": RATIO, "cpu_share": SHARE, "idle_share": SHARE},
            *[{"lag_s": SECONDS, "rows": (10, 1e4)}] * 3,
            *[{"ratio": RATIO}] * 2,
        ],
        results=6,
    ),
    "bench_memory.py": Short(
        "--engines 2", {"ratio": RATIO, "ours_pss_mb": SIZE, "fresh_pss_mb": SIZE}
    ),
    "bench_overhead.py": Short(
        "--pairs 1 --seconds 0.2",
        {"ratio": RATIO, "torchrun_ratio": RATIO, "off_step_ms": MS, "goal": SHARE},
    ),
    "bench_models.py": Short(
        "--models lstm --strategies mirrored --steps 2",
        {"cases": (1, 1), "trained": (1, 1)},
    ),
    "bench_parity.py": Short(
        "--workers 2 --steps 8 --strategies mirrored,parameter_server",
        {"off_most": (0.0, 1e-9), "steps_per_s": RATE, "wait_read_ms": (-1e3, 1e3), "named": SHARE},
        results=2,
    ),
    "bench_pipeline.py": Short(
        "--only asleep,split --steps 4 --repeats 1 --sleep-ms 1",
        [*[{"ideal": SHARE, "measured": SHARE}] * 10, {"ms": MS, "best_ms": MS}],
        results=11,
    ),
    "bench_auto.py": Short(
        "--quick",
        {"recipes": (1, 1), "least": (0.0, 1.0), "longest_choice_s": SECONDS},
    ),
    "bench_predict.py": Short(
        "--quick",
        {"runs": (1, 2), "median_error": (0.0, 10.0), "coverage": SHARE, "left_out": (0, 2)},
    ),
    "bench_start.py": Short(
        "--engines 2 --rounds 1",
        {"default_s": SECONDS, "cold_s": SECONDS, "warm_s": SECONDS, "warm_ratio": RATIO},
    ),
    "bench_waits.py": Short(
        "--workers 2 --steps 12",
        {"read_ms": (-1e3, 1e3), "own_ms": (-1e3, 1e3), "named": SHARE, "steps": (7, 7)},
        results=3,
    ),
    "soak.py": Short(
        "--restarts 4",
        {
            "restarts": (4, 4),
            "worst_s": SECONDS,
            "threads_now": (1, 1e3),
            "files_now": (1, 1e4),
            "rss_mb_now": (1.0, 1e5),
        },
    ),
    "rivals.py": Short(
        "--tool workbench --only listens --repeats 1", {"median": NONE, "worst": NONE}
    ),
}
"""Those that start a cluster."""

TENSORFLOW = {
    "bench_tensorflow_overhead.py": Short(
        "--pairs 1 --steps 15 --width 16",
        {"step_ratio": RATIO, "cpu_ratio": RATIO, "plain_step_ms": MS},
        results=2,
        needs=("tensorflow",),
    ),
    "bench_tensorflow_parameter_server.py": Short(
        "--steps 40 --turns 1",
        {"recorded_ratio": RATIO, "wb_fit_ratio": RATIO, "tutorial_closures_per_s": RATE},
        needs=("tensorflow",),
    ),
    "bench_tensorflow_start.py": Short(
        "--engines 1 --rounds 1",
        {"ratio": RATIO, "added_mib": (-1e3, 1e4), "fresh_s": SECONDS, "warm_s": SECONDS},
        needs=("tensorflow",),
    ),
}

TABLE = {**QUICK, **ON_WORKERS, **ON_ENGINES, **TENSORFLOW}


def results(file: str, arguments: str) -> list[dict[str, Any]]:
    """Run a benchmark, in a folder of its own; return what its lines of JSON say."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(FOLDER / file), *arguments.split()],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=env,
            cwd=folder,
        )
    said = f"{file} {arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    lines = done.stdout.splitlines()
    assert lines[-1:], said
    assert lines[-1].startswith("{"), said
    return [json.loads(line) for line in lines if line.startswith("{")]


def check(file: str) -> None:
    """Run a benchmark of the table; see that each of its results is whole."""
    short = TABLE[file]
    need(*short.needs)
    found = results(file, short.arguments)
    assert len(found) == short.results, found
    figures = short.figures if isinstance(short.figures, list) else [short.figures] * short.results
    for result, expected in zip(found, figures, strict=True):
        assert isinstance(result.get("what"), str), result
        for name, (least, most) in expected.items():
            value = result.get(name)
            assert isinstance(value, int | float), f"{name} in {result}"
            assert math.isfinite(value), f"{name} in {result}"
            assert least <= value <= most, f"{name} in {result}"


@pytest.mark.parametrize("file", QUICK)
def test_a_cheap_benchmark_runs(file: str) -> None:
    check(file)


@pytest.mark.torch
@pytest.mark.parametrize("file", ON_WORKERS)
def test_a_benchmark_on_workers_runs(file: str) -> None:
    check(file)


@pytest.mark.torch
@pytest.mark.cluster
@pytest.mark.parametrize("file", ON_ENGINES)
def test_a_benchmark_on_engines_runs(file: str) -> None:
    check(file)


@pytest.mark.tensorflow
@pytest.mark.cluster
@pytest.mark.parametrize("file", TENSORFLOW)
def test_a_benchmark_of_tensorflow_runs(file: str) -> None:
    check(file)


def test_no_benchmark_is_left_out() -> None:
    there = {path.name for path in FOLDER.glob("*.py")}
    assert there == {*TABLE, *PARTS, *ELSEWHERE}
    for test in ELSEWHERE.values():
        assert (Path(__file__).parents[1] / test).exists()
