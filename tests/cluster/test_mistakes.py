"""Every mistake of the table is made for real: what is shown, what it advises, what works after.

`docs/errors.md` is written from here: WORKBENCH_WRITE_DOCS=1 writes it anew, otherwise each test
holds its part of the page against what was shown.
"""

from __future__ import annotations

import re
import socket

import pytest
from errors_page import check
from mistake_making import make, title, works
from mistakes import Mistake, fit
from mistakes_of_cells import ENGINES
from mistakes_of_lines import LINE
from needs import need
from notebook_shell import notebook, soon

from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


@pytest.fixture(scope="module")
def book():
    with notebook(2) as book:
        book.namespace["wb"] = __import__("workbench")
        yield book


@pytest.mark.parametrize("mistake", LINE, ids=title)
def test_a_mistake_of_the_line_is_named_before_an_engine_is_touched(book, mistake):
    engines = session.cluster.engine_set
    asked, submit = [], engines.submit
    engines.submit = lambda *args, **rest: asked.append(args) or submit(*args, **rest)
    try:
        book.refused(mistake.cell, mistake.code)
    finally:
        del engines.submit
    assert asked == []
    make(book, mistake)


@pytest.mark.parametrize("mistake", ENGINES, ids=title)
def test_a_mistake_in_the_cell_is_named_with_the_next_step(book, mistake):
    make(book, mistake)


def test_a_loss_that_is_no_number_is_a_note_and_training_goes_on(book):
    nan = Mistake(
        "The loss is no number",
        fit(optimizer="lambda p: torch.optim.SGD(p, 1e38)", steps="20"),
        "",
        fit(steps="20"),
    )
    book.ok(nan.cell)
    (note,) = [note for note in book["_run"].snapshot().notes if "NaN" in note]
    check(nan, note)
    book.ok(nan.cure)
    assert not any("no number" in note for note in book["_run"].snapshot().notes)


def test_another_run_waits_for_the_one_under_way(book):
    other = Mistake(
        "A run while another one goes on",
        fit(),
        "WB-RUN-065",
        "_run.stop(); None",
    )
    book.ok(fit("mirrored --background", steps="1_000_000"))
    cell = book.refused(other.cell, other.code)
    check(other, str(cell.error))
    book.ok(other.cure)
    assert soon(lambda: book["_run"].is_over)
    works(book)


def test_what_prints_without_end_is_cut_and_the_notebook_stays_small(book):
    printed = Mistake(
        "A cell that prints without end",
        "%%distributed\nif rank == 0:\n    for _ in range(100_000):\n        print('x' * 1000)",
        "",
        "%%distributed\nimport tempfile\ntempfile.TemporaryFile().close()",
    )
    cell = book.ok(printed.cell)
    (said,) = [line for line in cell.text.splitlines() if "MB" in line]
    assert len(cell.text) < 10_000_000
    check(printed, said)
    book.ok(printed.cure)
    works(book)


def test_a_port_that_is_taken_is_named_with_the_way_to_another(book):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cell = book.refused(f"%cluster debug 0 --port {port}", port, "WB-CLUSTER-039")
    taken_port = Mistake("A port that is taken", "%cluster debug 0 --port 5678", "WB-CLUSTER-039")
    said = str(cell.error).replace(port, "5678")
    check(taken_port, re.sub(r"--port \d+", "--port 5679", said))
    book.ok(f"%cluster debug 0 --port {port}")
    works(book)
