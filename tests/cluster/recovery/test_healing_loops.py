"""A user's own loop goes on when a worker dies, and a fresh engine joins it."""

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import MODEL, difference

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
EPOCHS, PER_EPOCH = 40, 5
STEPS = EPOCHS * PER_EPOCH

BEFORE = """
import os, pathlib, signal, time
folder = pathlib.Path(FOLDER)
def once(what):
    flag = folder / f'{what}-{rank}'
    there = flag.exists()
    flag.touch()
    return not there
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
LOOP = """
from torch.utils.data import DataLoader, TensorDataset
model.insert(1, nn.BatchNorm1d(16, momentum=0.5).double()) if BATCHNORM else None
generator = torch.Generator().manual_seed(1)
x = torch.randn(110, 8, generator=generator).double()
y = torch.randint(0, 4, (110,), generator=generator)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
each_step = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.9)
each_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
critic = nn.Linear(4, 1).double()
model, optimizer, loader = wb.prepare(model, optimizer, loader, keep=[each_step, each_epoch])
loss_fn = nn.CrossEntropyLoss()
done = 0
for epoch in range(EPOCHS):
    for at, (x_, y_) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_fn(model(x_), y_)
        IN_STEP
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        each_step.step()
        done += 1
        if epoch >= 4 and not (folder / 'hurry').exists():
            time.sleep(0.05)
    each_epoch.step()
