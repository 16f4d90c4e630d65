"""Any module as a chain of pieces, by `torch.export`.

The trace is one list of operations; it is cut where calls of modules begin, as below. Values
that skip pieces (a residual connection) are passed from piece to piece, so that each piece only
communicates with its neighbours:

    x -> [conv1, relu] -> a -> [conv2] -> (a, b) -> [add, fc] -> y

Values that are the same for every batch (positions, masks) are computed again in each piece that
needs them, and not sent.

A traced model can be cut at the calls of its modules, at any depth that stages need:

    forward of the model     transformer                          lm_head
    its calls                wte  wpe  drop  h.0      h.1   ln_f
    their calls                              ln attn
                                             mlp

The chain begins with the calls in the model's own forward. A call with more than a stage's fair
share of the parameters is replaced by the calls within it. So blocks are found at any depth (a
ModuleDict, an encoder's loop), and stay whole if they are small enough.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import traceback
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ....engine.torch.data import map_batch, tensors_of
from ....engine.torch.support import evaluating as evaluates
from ....errors import FitError
from ..parts.replica import NoBackward
from .measure import Layer, is_chain, tensor_names, with_aliases
from .program import Output, Program

PREFIX = "model."
"""The prefix of names in the trace, because the model is a child of the traced module."""

Node = torch.fx.Node


class Piece(torch.nn.Module):
    """A traced piece of the chain: takes all needed values, returns those for later pieces."""

    def __init__(self, body: torch.fx.GraphModule) -> None:
        super().__init__()
        self.body: torch.nn.Module = body

    def forward(self, *values: Any) -> Any:
        """Run the piece."""
        handed = self.body(*values)
        return handed if len(handed) > 1 else handed[0]


class _Whole(torch.nn.Module):
    """A program as a module of tensors."""

    def __init__(self, model: torch.nn.Module, program: Program, outputs: list[Any]) -> None:
        super().__init__()
        self.model = model
        self._program, self._outputs = program, outputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(tensors)
        output = self._program.call(self.model, map_batch(lambda _: next(left), self._program.data))
        self._outputs[:] = [output]
        return tuple(tensors_of(output))


def traced_layers(
    model: torch.nn.Module,
    program: Program,
    device: torch.device,
    stages: int,
    *,
    asked: Sequence[str] = (),
    only: bool = False,
) -> tuple[list[Layer], tuple[Output, Output]]:
    """Return the pieces of a program, and the form of its output in training and in evaluation.

    A trace keeps the behaviour of dropout and BatchNorm, so the program is traced once per mode.

    Args:
        device: The device of the pieces; the model can be on another device, or have no memory.
        stages: The number of stages that the pieces are for.
        asked: Names of calls at which to cut in any case.
        only: Whether to cut only at these calls.

    Raises:
        FitError: The program cannot be traced.
    """
    training = _trace(model, program)
    with evaluates(model):
        evaluating = _trace(model, program)
    names = list(asked) if only else chosen(model, training.calls, stages, asked)
    names = _in_both(names, training, evaluating)
    pieces = [_pieces(model, trace, names, device) for trace in (training, evaluating)]
    held = _held(model, *pieces)
    layers = [
        Layer(name, first, second, tuple(own))
        for name, first, second, own in zip(names or ["model"], *pieces, held, strict=True)
    ]
    return layers, (training.output, evaluating.output)


@dataclass(frozen=True)
class _Trace:
    """A traced program.

    Attributes:
        nodes: Its computation, in order.
        results: Its results.
    """

    module: torch.fx.GraphModule
    device: torch.device
    nodes: list[Node]
    calls: dict[str, Any]
    results: list[Node]
    output: Output


def _trace(model: torch.nn.Module, program: Program) -> _Trace:
    held = next(model.parameters()).device
    outputs: list[Any] = []
    whole = _Whole(model, program, outputs)
    guard = NoBackward()
    try:
        with _quiet(), guard:
            tensors = tuple(tensor.to(held) for tensor in program.tensors)
            exported = torch.export.export(whole, tensors, strict=False)
            module = exported.module()
    except Exception as error:
        if guard.refused is not None:
            raise guard.refused from None
        raise FitError(
            "PyTorch cannot trace the model, so Workbench cannot cut it into stages automatically.",
            seen=f"{_first_line(error)}{_place(error, model)}",
            allowed="nn.Sequential, a list of stages, or a module that does the same operations "
            "for all inputs (no `if` on a tensor)",
            next_step="pass the stages as a list of modules: wb.fit([first, second], ...)",
            code="WB-FIT-148",
        ) from error
    nodes = [node for node in module.graph.nodes if _computes(node)]
    results = list(next(n for n in module.graph.nodes if n.op == "output").args[0])
    if not results or not all(isinstance(result, Node) for result in results):
        raise FitError(
            "The model must return tensors that it computes, not constants or None.",
            seen=type(outputs[0]).__name__ if outputs else "nothing",
            next_step="make the model return a tensor, or tensors in a tuple or dictionary",
            code="WB-FIT-149",
        )
    distinct = list(dict.fromkeys(results))
    plain = (int, float, str, bool, type(None))
    form = map_batch(
        lambda _: torch.empty(0), outputs[0], lambda v: v if isinstance(v, plain) else None
    )
    return _Trace(
        module, held, nodes, calls_of([_stack(node) for node in nodes]), distinct,
        Output(form, tuple(distinct.index(result) for result in results)),
    )  # fmt: skip


def _computes(node: Node) -> bool:
    """Return whether a node is part of the computation; checks that tracing adds are not."""
    if node.op == "call_module":  # guards on the inputs
        return False
    return node.op == "call_function" and "_assert_tensor_metadata" not in str(node.target)


def _stack(node: Node) -> list[str]:
    """Return the modules in which a node was computed, outermost first."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return [path.removeprefix(PREFIX) for path in paths if path.startswith(PREFIX)]


