"""Who is left trains on, nothing is done again, and a fresh engine joins them."""

import random
import time

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import HEALING_STEPS, cell, counts_once, difference, kill, pids

from workbench.errors import RunError
from workbench.execution.workers.healing import Healer
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = HEALING_STEPS


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody dies."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_dead_worker_is_done_without_and_another_joins(cluster, undisturbed, paced, heal, rank):
    before = pids(cluster)
    run = heal(paced(), rank, inject=[f"kill={rank}@20"])
    assert difference(run.weights(), undisturbed) <= EXACT
    healed, joined = run.events
    assert (healed["ranks"], healed["workers"]) == ([rank], 2)
    assert healed["step"] in (19, 20)  # its last messages may have gone with it
    assert (joined["ranks"], joined["workers"]) == ([rank], 3)
    assert 20 <= joined["step"] < STEPS
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.workers) == ((rank,), 0, 2)
    assert done.step == healed["step"]
    assert "SIGKILL" in done.how
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {rank}
    counts_once(run)
    rows = run.history.totals.rows
    assert {rows[i] for i in range(3) if i != rank} == {STEPS}
    lost = joined["step"] - 20
    assert STEPS - lost - 20 <= rows[rank] <= STEPS - lost  # the last before a death may be missing


@pytest.mark.parametrize("allreduce", ["backend", "ring"])
def test_by_any_all_reduce_with_evaluations_and_checkpoints(
    undisturbed, tmp_path, paced, heal, allreduce
):
    run = heal(
        paced(more=", eval_data=(x, y), eval_every=20"), 1, options={"allreduce": allreduce},
        inject=["kill=1@27"], checkpoint=str(tmp_path / "c"),
        checkpoint_every=25,
    )  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert [one["step"] for one in run.evals] == list(range(19, STEPS, 20))
    counts_once(run)
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [225, STEPS]
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_the_next_cell_has_the_engine_that_was_still_starting_when_the_run_ended(cluster):
    run = cluster.run(cell(21), strategy="mirrored", on_failure="heal", inject=["kill=1@20"])
    run.wait(WAIT_S)
    assert [one["event"] for one in run.events] == ["healed"]
    task = cluster.execute("print(rank)")
    assert task.over.wait(WAIT_S)
    assert task.ids == [0, 1, 2]
    assert task.failure() is None


SAMPLER = """
data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=24,
    sampler=torch.utils.data.SubsetRandomSampler(range(96), generator=generator))
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 96
    def __iter__(self):
        for i in torch.randperm(96, generator=generator).tolist():
            yield x[i], y[i]
data = torch.utils.data.DataLoader(Stream(), batch_size=24)
"""


def reading(source, data):
    return source.replace("wb.fit(model, (x, y),", data + "wb.fit(model, data,")


def test_a_samplers_own_generator_keeps_its_order(cluster, paced, heal):
    whole = cluster.run(reading(cell(STEPS), SAMPLER), strategy="mirrored").wait(WAIT_S).weights()
    run = heal(reading(paced(), SAMPLER), 1, inject=["kill=1@30"])
    assert difference(run.weights(), whole) <= EXACT
    counts_once(run)


def test_a_stream_that_shuffles_keeps_its_order_after_a_restart(cluster):
    source = reading(cell(40), STREAM)
    whole = cluster.run(source, strategy="mirrored").wait(WAIT_S).weights()
    run = cluster.run(source, strategy="mirrored", on_failure="heal", inject=["kill=1@30"])
    assert difference(run.wait(3 * WAIT_S).weights(), whole) <= EXACT
    assert run.recoveries[-1].again


CAUGHT = """
import torch
class Caught(torch.optim.SGD):
    steps = 0
    def step(self, *args):
        Caught.steps += 1
        if Caught.steps == 61 and rank == 1 and once('killed'):
            die()
        if Caught.steps == 61 and rank == 2 and once('failed'):
            raise RuntimeError('gloo: Connection closed by peer')
        return super().step(*args)
"""


