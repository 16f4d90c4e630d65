"""One worker of the contract tests: a cell as an engine runs it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from worker_reports import Report

from workbench.engine.debugging import postmortem
from workbench.engine.telemetry.step_gate import FaultInjector
from workbench.engine.testing import CollectingLink, EngineHarness

CALL = """
__answer__ = __call__(*__arguments__[0], **__arguments__[1])
"""
"""Stands below a cell's functions, so that their lines keep their numbers."""


class ByTurns(FaultInjector):
    """Faults that are there in every other five steps, beginning without them."""

    def __init__(self, rank: int, texts: tuple[str, ...]) -> None:
        super().__init__(rank)
        self._texts = texts

    def before_step(self, step: int) -> None:
        if step % 5 == 0:
            self.set(self._texts if step // 5 % 2 else ())
        super().before_step(step)


def run_here(
    harness: EngineHarness,
    wire: dict[str, Any],
    source: str,
    call: str,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    by_turns: bool,
) -> Report:
    """Run a cell under a strategy in this process; a server runs none."""
    from workbench.shared.protocol import RunSpec

    spec = RunSpec.from_wire(wire)
    before = _footprint()
    source += CALL.replace("__call__", call)
    report = _run(harness, spec, source, (args, keywords), by_turns)
    if report.error:
        postmortem.clear()  # frames that a debugger may ask for hold the cell's variables
    gc.collect()
    report.left = _left(before)
    return report


def _run(
    harness: EngineHarness, spec: Any, source: str, arguments: tuple[Any, ...], by_turns: bool
) -> Report:
    report = Report(strategy=spec.strategy)
    namespace: dict[str, Any] = {"__name__": "cell", "__arguments__": arguments}

    def begun(run: Any) -> None:
        namespace["context"] = run
        if by_turns and spec.role == "worker":
            run.faults = ByTurns(spec.rank, spec.faults)

    def ended(run: Any) -> None:  # each worker's, where the run keeps rank 0's alone
        if run.strategy is not None:
            report.weights = run.strategy.weights()
        elif run.weights is not None:
            report.weights = run.weights()

    link = CollectingLink()
    link.begun, link.ended = begun, ended
    found = harness.run(spec, source, namespace, link)
    report.value = namespace.get("__answer__")
    report.error, report.rows, report.events = found.error or None, found.rows, found.events
    report.train_s, report.eval_s, report.trained = found.train_s, found.eval_s, found.trained
    report.copy = {} if found.outcome.copies is None else vars(found.outcome.copies)
    report.replace = found.outcome.replace
    report.saved = _saved(spec.run_dir, found.outcome.weights)
    report.wrapped = _wrapped(namespace.get("keep") or {})
    return report


def _saved(folder: str, name: str | None) -> dict[str, Any]:
    """Return the weights that the run keeps."""
    if name is None:
        return {}
    with np.load(Path(folder) / name) as stored:
        return {key: stored[key] for key in stored.files}


def _wrapped(kept: dict[str, Any]) -> list[str]:
    """Return the names of the cell's modules that are not as plain as their classes are."""
    import torch

    return [
        name
        for name, value in kept.items()
        if isinstance(value, torch.nn.Module) and not _plain(value)
    ]


def _plain(module: Any) -> bool:
    cls = type(module)
    if cls.__module__ == "cell":  # the user's own class, which nobody can have replaced
        known: Any = cls
    else:
        known = getattr(sys.modules[cls.__module__], cls.__qualname__, None)
    if cls.__name__ == "DistributedDataParallel":  # the user's own: it must hold no group
        return known is cls and "reducer" not in module.__dict__
    hooks = module._forward_pre_hooks or module._forward_hooks
    return known is cls and "forward" not in module.__dict__ and not hooks


def _footprint() -> dict[str, Any]:
    import torch

    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "sockets": _sockets(),
        "environ": dict(os.environ),
        "backward": (torch.Tensor.backward, torch.autograd.backward),
        "scale": torch.amp.GradScaler.scale,
    }


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add(target)
    return found


def _left(before: dict[str, Any]) -> list[str]:
    """Name what a run left behind; sockets of a closed connection may need a moment."""
    import torch.distributed as dist

    deadline = time.monotonic() + 2
    while _sockets() - before["sockets"] and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    after = _footprint()
    left = [
        f"{key} changed" for key in ("environ", "backward", "scale") if after[key] != before[key]
    ]
    left += [
        f"{key}: {after[key] - before[key]}"
        for key in ("threads", "sockets")
        if after[key] - before[key]
    ]
    return left + (["process group"] if dist.is_initialized() else [])
