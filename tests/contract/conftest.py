"""One pool of worker processes for the whole suite: every run follows many others in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
pytest.register_assert_rewrite("worker_reports")  # it checks: what it saw is told

from fakes import gpu  # noqa: E402
from needs import need  # noqa: E402
from workers import Workers  # noqa: E402

need("torch")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    kind = os.environ.get("WORKBENCH_TEST_DEVICE", "cpu")
    if kind == "fakegpu" and (lacking := gpu.missing()):
        pytest.skip(f"a GPU for tests cannot be built: {lacking} is missing")
    pool = Workers(3, kind)
    yield pool
    pool.close()
