"""Workers that are told to end say goodbye, and nobody waits for a timeout."""

import contextlib
import os
import signal

import numpy as np
import psutil
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, every_step_counts_once, pids

from workbench.errors import RunError
from workbench.execution.workers.healing import Healer
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 240
WARNED = {"event": "left", "reason": "SIGTERM"}


@pytest.fixture(scope="module")
def undisturbed(cluster):
    """Weights after all steps when nobody leaves."""
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def before(tmp_path):
    """Code above a cell: its steps take long enough to be disturbed, until a file is there."""
    return (
        "import os, pathlib, signal, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def pace(step, logs):\n"
        "    if step >= 20 and not (folder / 'hurry').exists():\n"
        "        time.sleep(0.05)\n"
    )


@pytest.fixture
def paced(before):
    """A cell that trains and can be disturbed."""
    return before + cell(STEPS, ", callbacks=[pace]")


def warn(cluster, *engines):
    """Tell engines to end, as the system does."""
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids(cluster)[engine], signal.SIGTERM)


def trains(run, step=22):
    assert soon(lambda: run.is_over or run.snapshot().step >= step), run


def exits(cluster):
    return {one.id: one.exit and one.exit.short for one in cluster.engines}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_does_not_go_on_stops_at_a_step_with_its_checkpoint(
    cluster, paced, tmp_path, rank
):
    run = cluster.run(
        paced, strategy="mirrored", on_failure="stop", checkpoint=str(tmp_path / "c"),
        checkpoint_every=1000,
    )  # fmt: skip
    trains(run)
    warn(cluster, rank)
    with pytest.raises(RunError, match=r"WB-RUN-149") as caught:
        run.wait(WAIT_S)
    assert "SIGTERM" in str(caught.value)
    steps = run.history.totals.steps
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == [steps]
    assert 22 <= steps < STEPS
    assert soon(lambda: exits(cluster)[rank] == "SIGTERM"), exits(cluster)
    (event,) = run.events
    assert event.items() >= {**WARNED, "ranks": [rank], "step": steps}.items()


def test_the_run_goes_on_from_the_checkpoint_of_the_step_it_stopped_at(
    cluster, paced, undisturbed, tmp_path
):
    run = cluster.run(
        paced, strategy="mirrored", checkpoint=str(tmp_path / "c"), checkpoint_every=1000
    )
    trains(run)
    warn(cluster, 1)
    assert soon(lambda: run.is_over or run.recoveries), run
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.workers) == ((1,), 0, 3)
    assert done.step >= 22
    assert "SIGTERM" in done.how
    assert difference(run.weights(), undisturbed) <= EXACT
    every_step_counts_once(run, STEPS)


def test_a_handler_of_the_users_own_is_called_too(cluster, paced, tmp_path):
    handler = (
        "def mine(number, frame):\n"
        "    (folder / f'heard-{rank}').touch()\n"
        "signal.signal(signal.SIGTERM, mine)\n"
    )
    run = cluster.run(
        paced.replace("def pace", handler + "def pace"), strategy="mirrored", on_failure="stop"
    )
    trains(run)
    warn(cluster, 2)
    with pytest.raises(RunError, match=r"WB-RUN-149"):
        run.wait(WAIT_S)
    assert (tmp_path / "heard-2").exists()
    assert soon(lambda: exits(cluster)[2] == "SIGTERM"), exits(cluster)


def test_a_second_signal_ends_it_at_once(cluster, before, tmp_path):
    block = (
        "def pace(step, logs):\n"
        "    if step == 5 and rank == 1:\n"
        "        (folder / 'blocks').touch()\n"
        "        while True: time.sleep(0.05)\n"
    )
    run = cluster.run(
        before + block + cell(STEPS, ", callbacks=[pace]"), strategy="mirrored", on_failure="stop"
    )
    assert soon(lambda: (tmp_path / "blocks").exists())
    warn(cluster, 1)
    assert soon(lambda: any("leaves" in note for note in run.history.story.notes))
    assert not run.is_over
    assert soon(lambda: warn(cluster, 1) or exits(cluster)[1] == "SIGTERM")
    with pytest.raises(RunError, match="killed by SIGTERM"):
        run.wait(WAIT_S)


def test_an_engine_that_does_nothing_ends_as_ever(cluster):
    warn(cluster, 1)
    assert soon(lambda: exits(cluster)[1] is not None)
    assert cluster.ids == [0, 2]


def test_a_notice_that_the_host_goes_is_a_warning_of_all_on_it(cluster, paced, tmp_path):
    notice = tmp_path / "notice"
    run = cluster.run(
        f"wb.leave_when({str(notice)!r}, every_s=0.05)\n" + paced,
        strategy="mirrored", checkpoint=str(tmp_path / "c"), on_failure="stop",
    )  # fmt: skip
    trains(run)
    notice.write_text("120")
    with pytest.raises(RunError, match=r"WB-RUN-149") as caught:
        run.wait(WAIT_S)
    assert "120 s left" in str(caught.value)
    assert checkpoints.found(tmp_path / "c")[-1].step == run.history.totals.steps
    assert soon(lambda: cluster.ids == []), exits(cluster)


