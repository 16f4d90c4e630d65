"""TensorFlow's devices: which GPUs this process sees, their names, and what it takes of them.

All questions to TensorFlow about devices are asked here; the rest of the package only names them.

A run gives its engine `cuda:k`: the k-th GPU of those that the process may see. TensorFlow counts
the visible ones from 0, and calls the first `GPU:0`, which is also what cells find as `device`:

    leased to this worker   cuda:2, cuda:3      numbers of physical devices
    shown to TensorFlow     [2, 3]              set_visible_devices, before its first operation
    in tf.device            GPU:0, GPU:1

Some things are fixed for the life of a process, and no reset changes them:

    which GPUs the driver counts    its mask is read when TensorFlow first lists devices
    which GPU is called GPU:k       fixed by the first context that used it; a context that means
                                    another raises "is being mapped to multiple devices"
    memory                          a GPU's memory is returned only when the process ends

If one of them is in the way, the engine is spent and another one replaces it. So that memory is
taken as needed, and not all at once, growth is set for every GPU before the first operation.

Sources: https://www.tensorflow.org/guide/gpu; `InsertTfDevicePlatformDeviceIdPair` in
`tensorflow/core/common_runtime/device/device_id_manager.cc`. None of it has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ... import catalog
from ...devices import mask as masks
from ...errors import ClusterError, EngineSpentError

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec

TYPES = {"cuda": "GPU", "xpu": "XPU", "mps": "GPU"}
"""TensorFlow's word for each kind of GPU, by the word of our leases."""

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"

GREEDY = (
    "TensorFlow started before this run, and keeps nearly all memory of {gpus} until the engine "
    "ends. To free this memory, run %cluster restart."
)


@dataclass
class _Process:
    """What holds until the process ends."""

    listed: bool = False  # TensorFlow has asked the driver, so its mask was read
    shown: tuple[str, ...] | None = None  # leased devices shown last; None: nobody has chosen
    called: dict[int, int] = field(default_factory=dict)  # GPU:k -> physical device


_process = _Process()


def is_gpu(device: str) -> bool:
    """Whether a leased device (`cpu`, `cuda:0`) is a GPU."""
    return device.partition(":")[0] in TYPES


def own(spec: RunSpec) -> tuple[str, ...]:
    """Return the GPUs on which this engine computes, as leased; empty if it uses the CPU.

    A coordinator hands out work and a parameter server adds up: neither should use a GPU's memory.
    """
    devices = spec.devices or (spec.device,)
    if not all(map(is_gpu, devices)):
        return ()
    coordinates = (
        spec.mode == "run"
        and spec.role == "worker"
        and bool(spec.strategy)
        and catalog.lookup(spec.strategy, spec.framework).remote_workers
    )
    return () if coordinates else tuple(devices)


def name(spec: RunSpec) -> str:
    """Return the `device` of cells: a name for `tf.device`."""
    mine = own(spec)
    return f"{_type(mine[0])}:0" if mine else "cpu"


def names(devices: Sequence[str]) -> list[str]:
    """Return TensorFlow's name of each leased device: one for each replica.

    Raises:
        ClusterError: One GPU is used for several replicas.
    """
    if not all(map(is_gpu, devices)):
        return [f"CPU:{number}" for number in range(len(devices))]
    if len(set(devices)) < len(devices):
        raise ClusterError(
            "Under this strategy, each replica needs its own GPU.",
            seen=", ".join(devices),
            allowed="a GPU for each replica",
            next_step=f"use -n {len(set(devices))}, or run %cluster stop, then %cluster start "
            "--devices cpu",
            code="WB-CLUSTER-049",
        )
    return [f"{_type(device)}:{number}" for number, device in enumerate(devices)]


def label(device: str) -> str:
    """Return `cpu`, or `cuda:0 NVIDIA H200`."""
    if not is_gpu(device):
        return device
    gpus, number = _physical(_type(device)), _number(device)
    details = tf.config.experimental.get_device_details(gpus[number]) if number < len(gpus) else {}
    return f"{device} {details.get('device_name', '')}".strip()


# -- what this process sees ------------------------------------------------------------------------


def mask(spec: RunSpec) -> None:
    """Let the driver count only the run's GPUs on this host, in their order.

    If the driver counts others already, the engine can continue if the GPUs on which it computes
    have the same numbers.

    Raises:
        EngineSpentError: They have other numbers.
    """
    counted = _process.listed or context()._physical_devices is not None
    masks.show(spec.accelerator or "cuda", spec.gpus, spec.gpus_used, counted=counted)


def check(devices: Sequence[str]) -> None:
    """Raise unless these GPUs can be shown to TensorFlow in this process.

    Raises:
        ClusterError: TensorFlow does not see them.
        EngineSpentError: Others have their names, or TensorFlow holds the memory of others.
    """
    _remember()
    for device in devices:
        found = len(_physical(_type(device)))
        if _number(device) >= found:
            raise _unseen(device, found)
    for number, device in enumerate(devices):
        before = _process.called.get(number, _number(device))
        if before != _number(device):
            raise EngineSpentError(
                "TensorFlow has already used another GPU on this engine, and cannot change to this "
                "worker's GPU.",
                seen=f"TensorFlow's name {_type(device)}:{number} stands for GPU {before}",
                allowed=f"{_type(device)}:{number} for GPU {_number(device)}",
                next_step="%cluster restart",
                code="WB-CLUSTER-051",
            )
    foreign = [] if not greedy() else sorted(set(_visible()) - set(map(_number, devices)))
    if foreign:
        raise EngineSpentError(
            "TensorFlow has started on this engine with GPUs that this worker is not allowed to "
            "use.",
            seen=f"GPU {', '.join(map(str, foreign))}",
            allowed=", ".join(devices) or "no GPU",
            next_step="%cluster restart",
            code="WB-CLUSTER-052",
        )


