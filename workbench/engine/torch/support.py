"""What an engine needs from PyTorch: seeds, threads, names, models; but not the process group.

It is loaded by name (`engine.runtime.support`), so no other part of the engine names the framework.

It explains the cause and the repair of well-known mistakes whose error says little. In a model and
its optimizer, it finds parts that only some strategies can train. It also has PyTorch's profiler
for a window of steps.

Some imports must not be interrupted, because a half-imported `torch._dynamo` cannot be imported
again. The first step of an optimizer imports it. This takes seconds in an engine that was not
forked from a warm parent. If another rank failed meanwhile, the import would be interrupted, and
every later optimizer of that engine would fail. So a run imports it at its start, before the ranks
meet, and holds interrupts back until the import is complete.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from ...devices import mask
from ...errors import FitError, RunError
from ...history.disk import weights_stem
from ..debugging import stacks
from ..debugging.stacks import DeviceWork
from . import accelerator as accelerators
from .accelerator import give_back as give_back
from .data import map_batch
from .group import break_collectives as break_collectives
from .group import destroy_group as destroy_group
from .group import ensure_group as ensure_group
from .group import environ as environ
from .group import has_group as has_group
from .group import let_cells_join, verify
from .group import open_store as open_store
from .group import rest_group as rest_group
from .group import shutdown_group_sockets as shutdown_group_sockets
from .group import was_cut as was_cut
from .horovod import finder as horovod_finder
from .horovod.gradients import refuse_averaged

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec
    from ..context import RunContext


LOST_S = 5.0
"""How long a device may be busy after a failed cell. A device that raises is lost at once."""


def setup(spec: RunSpec) -> None:
    """Set threads, device and seeds before a cell; equal seeds give equal initial weights."""
    torch.set_num_threads(max(1, spec.threads))
    let_cells_join(spec)
    horovod_finder.install()
    _take_device(spec)
    accelerators.settle(spec.device)
    if spec.mode == "run":
        import_for_optimizers()
        seed = int(spec.overrides.get("seed", 0))
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)


SHARED = 0.9
"""The part of a device's memory that workers on the same device may use together."""


def _take_device(spec: RunSpec) -> None:
    device = accelerators.of(spec.device)
    mask.show(
        spec.accelerator, spec.gpus, spec.gpus_used,
        counted=not device.is_cpu and device.is_in_use(),
    )  # fmt: skip
    accelerators.take(spec.device)
    if spec.sharers > 1 or _limited:  # else the first worker takes all of it
        device.limit_memory(SHARED / spec.sharers if spec.sharers > 1 else 1.0)
        _limited.add(str(device.device))
    _asked.close()
    if not device.is_cpu:
        _asked.callback(stacks.ask_device(functools.partial(collective_under_way, device)))


_asked = contextlib.ExitStack()
_limited: set[str] = set()


def collective_under_way(device: accelerators.Accelerator) -> DeviceWork | None:
    """Return the device's unfinished collective; None: there is none.

    NCCL's flight recorder knows it, and reading the recorder never waits. The control thread asks
    inside the device's context. Otherwise the recorder, which looks at its events, would make a
    context on the first GPU.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    if dump is None or not dist.is_initialized():
        return None
    with device.current():
        entries = json.loads(dump(True, True)).get("entries", [])
    # Without TORCH_NCCL_ENABLE_TIMING, a collective that has begun is still called scheduled.
    open_ones = [one for one in entries if one.get("state") in ("started", "scheduled")]
    if not open_ones:
        return None
    name = str(open_ones[0].get("profiling_name", "")).rpartition(":")[2] or "a collective"
    return DeviceWork(True, f"in {name} on the GPU")


def on_updates(watch: Any) -> Callable[[], None]:
    """Tell `watch` when an optimizer begins and ends an update; return a function that ends this.

    An update begins with complete gradients. On a device it waits for complete gradients, because
    other workers may have to continue from its result.
    """

    def began(*unused: Any) -> None:
        verify()
        watch.update_began()

    before = register_optimizer_step_pre_hook(began)
    after = register_optimizer_step_post_hook(lambda *_: watch.update_ended())

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def device_is_lost(spec: RunSpec) -> bool:
    """Whether the engine's device has failed permanently, or does not answer."""
    return accelerators.of(spec.device).is_lost(LOST_S)


