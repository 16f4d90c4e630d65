"""What an engine needs to know of TensorFlow: devices, threads, seeds, the scope of a cell.

Loaded by name (`engine.runtime.support`), so nothing else in the engine names the framework.

TensorFlow cannot change devices and threads after its first operation. So an engine asks for a
large number of logical CPU devices at once (`LOGICAL_DEVICES`), so that most runs fit after any
earlier one. If a run does not fit, TensorFlow's state is made again (`reset`). If even that fails,
the run ends with `EngineSpentError`, and the kernel replaces the engine. Which GPUs TensorFlow
sees, and how it takes their memory, is fixed then too (`accelerator.py`).

A worker is limited to its share of the host's cores if its thread pools cannot be resized.
TensorFlow decides the size of its thread pool at its first operation. A pool sized for one run
would falsify the speed-up of another. So the pool is sized for the whole host, and a worker that
shares the host with others may only use some of its cores meanwhile.

TensorFlow's generated source files go into the cluster's folder, and are removed with it. AutoGraph
writes each function that it traces to the temporary folder and removes it when the process exits,
but an engine that is killed never removes it. Its maps from generated lines to the user's are kept,
so that errors show the user's own code (`engine/debugging/tracebacks.py`).

TensorFlow's profiler, for a window of steps, writes an XSpace (`.xplane.pb`, which TensorBoard
reads); the Chrome trace is made from that.

Source: `tensorflow/tsl/profiler/protobuf/xplane.proto`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import ClusterError, EngineSpentError, RunError
from ...shared import cluster_env, events
from ..debugging import tracebacks
from ..training import fit_arguments
from . import accelerator
from .models import build_module as build_module
from .models import check_optimizer as check_optimizer
from .models import check_scheduler as check_scheduler
from .models import load_weights as load_weights
from .models import parameter_count as parameter_count
from .models import sketch_module as sketch_module
from .models import weight_shapes as weight_shapes

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec
    from ..context import RunContext

LOGICAL_DEVICES = 8
"""Logical CPU devices that an engine has at least."""

MADE_ANEW = (
    "TensorFlow had started with {before} this run needs, so Workbench restarted TensorFlow with "
    "{devices}. Tensors, variables and models of earlier cells can no longer be used on this "
    "engine."
)


@dataclass
class _Configured:
    """What TensorFlow was told before its first operation; 0: nothing yet."""

    devices: int = 0
    threads: int = 0
    untold: list[str] = field(default_factory=list)  # what the next run's user is to know


_configured = _Configured()


def setup(spec: RunSpec) -> None:
    """Set devices, threads and seeds before a cell; equal seeds give equal initial weights.

    Raises:
        ClusterError: Keras uses another framework.
        EngineSpentError: TensorFlow has started with settings that this run cannot use.
    """
    if keras.backend.backend() != "tensorflow":
        raise ClusterError(
            "Keras uses another framework on this engine.",
            seen=f"KERAS_BACKEND={keras.backend.backend()}",
            allowed="tensorflow",
            next_step="run os.environ['KERAS_BACKEND'] = 'tensorflow' in the notebook, then "
            "%cluster restart",
            code="WB-CLUSTER-027",
        )
    if spec.mode == "run" and os.environ.get("TF_CONFIG"):
        raise ClusterError(
            "TF_CONFIG must not be set: Workbench itself tells TensorFlow the run's devices and "
            "workers.",
            seen=os.environ["TF_CONFIG"],
            allowed="no TF_CONFIG",
            next_step="run del os.environ['TF_CONFIG'] in a %%distributed cell, then run this "
            "cell again",
            code="WB-CLUSTER-028",
        )
    keep_to_cluster()
    accelerator.mask(spec)
    # The pool of threads cannot be resized: it has all cores, `around` keeps a worker to its share.
    configure(
        max(LOGICAL_DEVICES, spec.replicas),
        max(1, spec.threads, spec.cores),
        accelerator.own(spec),
    )
    if spec.mode == "run":
        seed_all(int(spec.overrides.get("seed", 0)))
        _naming().reset_uids()  # a layer is called `dense` in every run, not `dense_7`


def configure(devices: int, threads: int, gpus: Sequence[str] = ()) -> None:
    """Ask for logical CPU devices, threads and GPUs, before TensorFlow's first operation.

    Later calls accept more devices than they ask for, and other threads: these cannot be changed
    without losing the user's variables.

    Args:
        gpus: As they are leased (`cuda:0`); others are not touched.

    Raises:
        ClusterError: TensorFlow does not see the GPUs.
        EngineSpentError: There are fewer devices, or other GPUs, and that cannot be changed.
    """
    accelerator.check(gpus)
    seen = accelerator.sees(gpus)
    if _configured.devices >= devices and seen:
        return
    if accelerator.started():
        have = accelerator.count("CPU")
        if have >= devices and seen:
            _configured.devices = have
            if accelerator.greedy():
                _configured.untold.append(accelerator.greedy_words())
            return
        reset()
        before, now = "fewer devices than", f"{devices} devices"
        if not seen:
            before, now = "other GPUs than", ", ".join(gpus)
        _configured.untold.append(MADE_ANEW.format(before=before, devices=now))
    accelerator.show(gpus)
    try:
        accelerator.divide_cpu(devices)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # Replicas that wait (for an injected delay, for each other) hold a thread each.
        tf.config.threading.set_inter_op_parallelism_threads(max(threads, devices))
    except RuntimeError as error:
        raise EngineSpentError(
            "TensorFlow has started on this engine with fewer devices than the run needs.",
            seen=str(error),
            allowed=f"{devices} logical CPU devices",
            next_step="%cluster restart",
            code="WB-CLUSTER-029",
        ) from error
    _configured.devices, _configured.threads = devices, threads


def reset() -> None:
    """Reset TensorFlow's whole state, as if it had just been imported.

    Tensors and variables of earlier cells are lost. Private, but the only way there is:
    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/python/eager/context.py
    """
    _built.clear()
    keras.backend.clear_session()
    gc.collect()
    accelerator.about_to_reset()
    importlib.import_module("tensorflow.python.eager.context")._reset_context()
    _configured.devices = _configured.threads = 0
    accelerator.show_again()


def seed_all(seed: int) -> None:
    """Seed Python, NumPy, TensorFlow and Keras."""
    keras.utils.set_random_seed(seed % (1 << 32))


def _naming() -> Any:
    return importlib.import_module("keras.src.utils.naming")


_built: dict[Any, Any] = {}
"""tf.distribute strategies of this engine, by what they were built from."""


def built(key: Any, build: Any) -> Any:
    """Return the strategy that was built under `key`, building it the first time.

    A model belongs to the strategy in whose scope it was made. The next run uses the same strategy,
    so the model can be trained further there.
    """
    if key not in _built:
        _built[key] = build()
    return _built[key]


@contextlib.contextmanager
def around(run: RunContext) -> Iterator[dict[str, Any]]:
    """Surround the cell of a training run with the strategy's scope.

    The cell runs as plain Keras code, so everything of ours is set up before it and undone after
    it: the strategy is built, steps are recorded, `model.fit` reports.

    Yields:
        Additional names for the cell.
    """
    spec = run.spec
    near = [] if run.entry.remote_workers else spec.neighbours
    position = near.index(spec.ranks[spec.rank]) if near else 0
    with limited(spec.cores if spec.device == "cpu" else 0, len(near), position):
        while _configured.untold:
            run.emit(events.Noted(rank=spec.rank, text=_configured.untold.pop(0)))
        run.strategy = strategy = fit_arguments.load_strategy(run)
        with strategy.around_cell() as names:
            yield names


def environ(spec: RunSpec) -> dict[str, str]:
    """Return additional environment variables; strategies set TF_CONFIG themselves."""
    return {}


def ensure_group(spec: RunSpec) -> None:
    """Do nothing: TensorFlow's strategies meet by themselves."""