def _unseen(device: str, found: int) -> ClusterError:
    built = "is built with CUDA" if tf.test.is_built_with_cuda() else "is built without CUDA"
    return ClusterError(
        "TensorFlow does not see this worker's GPU.",
        seen=f"{device}; TensorFlow {tf.__version__} {built} and sees {found} GPU"
        + ("" if found == 1 else "s"),
        allowed="GPUs that TensorFlow can use",
        next_step="TensorFlow's CUDA libraries may be missing: run %pip install "
        "'tensorflow[and-cuda]', then %cluster restart. To train on the CPU, run %cluster stop, "
        "then %cluster start --devices cpu",
        code="WB-CLUSTER-053",
    )


def sees(devices: Sequence[str]) -> bool:
    """Whether these GPUs have their names already; more GPUs may be visible."""
    wanted = [_number(device) for device in devices]
    if started():
        return _visible()[: len(wanted)] == wanted
    return _process.shown is not None and _process.shown == tuple(devices)


def show(devices: Sequence[str]) -> None:
    """Let TensorFlow see only these GPUs, and take memory as it needs it; before it starts.

    Raises:
        ClusterError, EngineSpentError: As `check`.
    """
    check(devices)
    for kind in dict.fromkeys(TYPES.values()):
        gpus = _physical(kind)
        for gpu in gpus:
            with contextlib.suppress(ValueError):  # a cell has set a limit, which goes before
                tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            chosen = [gpus[_number(device)] for device in devices if _type(device) == kind]
            tf.config.set_visible_devices(chosen, kind)
    _process.shown = tuple(devices)


def about_to_reset() -> None:
    """Note what TensorFlow's state will leave behind."""
    _remember()


def show_again() -> None:
    """Let a new state of TensorFlow see the devices of the one before."""
    if _process.shown is not None:
        show(_process.shown)


def started() -> bool:
    """Whether TensorFlow has devices: they are fixed at its first operation."""
    return context()._context_handle is not None


def greedy() -> bool:
    """Whether TensorFlow has started and takes all memory of the GPUs that it sees."""
    if not started() or os.environ.get(GROWTH, "").lower() in ("1", "true"):
        return False
    return any(
        not tf.config.experimental.get_memory_growth(gpu)
        for kind in dict.fromkeys(TYPES.values())
        for gpu in tf.config.get_visible_devices(kind)
    )


def greedy_words() -> str:
    """Return which GPUs TensorFlow takes completely, as text."""
    return GREEDY.format(gpus=", ".join(f"GPU {number}" for number in _visible()))


def limit_server(config: Any, spec: RunSpec) -> Any:
    """Let a `tf.distribute.Server` see only this engine's GPUs; return its ConfigProto.

    A server makes its own devices, independent of the settings of the process.
    """
    mine = own(spec)
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = ",".join(str(_number(device)) for device in mine)
    for kind in dict.fromkeys(TYPES.values()):  # an empty list would mean all of them
        config.device_count[kind] = sum(_type(device) == kind for device in mine)
    return config


# -- devices as they are ---------------------------------------------------------------------------


def count(kind: str) -> int:
    """Return how many logical devices of a kind (`CPU`, `GPU`, `TPU`) there are; it starts them."""
    return len(tf.config.list_logical_devices(kind))


def divide_cpu(devices: int) -> None:
    """Ask for logical CPU devices, before TensorFlow starts."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * devices,
    )


def synchronise() -> None:
    """Wait until the GPUs have finished their work."""
    tf.test.experimental.sync_devices()


def memory_words() -> str:
    """Return the memory of TensorFlow's tensors on each GPU, now and at most; empty without one."""
    found = []
    for gpu in tf.config.list_logical_devices("GPU"):
        place = gpu.name.rpartition("device:")[2]
        with contextlib.suppress(ValueError, tf.errors.OpError):  # not every kind can tell
            held = tf.config.experimental.get_memory_info(place)
            now, most = held["current"] / 1e9, held["peak"] / 1e9
            found.append(f"{now:.1f} GB on {place} (at most {most:.1f} GB so far)")
    return "; ".join(found)


def context() -> Any:
    """Return TensorFlow's own state of this process; private, but there is no other way."""
    return importlib.import_module("tensorflow.python.eager.context").context()


def _remember() -> None:
    """Note the names that GPUs have in the present state: they outlive it."""
    if started():
        for number, index in enumerate(_visible()):
            _process.called.setdefault(number, index)


def _visible() -> list[int]:
    kind = next((kind for kind in TYPES.values() if _physical(kind)), "GPU")
    known = {gpu.name: index for index, gpu in enumerate(_physical(kind))}
    return [known[gpu.name] for gpu in tf.config.get_visible_devices(kind)]


def _physical(kind: str) -> list[Any]:
    _process.listed = True
    found: list[Any] = tf.config.list_physical_devices(kind)
    return found


def _type(device: str) -> str:
    return TYPES[device.partition(":")[0]]


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