def names(spec: RunSpec) -> dict[str, Any]:
    """Return the names that cells find in addition to rank, world_size and device."""
    return {"dist": dist}


@contextlib.contextmanager
def around(run: RunContext) -> Iterator[dict[str, Any]]:
    """Wrap the cell of a training run; yields additional names for the cell."""

    def updated(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        run.updates += 1
        group = optimizer.param_groups[0]
        if "initial_lr" in group:  # a scheduler changes the rate
            run.log_rate(float(group["lr"]))

    counter = register_optimizer_step_post_hook(updated)
    try:
        yield {}
    finally:
        counter.remove()


def device_label(device: str) -> str:
    """Return `cpu`, or `cuda:0 NVIDIA H200`."""
    return accelerators.of(device).label


def save_weights(folder: Path, rank: int, arrays: dict[str, Any]) -> str:
    """Write the weights as `weights.npz`, and as `weights.pt` for `torch.load(weights_only=True)`.

    Returns:
        Name of the NumPy file; ranks other than 0 write `weights-rank{r}.*`.
    """
    stem = weights_stem(rank)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{stem}.npz", **arrays)
    torch.save(
        {k: torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}, folder / f"{stem}.pt"
    )
    return f"{stem}.npz"


def explain(error: BaseException) -> str | None:
    """Return the cause of a well-known mistake in a cell; None for all other errors."""
    return explain_mistake(error)


class Stages(torch.nn.Sequential):
    """Modules given as a list: a chain that the user has already cut into stages."""


def _joined(model: Any) -> Any:
    """Return a list of modules as one module; return anything else unchanged."""
    if isinstance(model, (list, tuple)) and all(isinstance(m, torch.nn.Module) for m in model):
        return Stages(*model)
    return model


def sketch_module(model: Any) -> tuple[torch.nn.Module, Callable[[], torch.nn.Module] | None]:
    """Return a given model, or only the form of a model that a function makes; and its builder.

    The form is on the `meta` device: layers, names and shapes without memory. No random number is
    used. Some functions cannot run there, because they compute with weights. They build the whole
    model.

    Raises:
        FitError: The same errors as in `build_module`.
    """
    if isinstance(model, (torch.nn.Module, type, list, tuple)) or not callable(model):
        return build_module(model), None
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module = build_module(model)
    except FitError:
        raise
    except Exception:
        return build_module(model), None
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    tensors = [*module.parameters(), *module.buffers()]
    if any(not tensor.is_meta for tensor in tensors):  # it returns a model that already exists
        return module, None
    return module, lambda: build_module(model)


def build_module(model: Any) -> torch.nn.Module:
    """Return the module given to `wb.fit` or `wb.prepare`; if it is a function, call it.

    Raises:
        FitError: It does not give a module, or the module has nothing to train.
    """
    built = _joined(model)
    if not isinstance(model, (torch.nn.Module, type)) and callable(model):
        built = _joined(model())
    if isinstance(model, type) or not isinstance(built, torch.nn.Module):
        raise FitError(
            "The model is not a torch.nn.Module.",
            seen=f"class {model.__name__}" if isinstance(model, type) else type(built).__name__,
            allowed="a module, or a function without arguments that returns a module",
            next_step="pass a module (model = Net()), or end the function with `return model`",
            code="WB-FIT-059",
        )
    if isinstance(built, torch.nn.parallel.DistributedDataParallel):
        raise FitError(
            "The model is already wrapped in DistributedDataParallel.",
            next_step="pass model.module, or train in your own loop and record it with wb.watch",
            code="WB-FIT-060",
        )
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise FitError(
            "The model has no trainable parameter.",
            seen=type(built).__name__,
            next_step="set requires_grad=True on some of the model's parameters",
            code="WB-FIT-061",
        )
    return built


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise FitError unless `optimizer` is a function or is built on the model's parameters."""
    refuse_averaged(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        owned = {id(parameter) for parameter in model.parameters()}
        strange = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in owned]
        if strange:
            raise FitError(
                "`optimizer` contains parameters that do not belong to the model.",
                seen=f"parameters that are not in the model: {len(strange)}",
                next_step="build the optimizer from this model's parameters; wb.fit also takes a "
                "function: optimizer=lambda p: torch.optim.SGD(p, 0.1)",
                code="WB-FIT-062",
            )
    elif not callable(optimizer):
        raise FitError(
            "`optimizer` must be a torch optimizer or a function.",
            seen=optimizer,
            allowed="a torch.optim.Optimizer, or a function (parameters) -> optimizer",
            next_step="pass optimizer=lambda p: torch.optim.SGD(p, 0.1)",
            code="WB-FIT-063",
        )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise FitError unless the scheduler can be stepped after each optimizer step."""
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    if isinstance(scheduler, ReduceLROnPlateau):
        raise FitError(
            "wb.fit cannot call ReduceLROnPlateau.step(), which needs a metric such as the loss.",
            next_step="remove `scheduler=`; call scheduler.step(loss) in a callback's on_epoch_end",
            code="WB-FIT-064",
        )
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise FitError(
                "The scheduler was not built for the optimizer that wb.fit received.",
                next_step="pass scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10)",
                code="WB-FIT-065",
            )
    elif scheduler is not None and not callable(scheduler):
        raise FitError(
            "`scheduler` must be a torch scheduler or a function.",
            seen=scheduler,
            allowed="a scheduler, or a function that makes a scheduler from the optimizer",
            code="WB-FIT-066",
        )


def forms(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters and buffers that have no memory (device `meta`)."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


def weight_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer, in the model's order."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def load_weights(model: torch.nn.Module, arrays: dict[str, Any]) -> None:
    """Give a model weights by name; others are not changed."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    model.load_state_dict({**model.state_dict(), **tensors})


def parameter_count(model: torch.nn.Module) -> int:
    """Return how many numbers the model trains."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


_BATCHES = re.compile(r"input batch_size \((\d+)\) to match target batch_size \((\d+)\)")
_VIEWS = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0")
MOST_NODES = 10_000


def explain_mistake(error: BaseException) -> str | None:
    """Return the cause of an error of a cell, or None if there is nothing to add."""
    found = _BATCHES.search(str(error))
    if found is None:
        return None
    rows, samples = int(found[1]), int(found[2])
    frames = list(_frames(error.__traceback__))
    shape = _folded(frames, rows, samples)
    if shape is None:
        return None
    one, width = math.prod(shape[1:]), math.prod(shape) // rows
    text = (
        f"The loss received {rows} outputs for {samples} targets, because view() changed the "
        f"number of samples:\n  {tuple(shape)} became ({rows}, {width})"
    )
    line = _line(frames)
    text += f" in: {line}" if line else ""
    text += (
        f"\n  before view(), one sample has {' * '.join(map(str, shape[1:]))} = {one} values, not "
        f"{width}. So view(-1, {width}) makes {one / width:g} rows from each sample\n"
        "  next: use x.flatten(1), which never changes the batch dimension"
    )
    if one == 4 * width and len(shape) == 4:
        text += (
            f", and set in_features of the next Linear to {one}. Or put a 2x2 max-pool before "
            f"view(): the pool reduces {shape[2]}x{shape[3]} to {shape[2] // 2}x{shape[3] // 2}"
        )
    else:
        text += f", and set in_features of the next Linear to {one}"
    return text


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _folded(frames: list[FrameType], rows: int, samples: int) -> tuple[int, ...] | None:
    """Return the shape that a view folded into the batch, from the graph behind the output."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if (
                isinstance(value, torch.Tensor)
                and value.grad_fn is not None
                and value.dim()
                and len(value) == rows
            ):
                return _search(value.grad_fn, rows, samples)
    return None


