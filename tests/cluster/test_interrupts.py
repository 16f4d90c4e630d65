"""Interrupts end cells and runs wherever they are; engines live, the next cell works."""

import gc
import os
import re
import threading
import time

import pytest
from needs import need
from notebook_shell import WAIT_S, interrupt_main_thread, notebook, soon
from warm_support import stopped

from workbench.errors import RunError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

AT_A_STEP_S, IN_A_COLLECTIVE_S = 1.0, 3.0
PROOF = "%%distributed\nimport torch\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"
FIT = """
import pathlib, time, torch
from torch import nn
class Data(torch.utils.data.Dataset):
    asked = 0
    def __len__(self): return 240
    def __getitem__(self, i):
        Data.asked += 1
        if rank == 1 and Data.asked > 200:
            IN_DATA
        return torch.zeros(64), 0
class Hook:
    def on_step_end(self, step, logs):
        if rank == 1 and step == 20:
            IN_STEP
def accuracy(out, y):
    if rank == 1:
        IN_EVALUATION
    return (out.argmax(1) == y).float().mean()
model = nn.Linear(64, 10)
wb.fit(model, Data(), batch_size=30, loss=nn.CrossEntropyLoss(), callbacks=[Hook()],
       optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7,
       eval_data=wb.data.synthetic(60, shape=(64,), classes=10), eval_every=30,
       metrics={"accuracy": accuracy})
"""
HERE = "pathlib.Path({path!r}).touch()"


@pytest.fixture(scope="module")
def book():
    with notebook(3) as book:
        book.ok(PROOF)
        yield book


@pytest.fixture
def reached(tmp_path):
    """A file that an engine makes when it is where the interrupt is to strike."""
    return tmp_path / "reached"


@pytest.fixture
def unharmed(book):
    """The engines of before, and a process group that works."""
    pids = {engine.id: engine.pid for engine in session.cluster.engines}
    yield
    now = {engine.id: engine.pid for engine in session.cluster.engines}
    assert pids.items() <= now.items()  # servers may have come
    assert book.ok(PROOF).lines() == ["[ranks 0-2] 3.0"]


def fit(reached, **where):
    source = FIT
    for place in ("IN_DATA", "IN_STEP", "IN_EVALUATION"):
        code = where.get(place.lower(), "pass").replace("HERE", HERE.format(path=str(reached)))
        source = source.replace(place, code)
    return source


def press_interrupt_when(condition):
    """Press the kernel's stop button; return the list that then holds when."""
    pressed = []

    def press():
        if soon(condition):
            pressed.append(time.perf_counter())
            interrupt_main_thread()

    threading.Thread(target=press, daemon=True).start()
    return pressed


@pytest.mark.timing
@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server", "model_split", "local_sgd"])
def test_stop_at_a_step_boundary(book, unharmed, reached, strategy):
    run = session.cluster.run(
        fit(reached).replace("nn.Linear(64, 10)\n", "nn.Sequential(nn.Linear(64, 8), nn.Tanh(), "
        "nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))\n"),
        strategy=strategy,
    )  # fmt: skip
    assert soon(lambda: run.history.totals.steps > 5)
    began = time.perf_counter()
    run.stop()
    run.wait(WAIT_S)
    assert time.perf_counter() - began < AT_A_STEP_S
    assert run.state == "stopped"
    if run.plan.sync:  # all of them stopped after the same step
        rows = run.history
        assert len({rows["step"][rows["rank"] == rank].max() for rank in range(3)}) == 1


@pytest.mark.timing
@pytest.mark.parametrize(
    "where",
    [
        {"in_data": "HERE; time.sleep(1000)"},
        {"in_step": "HERE; time.sleep(1000)"},
        {"in_step": "HERE\n            while True: pass"},
        {"in_evaluation": "HERE; time.sleep(1000)"},
    ],
    ids=["data", "sleep", "loop", "evaluation"],
)
def test_stop_while_the_others_wait_in_a_collective(book, unharmed, reached, where):
    run = session.cluster.run(fit(reached, **where), strategy="mirrored")
    assert soon(reached.exists), run.error
    began = time.perf_counter()
    run.stop()
    run.wait(WAIT_S)
    assert time.perf_counter() - began < IN_A_COLLECTIVE_S
    assert run.state == "stopped"
    assert run.history.totals.steps >= 6  # what was trained until then


@pytest.mark.timing
def test_the_kernels_stop_button_ends_a_run_and_marks_its_cell(book, unharmed, reached):
    source = "%%distributed mirrored --plot off" + fit(reached, in_data="HERE; time.sleep(1000)")
    pressed = press_interrupt_when(reached.exists)
    cell = book.run(source)
    assert time.perf_counter() - pressed[0] < IN_A_COLLECTIVE_S
    assert isinstance(cell.error, RunError)
    assert "'mirrored" in str(cell.error)
    assert "WB-RUN-088" in str(cell.error)
    assert book["_run"].state == "stopped"
    assert len(book["_run"].history) > 0