def _in_both(names: Sequence[str], training: _Trace, evaluating: _Trace) -> list[str]:
    """Return the calls that both traces have, in the same order."""
    kept: list[str] = []
    last = -1
    for name in names:
        call = evaluating.calls.get(name)
        if call is not None and name in training.calls and call.first > last:
            kept.append(name)
            last = call.first
    return kept


def _pieces(
    model: torch.nn.Module, trace: _Trace, names: list[str], device: torch.device
) -> list[Piece]:
    starts = [trace.calls[name].first for name in names]
    place: dict[Node, int] = {}
    for index, node in enumerate(trace.nodes):
        place[node] = max(bisect_right(starts, index) - 1, 0)
        if node.target is getitem:  # parts of a list of tensors are made in the piece of the list
            place[node] = place.get(node.args[0], place[node])  # type: ignore[arg-type]
    fixed = _fixed(trace)
    given = [node for node in trace.module.graph.nodes if node.op == "placeholder"]
    moving = [node for node in trace.nodes if node not in fixed]
    last = max(len(names), 1) - 1
    # The last piece that needs a value.
    needed = {
        value: max((place.get(user, -1) for user in value.users), default=-1)
        for value in (*given, *moving)
    }
    copier = _Copier(model, trace, device)
    pieces, alive = [], given
    for at in range(last + 1):
        own = [node for node in moving if place[node] == at]
        ends = [v for v in (*alive, *own) if needed[v] > at or v in trace.results]
        ends = ends if at < last else trace.results
        pieces.append(Piece(copier.body(alive, own, ends)))
        alive = ends
    return pieces


class _Copier:
    """Makes modules of parts of a trace."""

    def __init__(self, model: torch.nn.Module, trace: _Trace, device: torch.device) -> None:
        self._trace, self._device = trace, device
        self._known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._known |= dict(model.named_buffers(remove_duplicate=False))

    def body(
        self, alive: Sequence[Node], own: Sequence[Node], ends: Sequence[Node]
    ) -> torch.fx.GraphModule:
        """Return the nodes `own`, and the constant values that they need, as a module."""
        graph = torch.fx.Graph()
        made: dict[Node, Node] = {value: graph.placeholder(value.name) for value in alive}
        held: dict[str, Any] = {}

        def get(node: Node) -> Node:
            if node not in made:
                if node.op == "get_attr":
                    name = str(node.target).removeprefix(PREFIX)
                    held[name] = self._held(str(node.target))
                    made[node] = graph.get_attr(name)
                else:
                    put(node)
            return made[node]

        def put(node: Node) -> None:
            made[node] = copied = graph.node_copy(node, get)
            _retarget(copied, self._trace.device, self._device)

        for node in own:
            put(node)
        graph.output(tuple(get(end) for end in ends))
        graph.eliminate_dead_code()
        return torch.fx.GraphModule(held, graph)

    def _held(self, target: str) -> Any:
        """Return a parameter, buffer, constant or inner graph of the trace.

        Raises:
            FitError: A constant was made where the model has no memory.
        """
        name = target.removeprefix(PREFIX)
        if name in self._known:
            return self._known[name]
        value = _attribute(self._trace.module, target)
        if isinstance(value, torch.fx.GraphModule):
            inner = copy.deepcopy(value)
            for node in list(inner.graph.nodes):
                if node.op == "call_function" and not _computes(node):
                    inner.graph.erase_node(node)
                else:
                    _retarget(node, self._trace.device, self._device)
            inner.recompile()
            return inner
        if not value.is_meta:
            return value.to(self._device)
        if value.numel():
            raise FitError(
                "The model creates a constant on device `meta`, where tensors have no memory.",
                seen=name,
                next_step="pass the model itself, not a function that builds it; or register the "
                "constant as a buffer",
                code="WB-FIT-150",
            )
        return torch.empty_like(value, device=self._device)


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _retarget(node: Node, traced: torch.device, device: torch.device) -> None:
    """Replace the device of the trace in a node by the device on which it will run."""

    def other(value: Any) -> Any:
        same = isinstance(value, torch.device) and value.type == traced.type
        return device if same else value

    node.args = map_aggregate(node.args, other)
    node.kwargs = map_aggregate(node.kwargs, other)


