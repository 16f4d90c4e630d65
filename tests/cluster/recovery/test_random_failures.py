"""Failures of all kinds at random moments: no run hangs, none is off, no step counts twice.

A failure of a worker is ordered by a file that the first worker takes who comes to that moment, and
who fails there; those of `anywhere` strike from outside. More are ordered once all workers take
part again, until a run nears its end; then comes another run.
"""

import contextlib
import itertools
import os
import random
import signal
import time

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, pids

from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 600
ENOUGH = 150
"""Steps that are left to what has begun: then a run is hurried to its end."""
STILL_S = 40.0
"""Where no step is completed for so long, on a machine that does much else, a run hangs."""
KINDS = ("SIGKILL", "SIGSTOP")
MOMENTS = {
    "anywhere": 1, "all-reduce": 1, "checkpoint": 1, "two at once": 2, "healing": 2,
    "meeting": 2, "handing over": 2, "taking over": 2,
}  # fmt: skip
"""How many fail each time."""
IN_HEALING = ("healing", "meeting", "handing over", "taking over")

FAILING = """
import functools, os, pathlib, signal, time
from workbench.engine.checkpoints.checkpoints import Checkpoints
from workbench.engine.training.regrouping import Regrouping
from workbench.engine.transport import handover, peers
folder = pathlib.Path(FOLDER)
def come_to(moment):
    for order in folder.glob(f'{moment}.SIG*'):
        try:
            order.rename(folder / f'taken-{os.getpid()}-{order.name}')
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), getattr(signal, order.suffix[1:]))
plain = []
def strike(owner, name, moment):
    before = getattr(owner, name)
    before = getattr(before, 'plain', before)
    @functools.wraps(before)
    def struck(*args, **more):
        come_to(moment)
        return before(*args, **more)
    struck.plain = before
    setattr(owner, name, struck)
    plain.append((owner, name, before))
strike(peers.Peers, 'exchange', 'all-reduce')
strike(Checkpoints, 'save', 'checkpoint')
strike(Regrouping, '_meet', 'healing')
strike(Regrouping, '_compare', 'meeting')
strike(handover.Donor, 'give', 'handing over')
strike(handover, 'take', 'taking over')
def pace(step, logs):
    if step >= 10 and not (folder / 'hurry').exists():
        time.sleep(0.02)
"""
RESTORED = """
for owner, name, before in plain:
    setattr(owner, name, before)
"""


class Failures:
    """Makes workers of one run fail, and sees to it that it gets over each.

    Args:
        folder: Where failures are ordered.
    """

    def __init__(self, cluster, run, folder, draw):
        self.cluster, self.run, self.folder, self.draw = cluster, run, folder, draw
        self.made = []
        self.failed = set()  # processes

    def moves(self, condition):
        """Whether a condition comes true while steps are completed; the deadline is in steps."""
        steps, since_s = -1, time.monotonic()
        for _ in itertools.count():
            if soon(condition, 0.5) or self.run.is_over:
                return True
            if self.run.history.totals.steps != steps:
                steps, since_s = self.run.history.totals.steps, time.monotonic()
            if time.monotonic() - since_s > STILL_S:
                return False

    def one(self):
        """Have one or two workers fail, and wait until all take part again."""
        run, draw = self.run, self.draw
        moment = draw.choice(list(MOMENTS))
        if moment == "all-reduce" and run.plan.options.get("allreduce") != "ring":
            moment = "anywhere"
        ranks = draw.sample(range(3), 2)
        kinds = [draw.choice(KINDS) for _ in range(MOMENTS[moment])]
        self.made.append((run.history.totals.steps, moment, ranks, kinds))
        at = run.history.totals.steps + draw.randrange(1, 8)
        assert self.moves(lambda: run.history.totals.steps >= at), self.told()
        ordered = 0
        if moment in ("anywhere", "two at once"):
            for rank, kind in zip(ranks, kinds, strict=False):
                self.strike(rank, kind)
        else:
            *first, last = kinds
            (self.folder / f"{moment}.{last}").touch()
            ordered = 1
            for rank, kind in zip(ranks, first, strict=False):
                self.strike(rank, kind)
        order = f"{moment}.{kinds[-1]}"
        taken = lambda: list(self.folder.glob(f"taken-*-{order}"))  # noqa: E731
        assert self.moves(lambda: not ordered or taken()), self.told()
        for path in taken():
            self.failed.add(int(path.name.split("-")[1]))
            path.unlink()
        assert self.moves(self.replaced), self.told()
        done = run.history.totals.steps
        assert self.moves(lambda: self.all_passed(done)), self.told()

    def strike(self, rank, kind):
        pid = pids(self.cluster)[rank]
        self.failed.add(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, kind))

    def replaced(self):
        """Whether who failed has ended, and fresh engines are there."""
        return not self.failed & set(pids(self.cluster).values()) and len(self.cluster.ids) == 3

    def all_passed(self, step):
        """Whether all workers have completed a step after this one."""
        rank, at = self.run.history.together("rank", "step").values()
        return all((at[rank == one] > step).any() for one in range(3))

    def told(self):
        told = self.run, self.made, self.run.events, self.run.history.story.notes
        return "\n".join(map(str, told))  # whole: pytest would shorten a tuple


@pytest.fixture(scope="module")
def undisturbed(cluster):
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


def suffer(cluster, folder, draw, most):
    """Return how a run got over failures, that has come to its end."""
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink()
    saved = folder / f"saved-{draw.getrandbits(32)}"
    source = FAILING.replace("FOLDER", repr(str(folder))) + cell(STEPS, ", callbacks=[pace]")
    run = cluster.run(
        source + RESTORED, strategy="mirrored", on_failure="heal",
        options={"allreduce": draw.choice(["ring", "backend"])},
        checkpoint=str(saved), checkpoint_every=10,
    )  # fmt: skip
    failures = Failures(cluster, run, folder, draw)
    assert failures.moves(lambda: run.history.totals.steps >= 15), failures.told()
    while sum(len(kinds) for *_, kinds in failures.made) < most:
        if run.is_over or run.history.totals.steps > STEPS - ENOUGH:
            break
        failures.one()
    (folder / "hurry").touch()
    assert run.over.wait(2 * WAIT_S), failures.told()
    assert run.error is None, failures.told()
    run.history.finish()
    rows = list(zip(run.history["rank"].tolist(), run.history["step"].tolist(), strict=True))
    assert len(rows) == len(set(rows)), failures.told()
    assert run.history.totals.steps == STEPS, failures.told()
    assert not any(done.again for done in run.recoveries), failures.told()
    assert [one.step for one in checkpoints.found(saved)][-1] == STEPS
    return failures


@pytest.mark.parametrize(("seed", "count"), [(1, 4), *((seed, 20) for seed in range(10, 20))])
def test_failures_at_random_moments(cluster, undisturbed, tmp_path, seed, count):
    draw, made = random.Random(seed), 0
    while made < count:
        if dead := [engine.id for engine in cluster.engines if engine.state == "dead"]:
            cluster.restart(dead)
        failures = suffer(cluster, tmp_path, draw, count - made)
        assert difference(failures.run.weights(), undisturbed) <= EXACT, failures.told()
        made += sum(len(kinds) for *_, kinds in failures.made)
        print(made, failures.made, failures.run.events)
