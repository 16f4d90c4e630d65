"""Post-mortem: the frames of a failure, looked at from the notebook."""

import re
import threading

import pytest
from debugging import Typist, idle, paused
from needs import need
from notebook_shell import interrupt_main_thread, soon

from workbench.errors import RunError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FAILS = """%%distributed
import torch
def step(x, w):
    y = x @ w
    return y
x = torch.ones(3, 4)
if rank == 1:
    step(x, torch.ones(5, 2))
dist.barrier()
"""


def test_failed_rank_is_looked_at_with_commands(book):
    book.refused(FAILS, "Rank 1")
    said = book.ok("%cluster debug 1 -c 'p x.shape' -c 'p w.shape' -c u -c 'p rank' -c l").stdout
    lines = said.splitlines()
    assert lines[:2] == ["torch.Size([3, 4])", "torch.Size([5, 2])"]
    assert lines[2:5] == ["> cell line 8", "-> step(x, torch.ones(5, 2))", "1"]
    assert re.search(r"8 \s*->\s+step\(x, torch.ones\(5, 2\)\)", said)
    assert "w = Tensor (5, 2) float32" in book.ok("%cluster debug -c d -c locals").stdout
    assert "has ended" in book.ok("%cluster debug -c c").stdout
    assert "terminal" in book.ok("%cluster debug -c interact").stdout
    assert "*** NameError" in book.ok("%cluster debug -c nothing_of_that_name").stdout


def test_default_is_the_rank_whose_mistake_it_was(book):
    book.refused(FAILS, "Rank 1")
    text = book.ok("%cluster debug").text
    assert text.strip().startswith("rank 1: RuntimeError: mat1 and mat2")
    assert "> 1  cell line 4 in step: y = x @ w" in text
    book.refused("%cluster debug 0", "WB-RUN-076", "Engine 0")


def test_frames_as_data(book):
    book.refused(FAILS, "Rank 1")
    found = session.cluster.debug(1)
    assert found.error.startswith("RuntimeError: mat1")
    outer, inner = found.frames
    assert (outer.where, inner.where) == ("cell line 8", "cell line 4 in step")
    assert (inner.function, inner.line, inner.source, inner.yours) == ("step", 4, "y = x @ w", True)
    assert inner.variables["x"].startswith("Tensor (3, 4) float32: tensor([[1.")
    assert found.eval(inner, "tuple(w.shape)") == "(5, 2)"
    assert found.eval(0, "x.sum().item() + rank") == "13.0"
    with pytest.raises(RunError, match=r"AttributeError: .*shap[\s\S]*WB-RUN-077"):
        found.eval(1, "x.shap")
    with pytest.raises(RunError, match="numbered 0 to 1"):
        found.eval(7, "x")


def test_error_inside_a_library_is_opened_at_the_users_line(book):
    cell = "%%distributed\nimport json\ntext = '{]'\njson.loads(text)"
    book.refused(cell, "JSONDecodeError")
    found = session.cluster.debug(0)
    assert found.frames[found.current].where == "cell line 4"
    assert not found.frames[-1].yours
    assert found.frames[-1].where.startswith("decoder.py:")
    said = book.ok("%cluster debug 0 -c 'p text' -c d -c 'p len(s)'").stdout
    assert said.splitlines()[0] == "'{]'"
    assert said.splitlines()[-1] == "2"


def test_prompt_of_a_post_mortem(book, monkeypatch, capsys):
    book.refused(FAILS, "Rank 1")
    typist = Typist(monkeypatch, "p x.shape[1]", "w.shape[0] * 100", "q")
    said = book.ok("%cluster debug").stdout
    assert typist.prompts == ["rank 1 post-mortem> "] * 3
    assert "\n4\n" in said
    assert "\n500\n" in said


def test_frames_are_freed_by_the_next_cell_and_by_free(book):
    fails = """%%distributed
import gc, weakref, torch
held = []
def step():
    big = torch.ones(10)
    held.append(weakref.ref(big))
    raise ValueError("no")
step()
"""
    book.refused(fails, "ValueError")
    assert session.cluster.debug(0).eval(1, "held[0]() is big") == "True"
    book.ok("%%distributed\ngc.collect()\nassert held[0]() is None")
    with pytest.raises(RunError, match="WB-RUN-076"):
        session.cluster.debug(0)
    book.refused(fails, "ValueError")
    book.ok("%cluster free")
    with pytest.raises(RunError, match="WB-RUN-076"):
        session.cluster.debug(0)


def test_interrupt_ends_an_expression_and_no_more(book):
    book.refused(FAILS, "Rank 1")
    threading.Timer(1.0, interrupt_main_thread).start()
    cell = book.ok("%cluster debug 1 -c '__import__(\"time\").sleep(60)' -c 'p rank'")
    assert cell.seconds < 15
    assert "KeyboardInterrupt" in cell.stdout
    assert cell.stdout.endswith("\n1\n"), "the frames are still there"


def test_nothing_to_debug_is_said(book):
    book.ok("%%distributed\n1 + 1")
    book.refused("%cluster debug", "WB-RUN-080", "breakpoint()")
    book.refused("%cluster debug 7", "WB-CLUSTER-006")
    book.ok("%%distributed --background\nbreakpoint() if rank == 0 else None")
    assert soon(paused)
    book.ok("%cluster debug 0 -c c")
    assert idle()
