"""GPUs as TensorFlow shows them, where there are none: `tf.config` with a process's rules.

    gpus = TensorFlowGpus(monkeypatch, 4)
    ...                 # what is to be tested: it lists, masks, shows
    gpus.start()        # TensorFlow's first operation

What real GPUs refuse, these refuse too: settings after the first operation (RuntimeError), and a
`GPU:k` that stands for another GPU than before, for the life of the process (AlreadyExistsError).
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from workbench.devices import mask
from workbench.engine.tensorflow import accelerator, support

NAME = "NVIDIA H200"


class TensorFlowGpus:
    """`count` GPUs of one host, and a process in which TensorFlow has not started.

    Attributes:
        listed_under: What masked the driver when it was asked for devices first; None: never.
        visible: Names of the physical GPUs that TensorFlow is to see.
        growth: By name of a physical GPU, whether its memory is taken as needed.
        called: What each `GPU:k` stands for, until the process ends.
        synchronised: How often the devices were waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.gpus = [
            SimpleNamespace(name=f"/physical_device:GPU:{i}", device_type="GPU")
            for i in range(count)
        ]
        self.cpu = SimpleNamespace(name="/physical_device:CPU:0", device_type="CPU")
        self.called: dict[int, int] = {}
        self.listed_under: str | None = None
        self.synchronised = self.resets = 0
        self.state = SimpleNamespace(_context_handle=None, _physical_devices=None)
        self._anew()
        for name in ("MASK", "ORDER", "GROWTH"):
            monkeypatch.setenv(getattr(accelerator, name), "")  # so that it is put back
            monkeypatch.delenv(getattr(accelerator, name))
        config, more = tf.config, tf.config.experimental
        for owner, name, fake in (
            (accelerator, "context", lambda: self.state),
            (accelerator, "_process", accelerator._Process()),
            (support, "_configured", support._Configured()),
            (config, "list_physical_devices", self._physical),
            (config, "list_logical_devices", self._logical),
            (config, "get_visible_devices", self._get_visible),
            (config, "set_visible_devices", self._set_visible),
            (config, "set_logical_device_configuration", self._divide),
            (config.threading, "set_intra_op_parallelism_threads", self._set),
            (config.threading, "set_inter_op_parallelism_threads", self._set),
            (more, "set_memory_growth", self._grow),
            (more, "get_memory_growth", lambda gpu: self.growth.get(gpu.name)),
            (more, "get_device_details", lambda gpu: {"device_name": NAME}),
            (more, "get_memory_info", lambda place: {"current": 3 * 10**9, "peak": 7 * 10**9}),
            (tf.test.experimental, "sync_devices", self._synchronise),
            (mask, "OPEN_FILES", Path("/nowhere")),
        ):
            monkeypatch.setattr(owner, name, fake)
        module = importlib.import_module("tensorflow.python.eager.context")
        monkeypatch.setattr(module, "_reset_context", self._reset)

    def start(self) -> None:
        """Be TensorFlow's first operation: from now on its devices are fixed."""
        self._list()
        for number, name in enumerate(self.visible):
            index = int(name.rpartition(":")[2])
            if self.called.setdefault(number, index) != index:
                raise tf.errors.AlreadyExistsError(
                    None, None,
                    f"TensorFlow device (GPU:{number}) is being mapped to multiple devices "
                    f"({index} now, and {self.called[number]} previously), which is not supported.",
                )  # fmt: skip
        self.state._context_handle = object()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the physical GPUs that TensorFlow is to see."""
        return [int(name.rpartition(":")[2]) for name in self.visible]

    @property
    def started(self) -> bool:
        return self.state._context_handle is not None

    def _anew(self) -> None:
        self.visible = [gpu.name for gpu in self.gpus]
        self.growth: dict[str, bool] = {}
        self.cpus = 1

    def _reset(self) -> None:
        self.resets += 1
        self.state._context_handle = self.state._physical_devices = None
        self._anew()

    def _list(self) -> None:
        if self.listed_under is None:
            self.listed_under = os.environ.get(accelerator.MASK, "")
        self.state._physical_devices = [self.cpu, *self.gpus]

    def _set(self, *values: Any) -> None:
        if self.started:
            raise RuntimeError("cannot be modified after being initialized")

    def _physical(self, kind: str | None = None) -> list[Any]:
        self._list()
        return [one for one in (self.cpu, *self.gpus) if kind in (None, one.device_type)]

    def _logical(self, kind: str | None = None) -> list[Any]:
        if not self.started:
            self.start()
        counts = {"CPU": self.cpus, "GPU": len(self.visible)}
        return [
            SimpleNamespace(name=f"/device:{one}:{i}", device_type=one)
            for one in counts
            if kind in (None, one)
            for i in range(counts[one])
        ]

    def _get_visible(self, kind: str | None = None) -> list[Any]:
        return [gpu for gpu in self.gpus if gpu.name in self.visible and kind in (None, "GPU")]

    def _set_visible(self, devices: Any, kind: str | None = None) -> None:
        devices = devices if isinstance(devices, list) else [devices]
        wanted = [gpu.name for gpu in devices]
        if kind == "GPU" and wanted != self.visible:
            self._set()
            self.visible = wanted

    def _grow(self, gpu: Any, enable: bool) -> None:
        if self.growth.get(gpu.name) != enable:
            self._set()
            self.growth[gpu.name] = enable

    def _divide(self, cpu: Any, configurations: list[Any]) -> None:
        self._set()
        self.cpus = len(configurations)

    def _synchronise(self) -> None:
        self.synchronised += 1
