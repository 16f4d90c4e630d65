"""A fresh engine takes the place of a dead one, and the run goes on."""

import os
import signal

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import (
    EXACT,
    MODEL,
    cell,
    difference,
    every_step_counts_once,
    going,
    kill,
    pids,
)

import workbench as wb
from workbench.errors import RunError
from workbench.execution import launch
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_dead_worker_is_replaced_and_nothing_changes(cluster, undisturbed, tmp_path, rank):
    before = pids(cluster)
    run = cluster.run(
        cell(), strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25,
        inject=[f"kill={rank}@60"],
    ).wait(WAIT_S)  # fmt: skip
    assert run.state == "finished"
    assert difference(run.weights(), undisturbed) <= EXACT
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {rank}
    (done,) = run.recoveries
    assert (done.engines, done.workers) == ((rank,), 3)
    assert done.step in (25, 50)  # the second may not have been on the disk yet
    assert 0 < done.lost_steps <= 60 - done.step
    assert "SIGKILL" in done.how
    (told,) = [n for n in run.history.story.notes if "SIGKILL" in n]
    assert f"step {done.step}" in told
    every_step_counts_once(run)
    again = wb.load(run.save(tmp_path / "saved"))
    assert again.history.totals.rows.tolist() == run.history.totals.rows.tolist()