def test_a_death_between_two_optimizer_steps(undisturbed, paced, heal):
    """Rank 0 takes the step, rank 1 dies before its own, rank 2 has failed in the all-reduce."""
    run = heal(paced(CAUGHT).replace("torch.optim.SGD(p", "Caught(p"), 1)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.events[0]["step"] == 61  # the step of rank 0 stands
    counts_once(run)


IN_ALL_REDUCE = """
import struct
from workbench.engine.transport import peers
exchange = getattr(peers.Peers.exchange, 'plain', peers.Peers.exchange)
calls = 0
def dying(self, to, data, source, into):
    global calls
    calls += 1
    if rank == 1 and calls == 150 and once('killed'):
        self._sockets[to].sendall(struct.pack('!Q', len(data)) + bytes(data[:8]))
        die()
    return exchange(self, to, data, source, into)
dying.plain = exchange
peers.Peers.exchange = dying
"""


def test_a_death_in_the_middle_of_an_all_reduce(undisturbed, paced, heal):
    source = paced(IN_ALL_REDUCE) + "\npeers.Peers.exchange = exchange\n"
    run = heal(source, 1, options={"allreduce": "ring"})
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_two_deaths_at_once_and_down_to_one(undisturbed, paced, heal):
    run = heal(paced(), 0, 2, inject=["kill=0@30", "kill=2@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_a_second_death_while_a_fresh_engine_starts(cluster, undisturbed, paced, heal, monkeypatch):
    start, begun = Healer._start, []

    def killing(self, engine):
        if not begun:
            begun.append(engine)
            kill(cluster, 2)
            assert soon(lambda: 2 not in cluster.ids)
        start(self, engine)

    monkeypatch.setattr(Healer, "_start", killing)
    run = heal(paced(), 1, 2, inject=["kill=1@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


IN_HANDOVER = """
from workbench.engine.transport import handover
plain = getattr(handover.Donor.give, 'plain', handover.Donor.give)
def dying(self, *args):
    if rank == 0 and once('killed'):
        die()
    return plain(self, *args)
dying.plain = plain
handover.Donor.give = dying
"""


def test_the_healer_dies_while_it_hands_over(undisturbed, paced, heal):
    source = paced(IN_HANDOVER) + "\nhandover.Donor.give = plain\n"
    run = heal(source, 0, 2, inject=["kill=2@30"])
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_the_last_survivor_dies(cluster, paced):
    run = cluster.run(
        paced(), strategy="mirrored", on_failure="heal",
        inject=["kill=0@30", "kill=1@30", "kill=2@30"],
    )  # fmt: skip
    with pytest.raises(RunError, match="WB-RUN-138"):
        run.wait(WAIT_S)


def test_the_last_survivor_dies_and_a_checkpoint_is_there(cluster, undisturbed, tmp_path, paced):
    (tmp_path / "hurry").touch()
    run = cluster.run(
        paced(), strategy="mirrored", on_failure="heal", checkpoint=str(tmp_path / "c"),
        checkpoint_every=25, inject=["kill=0@130", "kill=1@130", "kill=2@130"],
    ).wait(WAIT_S)  # fmt: skip
    assert difference(run.weights(), undisturbed) <= EXACT
    assert run.recoveries[-1].again
    counts_once(run)


HANGING = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as of_torch
def hanging(*args, **more):
    if (folder / f'armed-{rank}').exists():
        if rank == 1 and once('died'):
            while not (folder / 'hangs').exists():
                time.sleep(0.01)
            die()
        if rank == 2 and once('hung'):
            (folder / 'hangs').touch()
            while True:
                time.sleep(0.5)
    return of_torch.all_reduce(*args, **more)
scope = {**globals(), '__name__': of_torch.__name__}
code = hanging.__code__.replace(co_filename=of_torch.__file__)
dist.all_reduce = type(hanging)(code, scope)
"""


def test_who_hangs_in_a_broken_collective_makes_room(undisturbed, paced, heal):
    """As gloo does where a connection closes just as a message is sent."""
    source = paced(HANGING, more=", eval_data=(x, y), eval_every=30")
    armed = "    if step == 25:\n        (folder / f'armed-{rank}').touch()\n"
    source = source.replace("def pace(step, logs):\n", "def pace(step, logs):\n" + armed)
    run = heal(source + "\ndist.all_reduce = of_torch.all_reduce\n", 1, 2)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert any("connections are" in one for one in run.history.story.notes)


COMES_LATE = """
def wait_for(what):
    while not (folder / what).exists():
        time.sleep(0.01)
if rank == 0 and not once('began'):
    wait_for('trained')
    (folder / 'came').touch()
"""
TRAINED = """
if rank:
    (folder / 'trained').touch()
    wait_for('came')
"""


def test_who_comes_when_all_have_trained_leaves_no_weights(cluster, undisturbed, tmp_path, paced):
    (tmp_path / "hurry").touch()
    source = paced(COMES_LATE) + TRAINED
    run = cluster.run(source, strategy="mirrored", on_failure="heal", inject=["kill=0@30"])
    assert difference(run.wait(WAIT_S).weights(), undisturbed) <= EXACT
    assert [one["event"] for one in run.events] == ["healed"]
    counts_once(run)


def test_an_error_of_the_users_code_still_ends_the_run(cluster, paced):
    run = cluster.run(
        paced(more=", metrics={'bad': lambda out, y: 1 / 0}, eval_data=(x, y), eval_every=40"),
        strategy="mirrored", on_failure="heal",
    )  # fmt: skip
    with pytest.raises(RunError, match="ZeroDivisionError"):
        run.wait(WAIT_S)
    assert run.events == []


def test_the_pause_is_short(cluster, undisturbed, paced, heal):
    """Beside what a restart of the cell would take: an engine's start, and the cell up to here."""
    run = heal(paced(), 1, inject=["kill=1@30"])
    history, (healed, joined) = run.history, run.events
    start = {r: history["start_s"][history["rank"] == r] for r in (0, 1, 2)}
    step_s = history["step_s"][history["rank"] == 0]
    gaps = np.sort(start[0][1:] - start[0][:-1] - step_s[:-1])
    missing_s = start[1][np.searchsorted(history["step"][history["rank"] == 1], joined["step"])]
    missing_s -= start[0][30]
    print(f"pauses {gaps[-2:]} s; told {healed['seconds']:.3f} and {joined['seconds']:.3f} s; "
          f"rank 1 was missing for {missing_s:.2f} s")  # fmt: skip
    assert joined["seconds"] < missing_s / 2


def test_deaths_at_random_moments(cluster, undisturbed, tmp_path, paced):
    """Whoever it is and wherever it was: in a step, in an all-reduce, while others are let in."""
    draw = random.Random(7)
    run = cluster.run(
        paced(more=", eval_data=(x, y), eval_every=5"), strategy="mirrored", on_failure="heal"
    )
    assert soon(lambda: run.is_over or run.history.snapshot().step >= 20)

    def is_whole(deaths):
        whole = not run.events or run.events[-1]["workers"] == 3
        return run.is_over or (len(run.recoveries) >= deaths and whole)

    for deaths in range(4):
        assert soon(lambda deaths=deaths: is_whole(deaths)), (run, run.events)
        time.sleep(draw.uniform(0, 0.15))  # some moment
        if not run.is_over:
            kill(cluster, draw.randrange(3))
    assert soon(lambda: is_whole(4)), (run, run.events, run.history.story.notes)
    (tmp_path / "hurry").touch()
    run.wait(3 * WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert not any(done.again for done in run.recoveries)
    assert [one["step"] for one in run.evals] == list(range(4, STEPS, 5))
    counts_once(run)
