"""Random faults in one kernel, round after round: does every cell end, does the next one work?

A round starts a cell or a run, breaks something while it goes on, and looks: whether the cell ended
within 30 s (of the interrupt, where the fault alone does not end it), whether the run's state fits,
whether the next cell works after at most the step that its message names. What the kernel holds
(threads, files, memory) is counted after each round. A seed gives the same rounds.

    python benchmarks/chaos.py [--rounds 40] [--seed 0] [--without disks halts] [--json FILE]

With `--json` what is known is written after every round. The last line is JSON: the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

import workbench as wb
from workbench import lifecycle
from workbench.errors import WorkbenchError

LIMIT_S = 30.0
QUIET_S = 6.0
"""How long a fault is given to end the cell by itself, before it is interrupted."""
PLAIN = (
    "import time, torch\nx = torch.ones(1)\nwhile True:\n    dist.all_reduce(x); time.sleep(0.01)"
)
SOUND = "import torch\nx = torch.ones(1)\ndist.all_reduce(x)\nassert float(x) == world_size"
TRAIN = """
import time, torch
from torch import nn
wb.fit(nn.Linear(16, 4), wb.data.synthetic(256, shape=(16,), classes=4), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=16, steps=1_000_000,
       callbacks=[lambda step, logs: time.sleep(0.002)])
