"""Runs with servers: who can be done without, and who comes back."""

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import STEPS, cell, difference, every_step_counts_once, going, kill

from workbench.errors import RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

SLOW = ", callbacks=[lambda step, logs: __import__('time').sleep(0.01)]"


def saved(run):
    """Wait until rank 0, which saves, is well past a checkpoint: others may be ahead of it."""
    assert soon(lambda: run.is_over or run.history.totals.rows[:1].sum() >= 40), run


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
    (told,) = [note for note in run.history.story.notes if "gone" in note]
    assert "SIGKILL" in told
    assert "SIGKILL" in told
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
    saved(run)
    kill(cluster, 0)
    run.wait(WAIT_S)
    assert [(done.engines, done.step > 0) for done in run.recoveries] == [((0,), True)]
    assert run.history.totals.rows[0] == STEPS


@pytest.mark.parametrize("strategy", ["parameter_server", "central_storage"])
def test_a_dead_server_comes_back_with_the_checkpoint(cluster, undisturbed, tmp_path, strategy):
    run = cluster.run(
        cell(more=SLOW), strategy=strategy, checkpoint=str(tmp_path), checkpoint_every=25
    )
    saved(run)
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
    with pytest.raises(RunError, match=r"Server s0 [\s\S]*workers"):
        run.wait(WAIT_S)


def servers(cluster):
    return [i for i in cluster.ids if i not in cluster.worker_ids]


@pytest.mark.parametrize("dead", [0, 1], ids=["s0", "s1"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("parameter_server", {"sync": True, "servers": 2}), ("central_storage", {})],
)
def test_what_two_servers_hold_outlives_one_and_no_step_is_done_again(
    cluster, undisturbed, strategy, options, dead
):
    run = cluster.run(cell(more=SLOW), strategy=strategy, options={**options, "replicas": 2})
    going(run, 20)
    server = servers(cluster)[dead]
    kill(cluster, server)
    run.wait(WAIT_S)
    assert run.state == "finished"
    assert run.recoveries == []
    every_step_counts_once(run)
    assert difference(run.weights(), undisturbed) <= 1e-10
    notes = [note for note in run.history.story.notes if f"s{dead}" in note]
    assert any("SIGKILL" in note for note in notes)
    took_over = dead == 0 or strategy == "parameter_server"
    assert any("took over" in note for note in notes) == took_over


def test_workers_at_their_own_pace_go_on_when_a_server_dies_and_stop_when_told_to(cluster):
    run = cluster.run(
        cell(steps=10**6, more=SLOW), strategy="parameter_server", options={"replicas": 2}
    )
    going(run, 20)
    kill(cluster, servers(cluster)[0])
    at = run.history.totals.rows.copy()
    assert soon(lambda: run.is_over or (run.history.totals.rows > at + 20).all())
    run.pause()
    assert soon(lambda: run.state == "paused")
    run.resume()
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert run.recoveries == []


@pytest.mark.parametrize("saved_to", ["disk", ""])
def test_the_second_death_is_the_runs_or_it_goes_on_from_its_checkpoint(
    cluster, undisturbed, tmp_path, saved_to
):
    checkpoint = {"checkpoint": str(tmp_path), "checkpoint_every": 25} if saved_to else {}
    run = cluster.run(
        cell(more=SLOW), strategy="central_storage", options={"replicas": 2}, **checkpoint
    )
    saved(run)
    first, second = servers(cluster)[:2]
    kill(cluster, first)
    assert soon(lambda: any("took over" in note for note in run.history.story.notes))
    kill(cluster, second)
    if not saved_to:
        with pytest.raises(RunError, match=r"Server s1 .*WB-RUN-066[\s\S]*Server s0"):
            run.wait(WAIT_S)
        return
    run.wait(WAIT_S)
    assert [set(done.engines) for done in run.recoveries] == [{first, second}]
    assert difference(run.weights(), undisturbed) <= 1e-10
