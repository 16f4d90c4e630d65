"""Workers as processes, without ipyparallel: each runs cells as an engine does (`harness.py`).

Each worker lives through many runs, as an engine does, so that what a run leaves behind is met by
the next one.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest import mock

import networks
import pytest
from fakes import gpu
from harness import run_here
from notebook_shell import soon
from worker_reports import Report, clean

from workbench import catalog
from workbench.engine.testing import EngineHarness
from workbench.shared.faults import parse_fault

# What runs would import otherwise, each process for itself.
PRELOAD = [
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "torch.fx",
    "workbench.engine.training.fit", "workbench.engine.training.user_loops",
    "workbench.engine.runtime", "workbench.engine.torch.support", "workbench.data.torch_sets",
    *sorted({entry.module.partition(":")[0] for entry in catalog.strategies("torch")}),
]  # fmt: skip

ENVIRON = {
    "OMP_NUM_THREADS": "1",
    # A cell begins when all are in the group: one that fails at once would keep others out.
    "TORCH_DIST_INIT_BARRIER": "1",
}
"""What the processes are started with."""

COLLECTIVES = {"fakegpu": "fakenccl", "cuda": "nccl"}

ANSWER_S = 60.0
"""How long a run may take; beyond that something hangs."""


ALONE_S = 3.0
"""How long the others may wait for one that has failed; then they are interrupted."""


def _serve(pipe: Any, stacks: str, network: str) -> None:
    if network:
        networks.enter(network)
    # Asked for by `Workers._abandon`; stays open as long as the process lives.
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in an engine, but while a cell runs
    # As in an engine: what is there now stays, so the collector need not look through it again.
    # Else most of the suite's time is spent in that.
    gc.freeze()
    # An engine's loaders fork; who was started by a fork server would ask one for each loader,
    # which then imports the framework.
    multiprocessing.set_start_method("fork", force=True)
    harness = EngineHarness()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(run_here(harness, *job))


class Workers:
    """A pool of worker processes and the store in which they meet.

    Args:
        kind: What each worker of a run has one of: `cpu`, the tests' `fakegpu`, or `cuda`.
    """

    kind_of_all = ""

    def __init__(self, count: int, kind: str = "cpu") -> None:
        import torch.distributed as dist

        self.kind = kind
        # A process has one fork server, whose environment is that of the pool that came first.
        if Workers.kind_of_all not in ("", kind):
            pytest.skip(
                f"needs a process of its own: the workers here have a {Workers.kind_of_all}"
            )
        Workers.kind_of_all = kind
        self._starter = multiprocessing.get_context("forkserver")
        self._starter.set_forkserver_preload(PRELOAD)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self._folder = tempfile.TemporaryDirectory()
        self._environ = dict(ENVIRON)
        if kind == "fakegpu":
            self._environ |= gpu.install(Path(self._folder.name) / "backend", devices=8)
        self._truths: dict[str, Report] = {}
        self._grow(count)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.meet = "127.0.0.1", self.store.port
        self.runs = 0

    def _grow(self, count: int) -> None:
        """Start processes until there are so many."""
        while len(self.processes) < count:
            ours, theirs = self._starter.Pipe()
            place = len(self.processes)
            process = self._starter.Process(
                target=_serve, args=(theirs, self._stacks_of(place), self._network(place))
            )  # not daemonic: loaders have processes of their own
            with mock.patch.dict(
                os.environ, self._environ
            ):  # the fork server keeps it for all of them
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def _network(self, place: int) -> str:
        """Return the network namespace that a process lives in; empty: this one."""
        return ""

    def _devices(self, rank: int, workers: int) -> dict[str, Any]:
        """Return what a worker is told of its device: one of its own each."""
        if self.kind == "cpu" or rank >= workers:
            return {}
        return {
            "device": f"{self.kind}:{rank}",
            "backend": f"cpu:gloo,{self.kind}:{COLLECTIVES[self.kind]}",
        }

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
        doomed: Collection[int] = (),
        **told: Any,
    ) -> list[Report]:
        """Run `function(*args, **keywords)` as a cell on the first `workers` processes.

        Args:
            by_turns: Whether faults are there in every other five steps only, for `more_ms`.
            doomed: Servers whose death is no error of the run.
        """
        from workbench.cookbook.recipe import Recipe
        from workbench.shared.protocol import RunSpec

        recipe = Recipe.from_function(function)
        entry = catalog.lookup(strategy)
        self.runs += 1
        settings = entry.settings(options or {})
        servers, key = entry.server_count(settings), secrets.token_hex(32)
        if not all(process.is_alive() for process in self.processes):
            self._abandon(0)  # one died in the run before
        self._grow(workers + servers)
        folder = os.path.join(self._folder.name, f"run{self.runs}")
        for rank in range(workers + servers):
            spec = RunSpec(
                mode="run", rank=rank, world_size=workers, ranks=tuple(range(workers)),
                store=self.meet, prefix=f"run{self.runs}/", run=self.runs,
                run_id=f"run{self.runs}", strategy=entry.name,
                options=settings, overrides=overrides or {},
                faults=tuple(map(parse_fault, faults)), servers=servers,
                key=key, init_from=init_from, role="worker" if rank < workers else "server",
                run_dir=folder, **{**self._devices(rank, workers), **told},
            )  # fmt: skip
            job = spec.to_wire(), recipe.source, function.__name__, args, keywords or {}, by_turns
            self.pipes[rank].send(job)
        reports = self._answers(workers + servers, {workers + number for number in doomed})
        for number, server in enumerate(reports[workers:]):
            if server.error == "died" and number in doomed:
                continue
            # What goes wrong on a server is told by the first worker.
            reports[0].error = server.error or reports[0].error
            reports[0].left += server.left
        shutil.rmtree(folder, ignore_errors=True)
        return reports[:workers]

    def truth(self, function: Any, *args: Any, **keywords: Any) -> Report:
        """Return what one device makes of a cell; of the same cell it is computed once."""
        cell = function.__module__, function.__qualname__
        key = json.dumps([cell, args, keywords], sort_keys=True)  # plain values: their text is all
        if key not in self._truths:
            reports = self.run("one_device", function, *args, keywords=keywords)
            (self._truths[key],) = clean(reports)
        return self._truths[key]

    def _stacks_of(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"stacks{rank}")

    def _answers(self, count: int, doomed: Collection[int] = ()) -> list[Report]:
        """Return what each process reports; those that wait for a failed one are interrupted.

        Raises:
            TimeoutError: One does not answer.
        """
        reports: dict[int, Report] = {}
        until_s, failed_s = time.monotonic() + ANSWER_S, 0.0
        while missing := [rank for rank in range(count) if rank not in reports]:
            if time.monotonic() > until_s:
                said = [report.error for report in reports.values() if report.error]
                stack = self._abandon(missing[0])
                raise TimeoutError(
                    "\n".join([f"worker {missing[0]} does not answer", stack, *said])
                )
            ready = multiprocessing.connection.wait([self.pipes[r] for r in missing], 0.5)
            for rank in missing:
                if self.pipes[rank] in ready:
                    try:
                        reports[rank] = self.pipes[rank].recv()
                    except EOFError:
                        reports[rank] = Report(error="died")
            if not ready and any(reports[rank].error for rank in reports if rank not in doomed):
                failed_s = failed_s or time.monotonic()
                if time.monotonic() - failed_s > ALONE_S:
                    failed_s = time.monotonic()
                    for rank in missing:
                        os.kill(self.processes[rank].pid, signal.SIGINT)
        return [reports[rank] for rank in range(count)]

    def _abandon(self, silent: int) -> str:
        """End all processes, whose late answers would be taken for the next run's; say why."""
        stacks, where = Path(self._stacks_of(silent)), "it has not begun"
        if stacks.exists() and self.processes[silent].is_alive():
            os.kill(self.processes[silent].pid, signal.SIGUSR1)
            soon(lambda: stacks.stat().st_size > 0, 5)
            where = stacks.read_text()
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
        self._folder.cleanup()
