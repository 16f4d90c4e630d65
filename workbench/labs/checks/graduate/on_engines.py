"""What the checks of labs 10 to 13 ask of answers on the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ...answers import Check

Floats = NDArray[np.float64]

SENT = """
class _LabsSent:
    def __enter__(self):
        self.sizes, self.kept = [], {}
        for name in (
            "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
            "all_gather_object", "scatter", "reduce_scatter", "reduce_scatter_tensor",
            "all_to_all", "all_to_all_single", "send", "isend",
        ):
            if hasattr(dist, name):
                self.kept[name] = getattr(dist, name)
                setattr(dist, name, self.noting(self.kept[name]))
        return self
    def noting(self, function):
        def call(*args, **named):
            given = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
            self.sizes.append(min((one.numel() for one in given), default=0))
            return function(*args, **named)
        return call
    def __exit__(self, *error):
        for name, function in self.kept.items():
            setattr(dist, name, function)
"""
"""Notes the size of each tensor that a worker sends with the functions of `dist`."""

PARTS = """
import copy
def _labs_numbers(*layers):
    return [p.detach().clone() for layer in layers for p in layer.parameters()]
def _labs_kind(module):
    return next((str(p.dtype) for p in module.parameters() if p.dtype != torch.float64), None)
def _labs_parts(module, divided, bias):
    mine = list(module.parameters())
    squares = [float(p.grad.square().sum()) for p in mine if p.grad is not None]
    both = torch.tensor([sum(squares), sum(p.numel() for p in mine)], dtype=torch.float64)
    held = both[1].item()
    dist.all_reduce(both)
    truth = [float(sum(p.grad.square().sum() for p in divided)), float(bias.grad.square().sum())]
    with torch.no_grad():  # a step of SGD on both
        for p in [*mine, *divided, bias]:
            if p.grad is not None:
                p -= 0.1 * p.grad
    return [held, both[0].item(), both[1].item(), sum(p.numel() for p in divided), bias.numel(),
            truth]
"""
"""The parameters of a divided module: their number here and on all workers, and their gradients.

The parts may have any shape, and the last bias may be on one worker or on several.
"""

MLP = """
def _labs_look():
    torch.manual_seed(5)
    d, h = 4, 6 * world_size
    first, second = torch.nn.Linear(d, h).double(), torch.nn.Linear(h, d).double()
    x, weight = (torch.randn(5, d, dtype=torch.float64) for _ in range(2))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept, begun = copy.deepcopy((first, second)), _labs_numbers(first, second)
    mlp = ParallelMLP(*kept)  # it may draw random numbers of its own, and change its layers
    if kind := _labs_kind(mlp):
        return kind
    with _LabsSent() as sent:
        out = mlp(a)
        if not isinstance(out, torch.Tensor):
            return None
        out.backward(weight)
    def undivided(x):
        return second(torch.nn.functional.gelu(first(x)))
    true = undivided(b)
    true.backward(weight)
    off = [float((out - true).abs().max()), float((a.grad - b.grad).abs().max())]
    parts = _labs_parts(mlp, [first.weight, first.bias, second.weight], second.bias)
    parts.append(int(all(map(torch.equal, _labs_numbers(*kept), begun))))
    parts.append([x.numel(), *(size for size in sent.sizes if x.numel() % max(size, 1))])
    return [*off, float((mlp(x) - undivided(x)).abs().max()), *parts]
"""

ATTENTION = """
def _labs_look():
    torch.manual_seed(6)
    d, heads = 4 * world_size, 2 * world_size
    qkv, out = torch.nn.Linear(d, 3 * d).double(), torch.nn.Linear(d, d).double()
    x, weight = (torch.randn(2, 5, d, dtype=torch.float64) for _ in range(2))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept, begun = copy.deepcopy((qkv, out)), _labs_numbers(qkv, out)
    attention = ParallelAttention(*kept, heads)
    if kind := _labs_kind(attention):
        return kind
    with _LabsSent() as sent:
        found = attention(a)
        if not isinstance(found, torch.Tensor):
            return None
        if found.shape != weight.shape:
            return [float("inf"), float("inf")] + 9 * [0]
        found.backward(weight)
    def undivided(x):
        q, k, v = [part.view(2, 5, heads, -1).transpose(1, 2) for part in qkv(x).chunk(3, -1)]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out(mixed.transpose(1, 2).reshape(2, 5, d))
    true = undivided(b)
    true.backward(weight)
    off = [float((found - true).abs().max()), float((a.grad - b.grad).abs().max())]
    parts = _labs_parts(attention, [qkv.weight, qkv.bias, out.weight], out.bias)
    parts.append(int(all(map(torch.equal, _labs_numbers(*kept), begun))))
    parts.append([x.numel(), *(size for size in sent.sizes if x.numel() % max(size, 1))])
    return [*off, float((attention(x) - undivided(x)).abs().max()), *parts]
"""


def have(c: Check, *names: str) -> int:
    """End the check unless the engines have these names, and return how many engines."""
    found = c.ask(f"_labs_answer = [n for n in {names!r} if not callable(globals().get(n))]")
    missing = sorted({str(name) for one in found for name in one})
    c.need(
        not missing,
        f"The engines have no `{', '.join(missing)}`.",
        f"run the cells of the lab in order, then the cell of exercise {c.number}: it begins with "
        "%%distributed",
    )
    c.need_all_engines()
    return len(found)


def filled(c: Check, value: Any, name: str) -> Any:
    c.need(
        value is not None,
        f"`{name}` returned None.",
        f"write the body of `{name}` in the cell of exercise {c.number}, and return the result",
    )
    return value


def floats(c: Check, value: Any, name: str, shape: tuple[int, ...] | None = None) -> Floats:
    """Return what a function of the engines returned, as numbers of that shape."""
    filled(c, value, name)
    try:
        found = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        c.wrong(f"`{name}`: the values are not numbers.", "return a tensor")
    if shape is not None:
        c.need(
            found.shape == shape,
            f"`{name}`: the shape is {found.shape}, but it must be {shape}.",
            "the text of the exercise says which size the vector (1-D tensor) must have"
            if shape
            else "the result must be a single number",
        )
    c.need(bool(np.isfinite(found).all()), f"`{name}`: at least one number is not finite.",
           "look for a division by zero, which can happen with a vector of zeros")  # fmt: skip
    return found