def has_group() -> bool:
    """Return True: there is no group that a cell could destroy."""
    return True


def destroy_group() -> None:
    """Do nothing: see `ensure_group`."""


def break_collectives(*, store: bool = False) -> int:
    """Break collectives in which this engine waits for others; return in how many clusters.

    Called from another thread than the one that waits. TensorFlow itself needs seconds to notice
    that a worker is dead, and never notices that one hangs.
    """
    context = accelerator.context()
    if context._context_handle is None or context._collective_ops_server_def is None:
        return 0
    context.abort_collective_ops(tf.errors.UNAVAILABLE, "Workbench ended this run")
    return 1


def names(spec: RunSpec) -> dict[str, Any]:
    """Return the names that cells find besides rank and world_size.

    `device` is a name for `tf.device`: `GPU:0` if the run's tables say `cuda:0`.
    """
    return {"device": accelerator.name(spec), "strategy": tf.distribute.get_strategy()}


def device_label(device: str) -> str:
    """Return `cpu`, or `cuda:0 NVIDIA H200`."""
    return accelerator.label(device)


def save_weights(folder: Path, rank: int, arrays: dict[str, Any]) -> str:
    """Write the weights as `weights.npz`; return the file's name.

    Ranks other than 0 write `weights-rank{r}.npz`.
    """
    name = "weights.npz" if rank == 0 else f"weights-rank{rank}.npz"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, **arrays)
    return name


