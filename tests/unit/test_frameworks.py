from types import SimpleNamespace

import pytest

from workbench.cluster.forkserver import preload
from workbench.errors import PlanError
from workbench.execution import allocator
from workbench.shared.cluster_env import import_environment


@pytest.fixture
def installed(monkeypatch):
    """Make these frameworks the ones that are installed."""

    def set_(*names):
        monkeypatch.setattr(allocator, "installed", lambda name: name in names)

    monkeypatch.delenv(allocator.PREWARM, raising=False)
    return set_


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (("torch", "tensorflow"), "torch"),
        (("torch",), "torch"),
        (("tensorflow",), "tensorflow"),
        ((), "torch"),  # whose absence is then reported
    ],
)
def test_the_default_framework_is_one_that_is_installed(installed, there, chosen):
    installed(*there)
    assert allocator.default_framework() == chosen
    assert allocator.prewarmed() == chosen


def test_the_environment_names_the_framework_or_none(installed, monkeypatch):
    installed("torch", "tensorflow")
    monkeypatch.setenv(allocator.PREWARM, "tensorflow")
    assert allocator.prewarmed() == allocator.default_framework() == "tensorflow"
    monkeypatch.setenv(allocator.PREWARM, "off")
    assert allocator.prewarmed() is None
    assert allocator.default_framework() == "torch"
    monkeypatch.setenv(allocator.PREWARM, "jax")
    with pytest.raises(PlanError, match=r"WORKBENCH_PREWARM.*WB-PLAN-105") as caught:
        allocator.prewarmed()
    assert "torch, tensorflow, off" in str(caught.value)


def test_keras_computes_with_what_was_asked_for_and_the_users_log_level_stands():
    given = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "0"}
    wanted = import_environment("tensorflow", given)
    assert wanted == {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "0"}
    assert import_environment("tensorflow", {})["TF_CPP_MIN_LOG_LEVEL"] in ("2", "3")
    assert import_environment("torch", given) == {}


def test_a_process_in_which_tensorflow_has_run_an_operation_must_not_fork(monkeypatch):
    name = "tensorflow.python.eager.context"
    monkeypatch.setattr(preload, "_count_threads", lambda: 1)
    monkeypatch.setitem(preload.sys.modules, name, SimpleNamespace(_context=None))
    before = preload.fork_hazard()
    context = SimpleNamespace(_initialized=False)
    monkeypatch.setitem(preload.sys.modules, name, SimpleNamespace(_context=context))
    assert preload.fork_hazard() == before
    context._initialized = True
    assert preload.fork_hazard() == "TensorFlow has run an operation"
