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
    assert import_environment("torch", given) == {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    asked = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    assert import_environment("torch", asked) == asked


def test_a_process_in_which_tensorflow_has_run_an_operation_must_not_fork(monkeypatch):
    name = "tensorflow.python.eager.context"
    monkeypatch.setattr(preload, "_count_threads", lambda: 1)
    monkeypatch.setitem(preload.sys.modules, name, SimpleNamespace(_context=None))
    before = preload.fork_hazard()
    context = SimpleNamespace(_initialized=False)
    monkeypatch.setitem(preload.sys.modules, name, SimpleNamespace(_context=context))
    assert preload.fork_hazard() == before
    context._initialized = True
    assert "TensorFlow" in str(preload.fork_hazard())


@pytest.mark.parametrize(
    ("open_files", "libraries", "hazard"),
    [
        (["/dev/nvidiactl", "/dev/nvidia0"], "libnvidia-ml.so.1", None),  # GPUs were counted
        (["/dev/dxg"], "/usr/lib/wsl/lib/libnvidia-ml.so.1", None),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], "", "CUDA was initialised (/dev/nvidia-uvm"),
        (["/dev/dxg"], "/usr/lib/wsl/lib/libcuda.so.1", "CUDA was initialised (/dev/dxg"),
        (["/dev/kfd"], "", "ROCm was initialised (/dev/kfd"),
    ],
)
def test_who_counted_gpus_may_fork_and_who_used_one_may_not(
    monkeypatch, tmp_path, open_files, libraries, hazard
):
    for number, target in enumerate(open_files):
        (tmp_path / str(number)).symlink_to(target)
    maps = tmp_path.with_suffix(".maps")
    maps.write_text(f"7f00 r-xp {libraries}\n")
    monkeypatch.setattr(preload, "FDS", str(tmp_path))
    monkeypatch.setattr(preload, "MAPS", str(maps))
    monkeypatch.setattr(preload, "_count_threads", lambda: 1)
    found = preload.fork_hazard()
    assert found is hazard if hazard is None else found.startswith(hazard)


def test_the_module_that_began_to_use_a_gpu_is_named(monkeypatch, tmp_path):
    fds, modules = tmp_path / "fds", tmp_path / "modules"
    fds.mkdir()
    modules.mkdir()
    (modules / "wb_asks_cuda.py").write_text(
        f"import os; os.symlink('/dev/nvidia-uvm', {str(fds / '9')!r})"
    )
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setattr(preload, "FDS", str(fds))
    monkeypatch.setattr(preload, "_count_threads", lambda: 1)
    monkeypatch.setattr(preload, "_allowed", preload._Allowed())
    assert preload.import_module("json")
    assert preload.fork_hazard() is None
    assert preload.import_module("wb_asks_cuda")
    del preload.sys.modules["wb_asks_cuda"]
    assert preload.fork_hazard().startswith("CUDA was initialised by wb_asks_cuda (/dev/nvidia-uvm")
