"""One pool of worker processes for the whole suite: every run follows many others in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Workers
from needs import need

need("torch")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    pool = Workers(3)
    yield pool
    pool.close()
