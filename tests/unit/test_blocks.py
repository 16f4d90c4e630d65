"""The display of a cell's blocks: replaced as output comes, text where nobody can show it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from workbench.notebook.run_view import CellView
from workbench.shared.members import Member
from workbench.views import blocks
from workbench.views.blocks import Blocks
from workbench.views.output import OutputBoard

MEMBERS = {0: Member.of_ranks(0), 1: Member.of_ranks(1)}
Published = list[tuple[dict[str, Any], str, bool]]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    """What a kernel would publish."""
    found: Published = []
    monkeypatch.setattr(blocks, "in_notebook", lambda: True)
    monkeypatch.setattr(blocks, "notebook_publisher", lambda: lambda *shown: found.append(shown))
    return found


def printed(*texts: str) -> OutputBoard:
    board = OutputBoard(MEMBERS)
    for engine, text in enumerate(texts):
        board.message(engine, "stream", {"name": "stdout", "text": text})
    return board


def test_a_captured_cell_of_text_prints_it(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    board, shown = printed("0\n", "1\n"), Blocks()
    shown.update(board, final=False)
    shown.update(board, final=True)
    assert sys.stdout.getvalue() == "[rank 0] 0\n[rank 1] 1\n"
    assert published == []


def test_a_captured_cell_of_pictures_displays_them(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    board = printed("0\n")
    board.message(1, "display_data", {"data": {"text/plain": "<Figure>", "image/png": "YQ=="}})
    Blocks().update(board, final=True)
    assert len(published) == 1
    assert sys.stdout.getvalue() == ""


def test_a_cell_that_nobody_captures_is_displayed(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOBase())  # as a kernel's own stream, no StringIO
    Blocks().update(printed("0\n"), final=True)
    assert len(published) == 1


class Over:
    """A task that is over."""

    outcomes: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, board: OutputBoard) -> None:
        import threading

        self.board, self.changed = board, threading.Event()
        self.on_late: Any = None


def test_what_is_printed_after_the_cells_end_is_shown(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOBase())
    task: Any = Over(printed("early\n"))
    CellView(task)._finish()
    task.board.message(0, "stream", {"name": "stdout", "text": "late\n"})
    task.on_late()
    task.on_late()  # drawn together
    from notebook_shell import soon

    assert soon(lambda: len(published) == 2)
    assert published[-1][0]["text/plain"] == "[rank 0] early\n[rank 0] late"
    assert published[-1][1:] == (published[0][1], True)  # in the same place
