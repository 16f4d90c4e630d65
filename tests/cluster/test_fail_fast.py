"""The first rank to raise ends the cell; its traceback comes first, the others' are folded."""

import time

import pytest
from needs import need
from notebook_shell import notebook, soon

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

PROMISE_S = 2.0
STAMP = "import time, pathlib; pathlib.Path({path!r}).write_text(repr(time.perf_counter()))"
PROOF = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); print(x.item(), kept)"
FIT = """%%distributed mirrored --plot off
from torch import nn
class Fails:
    def on_step_end(self, step, logs):
        if rank == 1 and step == 20:
            STAMP
            raise LookupError("mine")
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=33,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7,
       callbacks=[Fails()])
"""


@pytest.fixture(scope="module")
def book():
    with notebook(3) as book:
        book.ok("%%distributed\nimport torch\nkept = 'kept'\nx = torch.ones(1)\ndist.all_reduce(x)")
        yield book


@pytest.fixture
def stamp(tmp_path):
    """Where an engine writes down when it raised; both read the host's monotonic clock."""
    return tmp_path / "raised"


def fails(book, stamp, source, *words):
    """Run a cell that fails; return it and the seconds from the raise to the cell's end."""
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    cell = book.refused(source.replace("STAMP", STAMP.format(path=str(stamp))), *words)
    seconds = time.perf_counter() - float(stamp.read_text())
    # The engines live, their variables are kept, and the next cell has a process group.
    assert {engine.id: engine.pid for engine in session.cluster.engines} == pids
    assert book.ok(PROOF).lines() == ["[ranks 0-2] 3.0 kept"]
    return cell, seconds


@pytest.mark.timing
def test_one_raises_while_the_others_wait_in_a_collective(book, stamp):
    source = (
        "%%distributed\nif rank == 1:\n    STAMP\n    raise ValueError('mine')\ndist.all_reduce(x)"
    )
    cell, seconds = fails(
        book, stamp, source, "Rank 1 (engine 1) failed: ValueError: mine", "Also failed: ranks 0, 2"
    )
    assert seconds < PROMISE_S
    errors = [line for line in cell.lines() if line.startswith("[rank")]
    assert all(line.startswith("[rank 1]") for line in errors)  # the reason alone, in full
    assert any("Cell In[" in line and line.endswith("line 4") for line in errors)
    assert any(line.startswith("Also failed: ranks 0, 2: ") for line in cell.lines())


@pytest.mark.timing
def test_one_raises_while_the_others_sleep_or_compute(book, stamp):
    for others in ("time.sleep(1000)", "while True: pass"):
        source = (
            "%%distributed\nimport time\nif rank == 1:\n    STAMP\n    raise ValueError('mine')\n"
            f"{others}"
        )
        _, seconds = fails(book, stamp, source, "mine", "Also failed: ranks 0, 2: interrupted")
        assert seconds < PROMISE_S


@pytest.mark.timing
def test_one_raises_in_a_run(book, stamp):
    cell, seconds = fails(book, stamp, FIT, "Rank 1 (engine 1) failed: LookupError: mine")
    assert seconds < PROMISE_S
    run = book["_run"]
    assert run.state == "failed"
    assert run.history.totals.steps >= 20
    assert any(", line 7" in line for line in cell.lines())


def test_a_cell_that_swallows_the_first_interrupt_is_interrupted_again(book, stamp):
    source = (
        "%%distributed\nimport time\nif rank == 1:\n    STAMP\n    raise ValueError('mine')\n"
        "try:\n    time.sleep(1000)\nexcept KeyboardInterrupt:\n    time.sleep(1000)\n"
    )
    fails(book, stamp, source, "mine", "Also failed: ranks 0, 2: interrupted")


def test_what_is_folded_is_there_on_demand(book, stamp):
    task = session.cluster.execute(
        "if rank == 1:\n    raise ValueError('mine')\ndist.all_reduce(x)"
    )
    assert task.over.wait(30)
    html = task.board.render(final=True)["text/html"]
    reason, _, folded = html.partition("<details")
    assert "ValueError" in reason
    assert "KeyboardInterrupt" not in reason
    assert "Also failed: ranks 0, 2" in folded
    assert "KeyboardInterrupt" in folded or "Connection closed by peer" in folded
    assert task.cause == 1


def test_two_mistakes_are_both_shown(book, stamp):
    cell = book.refused(
        "%%distributed\nif rank < 2: raise [ValueError, LookupError][rank]('mine')\n"
        "dist.all_reduce(x)",
        "failed:",
    )
    assert "ValueError: mine" in cell.stdout
    assert "LookupError: mine" in cell.stdout
    assert "Also failed: rank 2" in cell.stdout


def test_a_call_that_never_returns_is_ended_by_pid_and_said_so(book):
    """Rank 2 waits in C for a lock that it holds itself, and keeps the interpreter's lock."""
    task = session.cluster.execute(
        "import ctypes\n"
        "if rank == 1:\n    raise ValueError('mine')\n"
        "if rank == 2:\n"
        "    lock = ctypes.create_string_buffer(128)\n"
        "    c = ctypes.PyDLL(None)\n"
        "    c.pthread_mutex_lock(lock)\n"
        "    c.pthread_mutex_lock(lock)\n"
    )
    assert soon(lambda: "2 s" in session.cluster.stacks([2])[0].place)
    assert session.cluster.stacks([0])[0].text
    assert task.over.wait(30)
    text = str(task.failure())
    assert text.startswith("Rank 1 (engine 1) failed: ValueError: mine")
    assert "rank 2: ended" in text
    assert "%cluster restart 2" in text
    assert soon(lambda: 2 not in session.cluster.ids)
    book.ok("%cluster restart 2")
    book.ok("%%distributed\nimport torch\nkept = 'kept'")
    assert book.ok(PROOF).lines() == ["[ranks 0-2] 3.0 kept"]
