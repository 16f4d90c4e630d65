"""What TensorFlow is told of GPUs, before it starts and for as long as its process lives."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

need("tensorflow")
pytestmark = pytest.mark.tensorflow

PACKAGE = Path(__file__).resolve().parents[2] / "workbench"


def spec_of(*devices: str, **told: Any) -> Any:
    from workbench.shared.protocol import RunSpec

    about = {
        "mode": "run", "rank": 0, "world_size": max(1, len(devices)), "framework": "tensorflow",
        "ranks": (0,) * max(1, len(devices)), "strategy": "mirrored", "threads": 1, "cores": 1,
        "device": devices[0] if devices else "cpu", "devices": devices,
        "replicas": max(1, len(devices)), **told,
    }  # fmt: skip
    return RunSpec(**about)


def one(device: str, **told: Any) -> Any:
    """Return the spec of an engine per worker."""
    return spec_of(device, strategy="multi_worker_mirrored", **told)


@pytest.fixture
def gpus(monkeypatch):
    from fakes.tensorflow_gpus import TensorFlowGpus

    return TensorFlowGpus(monkeypatch, 4)


@pytest.fixture
def setup(gpus, monkeypatch):
    from workbench.engine.tensorflow import support

    monkeypatch.setattr(support, "keep_to_cluster", lambda: None)
    monkeypatch.setattr(support, "seed_all", lambda seed: None)
    return support.setup


# -- before TensorFlow starts ----------------------------------------------------------------------


def test_memory_of_every_gpu_grows_and_a_worker_sees_its_own_alone(gpus, setup):
    setup(spec_of("cuda:1", "cuda:2"))
    assert gpus.growth == {gpu.name: True for gpu in gpus.gpus}
    assert gpus.numbers == [1, 2]
    gpus.start()
    assert gpus.called == {0: 1, 1: 2}


def test_an_engine_on_the_cpu_takes_no_gpu(gpus, setup):
    setup(spec_of("cpu", "cpu"))
    assert gpus.numbers == []


@pytest.mark.parametrize(
    ("told", "seen"),
    [
        ({"rank": 0, "device": "cuda:0", "devices": ("cuda:0", "cuda:1"), "replicas": 2}, []),
        ({"rank": 2, "role": "server", "part": "worker 0", "device": "cuda:0"}, [0]),
        ({"rank": 3, "role": "server", "part": "worker 1", "devices": ("cuda:1",)}, [1]),
        ({"rank": 4, "role": "server", "part": "server s0", "device": "cpu"}, []),
    ],
    ids=["coordinator", "worker 0", "worker 1", "server"],
)
def test_of_a_parameter_server_s_engines_only_workers_see_a_gpu(gpus, setup, told, seen):
    import tensorflow as tf

    from workbench.engine.tensorflow import accelerator

    about = {"devices": (), "replicas": 1, "strategy": "", **told}
    if told["rank"] == 0:
        about["strategy"] = "parameter_server"
    spec = spec_of(**{"world_size": 2, "ranks": (0, 0, 1, 2, 3), **about})
    setup(replace(spec, mode="spmd") if spec.role == "server" else spec)
    assert gpus.numbers == seen
    config = accelerator.limit_server(tf.compat.v1.ConfigProto(), spec)
    assert config.gpu_options.allow_growth
    assert config.gpu_options.visible_device_list == ",".join(map(str, seen))
    assert config.device_count["GPU"] == len(seen)  # an empty list alone would mean all of them
    if told["rank"] == 0:
        assert accelerator.name(spec) == "cpu"


@pytest.mark.parametrize(("device", "seen"), [("cuda:3", "3"), ("cpu", "")])
def test_a_server_is_started_with_its_gpus_alone(gpus, monkeypatch, device, seen):
    import tensorflow as tf

    from workbench.strategies.tensorflow.coordinator import servers

    made = []
    monkeypatch.setattr(tf.distribute, "Server", lambda *a, config, **k: made.append(config))
    spec = spec_of(
        device=device, devices=(), replicas=1, rank=2, world_size=1, role="server", servers=1,
        ranks=(0, 1, 2), hosts=("here",) * 3,
    )  # fmt: skip
    board = SimpleNamespace(wait=lambda topic, ranks, *more: dict.fromkeys(ranks, "127.0.0.1:1"))
    posts: dict[str, Any] = {}
    servers.serve(SimpleNamespace(spec=spec, post=posts.__setitem__, board=board))
    (config,) = made
    assert posts["up"] == ("cuda:3 NVIDIA H200" if seen else "cpu")
    assert config.gpu_options.allow_growth
    assert config.gpu_options.visible_device_list == seen
    assert config.device_count["GPU"] == len(seen)


def test_engines_are_started_so_that_memory_grows_in_any_cell(monkeypatch):
    from workbench.cluster.processes import environment

    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    assert environment("torch")["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert environment("torch")["TF_FORCE_GPU_ALLOW_GROWTH"] == "false"


def test_a_limit_that_a_cell_has_set_goes_before_growth(gpus, setup, monkeypatch):
    import tensorflow as tf

    def refuse(gpu: Any, enable: bool) -> None:
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    setup(spec_of("cuda:1"))
    assert gpus.numbers == [1]


def test_a_tensorflow_without_gpus_is_told_from_a_run_on_the_cpu(monkeypatch):
    from fakes.tensorflow_gpus import TensorFlowGpus

    from workbench.engine.tensorflow import accelerator
    from workbench.errors import ClusterError

    TensorFlowGpus(monkeypatch, 0)
    accelerator.show(())
    with pytest.raises(ClusterError, match=r"(?s)WB-CLUSTER-053.*0 GPUs.*--devices cpu"):
        accelerator.show(("cuda:0",))


def test_the_rows_of_remote_workers_name_the_devices_of_those_workers():
    from workbench.engine.training.notes import announce

    told = []
    context = SimpleNamespace(
        spec=spec_of(devices=(), replicas=2, world_size=2, strategy="parameter_server"),
        entry=SimpleNamespace(data_parallel=True), emit=told.append,
        remote_devices=("cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200"),
    )  # fmt: skip
    announce(context, 3, batch_size=8)
    assert [event.device for event in told] == list(context.remote_devices)
    context.remote_devices = ()
    announce(context, 3, batch_size=8)
    assert [event.device for event in told[2:]] == ["cpu", "cpu"]


# -- the mask --------------------------------------------------------------------------------------


def test_the_mask_is_set_before_the_driver_counts(gpus, setup):
    setup(one("cuda:1", gpus=("GPU-b", "GPU-a")))
    assert gpus.listed_under == "GPU-b,GPU-a"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # Its own GPU has the same number in a list that goes on otherwise, or none is computed on.
    setup(one("cuda:1", gpus=("GPU-b", "GPU-a", "GPU-c")))
    setup(one("cpu", gpus=("GPU-d",)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_an_engine_whose_driver_counts_others_is_spent(gpus, setup):
    from workbench.engine.runtime import outcome_of
    from workbench.errors import EngineSpentError

    setup(one("cuda:0", gpus=("GPU-a", "GPU-b")))
    with pytest.raises(EngineSpentError, match=r"(?s)WB-CLUSTER-050.*GPU-a,GPU-b.*GPU-c") as spent:
        setup(one("cuda:0", gpus=("GPU-c",)))
    assert outcome_of(spent.value).replace


def test_another_library_s_use_of_the_driver_counts_too(gpus, tmp_path, monkeypatch):
    from workbench.devices import mask
    from workbench.engine.tensorflow import accelerator
    from workbench.errors import EngineSpentError

    (tmp_path / "7").symlink_to("/dev/nvidia-uvm")
    monkeypatch.setattr(mask, "OPEN_FILES", tmp_path)
    with pytest.raises(EngineSpentError):
        accelerator.mask(one("cuda:0", gpus=("GPU-a",)))
    (tmp_path / "7").unlink()
    (tmp_path / "8").symlink_to("/dev/nvidiactl")  # NVML's: it counts nothing
    accelerator.mask(one("cuda:0", gpus=("GPU-a",)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a"


# -- for the life of a process ---------------------------------------------------------------------


def test_several_workers_follow_all_replicas_of_one_engine_and_back(gpus, setup):
    """Rank 0's GPU has the same name in both."""
    setup(spec_of("cuda:0", "cuda:1"))
    gpus.start()
    joins(one("cuda:0", world_size=2, ranks=(0, 1)))
    assert gpus.numbers == [0]
    gpus.start()
    setup(spec_of("cuda:0", "cuda:1"))
    assert gpus.numbers == [0, 1]
    gpus.start()


