"""Workers as processes, without ipyparallel: what the engines' runtime does around a cell.

Each worker lives through many runs, as an engine does, so that what a run leaves behind is met by
the next one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from notebook_shell import soon

from workbench import catalog
from workbench.engine.injector import FaultInjector

# What runs would import otherwise, each process for itself.
PRELOAD = [
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "torch.fx",
    "workbench.engine.fit", "workbench.engine.prepare", "workbench.engine.watch",
    "workbench.engine.runtime", "workbench.engine.torch_support", "workbench.data.torch_sets",
    *sorted({entry.module.partition(":")[0] for entry in catalog.strategies("torch")}),
]  # fmt: skip


ANSWER_S = 60.0
"""How long a run may take; beyond that something hangs."""


@dataclass
class Report:
    """What one worker brings back from a run."""

    value: Any = None
    error: str | None = None
    rows: Any = None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    wrapped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    train_s: float = 0.0
    eval_s: float = 0.0
    trained: int = 0
    strategy: str = ""

    def emitted(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


class ByTurns(FaultInjector):
    """Faults that are there in every other five steps, beginning without them."""

    def __init__(self, rank: int, texts: tuple[str, ...]) -> None:
        super().__init__(rank)
        self._texts = texts

    def before_step(self, step: int) -> None:
        if step % 5 == 0:
            self.set(self._texts if step // 5 % 2 else ())
        super().before_step(step)


def more_ms(column_s: Any, share: float = 0.2) -> Any:
    """Return by how many ms a column's quantile grows, per rank, with faults `by_turns`.

    What else goes on at the machine is in both kinds of steps, as they take turns. It only ever
    adds, and more where all workers compute: so the lower quintile says whether the whole delay is
    in the steps, and the median that not more is.

    Args:
        column_s: Seconds, (steps, ranks).
    """
    inside = [step for step in range(len(column_s)) if step % 5]  # the first may be part of both
    slowed, plain = (
        np.quantile([column_s[step] for step in inside if step // 5 % 2 == turn], share, axis=0)
        for turn in (1, 0)
    )
    return (slowed - plain) * 1e3


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


def _serve(pipe: Any, stacks: str) -> None:
    # Asked for by `Workers._abandon`; stays open as long as the process lives.
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115
    # As in an engine: what is there now stays, so the collector need not look through it again.
    # Else most of the suite's time is spent in that.
    gc.freeze()
    # An engine's loaders fork; who was started by a fork server would ask one for each loader,
    # which then imports the framework.
    multiprocessing.set_start_method("fork", force=True)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(run_here(*job))


class Workers:
    """A pool of worker processes and the store in which they meet."""

    def __init__(self, count: int) -> None:
        import torch.distributed as dist

        os.environ["OMP_NUM_THREADS"] = "1"
        # A cell begins when all are in the group: one that fails at once would keep others out.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        self._starter = multiprocessing.get_context("forkserver")
        self._starter.set_forkserver_preload(PRELOAD)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self._stacks = tempfile.TemporaryDirectory()
        self._grow(count)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.runs = 0

    def _grow(self, count: int) -> None:
        """Start processes until there are so many."""
        while len(self.processes) < count:
            ours, theirs = self._starter.Pipe()
            process = self._starter.Process(
                target=_serve, args=(theirs, self._stacks_of(len(self.processes)))
            )  # not daemonic: loaders have processes of their own
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self,
        strategy: str,
        function: Any,
        *args: Any,
        workers: int = 1,
        options: dict[str, Any] | None = None,
        overrides: dict[str, Any] | None = None,
        faults: tuple[str, ...] = (),
        by_turns: bool = False,
        keywords: dict[str, Any] | None = None,
        init_from: str = "",
        **told: Any,
    ) -> list[Report]:
        """Run `function(*args, **keywords)` as a cell on the first `workers` processes.

        Args:
            by_turns: Whether faults are there in every other five steps only; see `more_ms`.
        """
        from workbench import catalog
        from workbench.cookbook import Recipe
        from workbench.protocol import RunSpec

        recipe = Recipe.from_function(function)
        entry = catalog.lookup(strategy)
        self.runs += 1
        settings = entry.settings(options or {})
        servers, key = entry.server_count(settings), secrets.token_hex(32)
        self._grow(workers + servers)
        for rank in range(workers + servers):
            spec = RunSpec(
                mode="run", rank=rank, world_size=workers, ranks=tuple(range(workers)),
                store=("127.0.0.1", self.store.port), prefix=f"run{self.runs}/", run=self.runs,
                run_id=f"run{self.runs}", strategy=entry.name,
                options=settings, overrides=overrides or {}, faults=faults, servers=servers,
                key=key, init_from=init_from, role="worker" if rank < workers else "server",
                **told,
            )  # fmt: skip
            self.pipes[rank].send(
                (
                    spec.to_wire(), recipe.source, function.__name__, args, keywords or {},
                    ByTurns if by_turns else FaultInjector,
                )
            )  # fmt: skip
        reports = []
        for rank in range(workers + servers):
            if not self.pipes[rank].poll(ANSWER_S):
                raise TimeoutError(f"worker {rank} does not answer\n{self._abandon(rank)}")
            try:
                reports.append(self.pipes[rank].recv())
            except EOFError:
                reports.append(Report(error="died"))
        for server in reports[workers:]:  # what goes wrong on a server is told by the first worker
            reports[0].error = server.error or reports[0].error
            reports[0].left += server.left
        return reports[:workers]

    def _stacks_of(self, rank: int) -> str:
        return os.path.join(self._stacks.name, str(rank))

    def _abandon(self, silent: int) -> str:
        """End all processes, whose late answers would be taken for the next run's; say why."""
        os.kill(self.processes[silent].pid, signal.SIGUSR1)
        soon(lambda: os.path.getsize(self._stacks_of(silent)) > 0, 5)
        with open(self._stacks_of(silent)) as file:
            where = file.read()
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.pipes.clear()
        self.processes.clear()
        return where

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._stacks.cleanup()


def joined(reports: list[Report]) -> Any:
    """Return the rows as (steps, ranks)."""
    return np.stack([report.rows for report in reports], axis=1)


def failures(reports: list[Report]) -> list[str]:
    return [report.error for report in reports if report.error]
