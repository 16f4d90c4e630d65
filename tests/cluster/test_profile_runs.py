"""`--profile 10:15` in real runs: the traces are read back."""

import json

import pytest
from needs import need
from notebook_shell import soon

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS,
       callbacks=CALL)
"""
OWN = """import torch
from torch import nn
model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_fn = nn.CrossEntropyLoss()
loader = torch.utils.data.DataLoader(wb.data.digits("train"), batch_size=64, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad(); loss_fn(model(x.flatten(1)), y).backward(); optimizer.step()
"""
OFF = """import os, threading, torch
assert not torch._C._autograd._profiler_enabled()
assert "KINETO_LOG_LEVEL" not in os.environ
"""


def fit(steps=30, call="()"):
    return FIT.replace("STEPS", str(steps)).replace("CALL", call)


def steps_of(trace):
    """The profiled steps, each with its number of matrix products."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    products = [e["ts"] for e in events if e.get("name") == "aten::addmm"]
    found = {}
    for mark in marks:
        if mark["name"].startswith("step "):
            end = mark["ts"] + mark["dur"]
            found[mark["name"]] = sum(mark["ts"] <= t <= end for t in products)
    assert sum(found.values()) == len(products), "nothing outside the steps was profiled"
    return found


def notes(run):
    return [note for note in run.history.story.notes if "rofile" in note]


@pytest.mark.parametrize("cell", [fit(), OWN], ids=["fit", "own_loop"])
def test_five_steps_are_profiled_on_every_rank(book, cell):
    shown = book.ok(f"%%distributed mirrored --profile 10:15 --plot off\n{cell}")
    run = book["_run"]
    assert [trace.name for trace in run.profiles] == ["rank0.json", "rank1.json"]
    for trace in run.profiles:
        assert steps_of(trace) == {f"step {k}": 1 for k in range(10, 15)}
    (note,) = notes(run)
    assert str(run.folder / "profiles") in note
    assert "steps 10-14" in note
    assert "profiler_start" not in shown.text
    book.ok(f"%%distributed\n{OFF}")


def test_writing_the_trace_belongs_to_no_step(book):
    book.ok(f"%%distributed mirrored --profile 10:15 --plot off\n{fit()}")
    run = book["_run"]
    assert run.history.totals.steps == 30
    began = {
        (r, s): t
        for r, s, t in zip(*(run.history[k] for k in ("rank", "step", "start_s")), strict=True)
    }
    spent = {
        (r, s): t
        for r, s, t in zip(*(run.history[k] for k in ("rank", "step", "step_s")), strict=True)
    }
    for rank in (0, 1):
        gap_s = began[rank, 15] - (began[rank, 14] + spent[rank, 14])
        others = [began[rank, s + 1] - began[rank, s] - spent[rank, s] for s in range(20, 29)]
        assert gap_s > 10 * max(*others, 1e-6)


def test_a_run_that_ends_in_the_window_writes_what_it_has(book):
    book.ok(f"%%distributed mirrored --profile 25:99 --plot off\n{fit()}")
    for trace in book["_run"].profiles:
        assert list(steps_of(trace)) == [f"step {k}" for k in range(25, 30)]
    assert "steps 25-29" in notes(book["_run"])[0]


def test_failing_in_the_window_leaves_a_trace_and_no_profiler(book):
    call = "lambda step, logs: 1 / (12 - step) if rank == 1 else None"
    book.refused(
        f"%%distributed mirrored --profile 10:20 --plot off\n{fit(call=call)}", "ZeroDivisionError"
    )
    run = book["_run"]
    assert set(steps_of(run.profiles[1])) == {"step 10", "step 11", "step 12"}
    book.ok(f"%%distributed\n{OFF}")
    book.ok(f"%%distributed mirrored --profile 1:2 --plot off\n{fit()}")
    assert list(steps_of(book["_run"].profiles[0])) == ["step 1"]


def test_stopping_in_the_window(book):
    book.ok(f"%%distributed mirrored --profile 10:999999 --background --plot off\n{fit(1000000)}")
    run = book["_run"]
    assert soon(lambda: run.history.totals.steps > 40)
    run.stop()
    run.wait(30)
    assert run.state == "stopped"
    assert [len(steps_of(trace)) for trace in run.profiles] == [run.history.totals.steps - 10] * 2
    book.ok(f"%%distributed\n{OFF}")


def test_the_cells_own_profiler_wins(book):
    cell = fit(8).replace("wb.fit(", "own = torch.profiler.profile(); own.start()\nwb.fit(", 1)
    book.ok(f"%%distributed mirrored --profile 2:4 --plot off\n{cell}own.stop()")
    assert not book["_run"].profiles
    assert "torch.profiler" in notes(book["_run"])[0]


def test_saved_runs_keep_their_profiles(book, tmp_path):
    run = session.cluster.run(fit(6), strategy="one_device", profile="2:4").wait(60)
    run.save(tmp_path / "kept")
    assert [p.name for p in (tmp_path / "kept" / "profiles").iterdir()] == ["rank0.json"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--profile 15:10", "WB-PLAN-153"),
        ("--profile ten", "START:STOP"),
        ("--profile 10:15 --steps 12", "10:15 of 12 steps"),
    ],
)
def test_windows_that_make_no_sense_are_refused_before_engines_are_touched(book, line, words):
    book.refused(f"%%distributed mirrored {line}\n{fit()}", words)


def test_a_window_after_the_end_is_refused_on_every_rank(book):
    book.refused(
        f"%%distributed mirrored --profile 40:45 --plot off\n{fit()}", "40:45", "step 29", "25:30"
    )


def test_cells_without_a_strategy_have_no_steps(book):
    book.refused("%%distributed --profile 1:2\n1", "--profile", "WB-PLAN-129")
