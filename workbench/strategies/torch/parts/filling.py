"""Models that no worker has whole: built without memory, and filled part by part from rank 0.

    every worker   model on `meta` -- laid out --> own parts, empty --+
    rank 0         all values, on the host -- row by row, broadcast --+--> own parts, filled
                   (a tensor's values are freed as soon as they are sent)

So the host holds the model once, whatever the number of workers, and a device holds its parts and
one message. Rank 0's values come from the function that builds the model, from rank 0's own module
where that is real and the others' have no memory, from the run to start from (`--init-from`), or
they are drawn by the layers themselves: `reset_parameters`, Hugging Face's `initialize_weights`.

What `__init__` computes besides parameters comes from rank 0 too: buffers, also those that are not
saved, and plain tensors among a module's attributes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ....engine.torch.support import forms
from ....engine.training import initial
from ....errors import FitError
from ....shared.checkpoints import fit_weights
from .layout import local

if TYPE_CHECKING:
    from ....engine.context import RunContext

MESSAGE_BYTES = 16 << 20


def is_form_somewhere(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether some worker's model lacks memory, wholly or in part. Collective."""
    lacking = torch.tensor([float(bool(forms(model)))], device=device)
    dist.all_reduce(lacking, dist.ReduceOp.MAX)
    return bool(lacking > 0)


