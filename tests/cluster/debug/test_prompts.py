"""Breakpoints and questions that are answered in the cell that blocks."""

import re
import threading

import pytest
from debugging import TRAINS, Typist, paused
from needs import need
from notebook_shell import interrupt_main_thread

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


def test_prompt_opens_in_the_cell_that_blocks(book, monkeypatch):
    typist = Typist(monkeypatch, "p rank", "rank 1", "p rank", "all z = rank + 5", "all n", "all c")
    cell = book.ok("""%%distributed
import torch; z = 0
breakpoint()
z = z + 1
y = torch.tensor([float(z)])
dist.all_reduce(y)
print("sum", y.item())
""")
    assert not typist.lines
    assert typist.prompts[0] == "rank 0> "
    assert typist.prompts[-1] == "rank 1> "
    assert "rank 0 is paused at cell line 3; also paused: 1" in cell.stdout
    assert "30 min" not in cell.stdout, "nobody waits for it: both are paused"
    assert "[ranks 0-1] sum 13.0" in cell.text, "(5 + 1) + (6 + 1)"


def test_step_over_a_collective_that_waits_for_a_paused_rank(book, monkeypatch):
    monkeypatch.setattr("workbench.execution.paused.STEP_S", 0.5)
    typist = Typist(monkeypatch, "n", "n", "c", "c")
    cell = book.ok("""%%distributed
breakpoint()
dist.barrier()
done = True
""")
    assert not typist.lines
    assert "(rank 0 runs again" in cell.stdout
    assert typist.prompts == ["rank 0> ", "rank 0> ", "rank 1> ", "rank 0> "]


def test_questions_are_asked_in_the_cell_that_blocks(book, monkeypatch):
    typist = Typist(monkeypatch, "7", "secret")
    cell = book.ok("""%%distributed -r 1
import getpass
print(int(input("how many? ")) + 1, len(getpass.getpass("key? ")))
""")
    assert typist.prompts == ["rank 1: how many? ", "rank 1: key? "]
    assert "8 6" in cell.text
    assert "secret" not in cell.text


def test_breakpoint_in_a_run_is_answered(book, monkeypatch):
    typist = Typist(monkeypatch, "p step", "p logs['loss'] > 0", "c")
    cell = book.ok("%%distributed mirrored --plot off\n" + TRAINS.replace("STEPS", "6"))
    assert not typist.lines
    assert "\n3\nTrue\n" in re.sub(r"rank 0> .*\n", "", cell.stdout)
    assert "30 min" in cell.stdout
    assert book["_run"].history.totals.steps == 6


def test_breakpoints_and_commands_of_pdb(book, monkeypatch):
    typist = Typist(monkeypatch, "b 5", "c", "p i, total", "clear 1", "c")
    cell = book.ok("""%%distributed -r 0
total = 0
breakpoint()
for i in range(4):
    total += i
print("total", total)
""")
    assert not typist.lines
    assert "(0, 0)" in cell.stdout
    assert "total 6" in cell.text


def test_q_ends_the_cell(book, monkeypatch):
    Typist(monkeypatch, "q")
    book.refused(
        "%%distributed\nbreakpoint() if rank == 1 else None\ndist.barrier()", "`q`", "Rank 1"
    )
    monkeypatch.undo()
    book.ok("%%distributed\ndist.barrier()")


def test_interrupt_at_the_prompt_ends_the_cell(book, monkeypatch):
    def interrupted():
        interrupt_main_thread()
        threading.Event().wait(30)

    Typist(monkeypatch, interrupted)
    cell = book.refused(
        "%%distributed\nbreakpoint() if rank == 0 else None\ndist.barrier()", "Interrupted"
    )
    assert cell.seconds < 10
    monkeypatch.undo()
    book.ok(
        "%%distributed\nimport torch\nx = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 2"
    )


def test_prompt_is_taken_away_when_another_rank_fails(book, monkeypatch):
    opened = threading.Event()

    def never_answers():
        opened.set()
        threading.Event().wait(60)

    Typist(monkeypatch, never_answers)
    cell = book.refused(
        """%%distributed
import time
if rank == 0:
    breakpoint()
    time.sleep(60)
else:
    time.sleep(1)
    raise ValueError("mine")
""",
        "Rank 1",
        "mine",
    )
    assert opened.is_set()
    assert cell.seconds < 15
    assert "longer paused" in cell.stdout
    assert not paused()
