"""Makes a mistake in a notebook: reads its error, follows the advice, tries the cluster again."""

from __future__ import annotations

from errors_page import check
from mistakes import Mistake
from notebook_shell import Notebook

from workbench.errors import WorkbenchError


def title(mistake: Mistake) -> str:
    """Return the name of a test."""
    return mistake.title.replace(" ", "_")


def make(book: Notebook, mistake: Mistake) -> None:
    """Make the mistake, read its error, follow its advice, and check that the cluster works."""
    if mistake.before:
        book.ok(mistake.before)
    cell = book.refused(mistake.cell)
    assert isinstance(cell.error, WorkbenchError), cell.error
    assert cell.error.code == mistake.code, cell.error
    assert cell.seconds < mistake.within_s
    check(mistake, str(cell.error))
    if mistake.cure:
        book.ok(mistake.cure)
    works(book)


def works(book: Notebook) -> None:
    """Check that both engines of the cluster answer."""
    assert book.ok("%%distributed\nworld_size").lines() == ["[ranks 0-1] 2"]
