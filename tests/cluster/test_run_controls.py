"""A run that goes on: stop, pause, a step at a time, faults, an interrupt, in the background."""

import threading
import time

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S, interrupt_main_thread, soon
from run_cells import ENDLESS, LOOP, SHORT, going, steps_by_rank

import workbench as wb
from workbench.errors import PlanError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


def test_stop_ends_all_ranks_at_the_same_step(cluster):
    run = going(cluster.run(ENDLESS, strategy="mirrored"))
    run.stop()
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    first, second = steps_by_rank(run)
    assert first == second >= 3
    assert run.weights()["weight"].shape == (10, 64)


def test_a_stop_before_the_first_step_is_a_stop(cluster):
    run = cluster.run("import time\ntime.sleep(0.5)\n" + ENDLESS, strategy="mirrored")
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


def test_stop_ends_a_loop_of_ones_own_quietly(cluster):
    run = going(cluster.run(LOOP.replace("EPOCHS", "10**6"), strategy="mirrored"))
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    assert len(set(steps_by_rank(run))) == 1
    assert "RunStopped" not in run.task.board.text()


def test_pause_holds_step_advances_exactly_and_resume_goes_on(cluster):
    run = going(cluster.run(ENDLESS, strategy="mirrored"))
    run.pause()
    assert soon(lambda: run.state == "paused")
    assert soon(lambda: len(set(steps_by_rank(run))) == 1)
    held = run.history.totals.steps
    for advance in (1, 5):
        run.step(advance)
        held += advance
        assert soon(lambda held=held: steps_by_rank(run) == [held, held])
        assert soon(lambda: run.state == "paused")
    quiet = threading.Event()
    assert not quiet.wait(0.3)
    assert steps_by_rank(run) == [held, held]
    run.resume()
    assert soon(lambda: run.history.totals.steps > held + 5)
    assert run.state == "running"
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


def test_a_paused_run_can_be_stopped(cluster):
    run = going(cluster.run(ENDLESS, strategy="mirrored"))
    run.pause()
    assert soon(lambda: run.state == "paused")
    assert soon(lambda: len(set(steps_by_rank(run))) == 1)
    held = steps_by_rank(run)
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"
    assert steps_by_rank(run) == held  # not one more


def test_faults_are_injected_and_taken_away_while_a_run_goes_on(cluster):
    run = going(cluster.run(ENDLESS, strategy="mirrored"))
    run.inject("slow=1:30ms")

    def median_wait_ms():
        columns = run.history.together("step", "rank", "sync_wait_s")
        steps, ranks, waits_s = columns.values()
        return 1e3 * float(np.median(waits_s[(ranks == 0) & (steps > steps.max() - 10)]))

    assert soon(lambda: median_wait_ms() > 15)
    run.inject()
    resumed = run.history.totals.steps
    assert soon(lambda: run.history.totals.steps > resumed + 50, 10)
    with pytest.raises(PlanError, match=r"WB-PLAN-039[\s\S]*0 to 1"):
        run.inject("slow=7:30ms")
    run.stop()
    run.wait(WAIT_S)


def test_an_interrupt_stops_a_run_and_marks_the_cell(book, cluster):
    threading.Timer(1.5, interrupt_main_thread).start()
    cell = book.refused(
        "%%distributed mirrored --name cut --plot off\n" + ENDLESS, "Interrupted", "'cut'"
    )
    assert cell.seconds < 1.5 + 5
    assert wb.runs["cut"].state == "stopped"
    assert book["_run"] is wb.runs["cut"]
    assert len(set(steps_by_rank(wb.runs["cut"]))) == 1


def test_a_wait_for_a_message_of_our_own_links_can_be_ended(cluster):
    pids = {engine.id: engine.pid for engine in cluster.engines}
    asleep = ENDLESS.replace(
        "steps=1_000_000",
        "steps=50, callbacks=lambda step, logs: __import__('time').sleep(60 * (rank * step == 4))",
    )
    run = going(cluster.run(asleep, strategy="mirrored", options={"allreduce": "ring"}))
    began = time.monotonic()
    run.stop()
    run.wait(WAIT_S)
    assert time.monotonic() - began < 6  # one second of it: can they agree on a step?
    assert run.state == "stopped"
    assert {engine.id: engine.pid for engine in cluster.engines} == pids
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


def test_a_background_run_goes_on_without_its_cell(book, cluster):
    cell = book.ok("%%distributed mirrored -n 2 --background --plot off --name back\n" + ENDLESS)
    run = wb.runs["back"]
    assert not run.is_over, cell.text
    going(run).stop()
    assert run.wait(WAIT_S).state == "stopped"
