"""Random faults in one notebook, in many rounds: does every cell end, and does the next one work?

A round runs a cell or a training in an IPython shell and causes a fault meanwhile. Then it checks
three things: that the cell ended within 30 s (of the interrupt, if the fault alone does not end
it), that its message and the run's state are right, and that the next cell works, at the latest
after the step that a message names. The script reads this step in the message and takes it. It
counts the kernel's threads, files and memory after each round. A seed gives the same rounds.

    python benchmarks/chaos.py [--rounds 40] [--seed 0] [--without disks halts] [--json FILE]

With `--json` the results are written after every round; results of other seeds stay in the file.
The last line is JSON: the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_notebook import LIMIT_S, Attendant, Cell, Disks, Notebook, await_, press_interrupt

from workbench.execution import registry
from workbench.execution.run import Run
from workbench.notebook.session import session
from workbench.shared import events

QUIET_S = 8.0
"""How long a fault is given to end the cell by itself, before it is interrupted."""
HALT_S = 4.0
"""The same of faults that no cell need notice."""
BEGIN_S = 90.0
"""How long a cell may take until it trains: it may have to import TensorFlow."""
NOTICED_S = 5.0
STEPS = 3

PLAIN = """
import time, torch
x, at = torch.ones(1), 0
while True:
    dist.all_reduce(x); time.sleep(0.01)
    at += 1
    if rank == {who} and at == {at}: raise ValueError("provoked")
"""
BREAK = """
def pace(step, logs):
    time.sleep(0.002)
    if rank == {who} and step >= {at}: raise ValueError("provoked")
"""
TORCH = (
    "import time, torch\nfrom torch import nn"
    + BREAK
    + """
wb.fit(nn.Linear(16, 4), wb.data.synthetic(256, shape=(16,), classes=4), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=16, steps=1_000_000,
       callbacks=[pace])
"""
)
KERAS = (
    "import time, keras"
    + BREAK
    + """
wb.fit(keras.Sequential([keras.layers.Dense(4)]), wb.data.synthetic(256, shape=(16,), classes=4),
       loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
       optimizer=keras.optimizers.SGD(0.1), batch_size=16, steps=1_000_000, callbacks=[pace])
