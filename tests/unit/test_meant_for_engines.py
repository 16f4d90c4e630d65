"""Which lines below a `%distributed` were meant for the engines."""

import pytest

from workbench.magics import meant_for_engines


@pytest.mark.parametrize("body", [
    "import torch\nprint(1)",
    "from torch import nn",
    "import keras",
    "wb.fit(model, data)",
    "model, opt, loader = wb.prepare(model, opt, loader)",
    "print(rank)",
])  # fmt: skip
def test_code_that_trains_or_asks_for_its_rank_is_for_engines(body):
    assert meant_for_engines(body, {})


@pytest.mark.parametrize("body", ["", "_run.history", "wb.compare('a', 'b')", "%pull loss"])
def test_what_looks_at_runs_is_for_the_notebook(body):
    assert not meant_for_engines(body, {})


def test_a_name_that_the_notebook_has_is_its_own():
    assert not meant_for_engines("print(rank)", {"rank": 3})
