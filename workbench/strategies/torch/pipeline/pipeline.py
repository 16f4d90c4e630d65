"""Runs this worker's stages: a batch in microbatches through the schedule, or forward only.

All microbatches have the same size, so all messages have the same size. A batch that cannot be
divided is distributed evenly and filled with repeated samples. The outputs of repeated samples are
cut off before the loss, so they have no part in it. A worker builds only its own stages; the rest
of the model takes no memory. Each microbatch's mean loss counts by its samples:

    loss = sum over microbatches of (samples of the microbatch / samples of the batch) x its mean

The schedules are those of torch.distributed.pipelining; `catalog/schedules.py` explains them.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ....catalog.schedules import SCHEDULES
from ....engine.torch.data import map_batch, slice_batch
from ....engine.torch.group import data_wire
from ....engine.training.shares import share_bounds
from ....errors import FitError
from .measure import tensor_names
from .stage import Stage, TimedStage, Timeline
from .trace import Piece

if TYPE_CHECKING:
    from .cut import Cut
    from .measure import Form


def let_go(model: torch.nn.Module, keep: Iterable[str]) -> None:
    """Free the memory of every parameter and buffer of `model` except those in `keep`.

    Tensors that several layers share stay shared.
    """
    kept = set(keep)
    freed: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in kept and not parameter.is_meta:
            if id(parameter) not in freed:
                form = parameter.detach().to("meta")
                freed[id(parameter)] = torch.nn.Parameter(form, parameter.requires_grad)
            place(model, name, freed[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name not in kept and not buffer.is_meta:
            place(model, name, buffer.to("meta"))


def place(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set the parameter or buffer that has this full `name`."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    slots: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
    slots[leaf] = tensor


def tensors_of(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    wanted = set(names)
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in found.items() if name in wanted}


def fill(
    model: torch.nn.Module, make: Callable[[], Any], keep: Iterable[str], unit_of: Mapping[str, int]
) -> None:
    """Give the memoryless `model` its part of real tensors, built by `make`.

    Args:
        model: The result of `make` on the `meta` device.
        keep: Names of the part.
        unit_of: The layer to which each parameter and buffer belongs.

    Raises:
        FitError: The function returns another model each time it is called.
    """
    # Registrations are counted, because a tensor has no name while its module is being built.
    order = _Registrations(None)
    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), order, torch.device("meta"):
        shadow = make()
    random.setstate(state[0])
    np.random.set_state(state[1])
    names = _names(shadow, order.seen)
    kept = set(keep)
    drawn = _DrawnAnyway()  # type: ignore[no-untyped-call]
    with _Registrations(lambda i: _fate(names, i, kept, unit_of)) as building, drawn:
        built = make()
    final = tensors_of(built, kept)
    if len(building.seen) != len(names) or final.keys() != kept:
        raise FitError(
            "The function that builds the model must return the same model each time it is called.",
            seen=f"first call: {len(names)} tensors; second call: {len(building.seen)} tensors"
            + ", with other names" * (len(names) == len(building.seen)),
            next_step="build the whole model inside the function, from values that do not change",
            code="WB-FIT-133",
        )
    for name, tensor in final.items():
        place(model, name, tensor)


def _names(model: torch.nn.Module, seen: list[torch.Tensor | None]) -> list[str | None]:
    named: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        named.setdefault(id(tensor), name)
    return [named.get(id(tensor)) for tensor in seen]


def _fate(
    names: list[str | None], index: int, kept: set[str], unit_of: Mapping[str, int]
) -> tuple[int | None, bool]:
    """Return the layer of the tensor registered as number `index`, and whether it is kept."""
    name = names[index] if index < len(names) else None
    return (None, True) if name is None else (unit_of.get(name), name in kept)


class _DrawnAnyway(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers of freed tensors too, so that all other tensors get the right ones.

    If a model is initialised after it is built (`self.apply(init)`), freed tensors are filled too.
    Without memory, these tensors would use no random numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            found = [value for value in args if isinstance(value, torch.Tensor)]
            if any(value.is_meta for value in found):
                func(*(_with_memory(value) for value in args), **kwargs)
        return func(*args, **kwargs)


def _with_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros_like(value, device="cpu")
    return value


class _Registrations:
    """Watches each parameter and buffer that a module registers; frees those that are not kept."""

    def __init__(self, fate: Callable[[int], tuple[int | None, bool]] | None) -> None:
        self.seen: list[torch.Tensor | None] = []
        self._fate = fate
        self._waiting: list[tuple[int | None, dict[str, Any], str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Registrations:
        self._handles = [
            register_module_parameter_registration_hook(
                lambda module, name, value: self._take(module._parameters, name, value)
            ),
            register_module_buffer_registration_hook(
                lambda module, name, value: self._take(module._buffers, name, value)
            ),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._free(None)

    def _take(self, slots: dict[str, Any], name: str, value: torch.Tensor | None) -> None:
        if value is None:
            return
        index = len(self.seen)
        # Identity matters only in the first pass; references to the tensors would keep their
        # memory.
        self.seen.append(value if self._fate is None else None)
        if self._fate is None:
            return
        unit, kept = self._fate(index)
        if unit is not None:
            self._free(unit)
        if not kept:
            self._waiting.append((unit, slots, name))

    def _free(self, begun: int | None) -> None:
        """Free the tensors of all layers except `begun`, which is still being built."""
        still = []
        for unit, slots, name in self._waiting:
            if unit == begun and begun is not None:
                still.append((unit, slots, name))
                continue
            value = slots.get(name)
            if isinstance(value, torch.nn.Parameter):
                slots[name] = torch.nn.Parameter(value.detach().to("meta"), value.requires_grad)
            elif value is not None:
                slots[name] = value.to("meta")
        self._waiting = still


def move(model: torch.nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Move parameters and buffers to a device; parameters stay the same objects."""
    for name, tensor in tensors_of(model, names).items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.to(device)
        else:
            place(model, name, tensor.to(device))


