import numpy as np
import pytest

from workbench.errors import PlanError
from workbench.shared.checkpoints import fit_weights

rng = np.random.default_rng(0)


def shapes(arrays):
    return {name: array.shape for name, array in arrays.items()}


def test_names_are_found_whatever_their_order():
    arrays = {"a": np.ones((2, 3)), "b": np.zeros(3)}
    found = fit_weights(arrays, "torch", {"b": (3,), "a": (2, 3)}, "torch")
    assert list(found) == ["b", "a"]
    assert found["a"] is arrays["a"]


def test_other_names_are_filled_in_order():
    arrays = {"sequential/dense/kernel": np.ones((2, 3)), "sequential/dense/bias": np.zeros(3)}
    wanted = {"sequential_1/dense_7/kernel": (2, 3), "sequential_1/dense_7/bias": (3,)}
    found = fit_weights(arrays, "tensorflow", wanted, "tensorflow")
    assert shapes(found) == wanted


@pytest.mark.parametrize(
    "wanted", [{"x": (2, 3)}, {"x": (3, 2), "b": (3,)}, {"a": (2, 3), "b": (4,)}]
)
def test_another_form_is_refused(wanted):
    with pytest.raises(PlanError, match="WB-PLAN-151"):
        fit_weights({"a": np.ones((2, 3)), "b": np.zeros(3)}, "torch", wanted, "torch")


TORCH = {
    "0.weight": rng.normal(size=(4, 3, 2, 5)),  # out, in, height, width
    "0.bias": rng.normal(size=4),
    "1.weight": rng.normal(size=4),
    "1.bias": rng.normal(size=4),
    "1.running_mean": rng.normal(size=4),
    "1.running_var": rng.normal(size=4),
    "1.num_batches_tracked": np.array(3),
    "3.weight": rng.normal(size=(7, 24)),  # behind 4 maps of 6 places
    "3.bias": rng.normal(size=7),
    "5.weight": rng.normal(size=(2, 7)),
    "5.bias": rng.normal(size=2),
}
KERAS = {
    "s/conv/kernel": (2, 5, 3, 4), "s/conv/bias": (4,),
    "s/norm/gamma": (4,), "s/norm/beta": (4,), "s/norm/moving_mean": (4,),
    "s/norm/moving_variance": (4,), "s/dense/kernel": (24, 7), "s/dense/bias": (7,),
    "s/dense_1/kernel": (7, 2), "s/dense_1/bias": (2,),
}  # fmt: skip


def test_layers_are_laid_out_anew_for_the_other_framework():
    found = fit_weights(TORCH, "torch", KERAS, "tensorflow")
    assert (found["s/conv/kernel"][1, 2, 0, 3] == TORCH["0.weight"][3, 0, 1, 2]).all()
    assert (found["s/dense_1/kernel"] == TORCH["5.weight"].T).all()
    maps = rng.normal(size=(4, 2, 3))  # channel, height, width
    ours = TORCH["3.weight"] @ maps.ravel()
    theirs = maps.transpose(1, 2, 0).ravel() @ found["s/dense/kernel"]
    assert np.allclose(ours, theirs)


def test_there_and_back_is_the_same():
    there = fit_weights(TORCH, "torch", KERAS, "tensorflow")
    back = fit_weights(there, "tensorflow", shapes(TORCH), "torch")
    assert "1.num_batches_tracked" not in back
    for name, array in back.items():
        assert (array == TORCH[name]).all(), name


def test_embeddings_lie_alike():
    table = rng.normal(size=(5, 5))
    found = fit_weights(
        {"weight": table}, "torch", {"m/embedding/embeddings": (5, 5)}, "tensorflow"
    )
    assert found["m/embedding/embeddings"] is table
