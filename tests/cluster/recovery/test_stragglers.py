"""A worker that is slow for long has less of each batch, and the result stays what it was."""

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import MODEL, difference, every_step_counts_once, pids

from workbench.execution.workers import replacing, shedding
from workbench.execution.workers.stragglers import Rule

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
SLEEPY = """
import time
class Sleepy(nn.Module):
    # Workers that sleep do not fight for the cores of this machine.
    def forward(self, x):
        if self.training:
            time.sleep(0.002 * len(x))
        return x
model = nn.Sequential(Sleepy(), model)
"""
FIT = """
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator).double(); y = torch.randint(0, 4, (96,), generator=generator)
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=STEPS,
       optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9) MORE)
"""  # noqa: E501


def paced(steps, more="", sleeps=SLEEPY):
    return MODEL + sleeps + FIT.replace("STEPS", str(steps)).replace("MORE", more)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Call slow what is so for half a second."""
    monkeypatch.setattr(shedding, "RULE", Rule(steps=15, seconds=0.5))
    monkeypatch.setattr(replacing, "PATIENT", Rule(steps=15, seconds=0.5))


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Return the weights after so many steps when nobody is slow."""
    found = {}

    def after(steps):
        if steps not in found:
            source = paced(steps, sleeps="model = nn.Sequential(nn.Identity(), model)\n")
            found[steps] = cluster.run(source, strategy="one_device").wait(WAIT_S).weights()
        return found[steps]

    return after


def steps_of(run, column):
    """Return a column as a table: a row per step, a column per worker."""
    history = run.history
    order = np.lexsort((history["rank"], history["step"]))
    return history[column][order].reshape(-1, 3)


def shares_of(run, step):
    """Return the samples of a step by rank, of those who took it."""
    history = run.history
    return history["samples"][history["step"] == step].tolist()


