"""How a model is divided among the workers: decided once, and in the same way on all workers.

A chain of layers is cut so that the slowest stage is as fast as possible.

Source: the linear partition problem; used for pipelines in Narayanan et al., PipeDream, SOSP 2019,
section 3.1.

A pipeline is as fast as its slowest stage. There are many ways to cut the first i layers into s
stages. In each way, one stage is the slowest. T(i, s) is the shortest possible time of this stage:

    T(i, 1) = time of layers 0..i-1
    T(i, s) = min over j < i of max(T(j, s-1), time of layers j..i-1 and of moving the values at j)

The values T(i, s) are computed one after the other, beginning with the smallest i and s. This takes
O(layers^2 x stages) time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ....engine.torch import accelerator
from ....engine.torch.group import data_wire
from ....engine.torch.support import Stages
from ....errors import FitError
from .measure import Cost, Form, Layer, chain_of, check_enough, given_bounds, measure, shared
from .program import Output, Program
from .trace import traced_layers

PROBE_BYTES = 1 << 20
clock = time.perf_counter


@dataclass(frozen=True)
class Cut:
    """The stages of a pipeline; stage s belongs to worker s modulo the number of workers.

    Attributes:
        layers: The chain.
        bounds: First layer of each stage, then the number of layers: (stages + 1,).
        costs: Each layer's measured cost for one microbatch.
        cut_s: Seconds to send the values at a cut after layer i, and their gradients.
        inputs: Forms of the first stage's inputs for a microbatch.
        outputs: The last stage's tensors in the model's output: training, evaluation.
        program: The computation of all stages together.
        shared: Parameters that several stages hold, by name, with these stages.
    """

    layers: list[Layer]
    bounds: list[int]
    costs: list[Cost]
    cut_s: list[float]
    inputs: tuple[Form, ...]
    outputs: tuple[Output, Output]
    program: Program
    shared: dict[str, list[int]]

    @property
    def samples(self) -> int:
        """How many samples a microbatch has."""
        return self.inputs[0].shape[0]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    def of(self, stage: int) -> list[Layer]:
        """Return the layers of a stage."""
        return self.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def forms(self, stage: int) -> tuple[tuple[Form, ...], tuple[Form, ...]]:
        """Return the forms of a stage's inputs and outputs, in training."""
        first, end = self.bounds[stage], self.bounds[stage + 1]
        given = self.costs[first - 1].outputs if first else self.inputs
        return given, self.costs[end - 1].outputs

    def evaluated(self, stage: int) -> tuple[Form, ...]:
        """Return the forms of a stage's inputs in evaluation."""
        first = self.bounds[stage]
        return self.costs[first - 1].evaluated if first else self.inputs

    def table(self, workers: int) -> list[dict[str, Any]]:
        """Return one row per stage: worker, layers, parameters, seconds, bytes passed on."""
        times = stage_times(
            [c.forward_s + c.backward_s for c in self.costs], self.cut_s, self.bounds
        )
        rows = []
        for stage, (first, end) in enumerate(pairwise(self.bounds)):
            names = [layer.name for layer in self.layers[first:end]]
            rows.append(
                {
                    "stage": stage,
                    "rank": stage % workers,
                    "layers": names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
                    "parameters": sum(cost.parameters for cost in self.costs[first:end]),
                    "microbatch_s": times[stage],
                    "handed_bytes": sum(form.size_bytes for form in self.costs[end - 1].outputs)
                    if stage < self.stages - 1
                    else 0,
                }
            )
        return rows