def _fixed(trace: _Trace) -> set[Node]:
    """Return the nodes that give the same values for every batch and every step."""
    learnt = {name for name, _ in trace.module.named_parameters(remove_duplicate=False)}
    fixed: set[Node] = set()
    for node in trace.nodes:
        sources = [value for value in node.all_input_nodes if value.op != "get_attr"]
        held = [value for value in node.all_input_nodes if value.op == "get_attr"]
        if all(value in fixed for value in sources) and _pure(node) and all(
            str(value.target) not in learnt and _pure_inside(trace, value) for value in held
        ):  # fmt: skip
            fixed.add(node)
    changed = [value for node in trace.nodes if _changes(node) for value in node.all_input_nodes]
    while changed:  # tensors that are changed in place, and tensors that share their memory
        node = changed.pop()
        if node in fixed:
            fixed.discard(node)
            changed += node.all_input_nodes
    for node in trace.nodes:  # what was computed from it
        if any(value.op != "get_attr" and value not in fixed for value in node.all_input_nodes):
            fixed.discard(node)
    return fixed


def _pure(node: Node) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not random and not _changes(node)


def _pure_inside(trace: _Trace, held: Node) -> bool:
    value = _attribute(trace.module, str(held.target))
    inner = isinstance(value, torch.fx.GraphModule)
    return not inner or all(_pure(n) for n in value.graph.nodes if n.op == "call_function")


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _held(
    model: torch.nn.Module, training: Sequence[Piece], evaluating: Sequence[Piece]
) -> list[list[str]]:
    """Return the names of parameters and buffers by piece; each belongs to at least one."""
    order = list(dict.fromkeys(tensor_names(model)))
    own = [
        set(with_aliases(model, [*tensor_names(first.body), *tensor_names(second.body)]))
        for first, second in zip(training, evaluating, strict=True)
    ]
    at = 0
    for name in order:
        holders = [place for place, names in enumerate(own) if name in names]
        # not used in the forward pass: it stays in the piece of the tensor before it
        if not holders:
            own[at].update(with_aliases(model, [name]))
        at = holders[0] if holders else at
    return [[name for name in order if name in names] for names in own]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages of PyTorch's tracer; an error says what the user needs."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning, UserWarning):
            warnings.simplefilter("ignore", kind)
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # PyTorch adds general advice around the cause
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _place(error: BaseException, model: torch.nn.Module) -> str:
    """Return the place in the user's own code at which tracing ended."""
    cause: BaseException | None = error
    while cause is not None:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            own = "/torch/" not in frame.filename.replace("\\", "/") and frame.filename != __file__
            if frame.name == "forward" and own:
                return f", in forward, line {frame.lineno}: {frame.line or type(model).__name__}"
        cause = cause.__cause__ or cause.__context__
    return f", in {type(model).__name__}"


@dataclass
class Call:
    """A module's call: its first node, and the calls within it, in order."""

    first: int
    within: list[str] = field(default_factory=list)


def calls_of(stacks: Sequence[Sequence[str]]) -> dict[str, Call]:
    """Return the calls of modules that are called once; the model itself is ``.

    Args:
        stacks: For each node of the graph, the modules in which it was computed, outermost first;
            the names of repeated calls contain an `@`.
    """
    calls = {"": Call(0)}
    again: set[str] = set()
    left: set[str] = set()
    inside: set[str] = set()
    for index, stack in enumerate(stacks):
        around = ""
        left |= inside - set(stack)
        inside = set(stack)
        for name in stack:
            plain = name.partition("@")[0]
            if plain != name or name in left:
                again.add(plain)
            elif name not in calls:
                calls[name] = Call(index)
                calls[around].within.append(name)
            around = name if name in calls else around
    for call in calls.values():
        call.within = [name for name in call.within if name not in again]
    return {name: call for name, call in calls.items() if name not in again}


def chosen(
    model: torch.nn.Module, calls: dict[str, Call], stages: int, asked: Iterable[str] = ()
) -> list[str]:
    """Return the names of the calls that begin a link of the chain, in order.

    Args:
        stages: The number of stages that the chain is for.
        asked: Calls at which the user wants a cut.
    """
    share = {name: _size(model, name) for name in calls}
    links = list(calls[""].within)
    while coarse := _coarse(model, calls, share, links, stages):
        links = [
            inner for name in links for inner in (calls[name].within if name in coarse else [name])
        ]
    at = {calls[name].first: name for name in links}
    at |= {calls[name].first: name for name in asked if name in calls}
    return [at[first] for first in sorted(at)]


def _coarse(
    model: torch.nn.Module,
    calls: dict[str, Call],
    share: dict[str, int],
    links: list[str],
    stages: int,
) -> set[str]:
    """Return the links that must be replaced by the calls within them."""
    open_ones = [name for name in links if calls[name].within]
    chains = {name for name in open_ones if is_chain(model.get_submodule(name))}
    heavy = {name for name in open_ones if share[name] * stages > share[""]}
    if chains or heavy:
        return chains | heavy
    if len(links) < stages and open_ones:
        return {max(open_ones, key=lambda name: share[name])}
    return set()


def _size(model: torch.nn.Module, name: str) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