def test_a_worker_of_half_the_speed_has_half_the_work(cluster, undisturbed):
    run = cluster.run(
        paced(80, ", eval_data=(x, y), eval_every=20"), strategy="mirrored",
        on_straggler="shed", inject=["slow=1:2x"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed(80)) <= EXACT
    every_step_counts_once(run, 80)
    (change,) = run.events
    assert (change["event"], change["ranks"], change["workers"]) == ("shed", [1], 3)
    assert change["ratio"] == pytest.approx(2, rel=0.2)
    samples = steps_of(run, "samples")
    first = change["step"]
    assert (samples[:first] == 8).all()
    assert (samples[first:] == change["shares"]).all()
    # What a step could gain if all were equally long busy; its messages stay.
    own_s, step_s = steps_of(run, "compute_s"), steps_of(run, "step_s")
    before_s, after_s = np.median(step_s[5:first]), np.median(step_s[first:])
    ideal_s = 24 / np.median(samples[first:] / own_s[first:], axis=0).sum()
    possible_s = np.median(own_s[5:first, 1]) - ideal_s
    gain = (before_s - after_s) / possible_s
    print(f"{1e3 * before_s:.1f} ms, then {1e3 * after_s:.1f} ms: {gain:.0%} of what is possible")
    assert gain >= 0.75
    assert change["after_s"] < 0.85 * change["before_s"]
    assert any("step takes" in note for note in run.history.story.notes)


def test_when_it_has_recovered_shares_are_equal_again(cluster, undisturbed):
    run = cluster.run(paced(160), strategy="mirrored", on_straggler="shed", inject=["slow=2:3x"])
    assert soon(lambda: run.is_over or run.events), run
    run.inject()
    run.wait(WAIT_S)
    assert difference(run.weights(), undisturbed(160)) <= EXACT
    assert run.events[0]["ranks"] == [2]
    assert run.events[-1]["ranks"] == []
    assert run.events[-1]["shares"] == [8, 8, 8]


def test_random_delays_change_nothing(cluster):
    run = cluster.run(
        paced(100), strategy="mirrored", on_straggler="shed", inject=["jitter=20ms"]
    ).wait(WAIT_S)  # fmt: skip
    assert run.events == []


DYING = """
import os, signal
from workbench.engine.context import current
folder, gate = FOLDER, current().gate
def dying(*args):
    if rank == 0 and not os.path.exists(folder + "/died"):
        open(folder + "/died", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args)
plain = getattr(gate, WHERE)
setattr(gate, WHERE, dying)
def pace(step, logs):
    while step == 179 and not os.path.exists(folder + "/hurry"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("where", ["ask_to_deal", "deal", "take_portions"])
def test_a_death_while_shares_change(cluster, undisturbed, tmp_path, where):
    """Asked for its step, told of the shares, or about to take the first step with them."""
    dying = DYING.replace("FOLDER", repr(str(tmp_path))).replace("WHERE", repr(where))
    run = cluster.run(
        paced(200, ", callbacks=[pace]", SLEEPY + dying), strategy="mirrored",
        on_straggler="shed", on_failure="heal", inject=["slow=1:2x"],
    )  # fmt: skip
    assert soon(lambda: run.is_over or any(one["event"] == "joined" for one in run.events)), run
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert difference(run.weights(), undisturbed(200)) <= EXACT
    assert run.history.totals.steps == 200
    kinds = [one["event"] for one in run.events]
    assert kinds.index("healed") < kinds.index("joined")
    healed = next(one for one in run.events if one["event"] == "healed")
    assert shares_of(run, healed["step"] + 1) == [12, 12]  # equal at first
    assert "shed" in kinds[kinds.index("healed") :]  # and then anew


def test_a_training_whose_shares_stay_says_so_and_goes_on(cluster):
    source = (
        MODEL + SLEEPY
        + "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.zeros(960, 8).double(), torch.zeros(960).long())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model, optimizer, loader = wb.prepare(model, optimizer, DataLoader(data, batch_size=24))\n"
        "for _ in range(2):\n"
        "    for inputs, targets in loader:\n"
        "        optimizer.zero_grad()\n"
        "        nn.functional.cross_entropy(model(inputs), targets).backward()\n"
        "        optimizer.step()\n"
    )  # fmt: skip
    run = cluster.run(source, strategy="mirrored", on_straggler="shed", inject=["slow=1:2x"])
    run.wait(WAIT_S)
    assert run.events == []
    (told,) = [note for note in run.history.story.notes if "be changed" in note]
    assert told.startswith("Rank 1")


IN_ITS_PROCESS = """
import os, time
folder = FOLDER
slow = rank == 1 and not os.path.exists(folder + "/was")
if slow:
    open(folder + "/was", "x").close()
def pace(step, logs):
    while step == LAST and not os.path.exists(folder + "/hurry"):
        time.sleep(0.05)
class Sleepy(nn.Module):
    def forward(self, x):
        if self.training and (slow or not os.path.exists(folder + "/hurry")):
            time.sleep((0.006 if slow else 0.002) * len(x))
        return x
model = nn.Sequential(Sleepy(), model)
"""


def test_a_slow_worker_is_replaced_by_a_fresh_engine(cluster, undisturbed, tmp_path):
    before = pids(cluster)
    source = IN_ITS_PROCESS.replace("FOLDER", repr(str(tmp_path))).replace("LAST", "299")
    run = cluster.run(
        paced(300, ", callbacks=[pace]", source), strategy="mirrored", on_straggler="replace"
    )
    gained = lambda: [one for one in run.events if one.get("after_s")]  # noqa: E731
    assert soon(lambda: run.is_over or gained()), (run.events, run.history.story.notes)
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert difference(run.weights(), undisturbed(300)) <= EXACT
    assert run.history.totals.steps == 300
    assert 24 * 300 - run.history.totals.samples in (0, 8)  # who leaves may not tell of its last
    kinds = [one["event"] for one in run.events]
    assert kinds == ["left", "joined", "replaced"]
    replaced = run.events[-1]
    assert (replaced["ranks"], replaced["workers"]) == ([1], 3)
    assert replaced["ratio"] == pytest.approx(3, rel=0.2)
    assert replaced["after_s"] < 0.6 * replaced["before_s"]
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {1}
    assert not run.recoveries
    print(replaced, run.history.story.notes)
