"""A notebook with two engines, its cluster, and a stage for kernels that die.

A module that needs others makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from leftovers import Stage
from notebook_shell import Notebook, notebook, soon

from workbench.notebook.session import session
from workbench.session.cluster import Cluster


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    with notebook(2) as book:
        yield book


@pytest.fixture
def cluster(book: Notebook) -> Iterator[Cluster]:
    """Hand out the notebook's cluster; what still goes on in it ends with the test."""
    yield session.cluster
    busy = session.cluster.busy
    if busy is not None and not busy.is_over:
        busy.stop() if hasattr(busy, "stop") else busy.interrupt()
        assert soon(lambda: busy.is_over)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
