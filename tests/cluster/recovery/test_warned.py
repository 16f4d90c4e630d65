"""Workers that are told to end say goodbye, and nobody waits for a timeout."""

import contextlib
import os
import signal

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, every_step_counts_once, pids

from workbench.errors import RunError
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 240
WARNED = {"event": "departed", "reason": "SIGTERM"}


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
    with pytest.raises(RunError, match=r"WB-RUN-165") as caught:
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
    with pytest.raises(RunError, match=r"WB-RUN-165"):
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
    with pytest.raises(RunError, match=r"WB-RUN-165") as caught:
        run.wait(WAIT_S)
    assert "120 s left" in str(caught.value)
    assert checkpoints.found(tmp_path / "c")[-1].step == run.history.totals.steps
    assert soon(lambda: cluster.ids == []), exits(cluster)


def test_a_worker_that_nobody_waits_for_leaves_alone(cluster, paced, tmp_path):
    run = cluster.run(paced, strategy="parameter_server")
    trains(run)
    warn(cluster, 1)
    assert soon(lambda: exits(cluster)[1] == "SIGTERM"), exits(cluster)
    assert not run.is_over
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert run.state == "finished"
    (event,) = run.events
    assert event.items() >= {**WARNED, "ranks": [1], "workers": 2}.items()
    rows = run.history.totals.rows
    assert rows[0] == rows[2] == STEPS > rows[1] >= 22
