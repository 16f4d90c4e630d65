"""Ranks that are paused while the notebook's cell is long over."""

import time

import psutil
import pytest
from debugging import TRAINS, idle, paused, where
from needs import need
from notebook_shell import soon

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


def test_paused_in_the_background_until_debug_opens_it(book):
    book.ok("""%%distributed --background
def look(secret):
    breakpoint()
    return secret + 1
if rank == 1:
    found = look(41)
dist.barrier()
""")
    assert soon(paused)
    assert paused()[1].where == "cell line 3 in look"
    answers = where(0, 1)
    assert answers[1].state == "paused", "a rank paused by its user is not called a hang"
    book.refused("%cluster debug 0", "WB-RUN-065")
    assert "breakpoint()" in book.ok("%cluster debug 1 -c 'l'").stdout
    said = book.ok("%cluster debug -c 'p secret' -c 'secret = 99' -c c").stdout
    assert said.splitlines()[0] == "41"
    assert idle()
    assert session.cluster.pull(["found"], [1])[1]["found"] == 100
    assert where(1)[1].state == "idle"


def test_other_notebooks_question_is_found(book):
    book.ok("%%distributed --background -r 0\nbreakpoint()\nx = 1")
    assert soon(paused)
    waiting = session.cluster.paused
    waiting._stops.clear()  # as in a notebook that has just attached
    assert waiting.inquire(0).where == "cell line 2"
    book.ok("%cluster debug 0 -c c")
    assert idle()


def test_stop_lets_a_paused_run_end(book):
    book.ok("%%distributed mirrored --plot off --background\n" + TRAINS.replace("STEPS", "100000"))
    run = book["_run"]
    assert soon(paused)
    began = time.perf_counter()
    run.stop()
    run.wait(20)
    assert time.perf_counter() - began < 3
    assert run.state == "stopped"
    assert run.history.totals.steps >= 3
    assert not paused()
    book.ok("%%distributed\ndist.barrier()")


def test_paused_rank_can_be_paused_as_a_run(book):
    book.ok("%%distributed mirrored --plot off --background\n" + TRAINS.replace("STEPS", "100000"))
    run = book["_run"]
    assert soon(paused)
    run.pause()
    book.ok("%cluster debug 0 -c c")
    assert soon(lambda: run.state == "paused")
    run.resume()
    run.stop()
    run.wait(20)
    assert run.state == "stopped"


def test_wait_in_python_meets_the_breakpoint_too(book):
    source = TRAINS.replace("STEPS", "6")
    run = session.cluster.run(source, strategy="mirrored").wait(30)
    assert run.history.totals.steps == 6


def test_killed_while_paused(book):
    book.ok("%%distributed --background\nbreakpoint() if rank == 1 else None\ndist.barrier()")
    assert soon(paused)
    psutil.Process(session.cluster.engines[1].pid).kill()
    assert idle()
    assert not paused()
    book.refused("%cluster debug 1", "WB-CLUSTER-037", "%cluster logs 1")
    book.ok("%cluster restart 1")
    book.ok("%%distributed\ndist.barrier()")
