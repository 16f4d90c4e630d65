"""Where a traced model can be cut: at the calls of its modules, as deep down as stages need it.

    forward of the model     transformer                          lm_head
    its calls                wte  wpe  drop  h.0      h.1   ln_f
    their calls                              ln attn
                                             mlp

The chain begins with the calls in the model's own forward. A call that holds more than a stage's
fair share of the parameters is replaced by the calls within it, so that blocks are found however
deep they lie (a ModuleDict, an encoder's loop), and stay whole where they are small enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .layers import is_chain


@dataclass
class Call:
    """A module's call: the node it begins with, and the calls within it, in order."""

    first: int
    within: list[str] = field(default_factory=list)


def calls_of(stacks: Sequence[Sequence[str]]) -> dict[str, Call]:
    """Return the calls of modules that are called once; the model itself is ``.

    Args:
        stacks: For each node of the graph, the modules it was computed in, outermost first; those
            called again carry an `@`.
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
        stages: How many stages the chain is wanted for.
        asked: Calls that the user cuts at, whatever else is chosen.
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
    """Return the links to be replaced by what they call."""
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