"""
KINDS = (
    "",
    "mirrored",
    "one_device",
    "central_storage",
    "parameter_server",
    "local_sgd",
    "sharded",
)
"""What is going on: a plain cell, or a run under a strategy."""
GROUPS = {
    "kills": ("kill engine", "kill engines", "kill controller", "kill part", "kill warm parent",
              "kill keeper", "kill when idle"),
    "halts": ("halt engine", "halt controller", "halt part", "halt warm parent", "halt keeper"),
    "interrupts": ("interrupt", "interrupt twice"),
    "controls": ("stop", "pause, resume, stop", "pause, interrupt", "restart"),
    "disks": ("disk full",),
}  # fmt: skip
FIGURES = ("threads", "files", "memory_mb")


@dataclass
class Round:
    """One round and what was seen of it.

    Attributes:
        kind: Strategy; empty: a plain cell.
        ended_s: From the fault, or the interrupt that ended it, to the cell's end.
        step: What its message said was to be done; empty: nothing.
        after_s: Until the next cell had worked, the step included.
        wrong: What was not as promised.
    """

    number: int
    kind: str
    fault: str
    ended_s: float = 0.0
    state: str = ""
    said: str = ""
    step: str = ""
    after_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    threads: int = 0
    files: int = 0
    memory_mb: float = 0.0


class Chaos:
    """One cluster, and the dice."""

    def __init__(self, seed: int, groups: Sequence[str]) -> None:
        self.dice = random.Random(seed)
        self.faults = [fault for group in groups for fault in GROUPS[group]]
        self.cluster = wb.Cluster(2)

    def close(self) -> None:
        self.cluster.stop()

    def round(self, number: int) -> Round:
        """Do one round."""
        one = Round(number, self.dice.choice(KINDS), self.dice.choice(self.faults))
        try:
            self._break(one)
        except WorkbenchError as error:
            one.said, one.step = str(error), str(error.next_step or "")
        self._after(one)
        me = psutil.Process()
        one.threads, one.files = me.num_threads(), me.num_fds()
        one.memory_mb = me.memory_full_info().uss / 1e6
        return one

    def _break(self, one: Round) -> None:
        cluster = self.cluster
        idle = one.fault == "kill when idle"
        if idle:
            self._strike("kill", self.dice.choice(("part", "controller", "warm parent")))
            await_(lambda: not cluster.ids, 2.0) or one.wrong.append("not noticed within 2 s")
        busy = self._begin(one.kind)
        began = time.perf_counter()
        if not idle:
            with self._fault(one.fault, busy):
                await_(lambda: busy.is_over, QUIET_S if one.fault != "restart" else LIMIT_S)
        if not busy.is_over:
            began = time.perf_counter()
            end(busy)
        if not await_(lambda: busy.is_over, LIMIT_S):
            one.wrong.append(f"no end within {LIMIT_S:g} s")
        one.ended_s = time.perf_counter() - began
        error = busy.error if one.kind else busy.failure()
        one.said, one.step = str(error or ""), str(getattr(error, "next_step", "") or "")
        if one.kind:
            one.state = busy.state
            fits = one.state in lifecycle.OVER and (one.state == "failed") == (error is not None)
            if not fits:
                one.wrong.append(f"state {one.state} with {error!r}")

    def _begin(self, kind: str) -> Any:
        if not kind:
            task = self.cluster.execute(PLAIN)
            time.sleep(self.dice.uniform(0.0, 0.5))
            return task
        workers = 1 if kind == "one_device" else 2
        run = self.cluster.run(TRAIN, strategy=kind, workers=workers)
        if self.dice.random() < 0.8:  # else it is struck while it begins
            await_(lambda: run.is_over or run.history.totals.steps > 3, LIMIT_S)
        return run

    @contextlib.contextmanager
    def _fault(self, fault: str, busy: Any) -> Iterator[None]:
        verb, _, what = fault.partition(" ")
        if verb in ("kill", "halt"):
            self._strike(verb, what)
        elif fault.startswith("interrupt"):
            end(busy)
            if fault.endswith("twice"):
                time.sleep(self.dice.uniform(0, 0.3))
                busy._interrupt() if hasattr(busy, "_interrupt") else busy.interrupt()
        elif fault == "restart":
            self.cluster.restart()
        elif fault == "disk full":
            with full_disk():
                yield
            return
        elif not hasattr(busy, "pause") or fault == "stop":
            end(busy)
        else:
            busy.pause()
            time.sleep(self.dice.uniform(0, 0.5))
            if "resume" in fault:
                busy.resume()
                time.sleep(self.dice.uniform(0, 0.3))
            end(busy)
        yield

    def _strike(self, verb: str, what: str) -> None:
        """Send a signal to a process of the cluster, or to several."""
        ground = self.cluster._engines._ground
        engines = [e.pid for e in self.cluster.engines if e.state != "dead"]
        if what == "engines":
            pids = engines
        elif what == "engine":
            pids = [self.dice.choice(engines)]
        elif what == "controller":
            pids = [ground.hub.controller.pid]
        elif what == "part":
            pids = [self.dice.choice(psutil.Process(ground.hub.controller.pid).children()).pid]
        else:
            pids = [ground.warm.pid if what == "warm parent" else ground.store.pid]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)

    def _after(self, one: Round) -> None:
        """See that the next cell works, if need be after the step that is named."""
        began = time.perf_counter()
        for attempt in range(3):
            step = self._works()
            if step is None:
                break
            if attempt == 2:
                one.wrong.append(f"the next cell does not work: {step or 'it hangs'}")
                self.cluster.stop()
                self.cluster = wb.Cluster(2)
                break
            if attempt == 1:
                one.wrong.append(f"it works only after a second step: {step}")
            self._do(step)
        one.after_s = time.perf_counter() - began

    def _works(self) -> str | None:
        """Return None where a cell works, else the step that its message names."""
        try:
            task = self.cluster.execute(SOUND)
            if not task.over.wait(QUIET_S):
                task.interrupt()
                if not task.over.wait(LIMIT_S):
                    return ""
            error = task.failure()
        except WorkbenchError as failure:
            error = failure
        if error is None:
            if len(self.cluster.worker_ids) >= 2:
                return None
            return "%cluster restart"  # said by the note that the cluster is short of workers
        return str(error.next_step or "")

    def _do(self, step: str) -> None:
        with contextlib.suppress(WorkbenchError):
            if step.startswith("%cluster restart"):
                words = step.partition(",")[0].split()[2:]
                self.cluster.restart([int(word) for word in words] or None)
            elif step.startswith("%cluster stop"):
                self.cluster.stop()
                self.cluster = wb.Cluster(2)


def end(busy: Any) -> None:
    """Ask a run, or a cell, to end."""
    busy.stop() if hasattr(busy, "stop") else busy.interrupt()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this kernel and its descendants grow, for a while.

    A limit on the size of files is what a full disk is to the one who writes: the write fails. It
    needs no rights, and leaves other processes of the machine alone.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    mine = psutil.Process()
    pids = [mine.pid, *(child.pid for child in mine.children(recursive=True))]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        _limit(pids, (0, before[1]))
        yield
    finally:
        _limit(pids, before)


def _limit(pids: Sequence[int], limit: tuple[int, int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def await_(true: Callable[[], object], limit_s: float) -> bool:
    """Return whether something became true in time."""
    end_at = time.monotonic() + limit_s
    while time.monotonic() < end_at:
        if true():
            return True
        time.sleep(0.01)
    return bool(true())


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return what is said of them."""
    first = rounds[len(rounds) // 4] if len(rounds) > 3 else rounds[0]
    wrong = [one for one in rounds if one.wrong]
    return {
        "what": "chaos",
        "rounds": len(rounds),
        "hung": sum("within" in text for one in wrong for text in one.wrong),
        "wrong": len(wrong),
        "ended_median_s": statistics.median(one.ended_s for one in rounds),
        "ended_worst_s": max(one.ended_s for one in rounds),
        "after_median_s": statistics.median(one.after_s for one in rounds),
        "after_worst_s": max(one.after_s for one in rounds),
        "faults": dict(Counter(one.fault for one in rounds)),
        **{f"{name}_then": getattr(first, name) for name in FIGURES},
        **{f"{name}_now": getattr(rounds[-1], name) for name in FIGURES},
    }


async def main() -> None:
    """Do the rounds, in a running event loop as a notebook's kernel has one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", nargs="*", choices=GROUPS, default=())
    parser.add_argument("--only", help="one fault alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        os.environ["WORKBENCH_HOME"] = place
        chaos = Chaos(given.seed, [name for name in GROUPS if name not in given.without])
        if given.only:
            chaos.faults = [given.only]
        try:
            for number in range(given.rounds):
                one = chaos.round(number)
                rounds.append(one)
                said = "; ".join(one.wrong)
                print(f"{number:4d} {one.kind or 'cell':17} {one.fault:20} {one.ended_s:5.1f} s, "
                      f"next {one.after_s:5.1f} s  {said}", flush=True)  # fmt: skip
                if one.wrong:
                    print(f"     said: {one.said}", file=sys.stderr, flush=True)
                if given.json:
                    report = {**figures(rounds), "seed": given.seed}
                    report["each"] = [asdict(each) for each in rounds]
                    given.json.write_text(json.dumps(report, indent=1) + "\n")
        finally:
            chaos.close()
    print(json.dumps(figures(rounds)))


if __name__ == "__main__":
    asyncio.run(main())
