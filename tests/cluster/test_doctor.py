"""The doctor and the GPU test as users call them, with real engines, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import gpu
from needs import need

from workbench.devices import reservations

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

ROOT = Path(__file__).parents[2]


def doctor(*flags: str, timeout_s: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", "doctor", *flags], cwd=ROOT, capture_output=True,
        text=True, timeout=timeout_s, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
    )  # fmt: skip


def on_fake_gpus(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with two GPUs of the tests' own."""
    if lacking := gpu.missing():
        pytest.skip(f"a GPU for tests cannot be built: {lacking} is missing")
    env = gpu.install(tmp_path / "backend", 2, leased=True)
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env['PYTHONPATH']}"
    return env | {reservations.VARIABLE: str(tmp_path / "gpus")}


def test_the_doctor_finds_this_machine_well_and_says_what_it_cannot_check() -> None:
    done = doctor("--json")
    said = json.loads(done.stdout)
    found = {line["id"]: line for line in said["lines"]}
    assert done.returncode == int(said["failed"]) == 0, [
        line for line in said["lines"] if line["status"] == "fail"
    ]
    for id in ("machine.cluster", "machine.gloo", "machine.warm", "machine.loopback"):
        assert found[id]["status"] == "ok", found[id]
    assert found["gpu.matmul"]["status"] == "unknown"
    assert said["seconds"] < 45  # 9 s where nothing runs beside it


def test_a_short_gpu_test_on_the_cpu_passes_and_leaves_a_report(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = doctor("--gpu-test", "--on-cpu", "--quick", "--out", str(out))
    said = json.loads((out / "report.json").read_text())
    assert done.returncode == 0, done.stdout
    stages = {line["id"] for line in said["lines"] if line["id"].startswith("stage.")}
    assert {"stage.collectives", "stage.strategies", "stage.faults"} <= stages
    assert (tmp_path / "report.zip").exists()
    assert "torch" in (out / "collect_env.txt").read_text()


def test_a_short_gpu_test_on_two_gpus_passes(tmp_path: Path) -> None:
    out = tmp_path / "report"
    asked = ("--gpu-test", "--device", "fakegpu", "--gpus", "2", "--quick", "--out", str(out))
    done = doctor(*asked, **on_fake_gpus(tmp_path))
    assert done.returncode == 0, done.stdout
    found = {line["id"]: line for line in json.loads((out / "report.json").read_text())["lines"]}
    assert found["collectives.2_gpus.where"]["status"] == "ok"


def test_the_whole_gpu_test_on_two_gpus_passes(tmp_path: Path) -> None:
    """Left to `--long`: every stage that these GPUs can do, without autocast, without Triton."""
    out, only = (
        tmp_path / "report",
        "collectives,strategies,faults,memory,checkpoints,refusals,labs",
    )
    asked = ("--gpu-test", "--device", "fakegpu", "--gpus", "2", "--only", only, "--out", str(out))
    done = doctor(*asked, timeout_s=640, **on_fake_gpus(tmp_path))
    assert done.returncode == 0, done.stdout


def test_the_whole_gpu_test_on_the_cpu_passes(tmp_path: Path) -> None:
    """Left to `--long`: every stage, as on a machine with GPUs."""
    out = tmp_path / "report"
    done = doctor("--gpu-test", "--on-cpu", "--out", str(out), timeout_s=640)
    said = json.loads((out / "report.json").read_text())
    assert done.returncode == 0, done.stdout
    assert said["counts"]["ok"] > 40