def _search(root: Any, rows: int, samples: int) -> tuple[int, ...] | None:
    waiting, seen = [root], {root}
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node.name() in _VIEWS:
            shape = tuple(int(size) for size in node._saved_self_sym_sizes)
            if shape[:1] == (samples,) and math.prod(shape) % rows == 0:
                return shape
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return None


def _line(frames: list[FrameType]) -> str | None:
    """Return the line of a model's forward that has the view, if only one line is possible."""
    lines: set[str] = set()
    models = {
        type(value)
        for frame in frames
        for value in list(frame.f_locals.values())
        if isinstance(value, torch.nn.Module)
    }
    for kind in models:
        if kind.__module__.startswith("torch."):
            continue
        try:
            source = inspect.getsource(kind.forward)
        except (OSError, TypeError):
            continue
        lines |= {
            line.strip() for line in source.splitlines() if ".view(" in line or ".reshape(" in line
        }
    return lines.pop() if len(lines) == 1 else None


OPTIMIZERS_NEED = "torch._dynamo"


def import_for_optimizers() -> None:
    """Import the modules that the first optimizer step would import."""
    if OPTIMIZERS_NEED not in sys.modules:
        with interrupts_held_back():
            importlib.import_module(OPTIMIZERS_NEED)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay SIGINT to the end of the block; do nothing in threads that receive no SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