def joins(spec: Any) -> Any:
    """Do what a worker of several does before it joins the others; return its strategy."""
    from workbench.strategies.tensorflow.multi_worker_mirrored import MultiWorkerMirrored

    strategy = MultiWorkerMirrored(SimpleNamespace(spec=spec, options={}, emit=lambda event: None))
    strategy._begin_anew()
    return strategy


def test_a_worker_joins_with_its_own_gpu_and_a_second_time_too(gpus, setup):
    spec = one("cuda:2", rank=1, world_size=2, ranks=(0, 1))
    for _ in range(2):
        setup(spec)
        strategy = joins(spec)
        assert gpus.numbers == [2]
        assert all(gpus.growth[gpu.name] for gpu in gpus.gpus)
        assert strategy.devices == ["GPU:0"]
        gpus.start()


def test_a_gpu_of_another_name_makes_the_engine_a_spent_one(gpus, setup):
    from workbench.errors import EngineSpentError

    setup(spec_of("cuda:0", "cuda:1"))
    gpus.start()
    with pytest.raises(EngineSpentError, match=r"(?s)WB-CLUSTER-051.*GPU 0.*GPU 1"):
        joins(one("cuda:1", world_size=2, ranks=(0, 1)))
    with pytest.raises(EngineSpentError):
        setup(one("cuda:1"))


