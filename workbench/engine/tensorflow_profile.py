"""TensorFlow's profiler, for a window of steps.

It writes an XSpace (`.xplane.pb`, which TensorBoard reads); the Chrome trace is made from that.

Source: `tensorflow/tsl/profiler/protobuf/xplane.proto`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from .. import scratch
from ..errors import RunError
from ..protocol import RunSpec

_PROTOCOLS = ("tensorflow.tsl.profiler.protobuf", "tsl.profiler.protobuf", "xprof.protobuf")


class TensorFlowProfiler:
    """Collects what TensorFlow's threads, and GPUs, do."""

    def __init__(self) -> None:
        self._folder = ""

    def start(self) -> None:
        """Begin to collect."""
        self._folder = tempfile.mkdtemp(prefix="workbench-profile-", dir=scratch.folder())
        try:
            tf.profiler.experimental.start(self._folder)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def step(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Mark what happens within as a step."""
        trace: Any = tf.profiler.experimental.Trace(name, step_num=int(name.split()[-1]), _r=1)
        return trace  # type: ignore[no-any-return,unused-ignore]

    def stop(self, path: Path | None) -> Path | None:
        """End; write a Chrome trace to `path`, and the XSpace beside it.

        Raises:
            RunError: The profiler has left nothing.
        """
        try:
            tf.profiler.experimental.stop(save=path is not None)
            if path is None:
                return None
            found = sorted(Path(self._folder).rglob("*.xplane.pb"))
            if not found:
                raise RunError("TensorFlow's profiler has written nothing.", code="WB-RUN-028")
            shutil.copyfile(found[0], path.with_suffix(".xplane.pb"))
            path.write_text(json.dumps({"traceEvents": list(_events(found[0]))}))
            return path
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of an XSpace as those of a Chrome trace; times in microseconds."""
    space = _protocol().XSpace()
    space.ParseFromString(file.read_bytes())
    for pid, plane in enumerate(space.planes):
        name = {"name": plane.name}
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": name}
        for tid, line in enumerate(plane.lines):
            label = {"name": line.display_name or line.name}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": label}
            for event in line.events:
                about = plane.event_metadata[event.metadata_id]
                yield {
                    "ph": "X",
                    "name": about.display_name or about.name,
                    "pid": pid,
                    "tid": tid,
                    "ts": line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                    "dur": event.duration_ps / 1e6,
                }


def _protocol() -> Any:
    for package in _PROTOCOLS:
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{package}.xplane_pb2")
    raise RunError(
        "This TensorFlow does not bring the protocol of its profiles.", code="WB-RUN-029"
    )


def make(spec: RunSpec) -> TensorFlowProfiler:
    """Return a profiler for a worker."""
    return TensorFlowProfiler()