_LOG_LEVEL = "KINETO_LOG_LEVEL"


_ACTIVITIES = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU", "mps": "MPS"}
"""The profiler's name for computations on a kind of device. For a kind that a package
defines it is `PrivateUse1`."""


class TorchProfiler:
    """Collects operators on the CPU, and CUDA kernels if the worker has a GPU."""

    def __init__(self, spec: RunSpec) -> None:
        self._device = accelerators.of(spec.device)
        activities = [ProfilerActivity.CPU]
        known: Any = supported_activities()  # type: ignore[no-untyped-call]
        own: Any = getattr(ProfilerActivity, _ACTIVITIES.get(self._device.kind, "PrivateUse1"), 0)
        if not self._device.is_cpu and own in known:
            activities.append(own)
        self._profile = profile(activities=activities, acc_events=True)

    def start(self) -> None:
        """Begin to collect.

        Raises:
            RunError: The cell's own profiler already runs.
        """
        if torch._C._autograd._profiler_enabled():
            raise RunError("the cell's own torch.profiler is running", code="WB-RUN-033")
        self._synchronise()
        with _quiet():
            self._profile.start()

    def step(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Mark what happens within this context as a step."""
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
        self._device.synchronize()  # the trace has the window's kernels only


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Kineto's own log lines out of the cell; it reads this setting at its first use."""
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


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Let a model evaluate inside; then modules that trained before train again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_closure(optimizer: Any) -> None:
    """Raise FitError if an optimizer's step needs a closure.

    Args:
        optimizer: An optimizer or its class; if it is a function, its result is not known yet.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise FitError(
            "This optimizer needs a closure, because it computes the loss several times in one "
            "step. wb.fit computes the loss once.",
            seen=kind.__name__,
            allowed="an optimizer that needs no closure (SGD, Adam, AdamW, ...)",
            next_step="pass optimizer=lambda p: torch.optim.AdamW(p, 1e-3), or write your own loop "
            "with wb.prepare under %%distributed one_device",
            code="WB-FIT-046",
        )


def sparse_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers that were made with sparse=True."""
    return [
        f"{name or type(module).__name__} (sparse=True)"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True
    ]


def make_real(
    model: torch.nn.Module, peek: Callable[[], Any], step_fn: Callable[..., Any] | None = None
) -> None:
    """Give lazy layers their shapes, from a batch of one sample; other models stay unchanged.

    The weights are drawn here from the seed that all ranks share, before the strategy begins.

    Args:
        peek: Returns a batch of one sample; None if the data cannot be read without consuming it.
        step_fn: Calls the model on a batch. Without it, the model is called on the batch's first
            part.

    Raises:
        FitError: The batch does not determine the shapes.
    """
    if not _lazy_layers(model):
        return
    batch = peek()
    if batch is not None:
        here = next(iter([*model.parameters(), *model.buffers()])).device
        batch = map_batch(lambda t: t.to(here), batch)
        try:
            # Evaluate: no dropout, no batch statistics of a single sample.
            with evaluating(model), torch.no_grad():
                if step_fn is not None:
                    step_fn(model, batch)
                else:
                    model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        except Exception as error:
            raise _unreal(model, f"{type(error).__name__}: {error}") from error
    if _lazy_layers(model):
        raise _unreal(model, ", ".join(_lazy_layers(model)))


def _lazy_layers(model: torch.nn.Module) -> list[str]:
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(is_lazy(p) for p in module.parameters(recurse=False))
        or any(is_lazy(b) for b in module.buffers(recurse=False))
    ]


def _unreal(model: torch.nn.Module, seen: str) -> FitError:
    return FitError(
        "The shapes of the model's lazy layers could not be derived from the data.",
        seen=seen,
        allowed="a model that can be called as model(x), and data whose batches are x or (x, y)",
        next_step="call the model once yourself, model(x[:1]), then train it",
        code="WB-FIT-047",
    )
