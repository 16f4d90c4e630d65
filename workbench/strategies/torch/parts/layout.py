"""Re-partitions a model's parameters in place (`fully_shard`, `parallelize_module`), and back.

PyTorch's ways to shard a model replace its parameters by DTensors, change the classes of its
modules and hook into their forward. PyTorch cannot undo these changes. An optimizer that was built
before still holds the old parameters: it would train nothing, and there would be no error. Here
everything is restored when the run ends:

    lay out:   parameter -> DTensor, in the modules and in the optimizer's groups; the memory of
               the plain parameter is freed
    gather:    DTensor -> the same plain parameter, filled again; classes and hooks as before

So the user's module, optimizer and scheduler keep their identity throughout. Only a parameter that
had no memory before (device `meta`, see `sharded.py`) is a new object afterwards.

The whole model is gathered tensor by tensor, and each part is freed as soon as the whole tensor
exists. If the whole model does not fit the workers' devices, it is gathered on the host. If the
host has no room for one copy per worker, only rank 0 gathers it.

The common code of strategies that divide one model in this way is here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ....engine.contract import Strategy
from ....engine.torch import accelerator
from ....engine.torch.data import map_batch
from ....errors import FitError
from ....shared import events
from .guard import broadcast
from .replica import Trainer, held_bytes, parts_state

ROOM = 1.1
"""A whole model needs this multiple of its bytes as free memory, because allocators round up."""


def make_mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the workers of this run as a grid."""
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def release_mesh(mesh: DeviceMesh | None) -> None:
    """Release a mesh's process groups: PyTorch's caches keep the mesh itself permanently."""
    if mesh is not None:
        getattr(mesh, "_pg_registry", {}).clear()


