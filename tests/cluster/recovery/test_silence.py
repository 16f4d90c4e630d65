"""A worker that is halted is done without as a dead one is; one that only waits never is."""

import contextlib
import os
import signal
import time

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from recovering import cell, difference, pids

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

EXACT = 1e-10
STEPS = 200


@pytest.fixture(scope="module")
def undisturbed(cluster):
    return cluster.run(cell(STEPS), strategy="mirrored").wait(WAIT_S).weights()


@pytest.fixture
def paced(tmp_path):
    """Return a cell whose steps take 20 ms until its file `hurry` is there."""
    return (
        "import pathlib, time\n"
        f"hurry = pathlib.Path({str(tmp_path / 'hurry')!r})\n"
        "def pace(step, logs):\n"
        "    if step >= 10 and not hurry.exists():\n"
        "        time.sleep(0.02)\n"
    ) + cell(STEPS, ", callbacks=[pace]")


def begun(cluster, source):
    run = cluster.run(source, strategy="mirrored", on_failure="heal")
    assert soon(lambda: run.is_over or run.history.totals.steps >= 30), run
    return run


def events(run, kind):
    return [one for one in run.events if one["event"] == kind]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_halted_worker_is_ended_and_another_joins(cluster, undisturbed, tmp_path, paced, rank):
    run = begun(cluster, paced)
    pid = pids(cluster)[rank]
    os.kill(pid, signal.SIGSTOP)
    began = time.perf_counter()
    assert soon(lambda: run.is_over or events(run, "healed")), run.history.story.notes
    print(f"healed {time.perf_counter() - began:.2f} s after SIGSTOP")
    with pytest.raises(ProcessLookupError):  # it cannot wake up and write
        os.kill(pid, 0)
    assert soon(lambda: run.is_over or events(run, "joined")), run.history.story.notes
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert difference(run.weights(), undisturbed) <= EXACT
    (done,) = run.recoveries
    assert (done.engines, done.lost_steps, done.again) == ((rank,), 0, False)
    assert "SIGSTOP" in done.how
    assert run.history.totals.steps == STEPS


def test_a_worker_that_goes_on_at_once_stays(cluster, undisturbed, tmp_path, paced):
    run = begun(cluster, paced)
    for rank in range(3):
        os.kill(pids(cluster)[rank], signal.SIGSTOP)
        os.kill(pids(cluster)[rank], signal.SIGCONT)
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert run.events == []
    assert difference(run.weights(), undisturbed) <= EXACT


def test_where_all_are_halted_nobody_waits(cluster, undisturbed, tmp_path, paced):
    """Somebody has put the run aside, and goes on with it later."""
    run = begun(cluster, paced)
    known = pids(cluster)
    with contextlib.ExitStack() as stack:
        for pid in known.values():
            stack.callback(os.kill, pid, signal.SIGCONT)
            os.kill(pid, signal.SIGSTOP)
        steps = run.history.totals.steps
        assert not soon(lambda: run.is_over or bool(run.events), 1.0)
        assert run.history.totals.steps <= steps + 10
    (tmp_path / "hurry").touch()
    run.wait(WAIT_S)
    assert run.events == []
    assert pids(cluster) == known
    assert difference(run.weights(), undisturbed) <= EXACT


def test_a_paused_run_waits_for_whoever_is_halted(cluster, undisturbed, tmp_path, paced):
    run = begun(cluster, paced)
    run.pause()
    assert soon(lambda: run.state == "paused")
    pid = pids(cluster)[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not soon(lambda: run.is_over or bool(run.events), 1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "hurry").touch()
    run.resume()
    run.wait(WAIT_S)
    assert run.events == []
    assert difference(run.weights(), undisturbed) <= EXACT