def cut(
    model: torch.nn.Module,
    program: Program,
    *,
    stages: int,
    workers: int,
    rank: int,
    device: torch.device,
    split_at: str,
    around: Any,
) -> Cut:
    """Decide the stages of a model: the requested stages, or the best balanced ones.

    Rank 0 measures; all workers decide from its measurements. Collective.

    Args:
        program: The stages' computation, with a microbatch on the CPU.
        split_at: Layers that begin a stage; empty: decide from the measured times.

    Raises:
        FitError: The model cannot be cut; raised on every rank.
    """
    layers, outputs, traced = _chain(model, program, stages, device, split_at)
    check_enough(layers, stages, workers, traced=traced)
    bounds = given_bounds(layers, split_at, stages) if split_at else None
    if bounds is None and isinstance(model, Stages):
        if len(layers) != stages:
            fits, rest = divmod(len(layers), stages // workers)
            more = "" if rest else f"use -n {fits} (under hybrid: -o stages={fits}), or "
            raise FitError(
                "If the model is a list of modules, the list must contain one module for each "
                "stage.",
                seen=f"{len(layers)} modules",
                allowed=f"{stages} module{'s' * (stages > 1)} for {workers} "
                f"worker{'s' * (workers > 1)}",
                next_step=f"{more}join modules with nn.Sequential, so that the list has {stages} "
                f"module{'s' * (stages > 1)}",
                code="WB-FIT-135",
            )
        bounds = list(range(stages + 1))
    costs = _agreed_costs(layers, program, rank, device, around)
    cut_s = _crossing(costs, workers, rank, device)
    if bounds is None:
        bounds = balance([c.forward_s + c.backward_s for c in costs], cut_s, stages)
    return Cut(
        layers, bounds, costs, cut_s, _input_forms(program), outputs, program,
        shared(model, layers, bounds),
    )  # fmt: skip


def _chain(
    model: torch.nn.Module, program: Program, stages: int, device: torch.device, split_at: str
) -> tuple[list[Layer], tuple[Output, Output], bool]:
    """Return the layers, the outputs of the last layer, and whether tracing found the layers."""
    layers = None if program.scored else chain_of(model)
    outputs = Output(), Output()
    traced = layers is None
    if layers is None:
        listed = [name for name, _ in model.named_children()] if isinstance(model, Stages) else []
        layers, outputs = traced_layers(
            model, program, device, stages, only=bool(listed),
            asked=listed or [name.strip() for name in split_at.split(",") if name.strip()],
        )  # fmt: skip
    elif not isinstance(program.data, torch.Tensor):
        raise FitError(
            "If the model is a chain of layers, its input must be one tensor. Workbench divides "
            "this tensor into microbatches.",
            seen=type(program.data).__name__,
            next_step="make the data set return (x, y) where x is a tensor, or write a module "
            "that unpacks the input in forward",
            code="WB-FIT-134",
        )
    return layers, outputs, traced


def about(cut: Cut) -> dict[str, Any]:
    """Return a cut's description for a worker that joins later, as plain data."""
    forms = [[_plain(cost.outputs), _plain(cost.evaluated)] for cost in cut.costs]
    return {"bounds": cut.bounds, "forms": forms}


def cut_as(
    model: torch.nn.Module,
    program: Program,
    told: Mapping[str, Any],
    *,
    device: torch.device,
    split_at: str,
) -> Cut:
    """Cut a model in the same way as other workers.

    Args:
        program: As in `cut`.
        told: Another worker's description of its cut (`about`).
    """
    bounds = [int(bound) for bound in told["bounds"]]
    layers, outputs, _ = _chain(model, program, len(bounds) - 1, device, split_at)
    costs = [
        Cost(0.0, 0.0, 0, _forms(trained), _forms(evaluated))
        for trained, evaluated in told["forms"]
    ]
    return Cut(
        layers, bounds, costs, [0.0] * (len(layers) - 1), _input_forms(program), outputs, program,
        shared(model, layers, bounds),
    )  # fmt: skip


def _input_forms(program: Program) -> tuple[Form, ...]:
    return tuple(Form(tuple(tensor.shape), tensor.dtype) for tensor in program.tensors)


def _plain(forms: Sequence[Form]) -> list[tuple[tuple[int, ...], str]]:
    return [(form.shape, str(form.dtype).removeprefix("torch.")) for form in forms]


def _forms(plain: Iterable[Sequence[Any]]) -> tuple[Form, ...]:
    return tuple(Form(tuple(shape), getattr(torch, dtype)) for shape, dtype in plain)


def _agreed_costs(
    layers: list[Layer], program: Program, rank: int, device: torch.device, around: Any
) -> list[Cost]:
    """Return rank 0's measurements; an error on rank 0 is raised on all ranks."""
    answer: list[Any] = [None]
    if rank == 0:
        try:
            answer = [measure(layers, program.tensors, device, around, scored=program.scored)]
        except FitError as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], str):
        raise FitError(answer[0], code="WB-FIT-136")
    return list(answer[0])


def _crossing(costs: Sequence[Cost], workers: int, rank: int, device: torch.device) -> list[float]:
    """Return each cut's cost in seconds, from the measured speed of the link of ranks 0 and 1."""
    measured: list[Any] = [0.0]
    if workers > 1 and rank < 2:
        measured = [_probe(rank, data_wire(None, device))]
    dist.broadcast_object_list(measured, 0)
    per_byte = measured[0] / PROBE_BYTES
    moved = [
        sum(form.size_bytes * (2 if form.dtype.is_floating_point else 1) for form in cost.outputs)
        for cost in costs
    ]
    return [size * per_byte for size in moved[:-1]]


def _probe(rank: int, wire: torch.device) -> float:
    """Return the seconds that 1 MiB takes one way, the best of three."""
    data = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=wire)
    times = []
    for _ in range(3):
        began = clock()
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)
        accelerator.of(wire).synchronize_stream()
        times.append((clock() - began) / 2)
    return min(times)


def stage_times(
    layer_s: Sequence[float], cut_s: Sequence[float], bounds: Sequence[int]
) -> list[float]:
    """Return each stage's seconds: its layers, and the transfers at its two borders.

    Args:
        layer_s: Seconds of forward and backward of each layer.
        cut_s: Seconds to send the activations at a cut after layer i, and their gradients.
        bounds: First layer of each stage, then the number of layers: (stages + 1,).
    """
    return [
        sum(layer_s[a:b])
        + (cut_s[a - 1] if a else 0.0)
        + (cut_s[b - 1] if b < len(layer_s) else 0.0)
        for a, b in pairwise(bounds)
    ]


def balance(layer_s: Sequence[float], cut_s: Sequence[float], stages: int) -> list[int]:
    """Return the bounds with the fastest slowest stage; among equal bounds, those that send least.

    Args:
        cut_s: Seconds to send the values at a cut after layer i; one fewer than layers.
        stages: How many stages; at most as many as layers.
    """
    count = len(layer_s)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot make {stages} stages")
    before = [0.0, *accumulate(layer_s)]

    def crossing(cut: int) -> float:
        return cut_s[cut - 1] if 0 < cut < count else 0.0

    def time(first: int, end: int) -> float:
        return before[end] - before[first] + crossing(first) + crossing(end)

    # best[i]: (slowest stage, total moved, bounds) for the first i layers in s stages
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {i: (time(0, i), 0.0, (0,)) for i in range(1, count + 1)}
    for stage in range(1, stages):
        best = {
            i: min(
                (
                    max(best[j][0], time(j, i)),
                    best[j][1] + crossing(j),
                    (*best[j][2], j),
                )
                for j in range(stage, i)
            )
            for i in range(stage + 1, count + 1)
        }
    return [*best[count][2], count]
