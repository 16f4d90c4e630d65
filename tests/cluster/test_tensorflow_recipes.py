"""The built-in recipes under TensorFlow's strategies."""

import math

import pytest
from needs import need
from notebook_shell import notebook

from workbench.cookbook import builtin

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

PAIRS = [
    ("digits_mlp", "mirrored"),
    ("digits_mlp", "parameter_server"),
    ("digits_cnn", "mirrored"),
    ("digits_cnn", "model_split"),
    ("char_transformer", "model_split"),
]


@pytest.fixture(scope="module")
def book():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_PREWARM", "tensorflow")
        with notebook() as book:
            book.ok("%cluster start 2 --framework tensorflow")
            yield book


@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_a_built_in_recipe_trains(book, name, strategy):
    book.ok(f"%distributed {strategy} --recipe {name} --steps 3 --plot off")
    run = book["_run"]
    assert run.state == "finished"
    assert run.plan.framework == "tensorflow"
    assert run.plan.recipe == builtin.lookup(name, "tensorflow")
    assert len(run.history["step"]) == 3 * run.plan.workers
    assert all(math.isfinite(loss) for loss in run.history["loss"])
    metric = "bits_per_character" if name == "char_transformer" else "accuracy"
    assert math.isfinite(run.evals[-1][metric])


def test_the_digits_are_learnt(book):
    book.ok("%distributed mirrored --recipe digits_mlp --plot off")
    assert book["_run"].evals[-1]["accuracy"] > 0.9


def test_a_run_is_written_back_in_the_notebooks_framework(book):
    book.ok("%distributed mirrored --recipe digits_mlp --steps 3 --plot off")
    text = book["_run"].to_cell()
    assert text.startswith("%%distributed mirrored -n 2 --steps 3\nimport keras\n")


def test_pytorchs_strategies_are_refused(book):
    book.refused("%distributed sharded --recipe digits_mlp", "sharded", "--framework torch")