class _Module:
    """One module's state before it was divided, and the changes since."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.cls = module, type(module)
        self.parameters = dict(module._parameters)
        self.names = set(module.__dict__)
        self.hooks = {
            name: set(value) for name, value in module.__dict__.items() if name.endswith("_hooks")
        }
        self.added: set[str] = set()

    def changed(self) -> None:
        self.added = set(self.module.__dict__) - self.names

    def undo(self) -> None:
        module = self.module
        module.__class__ = self.cls
        _composed().pop(module, None)
        for name in self.added:
            module.__dict__.pop(name, None)
        for name, kept in self.hooks.items():
            hooks = module.__dict__[name]
            for key in [key for key in hooks if key not in kept and _is_torchs(hooks[key])]:
                for table in (n for n in module.__dict__ if n.startswith(name)):
                    module.__dict__[table].pop(key, None)  # also from `.._with_kwargs`
        for name, parameter in self.parameters.items():
            module._parameters[name] = parameter


class Layout:
    """A model that is divided over the workers.

    Args:
        model: The user's module, equal on all workers.
        optimizer: The user's optimizer if it is built already: its groups then hold the new
            parameters, and its state is partitioned like them.
        lay_out: Replaces parameters in place.

    Raises:
        FitError: The optimizer holds parameters that cannot be replaced.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, lay_out: Callable[[torch.nn.Module], object]
    ) -> None:
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        if self.optimizer is not None:
            check_exchangeable(self.optimizer)
        self._modules = [_Module(module) for module in model.modules()]
        lay_out(model)
        self._exchanged: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for before in self._modules:
            before.changed()
            for name, old in before.parameters.items():
                new = before.module._parameters[name]
                if old is not None and new is not None and new is not old:
                    self._exchanged[old] = new
        if self.optimizer is not None:
            exchange(self.optimizer, self._exchanged, _like)
        for old in self._exchanged:
            old.data = old.data.new_empty(0)  # its values are in the new parameter now

    @property
    def laid_out(self) -> bool:
        """Whether the model is still divided."""
        return bool(self._modules)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole: parameters, and the optimizer's state of each of them."""
        every: list[torch.Tensor] = [*self._exchanged.values()]
        if self.optimizer is not None:
            for new in self._exchanged.values():
                values = self.optimizer.state.get(new, {}).values()
                every += [v for v in values if isinstance(v, torch.Tensor) and v.dim()]
        return sum(tensor.numel() * tensor.element_size() for tensor in every)

    def gather(self, *, everywhere: bool = True, to: torch.device | None = None) -> None:
        """Give the model its plain parameters back, with the trained values; collective.

        It works tensor by tensor. In addition to the parts, a device holds one whole tensor at a
        time, or all tensors that it keeps.

        Args:
            everywhere: Whether all workers get the values; otherwise only rank 0 does, and the
                other workers' parameters end on the meta device.
            to: The device of the whole model; by default that of the parts.
        """
        keep = everywhere or dist.get_rank() == 0

        def whole(part: torch.Tensor) -> torch.Tensor | None:
            full = gathered(part)
            kept = full if to is None else full.to(to)
            own = local(part).untyped_storage()
            if own._cdata != kept.untyped_storage()._cdata:
                own.resize_(0)
            return kept if keep else None

        for new in self._exchanged.values():
            new.grad = None
        final: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        for old, new in self._exchanged.items():
            values = whole(new.detach())
            if values is None:
                final[old] = _form(new)
            elif old.is_meta:
                final[old] = torch.nn.Parameter(values, new.requires_grad)
            else:
                old.data = values
        if self.optimizer is not None:
            back = {new: final.get(old, old) for old, new in self._exchanged.items()}
            exchange(self.optimizer, back, lambda value, new: whole(value))
        self._undo(final)

    def abandon(self) -> None:
        """Restore the modules after a failure, without values: one worker cannot gather the parts.

        The parameters end on the meta device, where any use of them raises an error.
        """
        final = {old: _form(new) for old, new in self._exchanged.items()}
        if self.optimizer is not None and self.laid_out:
            back = {new: final[old] for old, new in self._exchanged.items()}
            exchange(self.optimizer, back, lambda value, new: None)
        self._undo(final)

    def _undo(self, final: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Restore the modules, with the new parameters in `final`."""
        for before in self._modules:
            before.undo()
            for name, old in before.parameters.items():
                if old is not None and old in final:
                    before.module._parameters[name] = final[old]
        for old in self._exchanged:
            old.grad = None
        self._modules, self._exchanged = [], {}


def _form(like: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter without memory; any use of it raises an error."""
    empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return torch.nn.Parameter(empty, like.requires_grad)


def check_exchangeable(optimizer: torch.optim.Optimizer) -> None:
    """Raise FitError if the optimizer keeps parameters outside its groups."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state"):
            continue
        items = value if isinstance(value, (list, tuple, set)) else [value]
        if any(id(item) in owned for item in items):
            raise FitError(
                "The strategy cannot divide this optimizer's parameters, because the optimizer "
                "also stores them outside param_groups.",
                seen=f"the attribute {name} of {type(optimizer).__name__}",
                allowed="optimizers that have their parameters only in param_groups",
                next_step="pass a function that builds the optimizer: optimizer=lambda p: "
                f"{type(optimizer).__name__}(p, ...)",
                code="WB-FIT-117",
            )


def exchange(
    optimizer: torch.optim.Optimizer,
    mapping: dict[torch.nn.Parameter, torch.nn.Parameter],
    convert: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor | None],
) -> None:
    """Replace an optimizer's parameters in place, so that existing schedulers still control it.

    Args:
        mapping: New parameter by old one.
        convert: Returns the replacement of a state tensor of a parameter's shape; None drops it.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        group["params"] = [mapping.get(p, p) for p in group["params"]]
    for old, new in mapping.items():
        if old not in state:
            continue
        values = state.pop(old)
        for name, value in list(values.items()):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == old.shape:
                values[name] = convert(value, new)
        if all(value is not None for value in values.values()):
            state[new] = values


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor; a plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the norm of the whole model's gradient; collective.

    Parameters can be DTensors over one mesh, or equal on all workers. Squares of shards are added
    up over the workers; equal parameters count once.
    """
    # the sums for shards, and for parameters that are equal on all workers
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            own = local(gradient)
            squares = squares.to(own.device)
            sharded = isinstance(gradient, DTensor) and any(
                placement.is_shard() for placement in gradient.placements
            )
            squares[0 if sharded else 1] += own.square().sum().double()
    dist.all_reduce(squares[:1])
    return squares.sum().sqrt()


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], clip_norm: float) -> None:
    """Scale gradients so that the norm of the whole model's gradient is at most `clip_norm`."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    scale = (clip_norm / (grad_norm(held) + 1e-6)).clamp(max=1.0)
    for parameter in held:
        assert parameter.grad is not None
        own = local(parameter.grad)
        own.mul_(scale.to(own.dtype))


def whole_state(trainer: Trainer, *, keep: bool = True) -> dict[str, Any]:
    """Return a trainer's state with every partitioned tensor gathered; collective.

    Args:
        keep: Whether this worker keeps the state. A worker that only helps to gather holds one
            tensor at a time.
    """
    state = parts_state(trainer)
    if not keep:

        def help_gather(tensor: torch.Tensor) -> None:
            gathered(tensor.detach())

        map_batch(help_gather, state)
        return {}
    return map_batch(lambda t: gathered(t.detach()).to("cpu", copy=True), state)  # type: ignore[no-any-return]


def load_whole_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load the state that `whole_state` returned; each worker takes its part."""
    own = trainer.model.state_dict()
    model = {name: _like(value, own[name]) for name, value in state["model"].items()}
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    slots: dict[int, Any] = state["optimizer"]["state"]
    parts = {
        place: {
            name: _like(value, parameters[place])
            if isinstance(value, torch.Tensor) and value.shape == parameters[place].shape
            else value
            for name, value in values.items()
        }
        for place, values in slots.items()
    }
    optimizer = {**state["optimizer"], "state": parts}
    trainer.load_state({**state, "model": model, "optimizer": optimizer})


def _like(value: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `value` partitioned as `new` is."""
    if not isinstance(new.data, DTensor):
        return value
    return distribute_tensor(value, new.data.device_mesh, new.data.placements)


def _composed() -> Any:
    """Return PyTorch's register of modules with `fully_shard`.

    PyTorch has no function to undo it.
    """
    try:
        from torch.distributed import _composable_state as register
    except ImportError:  # pragma: no cover - another PyTorch
        return {}
    return getattr(register, "_module_state_mapping", {})


def _is_torchs(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed")


class Partitioned(Strategy):
    """Keeps parts of parameters; gives the user the whole, plain model back at the end."""

    trainer: Trainer | None = None
    layout: Layout | None = None
    mesh: DeviceMesh | None = None
    state_is_collective = True

    def equal_buffers(self) -> None:
        """Give all workers rank 0's buffers (BatchNorm's statistics): training reads none."""
        trainer = self._trainer
        broadcast(trainer.model.buffers(), trainer.device)

    def finish(self) -> None:
        """Gather the trained model: on every worker, or on rank 0 (`gather=first`)."""
        if self.layout is not None and self.layout.laid_out:
            self.equal_buffers()
            everywhere, to = self._place_of_whole(self.layout.whole_bytes)
            self.layout.gather(everywhere=everywhere, to=to)
            for module in self._trainer.model.modules() if to is not None else ():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(to)

    def _place_of_whole(self, size_bytes: int) -> tuple[bool, torch.device | None]:
        """Agree which workers get the whole model, and on which device it has room. Collective.

        Returns:
            Whether all workers get it; and its device, None for the device of the parts.
        """
        asked = self.options["gather"] == "all"
        hosts = self.context.spec.hosts
        here = hosts.count(hosts[self.rank]) if hosts else self.world_size
        keepers = here if asked else 1
        device, needed_bytes = accelerator.of(self.device), ROOM * size_bytes
        room, host_bytes = device.memory(), psutil.virtual_memory().available
        fits_device = not device.is_cpu and (room is None or room.free_bytes > needed_bytes)
        fits_host = host_bytes > needed_bytes * keepers
        fits = torch.tensor([float(fits_device), float(fits_host)], device=self.device)
        dist.all_reduce(fits, dist.ReduceOp.MIN)
        on_device, on_host = (bool(value) for value in fits.tolist())
        if on_device or (device.is_cpu and on_host):
            return asked, None
        if self.rank == 0 and (asked or not device.is_cpu):
            place = "the free memory of a single device. So the model is now on the CPU"
            if asked and not on_host:
                place = (
                    "the host's memory if every worker has a copy. So only rank 0 receives "
                    "the model, as with -o gather=first"
                )
            self.context.emit(
                events.Noted(
                    rank=0,
                    text=f"The whole model with the optimizer's state ({size_bytes / 1e9:.1f} GB) "
                    f"does not fit into {place}.",
                )
            )
        return asked and on_host, None if device.is_cpu else torch.device("cpu")

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the gathered parameters and buffers by name; nothing before `finish`."""
        if self.layout is None or self.layout.laid_out:
            return {}  # parts of a failed run: the other workers' parts cannot be read
        if self.rank and self.options["gather"] == "first":
            return {}
        return self._trainer.weights()

    def state(self) -> dict[str, Any]:
        """Return the whole model, optimizer and scheduler, independent of the world size."""
        return whole_state(self._trainer)

    def snapshot(self) -> dict[str, Any]:
        """Return the same on rank 0; the others only help to gather it."""
        return whole_state(self._trainer, keep=self.rank == 0)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state that `state` returned: each worker takes its part."""
        load_whole_state(self._trainer, state)

    def memory_bytes(self) -> float:
        """Return the bytes of model, gradients and optimizer state on this worker."""
        trainer = self._trainer
        return held_bytes(trainer.model, trainer.optimizer)

    def close(self) -> None:
        """Restore the user's module."""
        if self.layout is not None and self.layout.laid_out:
            self.layout.abandon()
        release_mesh(self.mesh)
        self.trainer = self.layout = self.mesh = None

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return torch.device(self.context.spec.device)

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer
