"""Runs that go on after the death of an engine: in its place, with fewer, and when they cannot."""

import contextlib
import os
import signal

import numpy as np
import pytest
from notebook_shell import WAIT_S, soon

import workbench as wb
from workbench import checkpoints
from workbench.errors import PlanError, RunError
from workbench.session import recover

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
pytest.importorskip("torch")

STEPS = 120
EXACT = 1e-12
"""Which all-reduce is fastest is measured anew, and each adds up in another order."""
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
"""
FIT = """
import torch
from torch import nn
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator).double(); y = torch.randint(0, 4, (96,), generator=generator)
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=STEPS,
       optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9) MORE)
"""  # noqa: E501


def cell(steps=STEPS, more="", model=MODEL):
    return model + FIT.replace("STEPS", str(steps)).replace("MORE", more)


@pytest.fixture(scope="module")
def cluster():
    with wb.Cluster(3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def whole(cluster):
    """Give each test three living engines."""
    if dead := [e.id for e in cluster.engines if e.state == "dead"]:
        cluster.restart(dead)
    yield
    busy = cluster._busy
    if busy is not None and not busy.is_over:
        busy.stop() if hasattr(busy, "stop") else busy.interrupt()
        assert soon(lambda: busy.is_over)


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    return cluster.run(cell(), strategy="mirrored").wait(WAIT_S).weights()


def pids(cluster):
    return {engine.id: engine.pid for engine in cluster.engines}


def kill(cluster, *engines):
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids(cluster)[engine], signal.SIGKILL)


def going(run, steps):
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps), run
    return run


def difference(weights, others):
    return max(float(np.abs(weights[name] - others[name]).max()) for name in others)


def every_step_counts_once(run, steps=STEPS):
    run.history.finish()
    seen = list(zip(run.history["rank"].tolist(), run.history["step"].tolist(), strict=True))
    assert len(seen) == len(set(seen))
    assert run.history.totals.steps == steps
    assert run.history.totals.samples == 24 * steps


# -- a fresh engine ----------------------------------------------------------------------------


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
    assert any(f"checkpoint of step {done.step}" in n for n in run.history.story.notes)
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
    lend = recover.Recoverer._lend

    def killing(self, fresh):
        lend(self, fresh)
        if not begun:
            begun.append(fresh)
            kill(cluster, 2)
            assert soon(lambda: 2 not in cluster.ids)

    monkeypatch.setattr(recover.Recoverer, "_lend", killing)
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
    with pytest.raises(RunError, match="after 3 deaths already") as failure:
        run.wait(WAIT_S)
    assert "SIGKILL" in str(failure.value)
    assert "%cluster restart 1" in str(failure.value)
    assert len(run.recoveries) == recover.MOST
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
    assert any("but not lock" in note for note in run.history.story.notes)
    run = cluster.run(
        cell(model="torch.manual_seed(0); model = Net(); kept, nn\n"),
        strategy="mirrored", checkpoint=str(tmp_path / "b"), checkpoint_every=25,
        inject=["kill=0@60"],
    ).wait(WAIT_S)  # fmt: skip
    assert len(run.recoveries) == 1


def test_stop_while_the_run_recovers(cluster, tmp_path, monkeypatch):
    lend = recover.Recoverer._lend

    def stopping(self, fresh):
        run.stop()
        lend(self, fresh)

    monkeypatch.setattr(recover.Recoverer, "_lend", stopping)
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
        "import workbench.engine.torch_checkpoints as own\n"
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
    os.kill(cluster._engines._ground.warm.pid, signal.SIGKILL)
    run.wait(WAIT_S)
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


# -- with fewer ------------------------------------------------------------------------------------


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
    assert not (run.folder / recover.RESCUED).exists()
    again = wb.load(run.save(tmp_path / "saved"))
    assert again.history.totals.rows.tolist() == rows
    assert again.history.totals.steps == STEPS


def test_down_to_one_worker(cluster, undisturbed):
    run = cluster.run(
        cell(), strategy="mirrored", on_failure="continue", inject=["kill=1@60", "kill=0@30"]
    ).wait(WAIT_S)
    assert [done.workers for done in run.recoveries] == [2, 1]
    assert difference(run.weights(), undisturbed) <= 1e-10
    assert run.history.totals.steps == STEPS


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
    with pytest.raises(PlanError, match="cannot continue"):
        cluster.run(cell(), strategy="one_device", on_failure="continue")
    with pytest.raises(PlanError, match="cannot continue"):
        cluster.run(cell(), strategy="mirrored", workers=1, on_failure="continue")


def test_stop_is_what_happens_without_a_word(cluster):
    run = cluster.run(cell(), strategy="mirrored", inject=["kill=1@60"])
    with pytest.raises(RunError, match="SIGKILL"):
        run.wait(WAIT_S)
    assert run.recoveries == []


# -- other strategies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("sharded", {}), ("central_storage", {}), ("model_split", {}), ("tensor_parallel", {})],
)
@pytest.mark.parametrize("on_failure", ["replace", "continue"])
def test_strategies_go_on_and_end_where_they_would_have(
    cluster, undisturbed, tmp_path, strategy, options, on_failure
):
    if strategy == "tensor_parallel" and on_failure == "continue":
        more = {"inject": ["kill=2@60"]}  # 16 columns over 3, then over 2
    else:
        more = {"inject": ["kill=1@60"]}
    run = cluster.run(
        cell(), strategy=strategy, options=options, checkpoint=str(tmp_path), checkpoint_every=25,
        on_failure=on_failure, **more,
    ).wait(WAIT_S)  # fmt: skip
    assert len(run.recoveries) == 1
    assert difference(run.weights(), undisturbed) <= 1e-10
    assert run.history.totals.steps == STEPS


# -- servers ---------------------------------------------------------------------------------------

SLOW = ", callbacks=[lambda step, logs: __import__('time').sleep(0.01)]"


def test_asynchronous_workers_do_without_a_dead_one(cluster):
    run = cluster.run(cell(more=SLOW), strategy="parameter_server")
    going(run, 20)
    kill(cluster, 1)
    at = run.history.totals.rows.copy()
    run.wait(WAIT_S)
    assert run.state == "finished"
    assert run.recoveries == []
    rows = run.history.totals.rows
    assert rows[0] == rows[2] == STEPS
    assert at[1] <= rows[1] < STEPS
    assert sum("the others go on" in note for note in run.history.story.notes) == 1
    assert set(run.weights())


def test_the_last_but_rank_0_may_die_too_and_a_pause_still_holds(cluster):
    run = cluster.run(cell(steps=10**6, more=SLOW), strategy="parameter_server")
    going(run, 20)
    kill(cluster, 1, 2)
    assert soon(lambda: run.task.lost == 2)
    run.pause()
    assert soon(lambda: run.state == "paused")
    run.resume()
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"


def test_who_evaluates_and_saves_cannot_be_done_without(cluster, tmp_path):
    run = cluster.run(
        cell(more=SLOW), strategy="parameter_server", checkpoint=str(tmp_path), checkpoint_every=25
    )
    going(run, 40)
    kill(cluster, 0)
    run.wait(WAIT_S)
    assert [(done.engines, done.step > 0) for done in run.recoveries] == [((0,), True)]
    assert run.history.totals.rows[0] == STEPS


@pytest.mark.parametrize("strategy", ["parameter_server", "central_storage"])
def test_a_dead_server_comes_back_with_the_checkpoint(cluster, undisturbed, tmp_path, strategy):
    run = cluster.run(
        cell(more=SLOW), strategy=strategy, checkpoint=str(tmp_path), checkpoint_every=25
    )
    going(run, 40)
    (server,) = [i for i in cluster.ids if i not in cluster.worker_ids][:1]
    kill(cluster, server)
    run.wait(WAIT_S)
    assert [done.engines for done in run.recoveries] == [(server,)]
    assert run.recoveries[0].step >= 25
    assert run.history["step"].max() == STEPS - 1
    assert run.history.totals.rows[0] == STEPS  # others may have been behind the checkpoint
    if strategy == "central_storage":
        assert difference(run.weights(), undisturbed) <= 1e-10


def test_nobody_can_be_a_server_in_a_dead_ones_place_without_a_checkpoint(cluster):
    run = cluster.run(cell(more=SLOW), strategy="central_storage", on_failure="continue")
    going(run, 40)
    (server,) = [i for i in cluster.ids if i not in cluster.worker_ids][:1]
    kill(cluster, server)
    with pytest.raises(RunError, match="only workers can be done without"):
        run.wait(WAIT_S)