def test_a_cell_on_fewer_gpus_keeps_the_tensors_there_are(gpus, setup):
    setup(spec_of("cuda:0", "cuda:1"))
    gpus.start()
    setup(one("cuda:0", mode="spmd"))
    assert gpus.resets == 0
    setup(spec_of("cpu"))
    assert gpus.resets == 0


def test_more_gpus_are_had_by_starting_anew_and_that_is_said(gpus, setup):
    from workbench.engine.tensorflow import support

    setup(one("cuda:0", mode="spmd"))
    gpus.start()
    setup(spec_of("cuda:0", "cuda:1"))
    assert (gpus.resets, gpus.numbers) == (1, [0, 1])
    (text,) = support._configured.untold
    assert "other GPUs" in text
    assert "cuda:0, cuda:1" in text


def test_a_state_made_anew_sees_what_the_one_before_was_shown(gpus, setup):
    from workbench.engine.tensorflow import support

    setup(one("cuda:1"))
    gpus.start()
    support.reset()
    assert gpus.numbers == [1]
    assert all(gpus.growth.values())


def test_a_cell_that_has_started_tensorflow_by_itself_is_said_to_hold_all_memory(gpus, setup):
    from workbench.engine.tensorflow import support

    gpus.cpus = support.LOGICAL_DEVICES
    gpus.start()
    setup(spec_of(*(f"cuda:{i}" for i in range(4))))
    (text,) = support._configured.untold
    assert "GPU 0, GPU 1, GPU 2, GPU 3" in text
    assert "%cluster restart" in text


def test_who_holds_all_memory_of_others_gpus_is_spent(gpus, setup, monkeypatch):
    from workbench.errors import EngineSpentError

    gpus.start()
    with pytest.raises(EngineSpentError, match=r"(?s)WB-CLUSTER-052.*GPU 1, 2, 3"):
        setup(one("cuda:0"))
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # as engines are started
    setup(one("cuda:0"))


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [("cuda:2", "cuda:3"), ("cpu",)])
def test_what_a_cell_finds_as_device_is_one_of_tensorflow_s(spec):
    import tensorflow as tf

    from workbench.engine.tensorflow import support

    name = support.names(spec_of(*spec))["device"]
    assert name == ("GPU:0" if len(spec) > 1 else "cpu")
    with tf.device(name):
        assert float(tf.ones(1)[0]) == 1.0


def test_tables_show_the_leased_device_with_its_name(gpus):
    from workbench.engine.tensorflow.support import device_label

    assert device_label("cuda:1") == "cuda:1 NVIDIA H200"
    assert device_label("cuda:9") == "cuda:9"
    assert device_label("cpu") == "cpu"