def test_without_a_checkpoint_yet_the_run_begins_anew(cluster, undisturbed, tmp_path):
    run = cluster.run(
        cell(), strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=5000,
        inject=["kill=1@30"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.recoveries[0].step == 0
    every_step_counts_once(run)


def test_two_deaths_at_once(cluster, undisturbed, tmp_path):
    run = cluster.run(
        cell(), strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25,
        inject=["kill=0@60", "kill=2@60"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert {i for done in run.recoveries for i in done.engines} == {0, 2}
    every_step_counts_once(run)


def test_a_death_while_the_run_recovers(cluster, undisturbed, tmp_path, monkeypatch):
    begun = []
    lend = launch.Recoverer._lend

    def killing(self, fresh):
        lend(self, fresh)
        if not begun:
            begun.append(fresh)
            kill(cluster, 2)
            assert soon(lambda: 2 not in cluster.ids)

    monkeypatch.setattr(launch.Recoverer, "_lend", killing)
    run = cluster.run(
        cell(), strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25,
        inject=["kill=1@60"],
    ).wait(WAIT_S)  # fmt: skip
    assert begun
    assert difference(run.weights(), undisturbed) <= EXACT
    assert len(run.recoveries) == 2
    every_step_counts_once(run)


def test_what_dies_again_and_again_is_given_up_on(cluster, tmp_path):
    source = cell(model="import os, signal\n" + MODEL).replace(
        "wb.fit", "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwb.fit"
    )
    run = cluster.run(source, strategy="mirrored", checkpoint=str(tmp_path))
    with pytest.raises(RunError, match="3 times") as failure:
        run.wait(WAIT_S)
    assert "SIGKILL" in str(failure.value)
    assert "%cluster restart 1" in str(failure.value)
    assert len(run.recoveries) == launch.MOST
    assert run.state == "failed"


def test_an_error_of_the_users_code_is_never_recovered_from(cluster, tmp_path):
    source = cell(more=", callbacks=[lambda step, logs: 1 / (40 - step)]")
    run = cluster.run(source, strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25)
    with pytest.raises(RunError, match="ZeroDivisionError"):
        run.wait(WAIT_S)
    assert run.recoveries == []


def test_variables_of_earlier_cells_are_there_in_the_fresh_engine(cluster, tmp_path):
    cluster.execute(
        "import torch, threading\nfrom torch import nn\nwidth = 16\nlock = threading.Lock()\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(8, width).double()\n"
        "        self.out = nn.Linear(width, 4).double()\n"
        "    def forward(self, x):\n"
        "        return self.out(torch.tanh(self.layer(x)))\n"
        "torch.manual_seed(3); kept = torch.arange(5)\n"
    ).over.wait(WAIT_S)
    run = cluster.run(
        cell(model="torch.manual_seed(0); model = Net(); kept, lock, nn\n"),
        strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25, inject=["kill=1@60"],
    )  # fmt: skip
    with pytest.raises(RunError, match=r"NameError.*lock"):  # what cannot be copied is named
        run.wait(WAIT_S)
    assert any("lock" in note for note in run.history.story.notes)
    run = cluster.run(
        cell(model="torch.manual_seed(0); model = Net(); kept, nn\n"),
        strategy="mirrored", checkpoint=str(tmp_path / "b"), checkpoint_every=25,
        inject=["kill=0@60"],
    ).wait(WAIT_S)  # fmt: skip
    assert len(run.recoveries) == 1


def test_stop_while_the_run_recovers(cluster, tmp_path, monkeypatch):
    lend = launch.Recoverer._lend

    def stopping(self, fresh):
        run.stop()
        lend(self, fresh)

    monkeypatch.setattr(launch.Recoverer, "_lend", stopping)
    run = cluster.run(
        cell(steps=10**6), strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25
    )
    going(run, 40)
    kill(cluster, 1)
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert cluster.run(cell(), strategy="mirrored").wait(WAIT_S).state == "finished"


def test_a_death_in_an_evaluation(cluster, undisturbed, tmp_path):
    flag = tmp_path / "killed"
    more = (
        ", eval_data=(x, y), eval_every=20, metrics={'kill': lambda out, y: torch.tensor(float("
        "die()))}"
    )
    source = (
        "import os, signal, pathlib\ncount = 0\n"
        "def die():\n"
        "    global count\n"
        "    count += 1\n"
        f"    flag = pathlib.Path({str(flag)!r})\n"
        "    if rank == 1 and count == 3 and not flag.exists():\n"
        "        flag.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 0\n"
    ) + cell(more=more)
    run = cluster.run(
        source, strategy="mirrored", checkpoint=str(tmp_path / "c"), checkpoint_every=25
    ).wait(WAIT_S)
    assert len(run.recoveries) == 1
    assert difference(run.weights(), undisturbed) <= EXACT
    assert [one["step"] for one in run.evals] == [19, 39, 59, 79, 99, 119]
    every_step_counts_once(run)


def test_a_death_while_a_checkpoint_is_written(cluster, undisturbed, tmp_path):
    source = (
        "import os, signal, pathlib\n"
        "import workbench.engine.torch.checkpoints as own\n"
        # Survivors run this a second time: the plain function, not the one put in its place.
        "write = getattr(own.write_state, 'plain', own.write_state)\n"
        "def dying(folder, state):\n"
        f"    flag = pathlib.Path({str(tmp_path / 'killed')!r})\n"
        "    if rank == 0 and 'step-50' in str(folder) and not flag.exists():\n"
        "        flag.touch(); folder.mkdir(parents=True); (folder / 'half').write_text('x')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return write(folder, state)\n"
        "dying.plain = write\n"
        "own.write_state = dying\n"
    )
    source += cell() + "\nown.write_state = write\n"  # engines outlive the test
    run = cluster.run(
        source, strategy="mirrored", checkpoint=str(tmp_path / "c"), checkpoint_every=25
    ).wait(WAIT_S)
    assert [done.step for done in run.recoveries] in ([25], [0])
    assert difference(run.weights(), undisturbed) <= EXACT
    assert not list((tmp_path / "c").glob("*.tmp"))
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [100, 120]
    every_step_counts_once(run)


def test_a_death_before_the_first_step(cluster, undisturbed, tmp_path):
    flag = tmp_path / "killed"
    source = (
        f"import os, signal, pathlib\nflag = pathlib.Path({str(flag)!r})\n"
        "if rank == 2 and not flag.exists():\n"
        "    flag.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    ) + cell()
    run = cluster.run(source, strategy="mirrored", checkpoint=str(tmp_path / "c")).wait(WAIT_S)
    assert [done.lost_steps for done in run.recoveries] == [0]
    assert difference(run.weights(), undisturbed) <= EXACT


def test_the_warm_parents_death_takes_all_engines_and_the_run_goes_on(
    cluster, undisturbed, tmp_path
):
    run = cluster.run(
        cell(more=", callbacks=[lambda step, logs: __import__('time').sleep(0.01)]"),
        strategy="mirrored", checkpoint=str(tmp_path), checkpoint_every=25,
    )  # fmt: skip
    going(run, 30)
    os.kill(cluster.engine_set._ground.warm.pid, signal.SIGKILL)
    run.wait(4 * WAIT_S)  # the next one imports the framework first
    assert "warm parent" in run.recoveries[0].how
    assert difference(run.weights(), undisturbed) <= EXACT


def test_a_function_is_begun_again_with_its_arguments(cluster, tmp_path):
    def train(width, folder):
        import os
        import pathlib
        import signal

        import torch
        from torch import nn

        import workbench as wb

        def step(step, logs):
            flag = pathlib.Path(folder) / "killed"
            if step == 60 and torch.distributed.get_rank() == 1 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        model = nn.Linear(8, width)
        x, y = torch.randn(96, 8), torch.zeros(96, dtype=torch.int64)
        fitted = wb.fit(
            model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=80, callbacks=[step],
            optimizer=lambda p: torch.optim.SGD(p, 0.05),
        )  # fmt: skip
        return fitted.steps

    run = cluster.run(
        train, (4, str(tmp_path)), strategy="mirrored", checkpoint=str(tmp_path / "c"),
        checkpoint_every=25,
    ).wait(WAIT_S)  # fmt: skip
    assert len(run.recoveries) == 1
    assert run.results == [80, 80, 80]
