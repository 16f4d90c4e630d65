"""`workbench doctor --gpu-test`: ten minutes that say whether all of this works on these GPUs.

Each stage is a process with a time box: what hangs or crashes costs its own stage, and is itself
the result. After each stage the report is written anew, so nothing is lost where the test ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import children
from .report import MARKS, Line, Report, line_text

TOTAL_S = 600.0
STAGES_MODULE = "workbench.doctor.stages"
FAULTS_MODULE = "workbench.doctor.faults"
TRIALS_MODULE = "workbench.doctor.trials"
WANTED = (
    "torch", "ipyparallel", "ipykernel", "zmq", "psutil", "numpy", "cloudpickle", "platformdirs"
)  # fmt: skip
"""Modules without which no engine trains."""
CALLED = {"zmq": "pyzmq"}
"""What pip calls a module that is called otherwise."""


@dataclass(frozen=True)
class Stage:
    """One part of the test.

    Attributes:
        name: Of the function in its module.
        limit_s: Its time box; `quick_s` that of a short test.
        quick: Whether a short test does it too.
        needs: Modules that must be installed; of stages that start engines: `WANTED`.
    """

    name: str
    title: str
    limit_s: float
    quick: bool = False
    quick_s: float = 40.0
    needs: tuple[str, ...] = WANTED
    module: str = STAGES_MODULE


STAGES: tuple[Stage, ...] = (
    Stage("surroundings", "what is installed, and what the driver says", 45, True, 30, ()),
    Stage("devices", "each device computes as the CPU does", 45, True, 30, ("torch",)),
    Stage("group", "the smallest run: two processes, one all-reduce", 45, True, 30, ("torch",)),
    Stage("collectives", "collectives in cells, CPU and device tensors", 60, True),
    Stage("strategies", "each strategy against one device", 120, True),
    Stage("faults", "interrupts, errors, deaths", 120, True, module=FAULTS_MODULE),
    Stage("telemetry", "delays are read back", 60, module=TRIALS_MODULE),
    Stage("memory", "memory is given back", 40, module=TRIALS_MODULE),
    Stage("speed", "speed against torchrun, time to the first step", 75, module=TRIALS_MODULE),
    Stage("ways", "precision, compile, accumulation, loaders", 90, module=TRIALS_MODULE),
    Stage("checkpoints", "checkpoint and resume", 40, module=TRIALS_MODULE),
    Stage("refusals", "what cannot be is refused", 20, module=TRIALS_MODULE),
    Stage("tensorflow", "TensorFlow's strategies, then PyTorch", 75, module=TRIALS_MODULE),
    Stage("labs", "cells of the first labs", 90, module=TRIALS_MODULE),
)


@dataclass(frozen=True)
class Asked:
    """What the test is to do.

    Attributes:
        device: The kind that engines use: `cuda`, `cpu`, or another that torch knows.
        gpus: How many there are.
        quick: The shortest form of each stage, fewer stages.
        only: Names of stages; empty: all.
        total_s: When no further stage is begun.
    """

    out: Path
    device: str
    gpus: int
    quick: bool = False
    only: tuple[str, ...] = ()
    total_s: float = TOTAL_S


def missing(modules: Sequence[str] = WANTED) -> list[str]:
    """Return which modules cannot be imported, as pip calls them; none is imported."""
    from importlib.util import find_spec

    return [CALLED.get(name, name) for name in modules if find_spec(name) is None]


def run(
    asked: Asked, tell: Callable[[str], object] = print, stages: Sequence[Stage] = STAGES
) -> Report:
    """Do the stages one after the other; return the report, which is also written to `asked.out`.

    Args:
        tell: Gets each line as it is known.
    """
    folder = asked.out
    logs = folder / "stages"
    logs.mkdir(parents=True, exist_ok=True)
    report = Report("gpu-test")
    report.about |= {"device": asked.device, "gpus": asked.gpus}
    began = time.perf_counter()
    for stage in stages:
        if (asked.only and stage.name not in asked.only) or (
            asked.quick and not stage.quick and not asked.only
        ):
            continue
        lines = _stage(stage, asked, logs, began)
        for line in lines:
            tell(line_text(line))
        report.add(lines)
        report.seconds = time.perf_counter() - began
        _write(report, folder)
    _write(report, folder)
    tell("")
    tell(report.verdict())
    return report


def _stage(stage: Stage, asked: Asked, logs: Path, began: float) -> list[Line]:
    """Do one stage; its last line says how the stage as a whole went."""

    def whole(status: Any, found: str, step: str = "", seconds: float = 0.0) -> Line:
        return Line(f"stage.{stage.name}", status, stage.title, found, step, round(seconds, 2))

    if lacking := missing(stage.needs):
        names = " ".join(lacking)
        return [whole("unknown", f"not installed: {names}", f"pip install {names}")]
    left_s = asked.total_s - (time.perf_counter() - began)
    limit_s = min(stage.quick_s if asked.quick else stage.limit_s, left_s)
    if limit_s < 5:
        return [
            whole("unknown", f"not begun: {asked.total_s:g} s are over", "--only does it alone")
        ]
    told = {
        "device": asked.device, "gpus": asked.gpus, "quick": asked.quick, "limit_s": limit_s,
        "out": str(asked.out),
    }  # fmt: skip
    ended = children.run(stage.module, stage.name, told, limit_s, logs)
    return [*ended.lines, _judge(whole, ended, limit_s)]


def _judge(whole: Callable[..., Line], ended: children.Ended, limit_s: float) -> Line:
    log = "the log of the stage says where it stood"
    last = ended.lines[-1].what if ended.lines else "nothing"
    if ended.late:
        return whole(
            "fail", f"hangs: not over within {limit_s:.0f} s; the last thing done was: {last}",
            f"{log}:\n{_stacks(ended.tail)}", ended.seconds,
        )  # fmt: skip
    if ended.status:
        what = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
        return whole("fail", f"crashed ({what}) after: {last}", _last_line(ended.tail) or log,
                     ended.seconds)  # fmt: skip
    if ended.garbage:
        return whole("fail", "wrote something that is no line of a report", log, ended.seconds)
    if not ended.lines:
        return whole("unknown", "ended without a word", log, ended.seconds)
    bad = sum(line.status == "fail" for line in ended.lines)
    found = f"{len(ended.lines) - bad} of {len(ended.lines)} as it should be"
    return whole("fail" if bad else "ok", f"{found}, {ended.seconds:.1f} s", "", ended.seconds)


def _stacks(tail: str, most: int = 30) -> str:
    at = max(tail.rfind("Current thread"), tail.rfind("Thread 0x"), 0)
    return "\n".join(tail[min(at, max(0, len(tail) - 3000)):].splitlines()[:most])  # fmt: skip


def _last_line(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _write(report: Report, folder: Path) -> None:
    """Write the report, and all of the folder as one file that can be attached to an issue."""
    report.files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".zip"
    )  # fmt: skip
    report.write(folder)
    packed = folder.parent / f".{folder.name}.{os.getpid()}"
    made = Path(shutil.make_archive(str(packed), "zip", folder))
    made.replace(folder.parent / f"{folder.name}.zip")


def said_by(command: Sequence[str], limit_s: float = 20.0) -> str:
    """Return what a command prints; empty where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def summary(report: Report) -> str:
    """Return the failures and warnings once more, for the end of the output."""
    bad = [line for line in report.lines if line.status in ("fail", "warn")]
    return "\n".join(f"{MARKS[line.status]:<5} {line.id}: {line.found}" for line in bad)