@pytest.mark.parametrize(
    ("strategy", "made", "wanted"),
    [
        ("mirrored", "MirroredStrategy", ["GPU:0", "GPU:1"]),
        ("one_device", "OneDeviceStrategy", "GPU:0"),
        ("central_storage", "experimental.CentralStorageStrategy", ["GPU:0", "GPU:1"]),
        ("model_split", None, ["GPU:0", "GPU:1"]),
    ],
)
def test_strategies_count_the_gpus_that_are_shown(monkeypatch, strategy, made, wanted):
    import tensorflow as tf

    from workbench import catalog

    devices = ("cuda:2", "cuda:3")
    context = SimpleNamespace(spec=spec_of(*devices, strategy=strategy))
    entry = catalog.lookup(strategy, "tensorflow")
    context.options = context.spec.options
    built = load(entry)(context)
    assert built.devices == ["GPU:0", "GPU:1"]
    assert built.on_gpus
    if made is not None:
        owner = tf.distribute.experimental if "." in made else tf.distribute
        told = []
        monkeypatch.setattr(owner, made.rpartition(".")[2], lambda *a, **k: told.append((a, k)))
        built.build()
        ((arguments, keywords),) = told
        assert arguments[0] == wanted
        if strategy == "mirrored":
            assert isinstance(keywords["cross_device_ops"], tf.distribute.NcclAllReduce)


def load(entry: Any) -> Any:
    import importlib

    module, _, name = entry.module.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "model_split"])
def test_two_replicas_on_one_gpu_are_refused_with_the_way_out(strategy):
    from workbench import catalog
    from workbench.errors import ClusterError

    spec = spec_of("cuda:0", "cuda:0", strategy=strategy)
    said = r"(?s)WB-CLUSTER-049.*cuda:0, cuda:0.*-n 1.*--devices cpu"
    with pytest.raises(ClusterError, match=said):
        load(catalog.lookup(strategy, "tensorflow"))(SimpleNamespace(spec=spec))


@pytest.mark.parametrize(("sharers", "way"), [(1, "AUTO"), (2, "RING")])
def test_workers_that_share_a_gpu_do_not_meet_through_nccl(monkeypatch, sharers, way):
    import tensorflow as tf

    from workbench.strategies.tensorflow.multi_worker_mirrored import (
        COMMUNICATION,
        MultiWorkerMirrored,
    )

    told = []
    monkeypatch.setattr(
        tf.distribute, "MultiWorkerMirroredStrategy",
        lambda *a, communication_options: told.append(communication_options),
    )  # fmt: skip
    MultiWorkerMirrored(SimpleNamespace(spec=one("cuda:0", sharers=sharers))).build()
    assert told[0].implementation == COMMUNICATION[way]


