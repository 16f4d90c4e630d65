"""What an engine needs to know of PyTorch: seeds, threads, environment, process group.

Loaded by name (`engine.runtime.support`), so nothing else in the engine names the framework.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ClusterError, FitError
from ..protocol import RunSpec
from .context import RunContext
from .torch_checks import check_closure as check_closure
from .torch_checks import sparse_layers as sparse_layers
from .torch_imports import import_for_optimizers

GROUP_TIMEOUT = timedelta(minutes=30)
DESTROY_S = 5.0

_kept: set[int] = set()  # inodes of sockets that are not the group's
_store_port = 0


def setup(spec: RunSpec) -> None:
    """Set threads, device and seeds before a cell; equal seeds give equal initial weights."""
    torch.set_num_threads(max(1, spec.threads))
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(spec.device))
    if spec.mode == "run":
        import_for_optimizers()
        seed = int(spec.overrides.get("seed", 0))
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)


def environ(spec: RunSpec) -> dict[str, str]:
    """Return the environment that torchrun would set, so that other libraries find their rank."""
    host = spec.hosts[spec.rank] if spec.hosts else ""
    same = [rank for rank, name in enumerate(spec.hosts) if name == host]
    local_rank = same.index(spec.rank) if same else spec.rank
    local_size = len(same) or spec.world_size
    address, port = spec.store or ("127.0.0.1", 0)
    values = {
        "RANK": spec.rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": sorted(set(spec.hosts)).index(host) if spec.hosts else 0,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": spec.run_id or spec.prefix or "workbench",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Env-style groups of a cell meet in the same store; the attempt keeps them apart.
        "TORCHELASTIC_RESTART_COUNT": zlib.crc32(spec.prefix.encode()) % 1_000_000,
        # Connected when it is made: a rank that waits for a peer's first connection has no socket
        # that could be shut, so nothing could end its wait.
        "TORCH_GLOO_LAZY_INIT": 0,
    }
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun, which sets it where the user did not
        values["OMP_NUM_THREADS"] = max(1, spec.threads)
    if local_size == spec.world_size:
        values["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {name: str(value) for name, value in values.items()}


def ensure_group(spec: RunSpec) -> None:
    """Join the run's process group, as a client of the keeper's store.

    Raises:
        ClusterError: The keeper's store is not to be reached.
    """
    global _store_port
    if dist.is_initialized():
        return
    stores: Any = dist  # the stores are there, but not declared as exported
    store = _connect_store(spec)
    assert spec.store is not None
    _store_port = spec.store[1]
    _kept.clear()
    _kept.update(inode for _, inode in _sockets())
    store.set_timeout(GROUP_TIMEOUT)
    hook = sys.excepthook
    try:
        dist.init_process_group(
            spec.backend,
            store=stores.PrefixStore(spec.prefix, store),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=GROUP_TIMEOUT,
        )
    except BaseException:
        # torch numbers groups and counts this one. The number is part of the keys under which
        # ranks meet, so the next group would wait for ranks that count otherwise.
        with contextlib.suppress(AttributeError):
            stores.distributed_c10d._world.group_count = 0
        raise
    finally:
        # torch wraps the hook of before in one of its own with every group, and keeps them all.
        sys.excepthook = hook


def on_updates(watch: Any) -> Callable[[], None]:
    """Tell `watch` when an optimizer begins and ends an update; returns what ends that."""
    before = register_optimizer_step_pre_hook(lambda *_: watch.update_began())
    after = register_optimizer_step_post_hook(lambda *_: watch.update_ended())

    def undo() -> None:
        before.remove()
        after.remove()

    return undo


def has_group() -> bool:
    """Return whether this worker is in a process group."""
    return dist.is_initialized()


def _connect_store(spec: RunSpec) -> Any:
    if spec.store is None:
        raise ClusterError("The engine was not told where the store is.", seen=spec.run_id)
    host, port = spec.store
    stores: Any = dist  # the stores are there, but not declared as exported
    try:
        return stores.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            "The store in which workers meet does not answer.",
            seen=f"{host}:{port}",
            next_step="%cluster restart",
        ) from error


def open_store(spec: RunSpec) -> Any:
    """Return the run's part of the keeper's store, where its processes find each other.

    Raises:
        ClusterError: The keeper's store is not to be reached.
    """
    stores: Any = dist
    return stores.PrefixStore(f"{spec.prefix}links/", _connect_store(spec))


def destroy_group() -> None:
    """Leave the process group; never hangs, even when a peer died in a collective.

    A DDP wrapper that is still alive would deadlock here, so its hold on the group is taken away;
    what remains forwards to the plain module.
    """
    if not dist.is_initialized():
        return
    _retire_wrappers()
    worker = threading.Thread(target=_destroy, name="workbench-destroy", daemon=True)
    worker.start()
    worker.join(DESTROY_S)
    if worker.is_alive():
        shutdown_group_sockets()
        worker.join(DESTROY_S)


def _retire_wrappers() -> None:
    """Empty every DDP wrapper of this process: their names may outlive the group they use."""
    kinds = set(_with_subclasses(torch.nn.parallel.DistributedDataParallel))
    # Among 100,000 objects `isinstance` alone would take a third of a second.
    for wrapper in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        held = wrapper.__dict__
        if "reducer" in held:
            held["forward"] = wrapper.module.forward
            for name in ("reducer", "logger", "process_group", "device_mesh"):
                held.pop(name, None)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    sub: type[Any]
    for sub in kind.__subclasses__():
        yield from _with_subclasses(sub)


def _destroy() -> None:
    # A group whose peer died complains while it is taken down; it is gone all the same.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def shutdown_group_sockets(*, store: bool = False) -> int:
    """Break the process group's connections, so that a blocked collective raises at once.

    Callable from any thread. The group's sockets are those opened since it was made that are
    connected, are not the store's, and lead to this host when the group is local. Listening
    sockets are left alone (shutting one ends the process).

    Args:
        store: Break the connection to the store as well: a worker whose peer has never joined
            waits there, not in a collective.

    Returns:
        How many connections were shut.
    """
    shut = 0
    local = os.environ.get("GLOO_SOCKET_IFNAME", "").startswith("lo")
    for fd, inode in _sockets():
        if inode in _kept and not store:
            continue
        with contextlib.suppress(OSError):
            copy = os.dup(fd)
            with socket.socket(fileno=copy) as connection:
                wanted = _is_groups(connection, local) if inode not in _kept else False
                wanted = wanted or (store and _peer_port(connection) == _store_port)
                if os.fstat(copy).st_ino == inode and wanted:
                    connection.shutdown(socket.SHUT_RDWR)
                    shut += 1
    return shut


def _is_groups(connection: socket.socket, local: bool) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    peer = connection.getpeername()  # OSError for a listening socket: it has no peer
    address = str(peer[0]).removeprefix("::ffff:")
    if local and not (address.startswith("127.") or address == "::1"):
        return False
    return bool(peer[1] != _store_port)


def _peer_port(connection: socket.socket) -> int:
    inet = connection.family in (socket.AF_INET, socket.AF_INET6)
    return int(connection.getpeername()[1]) if inet else 0


def _sockets() -> list[tuple[int, int]]:
    """Return (descriptor, inode) of this process's sockets."""
    found = []
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if (status.st_mode & 0o170000) == 0o140000:
                found.append((int(name), status.st_ino))
    return found