"""
CRITIC = """
critic, its_optimizer = wb.prepare(critic, torch.optim.Adam(critic.parameters()))
loss_fn = """


@pytest.fixture
def source(tmp_path):
    """Return a cell with an own loop, whose epochs take their time until `hurry` is there."""

    def make(more="", in_step="pass", batchnorm=False, change=lambda text: text):
        loop = LOOP.replace("EPOCHS", str(EPOCHS)).replace("IN_STEP", in_step)
        loop = loop.replace("BATCHNORM", str(batchnorm))
        return change(BEFORE.replace("FOLDER", repr(str(tmp_path))) + MODEL + more + loop)

    return make


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """Weights after all steps when nobody dies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "hurry").touch()
    text = BEFORE.replace("FOLDER", repr(str(folder))) + MODEL + LOOP
    for name, value in (("EPOCHS", EPOCHS), ("IN_STEP", "pass"), ("BATCHNORM", False)):
        text = text.replace(name, str(value))
    return cluster.run(text, strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def heal(cluster, tmp_path):
    """Run a cell until these ranks went and came, then to its end."""

    def run_it(text, *ranks, **more):
        run = cluster.run(text, strategy="mirrored", on_failure="heal", **more)
        changed = lambda event: sorted(  # noqa: E731
            rank for one in run.events if one["event"] == event for rank in one["ranks"]
        )
        assert soon(lambda: run.is_over or changed("joined") == sorted(ranks)), (
            run, run.events, run.history.story.notes,
        )  # fmt: skip
        (tmp_path / "hurry").touch()
        run.wait(3 * WAIT_S)
        assert changed("healed") == changed("joined") == sorted(ranks), run.history.story.notes
        assert not any(done.again for done in run.recoveries)
        return run

    return run_it


def counts_once(run):
    run.history.finish()
    rank, step = run.history["rank"], run.history["step"]
    assert len(set(zip(rank.tolist(), step.tolist(), strict=True))) == len(step)
    assert run.history.totals.steps == STEPS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_goes_on_and_a_fresh_engine_comes_to_its_place(source, undisturbed, heal, rank):
    run = heal(source(), rank, inject=[f"kill={rank}@23"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)
    assert [done.lost_steps for done in run.recoveries] == [0]


SAMPLER = """
sampler = torch.utils.data.SubsetRandomSampler(range(110), generator=generator)
loader = DataLoader(TensorDataset(x, y), batch_size=24, sampler=sampler)
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for i in torch.randperm(110, generator=generator).tolist():
            yield x[i], y[i]
loader = DataLoader(Stream(), batch_size=24)
"""


def reading(data):
    line = "loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)\n"
    assert line in LOOP
    return lambda text: text.replace(line, data)


def test_a_samplers_own_generator_keeps_its_order(cluster, tmp_path, source, heal):
    text = source(change=reading(SAMPLER))
    (tmp_path / "hurry").touch()
    whole = cluster.run(text, strategy="mirrored").wait(WAIT_S).weights()
    (tmp_path / "hurry").unlink()
    run = heal(text, 1, inject=["kill=1@23"])
    assert difference(run.weights(), whole) <= EXACT
    counts_once(run)


def test_a_stream_that_shuffles_keeps_its_order_after_a_restart(cluster, tmp_path, source):
    text = source(change=reading(STREAM))
    (tmp_path / "hurry").touch()
    whole = cluster.run(text, strategy="mirrored").wait(WAIT_S).weights()
    run = cluster.run(text, strategy="mirrored", on_failure="heal", inject=["kill=1@23"])
    assert difference(run.wait(3 * WAIT_S).weights(), whole) <= EXACT
    assert run.recoveries[-1].again


FAILS_IN_BACKWARD = """
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if epoch == 5 and at == 2 and rank == 1 and once('killed'):
            die()
        return gradient
"""


def test_a_death_in_the_middle_of_a_backward(source, undisturbed, heal):
    run = heal(source(FAILS_IN_BACKWARD, "loss = Broken.apply(loss)"), 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_a_death_between_two_optimizer_steps(source, undisturbed, heal):
    """Rank 0 takes the step, rank 1 dies before its own, rank 2 fails after the all-reduce."""

    def change(text):
        text = text.replace("optimizer = torch.optim.SGD(", "optimizer = Dying(")
        return text.replace("        loss.backward()\n", "        backward(loss)\n")

    more = """
class Dying(torch.optim.SGD):
    steps = 0
    def step(self, *args):
        Dying.steps += 1
        if Dying.steps == 31 and rank == 1 and once('killed'):
            die()
        return super().step(*args)
import torch.distributed as dist
from workbench.strategies.torch.parts import reduction
plain = getattr(reduction.Reductions.after_backward, 'plain', reduction.Reductions.after_backward)
calls = 0
def after_backward(self, timer):
    global calls
    calls += 1
    plain(self, timer)
    if calls == 31 and rank == 2 and once('failed'):
        raise RuntimeError('gloo: Connection closed by peer')
after_backward.plain = plain
reduction.Reductions.after_backward = after_backward
def backward(loss):
    loss.backward()
"""
    run = heal(source(more, change=change) + "\nreduction.Reductions.after_backward = plain\n", 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 31  # the step of rank 0 stands
    counts_once(run)


def test_a_death_at_the_end_of_an_epoch(source, undisturbed, heal):
    """Between two passes, where buffers are made equal and schedulers take their steps."""

    def change(text):
        last = "    each_epoch.step()\n"
        return text.replace(
            last, last + "    if epoch == 5 and rank == 1 and once('killed'):\n        die()\n"
        )

    run = heal(source(change=change), 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_buffers_see_each_batch_once(source, cluster, tmp_path, heal):
    """Rank 0's statistics are everybody's at the end of a pass; it is not rank 0 that dies."""
    run = heal(source(batchnorm=True), 1, inject=["kill=1@23"])
    counts = {v.tolist() for name, v in run.weights().items() if name.endswith("batches_tracked")}
    assert counts == {STEPS}


def test_collectives_between_epochs_do_not_meet_the_others_all_reduce(source, undisturbed, heal):
    """A fresh engine passes over epochs that are over: alone, it has nobody to call."""

    def change(text):
        last = "    each_epoch.step()\n"
        line = "    if dist.is_initialized():\n        dist.all_reduce(torch.ones(1))\n"
        return "import torch.distributed as dist\n" + text.replace(last, last + line)

    run = heal(source(change=change), 1, inject=["kill=1@33"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("keep=[each_step, each_epoch]", "keep=[]"), "scheduler"),
        (
            lambda text: text.replace(
                "model, optimizer, loader = wb.prepare(model, optimizer, loader, ",
                "model, optimizer = wb.prepare(model, optimizer, ",
            ),
            "without a loader",
        ),
        (
            lambda text: text.replace("loss_fn = ", CRITIC).replace(
                "each_epoch]", "each_epoch, critic]"
            ),
            "optimizer (Adam)",
        ),
    ],
)
def test_what_cannot_be_handed_over_is_said_as_training_begins(
    cluster, tmp_path, source, change, why
):
    (tmp_path / "hurry").touch()
    run = cluster.run(source(change=change), strategy="mirrored", on_failure="heal").wait(WAIT_S)
    assert any(why in note and "cannot heal" in note for note in run.history.story.notes)


def test_steps_over_several_batches_end_in_a_restart(cluster, tmp_path, source):
    """Their earlier batches cannot be given out again, so nobody is done without or let in."""

    def change(text):
        return text.replace("        optimizer.step()\n", "        if at % 2: optimizer.step()\n")

    (tmp_path / "hurry").touch()
    run = cluster.run(
        source(change=change), strategy="mirrored", on_failure="heal", inject=["kill=1@13"]
    ).wait(3 * WAIT_S)
    assert any("several batches" in note for note in run.history.story.notes)
    assert run.events == []
    assert [done.again for done in run.recoveries] == [True]
    assert run.history.totals.steps == EPOCHS * 2
