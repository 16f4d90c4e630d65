"""Who is left goes on without the dead."""

import pytest
from needs import need
from notebook_shell import WAIT_S
from recovering import STEPS, cell, difference, pids

import workbench as wb
from workbench.errors import PlanError, RunError
from workbench.execution import launch

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.mark.parametrize("saved", [True, False])
def test_fewer_workers_go_on_with_the_same_batch_and_nothing_is_lost(
    cluster, undisturbed, tmp_path, saved
):
    before = pids(cluster)
    checkpoint = {"checkpoint": str(tmp_path), "checkpoint_every": 25} if saved else {}
    run = cluster.run(
        cell(), strategy="mirrored", on_failure="continue", inject=["kill=1@60"], **checkpoint
    ).wait(WAIT_S)
    assert pids(cluster) == before
    assert difference(run.weights(), undisturbed) <= 1e-10
    (done,) = run.recoveries
    assert (done.workers, done.step, done.lost_steps) == (2, 60, 0)
    assert run.history.totals.steps == STEPS
    rows = run.history.totals.rows.tolist()
    assert rows[0] == rows[2] == STEPS
    assert rows[1] <= 60
    assert not (run.folder / launch.RESCUED).exists()
    again = wb.load(run.save(tmp_path / "saved"))
    assert again.history.totals.rows.tolist() == rows
    assert again.history.totals.steps == STEPS


OWN_LOOP = """
from torch import nn
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1)).double()
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Linear(8, 1).double()
nn.init.constant_(model.weight, 0.1)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
for epoch in range(8):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("step", [0, 20, 23, 24])
def test_an_own_loop_repeats_the_batch_of_the_step_that_failed(cluster, step):
    """An epoch has 8 batches: step 23 is the last of an epoch, step 24 the first of the next."""
    source = "import torch\n" + OWN_LOOP
    whole = cluster.run(source, strategy="mirrored").wait(WAIT_S)
    run = cluster.run(
        source, strategy="mirrored", on_failure="continue", inject=[f"kill=1@{step}"]
    ).wait(WAIT_S)
    assert run.history.totals.steps == whole.history.totals.steps == 64
    assert difference(run.weights(), whole.weights()) <= 1e-10


def test_down_to_one_worker(cluster, undisturbed):
    run = cluster.run(
        cell(), strategy="mirrored", on_failure="continue", inject=["kill=1@60", "kill=0@30"]
    ).wait(WAIT_S)
    assert [done.workers for done in run.recoveries] == [2, 1]
    assert difference(run.weights(), undisturbed) <= 1e-10
    assert run.history.totals.steps == STEPS


def test_who_is_left_keeps_the_rank_it_began_with_in_every_message(cluster):
    run = cluster.run(
        cell(), strategy="mirrored", workers=2, on_failure="continue",
        inject=["kill=0@30", "kill=1@60"],
    )  # fmt: skip
    with pytest.raises(RunError, match=r"^Rank 1 is gone: Engine 1 ") as found:
        run.wait(WAIT_S)
    assert "Rank 0 (engine 0) died: " in run.recoveries[0].how
    assert any(note.startswith("Rank 1 (engine 1) is gone") for note in run.history.story.notes)
    assert "%cluster restart 1" in str(found.value)


def test_who_was_caught_in_an_update_has_nothing_to_go_on_from(cluster, undisturbed, tmp_path):
    source = (
        "import os, signal, pathlib\n"
        # One for each rank: who saw another's would do the whole update, and hold step 61.
        f"flag = pathlib.Path({str(tmp_path)!r}) / f'caught-{{rank}}'\n"
        "import torch\n"
        "class Slow(torch.optim.SGD):\n"
        "    steps = 0\n"
        "    def step(self, *args):\n"
        "        Slow.steps += 1\n"
        "        if Slow.steps == 61 and not flag.exists():\n"
        "            flag.touch()\n"
        "            if rank == 1:\n"
        "                os.kill(os.getpid(), signal.SIGKILL)\n"
        "            self.param_groups[0]['params'][0].data.zero_()\n"  # half of an update
        "            raise RuntimeError('Connection closed by peer')\n"
        "        return super().step(*args)\n"
    ) + cell().replace("torch.optim.SGD(p", "Slow(p")
    run = cluster.run(
        source, strategy="mirrored", on_failure="continue", checkpoint=str(tmp_path / "c"),
        checkpoint_every=25,
    ).wait(WAIT_S)  # fmt: skip
    assert [done.step for done in run.recoveries] in ([50], [25])
    assert difference(run.weights(), undisturbed) <= 1e-10


def test_continue_is_refused_where_nobody_would_be_left(cluster):
    with pytest.raises(PlanError, match="WB-PLAN-088"):
        cluster.run(cell(), strategy="one_device", on_failure="continue")
    with pytest.raises(PlanError, match="WB-PLAN-088"):
        cluster.run(cell(), strategy="mirrored", workers=1, on_failure="continue")


def test_stop_is_what_happens_without_a_word(cluster):
    run = cluster.run(cell(), strategy="mirrored", inject=["kill=1@60"])
    with pytest.raises(RunError, match="SIGKILL"):
        run.wait(WAIT_S)
    assert run.recoveries == []