def explain(error: BaseException) -> str | None:
    """Return the cause of a well-known mistake in a cell; None for all others."""
    text = str(error)
    if isinstance(error, tf.errors.ResourceExhaustedError) and (held := accelerator.memory_words()):
        return f"Why: no memory is left on a GPU. TensorFlow's tensors on this engine: {held}."
    for words, cause in _CAUSES.items():
        if words in text:
            return f"Why: {cause}"
    return None


_OUTSIDE = (
    "the cell called the optimizer outside strategy.run. Put the forward pass, the backward pass "
    "and the optimizer's call into a function `step`, and call strategy.run(step, args=(batch,))."
)
_CAUSES = {
    "cannot be modified after being initialized": "TensorFlow has already set up the devices of "
    "this engine, so a cell cannot change the devices. Remove the line that changes the devices. "
    f"The engine already has at least {LOGICAL_DEVICES} logical CPU devices. To change the number "
    "of replicas, use -n in the cell's first line.",
    "AddN must have the same size and shape": "the cell adds tensors of different replicas. These "
    "tensors have one row per sample, and the replicas have different numbers of samples, so the "
    "shapes differ. Use a batch size that is a "
    "multiple of the number of replicas, and drop the smaller last batch: "
    "data.batch(64, drop_remainder=True).",
    "optimizer can only optimize Tensors": "a PyTorch optimizer cannot train a Keras model; "
    "use an optimizer of keras.optimizers.",
    "No module named 'tf_keras'": "tf_keras (Keras 2) is not installed, and you do not need it: "
    "write the model with `keras`.",
    "outside the replica context": _OUTSIDE,
    "cross-replica context": _OUTSIDE,
}
"""Words in TensorFlow's errors, and what lies behind them."""


@contextlib.contextmanager
def limited(of: int, workers: int, position: int) -> Iterator[None]:
    """Let all threads of this process run on this worker's share of the host's cores only.

    Does nothing in three cases: the system cannot do it (not Linux); there are fewer cores than
    workers, which the system distributes more evenly; or a container's quota gives fewer cores than
    it sees, because all containers would then use the first ones.

    Args:
        of: Cores of the host that the run has in total.
        workers: How many of them share these cores.
        position: Which one this is, from 0.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 < workers <= of or of != len(allowed):
        yield
        return
    count = of // workers
    _keep_to(allowed[position * count : (position + 1) * count])
    try:
        yield
    finally:
        _keep_to(allowed)


def _keep_to(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)


LOADER = "tensorflow.python.autograph.pyct.loader"


def keep_to_cluster() -> None:
    """Let AutoGraph write into the cluster's folder from now on; may be called again."""
    try:
        loader = importlib.import_module(LOADER)
    except ImportError:  # another version keeps it elsewhere: files are then left as before
        return
    _note_lines(loader)
    folder = cluster_env.folder()
    if folder is None:
        return
    if hasattr(loader, "tempfile"):
        named = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        vars(loader)["tempfile"] = SimpleNamespace(NamedTemporaryFile=named)


def _note_lines(loader: Any) -> None:
    """Have every map of lines noted from now on; once."""
    own = getattr(loader, "load_ast", None)
    if own is None or hasattr(own, "notes_lines"):
        return

    @functools.wraps(own)
    def load_ast(*args: Any, **settings: Any) -> Any:
        found = own(*args, **settings)
        module, origins = found[0], found[-1]
        if origins:
            tracebacks.note(module.__file__, origins)
        return found

    vars(load_ast)["notes_lines"] = True
    loader.load_ast = load_ast


_PROTOCOLS = ("tensorflow.tsl.profiler.protobuf", "tsl.profiler.protobuf", "xprof.protobuf")


class TensorFlowProfiler:
    """Collects what TensorFlow's threads, and GPUs, do."""

    def __init__(self) -> None:
        self._folder = ""

    def start(self) -> None:
        """Begin to collect."""
        self._folder = tempfile.mkdtemp(prefix="workbench-profile-", dir=cluster_env.folder())
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
        """End; write a Chrome trace to `path`, and the XSpace next to it.

        Raises:
            RunError: The profiler wrote nothing.
        """
        try:
            tf.profiler.experimental.stop(save=path is not None)
            if path is None:
                return None
            found = sorted(Path(self._folder).rglob("*.xplane.pb"))
            if not found:
                raise RunError("TensorFlow's profiler wrote no file.", code="WB-RUN-028")
            shutil.copyfile(found[0], path.with_suffix(".xplane.pb"))
            path.write_text(json.dumps({"traceEvents": list(_events(found[0]))}))
            return path
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of an XSpace as events of a Chrome trace, times in microseconds."""
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
        "This version of TensorFlow has no module that can read profiles.", code="WB-RUN-029"
    )


def make(spec: RunSpec) -> TensorFlowProfiler:
    """Return a profiler for a worker."""
    return TensorFlowProfiler()
