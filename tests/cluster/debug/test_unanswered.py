"""Breakpoints and questions where nobody is at the keyboard: cells go on, or fail at once."""

import re

import pytest
from debugging import TRAINS
from needs import need

from workbench.execution import paused
from workbench.notebook import run_view

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.mark.parametrize(
    "stop",
    [
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
    ],
)
def test_breakpoint_goes_on_where_nobody_can_answer(book, stop):
    cell = book.ok(f"%%distributed\nfor i in range(50):\n    {stop}\nprint('done', i)")
    assert cell.text.count("breakpoint() at cell line 3") == 2, "said once on each rank"
    assert "%cluster debug 0" in cell.text
    assert cell.text.count("done 49") == 2


def test_a_breakpoint_before_the_cell_is_waited_for_reads_the_same(book, monkeypatch):
    looks = iter([False, False])
    monkeypatch.setattr(
        run_view, "attend", lambda *draw: next(looks, True) and paused.attend(*draw)
    )
    cell = book.ok("%%distributed\nbreakpoint()\nprint('done')")
    assert cell.text.count("breakpoint() at cell line 2") == 2
    assert "paused" not in re.sub(r"--background[^\n]*", "", cell.text)
    assert cell.text.count("done") == 2


def test_breakpoint_in_a_run_goes_on_too(book):
    cell = book.ok("%%distributed mirrored --plot off\n" + TRAINS.replace("STEPS", "6"))
    assert "breakpoint() at cell line 6 in look" in cell.text
    assert book["_run"].state == "finished"
    assert book["_run"].history.totals.steps == 6


@pytest.mark.parametrize("ask", ["input('name? ')", "__import__('getpass').getpass('key? ')"])
def test_questions_fail_where_nobody_can_answer(book, ask):
    cell = book.refused(f"%%distributed\n{ask}", "WB-RUN-004", "%push")
    assert cell.seconds < 10
    book.ok("%%distributed\nassert rank in (0, 1)")


def test_reading_stdin_meets_its_end(book):
    said = book.ok("%%distributed\nimport sys, os\nprint(repr(sys.stdin.read()), os.read(0, 5))")
    assert "[ranks 0-1] '' b''" in said.text


def test_breakpoint_in_another_process_of_the_engine_is_passed_by(book):
    book.ok("""%%distributed
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        breakpoint()
        return i
assert list(torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=2))[0].tolist() == [0, 1]
""")


def test_pythonbreakpoint_0_switches_them_off(book):
    cell = book.ok("""%%distributed
import os
os.environ["PYTHONBREAKPOINT"] = "0"
breakpoint()
del os.environ["PYTHONBREAKPOINT"]
""")
    assert "breakpoint" not in cell.text
