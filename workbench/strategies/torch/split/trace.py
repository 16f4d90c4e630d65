"""Any module as a chain of pieces, by `torch.export` and `torch.distributed.pipelining`.

The trace is cut wherever a child of the model is called. Values that skip pieces (a residual
connection) are handed from piece to piece, so that each piece talks to its neighbours only:

    x -> [conv1, relu] -> a -> [conv2] -> (a, b) -> [add, fc] -> y
"""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
import warnings
from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch.distributed.pipelining import SplitPoint, pipeline

from ....errors import FitError
from .layers import Layer, tensor_names


class Piece(torch.nn.Module):
    """A traced piece as a link: takes all values that are still needed, hands on those that are.

    Args:
        body: The traced computation.
        alive: Names of the values it is given.
        takes: Names of the body's arguments.
        gives: Names of the body's results, with their index; None where it has one.
        passes: Names of the values handed on.
    """

    def __init__(
        self,
        body: torch.nn.Module,
        alive: list[str],
        takes: list[str],
        gives: list[tuple[str, int | None]],
        passes: list[str],
    ) -> None:
        super().__init__()
        self.body: torch.nn.Module = body
        self.alive, self.takes, self.gives, self.passes = alive, takes, gives, passes

    def forward(self, *values: Any) -> Any:
        """Run the piece."""
        known = dict(zip(self.alive, values, strict=True))
        result = self.body(*(known[name] for name in self.takes))
        for name, index in self.gives:
            known[name] = result if index is None else result[index]
        handed = tuple(known[name] for name in self.passes)
        return handed if len(handed) > 1 else handed[0]


def traced_layers(model: torch.nn.Module, x: torch.Tensor) -> list[Layer]:
    """Return the pieces of a model, in training and in evaluation mode.

    Tracing fixes what dropout and BatchNorm do, so the model is traced once per mode.

    Args:
        x: A microbatch, on the model's device.

    Raises:
        FitError: The model cannot be traced.
    """
    was_training = model.training
    try:
        names = _called(model, x)
        pieces = []
        for mode in (True, False):
            model.train(mode)
            pieces.append(_pieces(model, x, names))
    finally:
        model.train(was_training)
    return [
        Layer(name, training, evaluating, tuple(tensor_names(training.body)))
        for name, training, evaluating in zip(names, *pieces, strict=True)
    ]


def _candidates(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.Sequential, torch.nn.ModuleList)):
            yield from _candidates(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _called(model: torch.nn.Module, x: torch.Tensor) -> list[str]:
    """Return the names of the children that the model calls exactly once, in that order."""
    calls: list[str] = []
    hooks = [
        child.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name, child in _candidates(model)
    ]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(x)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return [name for name in calls if calls.count(name) == 1]


def _pieces(model: torch.nn.Module, x: torch.Tensor, names: list[str]) -> list[Piece]:
    spec = dict.fromkeys(names[1:], SplitPoint.BEGINNING)
    try:
        with _quiet():
            traced = pipeline(_twin(model), (x,), split_spec=spec)
    except Exception as error:
        raise FitError(
            "The model could not be traced, so it cannot be cut by itself.",
            seen=f"{_first_line(error)}{_place(error, model)}",
            allowed="nn.Sequential, a list of stages, or a module whose forward does not branch "
            "on values",
            next_step="give the stages yourself: wb.fit([first, second], ...), each a module",
        ) from error
    return _links(traced.split_gm)


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of the modules with the same tensors: marking split points rewrites modules."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what PyTorch's tracer says of itself; an error says what the user needs."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return a traced module as Python code, with all within it.

    Exported modules interpret their graph anew each time, which is slow, and the interpreter's
    progress bar leaves a thread behind.
    """
    for name, child in list(module.named_children()):
        setattr(module, name, _compiled(child))
    graph = getattr(module, "graph", None)
    if isinstance(graph, torch.fx.Graph) and not isinstance(module, torch.fx.GraphModule):
        compiled = torch.fx.GraphModule(module, graph)
        for name, child in module.named_children():  # others may call what its graph does not
            if name not in compiled._modules:
                compiled.add_module(name, child)
        return compiled
    return module


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # PyTorch wraps what went wrong in general advice
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _place(error: BaseException, model: torch.nn.Module) -> str:
    """Return where in the user's own code tracing ended."""
    cause: BaseException | None = error
    while cause is not None:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if frame.name == "forward" and "/torch/" not in frame.filename.replace("\\", "/"):
                return f", in forward, line {frame.lineno}: {frame.line or type(model).__name__}"
        cause = cause.__cause__ or cause.__context__
    return f", in {type(model).__name__}"


def _links(split: torch.fx.GraphModule) -> list[Piece]:
    """Return the pieces of a split graph as links of a chain."""
    nodes = list(split.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    # What each piece gives: itself, or the parts of it that are picked out.
    gives: dict[str, list[tuple[str, int | None]]] = {call.name: [] for call in calls}
    for node in nodes:
        if node.op == "call_function" and node.target is getitem:
            gives[node.args[0].name].append((node.name, node.args[1]))
    for call in calls:
        gives[call.name] = gives[call.name] or [(call.name, None)]
    output = next(node for node in nodes if node.op == "output")
    wanted = [node.name for node in output.all_input_nodes]
    takes = [[node.name for node in call.args] for call in calls]
    alive = [node.name for node in nodes if node.op == "placeholder"]
    pieces = []
    for at, call in enumerate(calls):
        known = [*alive, *(name for name, _ in gives[call.name])]
        later = {name for names in takes[at + 1 :] for name in names} | set(wanted)
        last = at == len(calls) - 1
        passes = wanted if last else [name for name in known if name in later]
        body = _compiled(split.get_submodule(call.target))
        pieces.append(Piece(body, alive, takes[at], gives[call.name], passes))
        alive = passes
    return pieces