@pytest.mark.timing
@pytest.mark.parametrize(
    ("body", "promise_s"),
    [
        ("import time\nHERE\ntime.sleep(1000)", 1.0),
        ("HERE\nwhile True: pass", 1.0),
        ("HERE\ntry:\n    while True: pass\nfinally:\n    done = True", 1.0),
        ("HERE\ndist.all_reduce(x) if rank else __import__('time').sleep(1000)", 3.0),
        ("HERE\ndist.recv(x, src=(rank + 1) % world_size)", 3.0),
    ],
    ids=["sleep", "loop", "finally", "all_reduce", "recv"],
)
def test_the_kernels_stop_button_ends_a_cell(book, unharmed, reached, body, promise_s):
    here = f"pathlib.Path(f'{reached}{{rank}}').touch()"
    pressed = press_interrupt_when(lambda: len(list(reached.parent.glob("reached*"))) == 3)
    cell = book.run(f"%%distributed\nimport pathlib\n{body.replace('HERE', here)}")
    assert time.perf_counter() - pressed[0] < promise_s
    assert isinstance(cell.error, RunError)
    assert "WB-RUN-067" in str(cell.error)
    assert any(line.startswith("ranks 0-2: interrupted") for line in cell.lines()), cell.stdout


def test_interrupts_one_upon_another_do_no_harm(book, unharmed, reached):
    run = session.cluster.run(fit(reached, in_data="HERE; time.sleep(1000)"), strategy="mirrored")
    assert soon(reached.exists)
    run.task.interrupt()
    while not run.is_over:  # also while it is taken down
        session.cluster.engine_set.interrupt(run.task.unfinished())
        run.over.wait(0.02)
    assert run.state == "failed"
    assert "Interrupted" in str(run.error)


def test_an_interrupt_while_a_stopped_run_is_cleared_away_loses_nothing(book, unharmed, reached):
    slow = f"""from workbench.engine.context import current
run = current()
def slowly(weights=None):
    {HERE.format(path=str(reached))}
    time.sleep(1)
    return weights()
import functools
class Late:
    def on_step_end(self, step, logs):
        if step == 0 and run.weights:
            run.weights = functools.partial(slowly, run.weights)
"""
    source = fit(reached).replace("wb.fit(", slow + "wb.fit(").replace("[Hook()]", "[Late()]")
    run = session.cluster.run(source, strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 5), run.error
    run.stop()
    assert soon(reached.exists)
    session.cluster.engine_set.interrupt(run.task.unfinished())
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert run.weights()["weight"].shape == (10, 64)


@pytest.mark.parametrize("how", ["stopped", "interrupted", "failed"])
def test_the_memory_of_a_run_is_released(book, unharmed, reached, how):
    """Neither tracebacks nor strategies hold on to the run's tensors."""
    keep = "import builtins, weakref\nbuiltins.wb_alive = weakref.WeakSet(model.parameters())\n"
    where = {"in_step": "HERE; raise ValueError('mine')"} if how == "failed" else {}
    if how == "interrupted":
        where = {"in_step": "HERE; time.sleep(1000)"}
    source = fit(reached, **where).replace("wb.fit(", keep + "wb.fit(")
    run = session.cluster.run(source, strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 5 and (not where or reached.exists()))
    if how != "failed":
        run.stop()
    assert soon(lambda: run.is_over)
    assert run.state == ("failed" if how == "failed" else "stopped")
    count = "import builtins\nalive = len(builtins.wb_alive)"
    run = None
    gc.collect()
    session.cluster.free()
    task = session.cluster.execute(count)
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    found = session.cluster.pull(["alive"], session.cluster.worker_ids)
    assert {rank: values["alive"] for rank, values in found.items()} == {0: 0, 1: 0, 2: 0}


def test_an_engine_that_no_interrupt_reaches_is_ended_by_pid_and_said_so(
    book, reached, monkeypatch
):
    monkeypatch.setattr("workbench.execution.task.KILL_S", 2.5)  # test_fail_fast has it as it is
    here = HERE.format(path=str(reached))
    task = session.cluster.execute(
        "import ctypes, pathlib\n"
        "if rank == 2:\n"
        "    lock = ctypes.create_string_buffer(128)\n"
        "    c = ctypes.CDLL(None)\n"
        "    c.pthread_mutex_lock(lock)\n"
        f"    {here}\n"
        "    c.pthread_mutex_lock(lock)\n"
    )
    assert soon(reached.exists)
    pid = session.cluster.engines[2].pid
    task.interrupt()
    assert task.over.wait(WAIT_S)
    text = str(task.failure())
    assert text.startswith("Interrupted")
    assert re.search(rf"Rank 2 \(engine 2, pid {pid}\) .* 2.5 s", text)
    assert "%cluster restart 2" in text
    assert soon(lambda: 2 not in session.cluster.ids)
    book.ok("%cluster restart 2")
    assert book.ok(PROOF).lines() == ["[ranks 0-2] 3.0"]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system knows no pidfd")
def test_an_interrupt_arrives_while_the_warm_parent_is_busy(book, unharmed, reached, tmp_path):
    warm_pid = session.cluster.engine_set._ground.parents.living["torch"]
    source = f"""%%distributed
import pathlib, time
try:
    if rank == 1:
        {HERE.format(path=str(reached))}
    time.sleep(1000)
finally:
    pathlib.Path({str(tmp_path)!r}, f"heard-{{rank}}").touch()
"""
    with stopped(warm_pid):
        press_interrupt_when(reached.exists)
        book.refused(source, "Interrupted")
        assert {path.name for path in tmp_path.glob("heard-*")} >= {"heard-1"}