"""
)
SOUND = """%%distributed
import torch
x = torch.ones(1)
dist.all_reduce(x)
assert float(x) == world_size
print(f"works on {rank} of {world_size};")
"""
TRAINS = "%%distributed mirrored --plot text --steps 5\n" + TORCH.format(who=-1, at=0)

KINDS = {
    "cell": "",
    "mirrored": "mirrored",
    "one_device": "one_device -n 1",
    "central_storage": "central_storage",
    "parameter_server": "parameter_server",
    "local_sgd": "local_sgd",
    "sharded": "sharded",
    "continue": "mirrored --on-failure continue",
    "checkpoints": "mirrored --checkpoint {disk}/kept --checkpoint-every 20",
    "keras": "mirrored --framework tensorflow",
    "keras, workers": "multi_worker_mirrored --framework tensorflow",
}
"""The line of what is going on: a plain cell, or a run."""
DISKS = ("disk fills", "disk full before", "checkpoint disk fills", "checkpoint disk full before")
GROUPS = {
    "kills": ("kill engine", "kill engines", "kill controller", "kill part", "kill warm parent",
              "kill keeper", "kill when idle"),
    "halts": ("halt engine", "halt controller", "halt part", "halt warm parent", "halt keeper"),
    "interrupts": ("interrupt", "interrupt twice"),
    "controls": ("stop", "pause, resume, stop", "pause, interrupt", "restart"),
    "errors": ("raise",),
    "disks": DISKS,
}  # fmt: skip
GOES_ON = {"continue": "continue", "checkpoints": "replace"}
"""Kinds whose run goes on where a worker dies."""
FIGURES = ("threads", "files", "processes", "memory_mb")


@dataclass
class Round:
    """One round and what was seen of it.

    Attributes:
        kind: What kind of cell was running.
        ended_s: From the fault, or the interrupt that ended it, to the cell's end.
        by_itself: Whether the cell ended without an interrupt by this script.
        state: Of its run; empty: there was none.
        said: The cell's error.
        before: The step that was taken because of an earlier round's fault.
        steps: The steps that were taken because a message named them.
        after_s: The time until the next cell had worked, including the step.
        wrong: The broken promises.
    """

    number: int
    kind: str
    fault: str
    group: str
    ended_s: float = 0.0
    by_itself: bool = True
    state: str = ""
    said: str = ""
    before: str = ""
    steps: list[str] = field(default_factory=list)
    after_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    threads: int = 0
    files: int = 0
    processes: int = 0
    memory_mb: float = 0.0

    @property
    def hung(self) -> bool:
        return any("no end within" in text for text in self.wrong)


class Chaos:
    """One notebook, and the dice."""

    def __init__(
        self, seed: int, faults: Sequence[str], kinds: Sequence[str], engines: int, place: Path
    ) -> None:
        self.seed, self.faults, self.kinds, self.engines = seed, faults, kinds, engines
        self.disks = Disks(place)  # before a process is started that must see them
        self.home = place / "home"
        self.book = Notebook(engines)
        self._runs = 0

    def close(self) -> None:
        """End the cluster, then the disks it may use."""
        try:
            self.book.close()
        finally:
            self.disks.close()

    def round(self, number: int) -> Round:
        """Do one round."""
        dice = random.Random(f"{self.seed}/{number}")  # so that a round can be done again alone
        fault = dice.choice(self.faults)
        one = Round(number, dice.choice(self._kinds_for(fault)), fault, _group(fault))
        os.environ["WORKBENCH_HOME"] = str(self.home)
        small = self.disks.fresh() if fault in DISKS or "{disk}" in KINDS[one.kind] else None
        if fault in DISKS:
            os.environ["WORKBENCH_HOME"] = str(small)
        cell, made = self._break(one, dice, small)
        if not made and cell.step and one.kind != "cell" and "when idle" not in one.fault:
            # What an earlier round halted is met where another engine is needed: it is named, too.
            one.before = cell.step
            self._follow(one, one.before)
            cell, made = self._break(one, dice, small)
        self._judge(one, cell, made)
        self._look(one, cell)
        self._after(one, cell, dice)
        me = psutil.Process()
        one.threads, one.files = me.num_threads(), me.num_fds()
        one.processes = len(me.children(recursive=True))
        one.memory_mb = me.memory_full_info().uss / 1e6
        return one

    def _kinds_for(self, fault: str) -> list[str]:
        if fault.startswith("checkpoint disk"):
            return ["checkpoints"]
        unfit = {"cell"} if fault.startswith("pause") or fault == "stop" else set()
        if fault in DISKS:
            unfit = {"cell", "checkpoints"}  # which have a disk of their own
        return [kind for kind in self.kinds if kind not in unfit]

    # -- the fault ---------------------------------------------------------------------------------

    def _break(self, one: Round, dice: random.Random, small: Path | None) -> tuple[Cell, list[Run]]:
        """Run the round's cell, and cause a fault before or while it runs.

        Returns:
            The cell as it ended, and the runs it has made.
        """
        who, at = (-1, 0) if one.fault != "raise" else (dice.randrange(self.engines), 50)
        if KINDS[one.kind].endswith("-n 1") or one.kind == "keras":
            who = min(who, 0)  # one engine has them all
        body = {"cell": PLAIN}.get(one.kind, KERAS if "keras" in one.kind else TORCH)
        line = f"%%distributed {KINDS[one.kind].format(disk=small)}"
        if one.kind != "cell":
            line += f" --plot {dice.choice(('off', 'off', 'text'))}"
        source = f"{line}\n{body.format(who=who, at=at)}"
        early = dice.random() < 0.2 and one.fault not in DISKS  # nothing is written yet
        quiet_s = {"halts": HALT_S, "disks": HALT_S, "errors": LIMIT_S}.get(one.group, QUIET_S)
        before = set(registry.runs.values())
        with contextlib.ExitStack() as later:

            def strike(beside: Attendant) -> bool:
                over = beside.over
                begun = self._begun(one, before, over, 0 if early else STEPS, dice)
                beside.now()
                if one.fault == "raise":
                    return begun
                if "when idle" in one.fault or one.fault.endswith("full before"):
                    return True
                if not begun:
                    return False
                if one.fault in DISKS:
                    assert small is not None
                    full = later.enter_context(contextlib.ExitStack())
                    full.enter_context(self.disks.full(small))
                    over.wait(HALT_S)
                    if dice.random() < 0.5:  # else there is no room until it has ended
                        full.close()
                else:
                    self._strike(one, dice, beside)
                return True

            if one.fault == "kill when idle":
                self._kill_idle(one, dice)
            elif one.fault.endswith("full before"):
                assert small is not None
                later.enter_context(self.disks.full(small))
            cell = self.book.run(source, quiet_s, strike)
        return cell, [run for run in registry.runs.values() if run not in before]

    def _begun(
        self, one: Round, before: set[Run], over: threading.Event, steps: int, dice: random.Random
    ) -> bool:
        """Wait until the cell is at the point of the fault; return whether it still runs."""

        def there() -> bool:
            if one.kind == "cell":
                return session.cluster is not None and session.cluster.is_busy
            made = [run for run in registry.runs.values() if run not in before]
            return bool(made) and (made[-1].history.totals.steps >= steps or made[-1].is_over)

        await_(lambda: over.is_set() or there(), BEGIN_S)
        if one.kind == "cell" or not steps:
            over.wait(dice.uniform(0.0, 0.5))
        return not over.is_set()

    def _kill_idle(self, one: Round, dice: random.Random) -> None:
        cluster = session.cluster
        assert cluster is not None
        what = dice.choice(("engine", "part", "controller", "warm parent"))
        one.fault = f"kill {what} when idle"
        lived = len(cluster.ids)
        self._signal("kill", what, dice)
        gone = (lambda: len(cluster.ids) < lived) if what == "engine" else (lambda: not cluster.ids)
        if not await_(gone, NOTICED_S):
            one.wrong.append(f"not noticed within {NOTICED_S:g} s")

    def _strike(self, one: Round, dice: random.Random, beside: Attendant) -> None:
        over = beside.over
        verb, _, what = one.fault.partition(" ")
        cluster = session.cluster
        assert cluster is not None
        busy: Any = cluster.busy
        if verb in ("kill", "halt"):
            self._signal(verb, what, dice)
            if GOES_ON.get(one.kind) and one.fault == "kill engine":
                await_(lambda: over.is_set() or getattr(busy, "recoveries", ()), LIMIT_S)
        elif verb == "interrupt":
            press_interrupt()
            if what and not over.wait(dice.uniform(0, 0.3)):
                press_interrupt()
        elif one.fault == "restart":
            cluster.restart()
        elif one.fault == "stop":
            busy.stop()
        else:
            busy.pause()
            over.wait(dice.uniform(0, 0.5))
            beside.now()
            if one.fault == "pause, interrupt":
                press_interrupt()
                return
            busy.resume()
            over.wait(dice.uniform(0, 0.3))
            beside.now()
            busy.stop()

    def _signal(self, verb: str, what: str, dice: random.Random) -> None:
        """Send a signal to a process of the cluster, or to several."""
        cluster = session.cluster
        assert cluster is not None
        ground = cluster.engine_set._ground
        task = cluster.last_task if cluster.is_busy else None
        engines = [
            e.pid for e in cluster.engines
            if e.state != "dead" and (task is None or what == "engines" or e.id in task.ids)
        ]  # fmt: skip
        pids: list[int | None]
        if what == "engines":
            pids = [*engines]
        elif what == "engine":
            pids = [dice.choice(engines)]
        elif what == "controller":
            pids = [ground.hub.controller.pid]
        elif what == "part":
            pids = [dice.choice(psutil.Process(ground.hub.controller.pid).children()).pid]
        elif what == "warm parent":
            pids = [None if ground.warm is None else ground.warm.pid]
        else:
            pids = [ground.store.pid]
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)

    # -- what is seen ------------------------------------------------------------------------------

    def _look(self, one: Round, cell: Cell) -> None:
        """Note how a cell ended that should not end by itself."""
        one.ended_s, one.by_itself = cell.ended_s, cell.by_itself
        one.said = str(cell.error or "")
        if cell.hung:
            one.wrong.append(f"no end within {LIMIT_S:g} s")
        if not cell.struck and one.group != "errors":
            one.wrong.append("the cell had ended before the fault")
        if cell.raw:
            one.wrong.append(f"an error that is not ours: {cell.error!r}")
        if "did not clear away" in cell.text:
            one.wrong.append("a rank did not clear away")
        if session.cluster is not None and session.cluster.is_busy:
            one.wrong.append("the cluster is busy although its cell has ended")

    def _judge(self, one: Round, cell: Cell, made: Sequence[Run]) -> None:
        """Compare the run's state and the messages with the fault."""
        if one.kind != "cell" and not made and cell.error is None:
            one.wrong.append("neither a run nor an error")
        for run in made:
            one.state = run.state
            fits = run.is_over and run.state in events.OVER and run.state != "finished"
            fits = fits and (run.state == "failed") == (run.error is not None)
            if not fits or (run.state == "failed" and cell.error is None):
                one.wrong.append(f"state {run.state} with {run.error!r} and {cell.error!r}")
        if one.fault == "raise" and "ValueError: provoked" not in str(cell.error):
            one.wrong.append("the error that was raised is not named")
        if one.kind == "cell" and cell.error is None:
            one.wrong.append("a cell without end has ended well")
        on_disk = [note for run in made for note in run.snapshot().notes if _no_room(note)]
        if one.group == "disks" and not on_disk and not _no_room(cell.text):
            one.wrong.append("the full disk is not named")
        if one.group == "disks" and cell.by_itself and one.fault != "checkpoint disk full before":
            one.wrong.append("the full disk ended the run")
        going = GOES_ON.get(one.kind)
        if going and one.fault == "kill engine" and cell.by_itself:
            one.wrong.append(f"the run did not go on, although --on-failure {going}")

    def _after(self, one: Round, cell: Cell, dice: random.Random) -> None:
        """Check that the next cell works, if necessary after the step that a message names."""
        began = time.perf_counter()
        obeys, source = dice.random() < 0.5, dice.choice((SOUND, SOUND, TRAINS))
        if obeys and cell.step:
            one.steps.append(cell.step)
            self._follow(one, cell.step)
        for _ in range(4):
            done = self.book.run(source, LIMIT_S)
            if done.hung:
                one.wrong.append(f"no end within {LIMIT_S:g} s of the interrupt of the next cell")
            if not done.by_itself and one.group != "halts":
                one.wrong.append("the next cell had to be interrupted")
            if done.raw:
                one.wrong.append(f"an error that is not ours: {done.error!r}")
            if self._works(source, done):
                break
            if len(one.steps) >= 1 or not done.step:
                one.wrong.append(f"the next cell does not work: {done.text[-1500:]}")
                self.book.follow("%cluster stop")
                break
            one.steps.append(done.step)
            self._follow(one, done.step)
        one.after_s = time.perf_counter() - began

    def _follow(self, one: Round, step: str) -> None:
        done = self.book.follow(step)
        if done.error is not None or not done.by_itself:
            one.wrong.append(f"the step {step} failed: {done.text[-1500:]}")

    def _works(self, source: str, done: Cell) -> bool:
        if done.error is not None:
            return False
        if source == SOUND:
            said = [f"works on {rank} of {self.engines};" for rank in range(self.engines)]
            return all(text in done.text for text in said)
        run = registry.runs[-1]
        if any(map(_no_room, run.snapshot().notes)):
            return False
        return run.state == "finished" and len(run.engines) == self.engines


