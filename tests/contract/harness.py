"""One worker, in this process: what the engines' runtime does around a cell."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from typing import Any

from worker_reports import Report

from workbench.engine.injector import FaultInjector


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
    wire: dict[str, Any],
    source: str,
    call: str,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    injector: type[FaultInjector],
) -> Report:
    """Run a cell under a strategy in this process."""
    import torch

    from workbench.engine import context as run_context
    from workbench.engine import torch_support as support
    from workbench.engine.gate import Gate
    from workbench.engine.recorder import Recorder
    from workbench.engine.serving import open_links
    from workbench.protocol import RunSpec, records_from

    spec = RunSpec.from_wire(wire)
    if spec.role == "server":
        return serve_here(spec)
    report = Report(strategy=spec.strategy)
    before = _footprint()
    environ = {key: os.environ.get(key) for key in support.environ(spec)}
    os.environ.update(support.environ(spec))
    run = run_context.RunContext(
        spec=spec,
        recorder=Recorder(spec.run, spec.rank),
        gate=Gate(),
        faults=injector(spec.rank, spec.faults),
        emit=lambda name, **fields: report.events.append((name, fields)),
    )
    run_context.set_current(run)
    namespace: dict[str, Any] = {"__name__": "cell", "context": run}
    try:
        support.setup(spec)
        support.ensure_group(spec)
        open_links(run, support)
        namespace.update(rank=spec.rank, world_size=spec.world_size, device=spec.device)
        exec(compile(source, "<cell>", "exec"), namespace)
        report.value = namespace[call](*args, **keywords)
        if run.checkpoints is not None:
            run.checkpoints.conclude(failed=False)
        if run.strategy is not None:
            report.weights = run.strategy.weights()
        elif run.weights is not None:
            report.weights = run.weights()
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        support.shutdown_group_sockets()
    finally:
        if run.strategy is not None:
            run.strategy.close()
        for close in reversed(run.closers):
            close()
        run.strategy = run.weights = None
        run.closers.clear()
        support.destroy_group()
        run_context.set_current(None)
        for key, value in environ.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
    report.rows = records_from(run.recorder.drain(1 << 20, final=True)).copy()
    report.train_s, report.eval_s, report.trained = run.train_s, run.eval_s, run.trained
    report.wrapped = [
        name
        for name, value in (namespace.get("keep") or {}).items()
        if isinstance(value, torch.nn.Module) and not _plain(value)
    ]
    del namespace, run
    gc.collect()
    report.left = _left(before)
    return report


def serve_here(spec: Any) -> Report:
    """Be a server in this process."""
    from workbench.engine import context as run_context
    from workbench.engine import torch_support as support
    from workbench.engine.gate import Gate
    from workbench.engine.recorder import Recorder
    from workbench.engine.serving import serve

    report, before = Report(), _footprint()
    run = run_context.RunContext(
        spec, Recorder(spec.run, spec.rank), Gate(), FaultInjector(spec.rank), emit=lambda *a: None
    )
    try:
        support.setup(spec)
        serve(run, support)
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    del run
    gc.collect()
    report.left = _left(before)
    return report


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
        "backward": torch.Tensor.backward,
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
