"""What an engine needs to know of PyTorch: seeds, threads, names, models; the group is apart.

Loaded by name (`engine.runtime.support`), so nothing else in the engine names the framework.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import FitError
from ..history.disk import weights_stem
from ..protocol import RunSpec
from .context import RunContext
from .torch_checks import check_closure as check_closure
from .torch_checks import make_real as make_real
from .torch_checks import sparse_layers as sparse_layers
from .torch_group import destroy_group as destroy_group
from .torch_group import ensure_group as ensure_group
from .torch_group import environ as environ
from .torch_group import has_group as has_group
from .torch_group import let_cells_join
from .torch_group import open_store as open_store
from .torch_group import shutdown_group_sockets as shutdown_group_sockets
from .torch_imports import import_for_optimizers


def setup(spec: RunSpec) -> None:
    """Set threads, device and seeds before a cell; equal seeds give equal initial weights."""
    torch.set_num_threads(max(1, spec.threads))
    let_cells_join(spec)
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(spec.device))
    if spec.mode == "run":
        import_for_optimizers()
        seed = int(spec.overrides.get("seed", 0))
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)


def on_updates(watch: Any) -> Callable[[], None]:
    """Tell `watch` when an optimizer begins and ends an update; returns what ends that."""
    before = register_optimizer_step_pre_hook(lambda *_: watch.update_began())
    after = register_optimizer_step_post_hook(lambda *_: watch.update_ended())

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def names(spec: RunSpec) -> dict[str, Any]:
    """Return the names that cells find besides rank, world_size and device."""
    return {"dist": dist}


@contextlib.contextmanager
def around(run: RunContext) -> Iterator[dict[str, Any]]:
    """Surround the cell of a training run; yields names that the cell finds besides."""

    def updated(*unused: Any) -> None:
        run.updates += 1

    counter = register_optimizer_step_post_hook(updated)
    try:
        yield {}
    finally:
        counter.remove()


def device_label(device: str) -> str:
    """Return `cpu`, or `cuda:0 NVIDIA H200`."""
    if not device.startswith("cuda"):
        return device
    return f"{device} {torch.cuda.get_device_name(torch.device(device))}"


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
    """Return what lies behind a well-known mistake in a cell; None for all others."""
    from .torch_explain import explain as explained

    return explained(error)


class Stages(torch.nn.Sequential):
    """Modules given as a list: a chain that the user has cut already."""


def _joined(model: Any) -> Any:
    """Return a list of modules as one module; anything else as it is."""
    if isinstance(model, (list, tuple)) and all(isinstance(m, torch.nn.Module) for m in model):
        return Stages(*model)
    return model


def sketch_module(model: Any) -> tuple[torch.nn.Module, Callable[[], torch.nn.Module] | None]:
    """Return a model and, where a function makes it, the model's form alone and its builder.

    The form lies on the `meta` device: layers, names and shapes without memory. No random number
    is used up. A function that cannot run there (it computes with weights) builds the whole.

    Raises:
        FitError: As `build_module`.
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
    if any(not tensor.is_meta for tensor in tensors):  # it hands out a model that exists
        return module, None
    return module, lambda: build_module(model)


def build_module(model: Any) -> torch.nn.Module:
    """Return the module that `wb.fit` or `wb.prepare` was given, calling a function that makes one.

    Raises:
        FitError: It is neither, or has nothing to train.
    """
    built = _joined(model)
    if not isinstance(model, (torch.nn.Module, type)) and callable(model):
        built = _joined(model())
    if isinstance(model, type) or not isinstance(built, torch.nn.Module):
        raise FitError(
            "The model is no torch.nn.Module.",
            seen=type(built).__name__ if not isinstance(model, type) else f"class {model.__name__}",
            allowed="a module, or a function without arguments that returns one",
            next_step="pass the module itself: wb.fit(model, ...)",
            code="WB-FIT-059",
        )
    if isinstance(built, torch.nn.parallel.DistributedDataParallel):
        raise FitError(
            "The model is wrapped in DistributedDataParallel already.",
            next_step="pass model.module, or keep your wrapper and call wb.watch instead",
            code="WB-FIT-060",
        )
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise FitError(
            "The model has no parameter that can be trained.",
            seen=type(built).__name__,
            next_step="set requires_grad=True on some of its parameters",
            code="WB-FIT-061",
        )
    return built


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    """Raise FitError unless `optimizer` is built on the model's parameters or is a function."""
    if isinstance(optimizer, torch.optim.Optimizer):
        owned = {id(parameter) for parameter in model.parameters()}
        strange = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in owned]
        if strange:
            raise FitError(
                "The optimizer holds parameters that are not the model's, so they would not train.",
                seen=f"{len(strange)} foreign parameters",
                next_step="build it from this model, or pass a function of the parameters: "
                "optimizer=lambda p: torch.optim.SGD(p, 0.1)",
                code="WB-FIT-062",
            )
    elif not callable(optimizer):
        raise FitError(
            "The optimizer was not understood.",
            seen=optimizer,
            allowed="a torch.optim.Optimizer, or a function of the parameters that returns one",
            next_step="optimizer=lambda p: torch.optim.SGD(p, 0.1)",
            code="WB-FIT-063",
        )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise FitError unless the scheduler can be stepped once per optimizer step."""
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    if isinstance(scheduler, ReduceLROnPlateau):
        raise FitError(
            "ReduceLROnPlateau needs a measured value, so it cannot be stepped by wb.fit.",
            next_step="step it in a callback: on_epoch_end(epoch, logs)",
            code="WB-FIT-064",
        )
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise FitError(
                "The scheduler steers another optimizer than the one that is trained with.",
                next_step="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10)",
                code="WB-FIT-065",
            )
    elif scheduler is not None and not callable(scheduler):
        raise FitError(
            "The scheduler was not understood.",
            seen=scheduler,
            allowed="a scheduler, or a function of the optimizer that returns one",
            code="WB-FIT-066",
        )


def weight_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer, in the model's order."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def load_weights(model: torch.nn.Module, arrays: dict[str, Any]) -> None:
    """Give a model weights by name; those that are not named stay."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    model.load_state_dict({**model.state_dict(), **tensors})


def parameter_count(model: torch.nn.Module) -> int:
    """Return how many numbers the model learns."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