def _no_room(text: str) -> bool:
    return "No space left" in text or "File too large" in text


def _group(fault: str) -> str:
    return next(name for name, faults in GROUPS.items() if fault in faults)


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the figures of the rounds."""
    first = rounds[len(rounds) // 4] if len(rounds) > 3 else rounds[0]
    return {
        "what": "chaos",
        "rounds": len(rounds),
        "hung": sum(one.hung for one in rounds),
        "wrong": sum(bool(one.wrong) for one in rounds),
        "followed": sum(bool(one.steps) for one in rounds),
        "ended_median_s": statistics.median(one.ended_s for one in rounds),
        "ended_worst_s": max(one.ended_s for one in rounds),
        "after_median_s": statistics.median(one.after_s for one in rounds),
        "after_worst_s": max(one.after_s for one in rounds),
        "faults": dict(Counter(one.fault for one in rounds)),
        "kinds": dict(Counter(one.kind for one in rounds)),
        **{f"{name}_then": getattr(first, name) for name in FIGURES},
        **{f"{name}_now": getattr(rounds[-1], name) for name in FIGURES},
    }


def write(path: Path, seed: int, disk: str, rounds: Sequence[Round]) -> None:
    """Write the results of one seed; results of other seeds stay in the file."""
    known = json.loads(path.read_text())["seeds"] if path.exists() else []
    mine = {"seed": seed, "disk": disk, **figures(rounds)}
    mine["each"] = [{**asdict(one), "said": one.said.partition("\n")[0]} for one in rounds]
    known = [*(one for one in known if one["seed"] != seed), mine]
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(json.dumps(_rounded({"seeds": known}), indent=1) + "\n")
    fresh.replace(path)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def tell(one: Round) -> None:
    """Print a round in a line, and its messages if a promise was broken."""
    ended = "" if one.by_itself else "i"
    print(f"{one.number:4d} {one.kind:17} {one.fault:28} {one.ended_s:5.1f} s{ended:1} "
          f"{one.state:8} next {one.after_s:5.1f} s {', '.join(one.steps):20} "
          f"{'; '.join(one.wrong)}", flush=True)  # fmt: skip
    if one.wrong:
        print(f"     said: {one.said}", file=sys.stderr, flush=True)


async def main() -> None:
    """Do the rounds, in a running event loop as a notebook's kernel has one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--without", nargs="*", choices=GROUPS, default=())
    parser.add_argument("--only", nargs="*", help="these faults alone")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    faults = [one for name in GROUPS if name not in given.without for one in GROUPS[name]]
    kinds = [one for one in given.kinds if "keras" not in one or _installed("tensorflow")]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as place:
        chaos = Chaos(given.seed, given.only or faults, kinds, given.engines, Path(place))
        try:
            for number in range(given.first, given.first + given.rounds):
                rounds.append(chaos.round(number))
                tell(rounds[-1])
                if given.json:
                    write(given.json, given.seed, chaos.disks.kind, rounds)
        finally:
            chaos.close()
    print(json.dumps({**figures(rounds), "disk": chaos.disks.kind}))


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    asyncio.run(main())
