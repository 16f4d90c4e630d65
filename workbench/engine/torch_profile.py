"""PyTorch's profiler, for a window of steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..errors import RunError
from ..protocol import RunSpec

_LOG_LEVEL = "KINETO_LOG_LEVEL"


class TorchProfiler:
    """Collects operators on the CPU, and kernels where the worker has a GPU."""

    def __init__(self, spec: RunSpec) -> None:
        activities = [ProfilerActivity.CPU]
        if spec.device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._cuda = len(activities) > 1
        self._profile = profile(activities=activities, acc_events=True)

    def start(self) -> None:
        """Begin to collect.

        Raises:
            RunError: The cell's own profiler is running.
        """
        if torch._C._autograd._profiler_enabled():
            raise RunError("the cell's own torch.profiler is running", code="WB-RUN-033")
        self._synchronise()
        with _quiet():
            self._profile.start()

    def step(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Mark what happens within as a step."""
        return record_function(name)

    def stop(self, path: Path | None) -> Path | None:
        """End; write a Chrome trace to `path`."""
        self._synchronise()
        with _quiet():
            self._profile.stop()
        if path is not None:
            self._profile.export_chrome_trace(str(path))
        return path

    def _synchronise(self) -> None:
        if self._cuda:  # kernels of the window, and no others
            torch.cuda.synchronize()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto's own log lines out of the cell; it reads this when it is first used."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def make(spec: RunSpec) -> TorchProfiler:
    """Return a profiler for a worker."""
    return TorchProfiler(spec)