def names(spec: RunSpec) -> dict[str, Any]:
    """Return the names that cells find besides rank, world_size and device."""
    return {"dist": dist}


@contextlib.contextmanager
def around(run: RunContext) -> Iterator[dict[str, Any]]:
    """Surround the cell of a training run; yields names that the cell finds besides."""
    yield {}


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
    stem = "weights" if rank == 0 else f"weights-rank{rank}"
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
        )
    if isinstance(built, torch.nn.parallel.DistributedDataParallel):
        raise FitError(
            "The model is wrapped in DistributedDataParallel already.",
            next_step="pass model.module, or keep your wrapper and call wb.watch instead",
        )
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise FitError(
            "The model has no parameter that can be trained.",
            seen=type(built).__name__,
            next_step="set requires_grad=True on some of its parameters",
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
            )
    elif not callable(optimizer):
        raise FitError(
            "The optimizer was not understood.",
            seen=optimizer,
            allowed="a torch.optim.Optimizer, or a function of the parameters that returns one",
            next_step="optimizer=lambda p: torch.optim.SGD(p, 0.1)",
        )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise FitError unless the scheduler can be stepped once per optimizer step."""
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    if isinstance(scheduler, ReduceLROnPlateau):
        raise FitError(
            "ReduceLROnPlateau needs a measured value, so it cannot be stepped by wb.fit.",
            next_step="step it in a callback: on_epoch_end(epoch, logs)",
        )
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise FitError(
                "The scheduler steers another optimizer than the one that is trained with.",
                next_step="scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 10)",
            )
    elif scheduler is not None and not callable(scheduler):
        raise FitError(
            "The scheduler was not understood.",
            seen=scheduler,
            allowed="a scheduler, or a function of the optimizer that returns one",
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