class Filling:
    """Fills a model that is laid out without memory with rank 0's values. Collective.

    Args:
        model: Alike on all workers but for its memory; loses what it has of that here.
        build: Builds the model for real, on rank 0; None where `model` is all there is.

    Raises:
        FitError: There is no way to come by some values; raised on every worker.
    """

    def __init__(
        self, context: RunContext, model: torch.nn.Module, build: Callable[[], Any] | None
    ) -> None:
        self._model, self._rank = model, context.spec.rank
        self._device = torch.device(context.spec.device)
        self._values: dict[str, torch.Tensor] = {}
        failed: Exception | None = None
        if self._rank == 0:
            try:
                self._values = _values_of(context, model, build)
            except Exception as error:  # also the user's function: nobody may wait for this rank
                failed = error
        _agree(failed)
        _let_go(model)

    def fill(self) -> None:
        """Give the parts memory and values, those of rank 0. Collective; after the layout."""
        self._model.to_empty(device=self._device)
        with torch.no_grad():
            for name, tensor in _tensors(self._model):
                value = self._values.pop(name, None)
                self._spread(tensor.detach(), None if value is None else value.detach())
                if value is not None:  # whoever holds the module that it was built with
                    value.data = value.data.new_empty(0)
            for module, name, tensor in _attributes(self._model):
                path = _path(self._model, module, name)
                held = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                self._spread(held, self._values.pop(path, None))
                setattr(module, name, held.cpu())  # where `__init__` had made it
        self._values.clear()

    def _spread(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Give every worker its part of a tensor, some rows in each message."""
        own, first = _own_rows(tensor)
        if not tensor.dim() or not tensor.numel():
            self._send(own, value)
            return
        row_bytes = tensor.numel() // len(tensor) * tensor.element_size()
        step = max(1, MESSAGE_BYTES // row_bytes)
        for begin in range(0, len(tensor), step):
            end = min(begin + step, len(tensor))
            rows = own.new_empty((end - begin, *tensor.shape[1:]))
            self._send(rows, None if value is None else value[begin:end])
            low, high = max(begin, first), min(end, first + len(own))
            if low < high:
                own[low - first : high - first].copy_(rows[low - begin : high - begin])

    def _send(self, into: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None:
            into.copy_(value)
        # As a flat view of bytes: not every backend knows every type.
        if into.numel():
            dist.broadcast(into.reshape(-1).view(torch.uint8), 0)


def _own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this worker's part and the row that it begins with."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    (placement,) = tensor.placements
    own = local(tensor)
    if not placement.is_shard():
        return own, 0
    assert placement.is_shard(0), "fully_shard divides rows"
    each = -(-len(tensor) // tensor.device_mesh.size())
    return own, min(each * tensor.device_mesh.get_local_rank(), len(tensor))


def _agree(failed: Exception | None) -> None:
    """Raise on every worker when rank 0 could not come by the values. Collective."""
    told = [None if failed is None else f"{type(failed).__name__}: {failed}"]
    dist.broadcast_object_list(told, 0)
    if failed is not None:
        raise failed
    if told[0] is not None:
        raise FitError(
            "Rank 0 could not build the model's weights.",
            seen=told[0].splitlines()[0],
            next_step="rank 0's error says what to do",
            code="WB-FIT-161",
        )


def _values_of(
    context: RunContext, model: torch.nn.Module, build: Callable[[], Any] | None
) -> dict[str, torch.Tensor]:
    """Return all values by name, on the CPU."""
    source = model
    if build is not None:
        source = build()
        if _names(source) != _names(model):
            raise FitError(
                "The function does not return the same model each time it is called.",
                seen=f"{len(_names(model))} tensors, then {len(_names(source))}",
                next_step="build the model from nothing but constants inside the function",
                code="WB-FIT-159",
            )
    if forms(source):
        _draw(context, source)
    for module, name, _ in _attributes(source):
        raise _undrawn(_path(source, module, name))
    found = dict(_tensors(source))
    for module, name, tensor in _attributes(source, memory=True):
        found[_path(source, module, name)] = tensor.detach()
    return found


def _draw(context: RunContext, model: torch.nn.Module) -> None:
    """Give a model without memory the weights to start from, or those that its layers draw."""
    _give_memory(model)
    with torch.no_grad():
        if context.spec.init_from and not context.initial_read:
            arrays, framework = initial.read(Path(context.spec.init_from))
            shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
            fitted = fit_weights(arrays, framework, shapes, context.spec.framework)
            unsaved = dict(_tensors(model)).keys() - shapes.keys()
            if unsaved:  # what is not saved with a model is not in a run's weights either
                _draw_layers(model, "")
            model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in fitted.items()})
            context.initial_read = True
        else:
            _draw_layers(model, "")
    for name, tensor in _tensors(model):
        if _is_marked(tensor):
            raise _undrawn(name)


def _draw_layers(module: torch.nn.Module, path: str) -> None:
    whole = getattr(module, "initialize_weights", None)
    if callable(whole) and hasattr(module, "_init_weights"):  # of Hugging Face: all inside too
        whole()
        return
    for name, child in module.named_children():
        _draw_layers(child, f"{path}.{name}" if path else name)
    own = (*module._parameters.values(), *module._buffers.values())
    if not any(tensor is not None and _is_marked(tensor) for tensor in own):
        return
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            getattr(module, name)()
            return
    raise _undrawn(f"{path or 'the model'} ({type(module).__name__})")


def _undrawn(what: str) -> FitError:
    return FitError(
        "The model has no memory (device meta), and a part of it cannot draw its own weights.",
        seen=f"{what} has no reset_parameters() that sets all it holds",
        allowed="layers of torch.nn and of Hugging Face, and layers with reset_parameters()",
        next_step="pass the function that builds the model: wb.fit(lambda: make_model(), ...)",
        code="WB-FIT-160",
    )


def _give_memory(model: torch.nn.Module) -> None:
    """Give what has no memory some, filled with a mark; what is shared stays shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    real = _marked(tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        real = torch.nn.Parameter(real, tensor.requires_grad)
                    made[id(tensor)] = real
                slots[name] = made[id(tensor)]


def _marked(form: torch.Tensor) -> torch.Tensor:
    real = torch.empty(form.shape, dtype=form.dtype, device="cpu")
    if form.is_floating_point() or form.is_complex():
        return real.fill_(float("nan"))
    return real.zero_() if form.dtype == torch.bool else real.fill_(torch.iinfo(form.dtype).min)


def _is_marked(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    least = False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return tensor.dtype != torch.bool and bool((tensor == least).any())


def _let_go(model: torch.nn.Module) -> None:
    """Free what memory the model has; what is shared stays shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    form = tensor.detach().to("meta")
                    if isinstance(tensor, torch.nn.Parameter):
                        form = torch.nn.Parameter(form, tensor.requires_grad)
                    made[id(tensor)] = form
                slots[name] = made[id(tensor)]
    for module, name, tensor in _attributes(model, memory=True):
        setattr(module, name, tensor.detach().to("meta"))
    gc.collect()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _names(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in _tensors(model)]


def _attributes(
    model: torch.nn.Module, *, memory: bool = False
) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield plain tensors among the modules' attributes: those without memory, or with."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta is not memory:
                yield module, name, value


def _path(model: torch.nn.Module, module: torch.nn.Module, name: str) -> str:
    path = next(path for path, other in model.named_modules() if other is module)
    return f"{path}:{name}"