def test_a_lack_of_memory_is_explained_by_what_is_held(gpus):
    import tensorflow as tf

    from workbench.engine.tensorflow.support import explain

    text = explain(tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"))
    assert text is not None
    assert re.search(r"3\.0 GB on GPU:0 .*7\.0 GB", text)


def test_nobody_else_asks_tensorflow_about_devices():
    asks = re.compile(
        r"tf\.config\.(?!threading|LogicalDevice)\w*(?:devices?|memory|visible)\w*\b(?<!to_cluster)"
        r"|get_memory_info|sync_devices|set_memory_growth"
    )
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    # The doctor asks TensorFlow itself, in a process of its own.
    assert found - {"doctor/probes.py"} == {"engine/tensorflow/accelerator.py"}


# -- when the devices are waited for ---------------------------------------------------------------


class Marks:
    """Stands for `Markers`: each call was one step, marked as is said."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def take(self, start_s: float, end_s: float) -> list[Any]:
        from workbench.engine.telemetry.recorder import StepResult
        from workbench.strategies.tensorflow.parts.markers import Measured

        results = (StepResult(4, 0.5, end_s - start_s),)
        return [Measured(start_s, end_s, (0.0,), results, eager) for eager in self.found]


@pytest.fixture
def steps(monkeypatch):
    from workbench.strategies.tensorflow.parts import steps as module

    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            self.now_s += 0.001
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(module, "clock", clock)
    rows: list[tuple[float, float]] = []
    context = SimpleNamespace(
        spec=spec_of("cuda:0"),
        entry=SimpleNamespace(data_parallel=True),
        recorder=SimpleNamespace(
            add_step=lambda step, one, start_s, end_s, **more: rows.append((start_s, end_s))
        ),
        gate=SimpleNamespace(paused_s=0.0, enter=lambda step: True),
        faults=SimpleNamespace(before_step=lambda step: None),
        trained=0, step=0, train_s=0.0, eval_s=0.0,
        emit=lambda event: None,
    )  # fmt: skip

    def synchronise() -> None:
        waits.append(len(rows))
        clock.now_s += 0.010  # what is left of an update

    waits: list[int] = []
    made = module.Steps(context, Marks(), synchronise)
    return SimpleNamespace(steps=made, rows=rows, waits=waits, context=context, clock=clock)


def call(watched: Any, count: int, *eager: bool) -> None:
    for _ in range(count):
        watched.steps.enter()
        watched.steps.markers.found = list(eager)
        watched.steps.wait()
        watched.steps.end(lambda: watched.steps.unmarked(4, 0.5))


def test_devices_are_waited_for_while_steps_are_few_and_where_they_end(steps):
    from workbench.strategies.tensorflow.parts.steps import EXACT

    call(steps, 100, False)
    assert len(steps.waits) == EXACT
    before_s = steps.context.train_s
    steps.steps.settle()
    assert len(steps.waits) == EXACT + 1
    assert steps.context.train_s == pytest.approx(before_s + 0.011)  # training, no evaluation
    assert steps.context.eval_s == 0.0
    steps.steps.settle()  # nothing is left
    assert len(steps.waits) == EXACT + 1
    call(steps, EXACT, False)  # another stretch begins exactly
    assert len(steps.waits) == 2 * EXACT + 1


def test_the_rows_of_a_stretch_lack_its_last_update_alone(steps):
    call(steps, 100, False)
    began_s = steps.rows[0][0]
    steps.steps.settle()
    lacking_s = steps.clock.now_s - began_s - sum(end_s - start_s for start_s, end_s in steps.rows)
    assert lacking_s == pytest.approx(0.011, abs=0.003)


@pytest.mark.parametrize("marked", [(), (True,)], ids=["no mark", "no graph"])
def test_each_call_is_waited_for_where_its_marks_cannot_tell_when_it_ended(steps, marked):
    call(steps, 40, *marked)
    assert len(steps.waits) == 40


def test_a_wait_for_the_last_update_is_no_evaluation(steps):
    call(steps, 30, False)
    steps.steps.skip()
    assert steps.context.eval_s < 0.005


FIT = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((160, 4), "float32"), np.ones((160, 1), "float32")
model.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), verbose=0)
found = device
"""


def test_a_fit_on_several_devices_is_recorded_whole_with_few_waits(monkeypatch):
    """Logical CPU devices stand for the GPUs that the engine was given."""
    import numpy as np
    from tf_harness import clean, run

    from workbench.engine.tensorflow import accelerator
    from workbench.strategies.tensorflow.parts.steps import EXACT

    waits = []
    monkeypatch.setattr(accelerator, "_process", accelerator._Process())
    monkeypatch.setattr(accelerator, "check", lambda devices: None)
    monkeypatch.setattr(accelerator, "sees", lambda devices: True)
    monkeypatch.setattr(accelerator, "names", lambda devices: ["CPU:0", "CPU:1"])
    monkeypatch.setattr(accelerator, "synchronise", lambda: waits.append(1))
    told = {"device": "cuda:0", "devices": ("cuda:0", "cuda:1")}
    options = {"cross_device_ops": "reduce_to_one"}
    report = clean(run("mirrored", FIT, 2, told=told, options=options))
    assert len(waits) == 2 * (EXACT + 1)  # of each epoch's 40 steps, and at its end
    assert report.names["found"] == "GPU:0"
    assert report.rows.shape == (80, 2)
    assert (report.rows["step"][:, 0] == np.arange(80)).all()
    step_s = (report.rows["end_s"] - report.rows["start_s"])[:, 0]
    assert report.train_s == pytest.approx(step_s.sum(), rel=0.01)
    assert report.eval_s > 0
