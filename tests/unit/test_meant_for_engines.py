"""Which lines below a `%distributed` were meant for the engines."""

import pytest

from workbench.errors import PlanError
from workbench.magics import meant_for_engines, refuse_launchers


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


@pytest.mark.parametrize(("cell", "seen"), [
    ("notebook_launcher(train, num_processes=2)", "notebook_launcher"),
    ("import accelerate\naccelerate.notebook_launcher(train)", "notebook_launcher"),
    ("trainer = L.Trainer(strategy='ddp_notebook', devices=2)", "ddp_notebook"),
])  # fmt: skip
def test_a_cell_that_starts_processes_itself_is_refused(cell, seen):
    with pytest.raises(PlanError) as caught:
        refuse_launchers(cell)
    assert caught.value.code == "WB-PLAN-341"
    assert seen in caught.value.seen


@pytest.mark.parametrize(
    "cell", ["train()", "L.Trainer(strategy='ddp')", "not python(", "plt.plot(strategy='x')"]
)
def test_other_cells_are_run(cell):
    refuse_launchers(cell)
