"""A notebook whose engines have imported torch; each test leaves them idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from debugging import idle
from notebook_shell import Notebook, notebook

from workbench.notebook.session import session


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook(2) as one:
        one.ok("%%distributed\nimport torch")
        yield one


@pytest.fixture(autouse=True)
def nothing_goes_on(book: Notebook) -> Iterator[None]:
    """One test's failure is not the next one's."""
    yield
    if session.cluster.is_busy:
        session.cluster.last_task.interrupt()
        assert idle()
