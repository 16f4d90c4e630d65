"""TPUs are looked for where they leave signs, before an engine is touched."""

import pytest

from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.shared.plan import make_plan


@pytest.fixture
def tpu():
    """Import it here: whoever only collects tests need not load TensorFlow."""
    pytest.importorskip("tensorflow")
    from workbench.strategies.tensorflow import tpu

    return tpu


@pytest.mark.tensorflow
def test_signs_are_variables_and_device_files(tpu, tmp_path):
    assert tpu.look({}, tmp_path) == tpu.Signs()
    (tmp_path / "accel0").touch()
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # there with any driver of this kind
    assert tpu.look({}, tmp_path).devices == (str(tmp_path / "accel0"),)
    (tmp_path / "vfio" / "0").touch()
    assert len(tpu.look({}, tmp_path).devices) == 2
    colab = tpu.look({"COLAB_TPU_ADDR": "10.0.0.2:8470"}, tmp_path / "none")
    assert (colab.variable, colab.address) == ("COLAB_TPU_ADDR", ("10.0.0.2", 8470))


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "address"),
    [("grpc://10.0.0.2:8470", ("10.0.0.2", 8470)), ("local", None), ("my-tpu", None), ("", None)],
)
def test_an_address_is_told_from_a_name(tpu, name, address):
    assert tpu.Signs(name).address == address


@pytest.mark.tensorflow
def test_without_a_sign_the_plan_says_what_was_looked_for(tpu, monkeypatch):
    monkeypatch.setattr(tpu, "look", tpu.Signs)
    with pytest.raises(PlanError, match="WB-PLAN-148") as error:
        make_plan(Recipe("x"), "tpu", framework="tensorflow", workers=2)
    for word in ("TPU_NAME", "COLAB_TPU_ADDR", "/dev/accel", "mirrored"):
        assert word in str(error.value)
    monkeypatch.setattr(tpu, "look", lambda: tpu.Signs("local", "TPU_NAME"))
    assert make_plan(Recipe("x"), "tpu", framework="tensorflow", workers=2).engines == 1


@pytest.mark.parametrize("value", ["nccl", "ring"])
def test_what_needs_gpus_is_refused_on_others(value):
    plan = make_plan(
        Recipe("x"), "mirrored", framework="tensorflow", workers=2,
        options={"cross_device_ops": value},
    )  # fmt: skip
    plan.check_devices(["cuda:0", "cuda:1"])
    with pytest.raises(PlanError, match="WB-PLAN-084") as error:
        plan.check_devices(["cuda:0", "cpu"])
    for word in (f"cross_device_ops={value}", "cuda:0, cpu", "cross_device_ops=auto"):
        assert word in str(error.value)
    auto = make_plan(Recipe("x"), "mirrored", framework="tensorflow", workers=2)
    auto.check_devices(["cpu", "cpu"])


def test_every_option_that_needs_gpus_exists():
    named = [(entry, *option) for entry in catalog.strategies() for option in entry.needs_gpus]
    assert named
    for entry, name, value in named:
        assert entry.option(name).parse(value) == value