def test_a_worker_that_nobody_waits_for_leaves_alone(cluster, paced, tmp_path):
    run = cluster.run(paced, strategy="parameter_server")
    trains(run)
    warn(cluster, 1)
    assert soon(lambda: exits(cluster)[1] == "SIGTERM"), exits(cluster)
    run.pause()
    assert soon(lambda: run.state == "paused")
    run.resume()
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert run.state == "finished"
    (event,) = run.events
    assert event.items() >= {**WARNED, "ranks": [1], "workers": 2}.items()
    rows = run.history.totals.rows
    assert rows[0] == rows[2] == STEPS > rows[1] >= 22


def test_a_server_with_a_copy_leaves_and_its_copy_takes_over(cluster, paced, undisturbed, tmp_path):
    run = cluster.run(paced, strategy="central_storage", options={"replicas": 2})
    trains(run)
    server = next(i for i in cluster.ids if i not in cluster.worker_ids)
    warn(cluster, server)
    assert soon(lambda: exits(cluster)[server] == "SIGTERM"), exits(cluster)
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert run.recoveries == []
    assert [one["ranks"] for one in run.events] == [[]]
    assert difference(run.weights(), undisturbed) <= EXACT
    every_step_counts_once(run, STEPS)


@pytest.mark.leaks("the client seeks the controller, which ended, until the next test restarts it")
def test_the_warm_parent_passes_it_on_and_ends_last(cluster, paced, tmp_path):
    run = cluster.run(paced, strategy="mirrored", on_failure="stop", checkpoint=str(tmp_path / "c"))
    trains(run)
    parent = psutil.Process(pids(cluster)[0]).parent()
    parent.terminate()
    with pytest.raises(RunError, match=r"WB-RUN-149"):
        run.wait(WAIT_S)
    assert checkpoints.found(tmp_path / "c")[-1].step == run.history.totals.steps
    assert soon(lambda: cluster.ids == []), exits(cluster)
    assert soon(lambda: not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE)


# -- healing ---------------------------------------------------------------------------------------


def changes(run, event):
    return sorted(rank for one in run.events if one["event"] == event for rank in one["ranks"])


@pytest.fixture
def healed(cluster, tmp_path):
    """Run a cell, warn these, and let it end when fresh engines have joined in their places."""

    def run_it(source, *engines, **more):
        run = cluster.run(source, strategy="mirrored", on_failure="heal", **more)
        trains(run)
        warn(cluster, *engines)
        joined = lambda: changes(run, "joined") == sorted(engines)  # noqa: E731
        assert soon(lambda: run.is_over or joined()), (run.events, run.history.story.notes)
        (tmp_path / "hurry").touch()
        run.wait(WAIT_S)
        assert changes(run, "left") == changes(run, "joined") == sorted(engines), run.events
        return run

    return run_it


def counts_once(run):
    """Every step once, whole: who leaves has sent all that it had."""
    every_step_counts_once(run, STEPS)
    assert (np.bincount(run.history["step"], run.history["samples"]) == 24).all()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_others_go_on_and_a_fresh_engine_joins(cluster, paced, undisturbed, healed, rank):
    before = pids(cluster)
    run = healed(paced, rank)
    assert difference(run.weights(), undisturbed) <= EXACT
    left, joined = run.events
    assert left.items() >= {**WARNED, "ranks": [rank], "workers": 2}.items()
    assert 20 <= left["step"] < joined["step"] < STEPS
    assert run.recoveries == []
    assert {i for i, pid in pids(cluster).items() if pid != before[i]} == {rank}
    counts_once(run)


def test_two_at_once(paced, undisturbed, healed):
    run = healed(paced, 0, 2)
    assert difference(run.weights(), undisturbed) <= EXACT
    counts_once(run)


def test_one_is_warned_while_another_one_is_being_replaced(
    cluster, paced, undisturbed, tmp_path, monkeypatch
):
    start, begun = Healer._start, []

    def warning(self, engine):
        if not begun:
            begun.append(engine)
            warn(cluster, 2)
        start(self, engine)

    monkeypatch.setattr(Healer, "_start", warning)
    run = cluster.run(paced, strategy="mirrored", on_failure="heal", inject=["kill=1@30"])
    assert soon(lambda: run.is_over or changes(run, "joined") == [1, 2]), run.events
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert (changes(run, "healed"), changes(run, "left")) == ([1], [2])
    assert difference(run.weights(), undisturbed) <= EXACT
    every_step_counts_once(run, STEPS)


def test_all_are_warned_and_the_run_goes_on_from_the_step_they_stopped_at(
    cluster, paced, undisturbed, tmp_path
):
    run = cluster.run(
        paced, strategy="mirrored", on_failure="heal", checkpoint=str(tmp_path / "c"),
        checkpoint_every=1000,
    )  # fmt: skip
    trains(run)
    warn(cluster, 0, 1, 2)
    assert soon(lambda: run.is_over or run.recoveries), run.events
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    assert sum(one.lost_steps for one in run.recoveries) == 0
    every_step_counts_once(run, STEPS)


def test_all_are_warned_and_the_last_one_leaves_what_it_holds(
    cluster, paced, undisturbed, tmp_path
):
    run = cluster.run(paced, strategy="mirrored", on_failure="heal")
    trains(run)
    warn(cluster, 0, 1, 2)
    assert soon(lambda: run.is_over or run.recoveries), run.events
    (tmp_path / "hurry").touch()
    assert run.over.wait(WAIT_S)
    if run.error is not None:  # on a slow machine it has ended before it was asked
        assert "WB-RUN-138" in str(run.error)
        return
    assert difference(run.weights(), undisturbed) <= EXACT
    every_step_counts_once(run, STEPS)
