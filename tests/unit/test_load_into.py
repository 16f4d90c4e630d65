import numpy as np
import pytest

from workbench.errors import PlanError
from workbench.shared.checkpoints import load_into


def test_a_torch_module_takes_the_weights_of_either_framework():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    arrays = {name: tensor.numpy() + 1 for name, tensor in model.state_dict().items()}
    assert load_into(model, arrays, "torch") is model
    assert (model[0].weight.detach().numpy() == arrays["0.weight"]).all()
    assert model[1].num_batches_tracked == 1
    keras = {"s/dense/kernel": np.arange(6.0).reshape(2, 3), "s/dense/bias": np.ones(3)}
    keras |= {f"s/norm/{name}": np.full(3, 2.0) for name in ("gamma", "beta", "mean", "variance")}
    load_into(model, keras, "tensorflow")
    assert (model[0].weight.detach().numpy() == keras["s/dense/kernel"].T).all()
    assert model[1].num_batches_tracked == 1  # Keras counts nothing; it is left as it was


def test_another_model_or_none_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(PlanError, match="WB-PLAN-151"):
        load_into(torch.nn.Linear(2, 3), {"weight": np.ones((3, 2))}, "torch")
    with pytest.raises(PlanError, match="WB-PLAN-106"):
        load_into(object(), {}, "torch")


@pytest.mark.tensorflow
def test_a_keras_model_takes_the_weights_of_either_framework():
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Dense(3, name="one")])
    with pytest.raises(PlanError, match="WB-PLAN-107"):
        load_into(model, {}, "tensorflow")
    model.build((None, 2))
    arrays = {"other/kernel": np.arange(6.0).reshape(2, 3), "other/bias": np.ones(3)}
    assert load_into(model, arrays, "tensorflow") is model
    assert (model.get_weights()[0] == arrays["other/kernel"]).all()
    load_into(model, {"0.weight": np.ones((3, 2)), "0.bias": np.zeros(3)}, "torch")
    assert (model.get_weights()[0] == 1).all()
    assert (model.get_weights()[1] == 0).all()