class Pipeline:
    """The stages that one worker holds.

    Args:
        microbatches: Microbatches of a batch, `size` samples each.
        rank, workers: Stage s is held by rank s modulo `workers` of the group.
        group: The workers of this pipeline; None: all.
    """

    def __init__(
        self,
        cut: Cut,
        timeline: Timeline,
        *,
        schedule: str,
        microbatches: int,
        rank: int,
        workers: int,
        device: torch.device,
        around: Any,
        group: Any = None,
    ) -> None:
        self.group = group
        self.cut, self.program, self.timeline = cut, cut.program, timeline
        self.microbatches, self.size = microbatches, cut.samples
        self.workers, self.device, self._around = workers, device, around
        self.indices = list(range(rank, cut.stages, workers))
        self.holds_last = cut.stages - 1 in self.indices
        self.modules = {index: self._module(index, training=True) for index in self.indices}
        self.evaluating = {index: self._module(index, training=False) for index in self.indices}
        self.stages = [
            TimedStage(self.modules[i], i, cut.stages, device, cut.forms(i), timeline, group)
            for i in self.indices
        ]
        self._run = build_schedule(schedule, self.stages, microbatches, self._weighted_loss)
        self._numbers = torch.arange(microbatches)
        self._target: Any = None
        self._samples = 0

    def _module(self, index: int, *, training: bool) -> Stage:
        layers = [layer.training if training else layer.evaluating for layer in self.cut.of(index)]
        last = index == self.cut.stages - 1
        return Stage(layers, self._around, first=index == 0, last=last)

    def train(self, batch: Any, samples: int) -> torch.Tensor | None:
        """Compute the gradients of a batch; return its mean loss on the last stage's worker."""
        self._samples = samples
        losses: list[torch.Tensor] = []
        inputs: tuple[torch.Tensor, ...] = ()
        # a share without samples holds one sample
        given = self.program.given(batch, max(samples, 1))
        if self.program.scored and samples != self.microbatches * self.size:
            raise uneven(samples, self.microbatches * self.size)
        if 0 in self.indices:
            inputs = tuple(self._dealt(x, samples).to(self.device) for x in given)
        if self.holds_last:
            self._target = map_batch(lambda t: t.to(self.device), self.program.target(batch))
        self.timeline.begin()
        for stage in self.stages:
            stage.mail.expect()
        self._run(*inputs, target=self._numbers, losses=losses)
        for stage in self.stages:
            stage.mail.settle()
        self.timeline.end()
        self._target = None
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def sent_bytes(self) -> int:
        """Return the bytes of activations and gradients sent since the last call."""
        total = sum(stage.mail.sent_bytes for stage in self.stages)
        for stage in self.stages:
            stage.mail.sent_bytes = 0
        return total

    def _bounds(self, number: int) -> tuple[int, int]:
        return share_bounds(self._samples, number, self.microbatches)

    def _dealt(self, x: torch.Tensor, samples: int) -> torch.Tensor:
        """Return the batch in equal microbatches, filled up if it does not divide evenly."""
        if samples == self.microbatches * self.size:
            return x
        rows = []
        for number in range(self.microbatches):
            start, stop = self._bounds(number)
            filling = [max(stop - 1, 0)] * (self.size - (stop - start))
            rows += [*range(start, stop), *filling]
        return x.index_select(0, torch.tensor(rows, device=x.device))

    def _weighted_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        self.timeline.work("forward", None)
        start, stop = self._bounds(int(number))
        if self.program.loss is None:
            loss: torch.Tensor = output * ((stop - start) / self._samples)
        elif start == stop:  # only filling: there is no loss, but the stages expect a gradient
            parts = output if isinstance(output, tuple) else (output,)
            loss = torch.stack([(part * 0.0).sum() for part in parts]).sum()
        else:
            kept = self.cut.outputs[0].restore(slice_batch(output, 0, stop - start, self.size))
            target = slice_batch(self._target, start, stop, self._samples)
            with self._around():
                loss = self.program.loss(kept, target) * ((stop - start) / self._samples)
        self.timeline.rest()
        return loss

    def forward(self, batch: Any, samples: int) -> Any:
        """Return the model's output (or the loss) for a batch on the last stage, otherwise None.

        Each worker sends when it is ready, so microbatches follow each other here too.
        """
        given = self.program.given(batch, max(samples, 1))
        if self.program.scored and samples % self.size:
            raise uneven(samples, self.size)
        outputs = []
        for start in range(0, samples, self.size):
            stop = min(start + self.size, samples)
            rows = torch.arange(start, start + self.size).clamp_(max=stop - 1)
            values: Any = None
            for index, module in self.evaluating.items():
                if index == 0:
                    chosen = (x.index_select(0, rows.to(x.device)) for x in given)
                    values = tuple(x.to(self.device) for x in chosen)
                elif self.workers > 1:
                    values = self._receive(self.cut.evaluated(index), (index - 1) % self.workers)
                result = module(*values)
                values = result if isinstance(result, tuple) else (result,)
                if index == self.cut.stages - 1:
                    outputs.append(slice_batch(result, 0, stop - start, self.size))
                elif self.workers > 1:
                    self._send(values, (index + 1) % self.workers)
        if not outputs:
            return None
        if self.program.scored:  # microbatches are equally large
            return torch.stack(outputs).mean()
        whole: Any
        if isinstance(outputs[0], tuple):
            whole = tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
        else:
            whole = torch.cat(outputs)
        return self.cut.outputs[1].restore(whole)

    def _send(self, values: tuple[torch.Tensor, ...], rank: int) -> None:
        for value in values:
            dist.send(value.contiguous().to(self._wire), self._peer(rank), group=self.group)

    def _receive(self, forms: tuple[Form, ...], rank: int) -> tuple[torch.Tensor, ...]:
        values = []
        for form in forms:
            value = torch.empty(form.shape, dtype=form.dtype, device=self._wire)
            dist.recv(value, self._peer(rank), group=self.group)
            values.append(value.to(self.device))
        return tuple(values)

    def _peer(self, rank: int) -> int:
        """Return the run's rank for a rank of this pipeline."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @property
    def _wire(self) -> torch.device:
        """The device from which messages are sent."""
        return data_wire(self.group, self.device)


def uneven(samples: int, whole: int, *, last: bool = True) -> FitError:
    """Return the error for a model that computes the loss and would count repeated samples.

    Args:
        last: Whether only the last batch can have this size.
    """
    change = (
        "drop the last, smaller batch (DataLoader with drop_last=True)"
        if last
        else f"use a batch_size that is a multiple of {whole}"
    )
    return FitError(
        "The model computes the loss itself, so each batch must be divisible into equal "
        "microbatches.",
        seen=f"{samples} samples",
        allowed=f"a multiple of {whole} samples",
        next_step=f"{change}. Or pass loss= to wb.fit, and make the model return its output "
        "instead of the loss (then batches can have any size)",
        code="WB-FIT-144",
    )


def share_names(cut: Cut, rank: int, workers: int) -> list[str]:
    """Return the full names of all parameters and buffers of a worker's stages."""
    return [
        name
        for stage in range(rank, cut.stages, workers)
        for layer in cut.of(stage)
        for name in layer.names
    ]


def adopt_share(model: torch.nn.Module, cut: Cut, rank: int, workers: int) -> None:
    """Let traced pieces compute with the model's own tensors; free the other workers'."""
    for stage in range(cut.stages):
        for piece in (p for layer in cut.of(stage) for p in (layer.training, layer.evaluating)):
            if not isinstance(piece, Piece):
                continue
            if stage % workers != rank:
                let_go(piece.body, ())
                continue
            known = tensor_names(piece.body)
            for name, tensor in tensors_of(model, known).items():
                place(piece.body, name, tensor)


BUILDERS: dict[str, Callable[..., Any]] = {
    "naive": pipelining.ScheduleGPipe,  # of one microbatch
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def build_schedule(
    name: str, stages: list[Any], microbatches: int, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `run(x, target=..., losses=...)`: one pass of the schedule over a batch.

    Args:
        stages: This worker's stages.
        loss: `loss(output, target)` of a microbatch, already weighted.
    """
    looped = SCHEDULES[name].stages is not None
    schedule = BUILDERS[name](
        stages if looped else stages[0], microbatches, loss_fn=loss, scale_grads=False
    )
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        return lambda *args, **given: schedule.step(*args, return_outputs=False, **given)
    return schedule.step  # type: ignore[no-any-return]
