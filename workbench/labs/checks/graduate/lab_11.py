"""Lab 11: sharded optimizer state, and a tensor-parallel block.

Answers run on the engines with models and links of the check's own. The truth is computed there by
plain PyTorch on one worker's copy of everything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...answers import exercise
from .on_engines import ATTENTION, MLP, PARTS, SENT, floats, have

if TYPE_CHECKING:
    from ...answers import Check

_LOOK = "\n_labs_answer = _labs_look()\ndel _labs_look\n"

_RAISED = (
    "the check uses tensors of the type float64. Call your code with such tensors in a new cell "
    "that begins with %%distributed: which line raises the error?"
)

_FLAT = """
def _labs_look():
    found = []
    for shapes in ([(2, 3), (4,)], [(1,), (1,), (1,)], [(5, 5)], [(2,), (3, 2), (1, 1, 3)]):
        given, number = [], 0
        for shape in shapes:
            count = torch.Size(shape).numel()
            given.append((torch.arange(count, dtype=torch.float64) + number + 1).view(shape))
            number += count
        flat = flatten(given)
        if flat is None:
            return None
        back = unflatten(-flat, given)  # other numbers than those of the second argument
        if back is None:
            return [flat, None]
        same = len(back) == len(given) and all(
            a.shape == b.shape and a.dtype == b.dtype and bool((a == -b).all())
            for a, b in zip(back, given))
        kind = "" if flat.dtype == torch.float64 else str(flat.dtype)
        found.append([len(flat), number, flat[:number].clone(), flat[number:].clone(), same, kind])
    return found
"""

_LINK = """
class _LabsLink:
    def __init__(self):
        self.said = []
    def all_reduce(self, x):
        self.said.append(["all_reduce", x.numel()])
        dist.all_reduce(x)
    def reduce_scatter(self, x):
        self.said.append(["reduce_scatter", x.numel()])
        whole = x.clone()
        dist.all_reduce(whole)
        return whole.view(world_size, -1)[rank].clone()
    def all_gather(self, part):
        self.said.append(["all_gather", part.numel()])
        parts = [torch.empty_like(part) for _ in range(world_size)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)
def _labs_net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
def _labs_data(step, of):
    generator = torch.Generator().manual_seed(100 * step + of)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)
"""

_ZERO = """
def _labs_look():
    plain = lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1, amsgrad=True)
    given = []
    def make(p):
        p = list(p)
        groups = [one["params"] if isinstance(one, dict) else [one] for one in p]
        given.append(sum(one.numel() for group in groups for one in group))
        return plain(p)
    mine, true, link = _labs_net(3), _labs_net(3), _LabsLink()
    zero, adam = Zero1(mine, link, make), plain(true.parameters())
    if not hasattr(zero, "step") or not hasattr(zero, "optimizer"):
        return None
    for step in range(4):
        mine.zero_grad(), true.zero_grad()
        mine(_labs_data(step, rank)).square().mean().backward()
        for of in range(world_size):
            (true(_labs_data(step, of)).square().mean() / world_size).backward()
        link.said.clear()
        with _LabsSent() as sent:
            zero.step()
        adam.step()
    off = max(float((a - b).abs().max()) for a, b in zip(mine.parameters(), true.parameters()))
    held = zero.state_bytes()
    numbers = sum(parameter.numel() for parameter in true.parameters())
    states = [t for s in zero.optimizer.state.values() for t in s.values() if t.numel() > 1]
    real = sum(t.numel() * t.element_size() for t in states)
    names = [said[0] for said in link.said]  # each of them sends with one function of dist
    names += ["a function of dist"] * (len(sent.sizes) - len(names))
    return [
        off, -1 if held is None else float(held), numbers, names, type(held).__name__, real,
        float(sum(given))]
"""

_STATE = """
def _labs_look():
    make = lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1, amsgrad=True)
    mine, true = _labs_net(4), _labs_net(4)
    zero, adam = SavedZero1(mine, _LabsLink(), make), make(true.parameters())
    def train(steps):
        for step in steps:
            mine.zero_grad(), true.zero_grad()
            mine(_labs_data(step, rank)).square().mean().backward()
            for of in range(world_size):
                (true(_labs_data(step, of)).square().mean() / world_size).backward()
            zero.step(), adam.step()
    train(range(3))
    whole = zero.whole_state()
    if not isinstance(whole, dict):
        return None
    every = adam.state[next(true.parameters())]
    lost = [name for name in every if name not in whole]
    if lost:
        return [[], 0.0, lost, 0.0, 1]
    kept = {name: torch.as_tensor(value).clone() for name, value in whole.items()}
    with torch.no_grad():  # the old object goes on: a copy does not change
        for state in zero.optimizer.state.values():
            for value in state.values():
                value.add_(1)
    sizes, off = [], 0.0
    for name, value in every.items():
        of = [adam.state[p][name].reshape(-1) for p in true.parameters()]
        wanted = torch.cat(of) if value.numel() > 1 else of[0]
        found = kept[name].reshape(-1)
        sizes.append([name, len(found), len(wanted)])
        if len(found) == len(wanted):
            off = max(off, float((found - wanted).abs().max()))
    if any(a != b for _, a, b in sizes):
        return [sizes, 0.0, [], 0.0, 1]
    for one in (kept, whole):  # another checkpoint than the one that was saved
        one["exp_avg"] = one["exp_avg"] * 2
    for state in adam.state.values():
        state["exp_avg"].mul_(2)
    zero = SavedZero1(mine, _LabsLink(), make)
    zero.load(whole)
    train(range(3, 5))
    again = max(float((a - b).abs().max()) for a, b in zip(mine.parameters(), true.parameters()))
    same = all(
        name in whole and bool((torch.as_tensor(whole[name]) == value).all())
        for name, value in kept.items())
    return [sizes, off, [], again, int(same)]
"""

_CONJUGATE = """
def _labs_look():
    found = []
    for operator in (CopyIn, SumOut):
        x = (torch.arange(3, dtype=torch.float64) + 10.0 ** rank).requires_grad_()
        kept = x.detach().clone()
        out = operator.apply(x)
        if not isinstance(out, torch.Tensor):
            return None
        weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * (rank + 1)
        given = weight.clone()
        out.backward(weight)
        untouched = bool((x.detach() == kept).all()) and bool((weight == given).all())
        gradient = torch.zeros(3, dtype=torch.float64) if x.grad is None else x.grad
        found += [out.detach().clone(), gradient.clone(), int(untouched)]
    return found
"""

_SAVED = """
def _labs_look():
    torch.manual_seed(0)
    found = []
    x = torch.randn(16, 8)  # the shape of the first layer's weight
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    found.append([saved_bytes(net, x), 4 * 16 * (8 + 16 + 16)])
    y = torch.randn(10, requires_grad=True, dtype=torch.float64)
    found.append([saved_bytes(lambda z: z * z, y), 80])
    found.append([saved_bytes(lambda z: (z.exp() * z.exp()).sum(), y), 160])
    found.append([saved_bytes(lambda z: z + 1, y), 0])
    w = torch.randn(2, 5, requires_grad=True, dtype=torch.float64)
    found.append([saved_bytes(lambda z: z.view(5, 2) * z.view(5, 2), w), 80])
    deep = [layer for _ in range(6) for layer in (torch.nn.Linear(8, 8), torch.nn.GELU())]
    found.append([saved_bytes(torch.nn.Sequential(*deep), x), 4 * 16 * 8 * 12])
    return [[-1.0 if a is None else float(a), float(b)] for a, b in found]
"""


def _bytes(workers: int, stage: int) -> float:
    return sum(
        part / workers if stage > 2 - place else float(part) for place, part in enumerate((4, 4, 8))
    )


@exercise("11.1", "What a worker holds and sends")
def held(c: Check) -> None:
    """Call the three functions for all stages, and compare bytes and the largest models."""
    for parameters, workers in ((1_000_000, 4), (7_000_000_000, 64), (10, 1), (999, 7)):
        for stage in range(4):
            found = c.number_from("held_bytes", parameters, workers, stage)
            c.need(
                math.isclose(found, parameters * _bytes(workers, stage), rel_tol=1e-9, abs_tol=4),
                f"held_bytes({parameters:_}, {workers}, {stage}) returned {found:.6g}, which is "
                "not the number of bytes that a worker holds.",
                f"look at ZeRO stage {stage} in the table: which of the three parts are divided "
                "by N? "
                "Do not round the result",
            )
    c.expect(True, "`held_bytes` returns the right number of bytes for every ZeRO stage", "")
    for memory, workers in ((80e9, 64), (1_000_010, 3), (24e9, 1)):
        for stage in range(4):
            found = c.number_from("largest", memory, workers, stage)
            of = _bytes(workers, stage)
            c.need(
                found == int(found) and found * of <= memory < (found + 1) * of * (1 + 1e-12),
                f"largest({memory:g}, {workers}, {stage}) returned {found:,.0f}, which is not the "
                "largest number of parameters that fits.",
                "divide the memory by the bytes per parameter, and round down",
            )
    c.expect(True, "`largest` is right for every ZeRO stage: one more parameter would not fit", "")
    for parameters, workers in ((1_000_000, 2), (28_810, 3), (7_000_000_000, 64)):
        for stage, times in ((0, 2), (1, 2), (3, 3)):
            found = c.number_from("sent_bytes", parameters, workers, stage)
            true = times * 4 * parameters * (workers - 1) / workers
            c.need(
                math.isclose(found, true, rel_tol=1e-9, abs_tol=4),
                f"sent_bytes({parameters:_}, {workers}, {stage}) returned {found:.5g}, which is "
                "not the number of bytes that a worker sends.",
                "an all-reduce is a reduce-scatter and an all-gather. Count all reduce-scatters "
                "and all-gathers of a step. In each of them, a worker sends (N-1)/N of the bytes "
                "of all parameters",
            )
    c.expect(
        True,
        "with ZeRO stage 1, a worker sends as many bytes as with stage 0. With stage 3, it sends "
        "1.5 times as many bytes",
        "",
    )


@exercise("11.2", "One long vector", where="the engines")
def flat(c: Check) -> None:
    """Call both functions with several shapes. Check the numbers, the padding and the shapes."""
    workers = have(c, "flatten", "unflatten")
    for found in c.ask(_FLAT + _LOOK, hint=_RAISED):
        c.need(
            found is not None and not (len(found) == 2 and found[1] is None),
            "`flatten` or `unflatten` returned None.",
            "fill in both functions, and return the results",
        )
        for length, numbers, values, padding, same, kind in found:
            given = np.asarray(values, dtype=float)
            c.need(
                len(given) == numbers and np.array_equal(given, np.arange(numbers) + 1.0),
                f"For tensors with the numbers 1, 2, ..., {int(numbers)}, the vector of `flatten` "
                "must begin with these numbers in this order, but it begins with "
                f"{given.tolist()}.",
                "put the numbers of the tensors one after the other; read each tensor row by row",
            )
            wanted = math.ceil(numbers / workers) * workers
            c.need(
                length == wanted and not np.any(np.asarray(padding, dtype=float)),
                f"For {int(numbers)} numbers, the vector of `flatten` has the length "
                f"{int(length)}. With {workers} workers the length must be {wanted}, and all "
                f"numbers after the first {int(numbers)} must be 0.",
                "how many zeros must you add to reach the next multiple of world_size? The "
                "operator % helps: -7 % 3 is 2",
            )
            c.need(
                not kind,
                f"For tensors of type float64, the vector of `flatten` has the type {kind}.",
                "make the vector with the type of the tensors, which is tensors[0].dtype",
            )
            c.need(
                bool(same),
                "`unflatten(flat, like)` returned wrong tensors. The tensors must have the numbers "
                "and the type of `flat`, and the shapes of the tensors in `like`.",
                "in the vector `flat`, each tensor begins where the previous tensor ends. Take all "
                "numbers from `flat`: the numbers in `like` can be different",
            )
    c.expect(
        True,
        "`unflatten` is the opposite of `flatten`, for any number of tensors and any shapes",
        "",
    )


@exercise("11.3", "ZeRO stage 1", where="the engines")
def zero(c: Check) -> None:
    """Train four steps with weight decay. Compare weights, state and collectives with Adam's."""
    workers = have(c, "Zero1", "flatten", "unflatten")
    found = c.ask(SENT + _LINK + _ZERO + _LOOK, hint=_RAISED)
    c.need(
        all(one is not None for one in found) and all(one[4] != "NoneType" for one in found),
        "A method of `Zero1` is empty, or `self.optimizer` is missing.",
        "fill in __init__ (with self.optimizer), step and state_bytes",
    )
    off = max(float(one[0]) for one in found)
    c.need(
        off < 1e-10,
        f"After four steps, the weights differ by {off:.2g} from the weights with ordinary AdamW.",
        "each worker updates its part with the mean of all workers' gradients; then every worker "
        "collects the new parts of all workers",
    )
    c.expect(True, "the weights equal the weights with ordinary AdamW", "")
    part_bytes = 3 * 8 * math.ceil(float(found[0][2]) / workers)  # amsgrad=True: three tensors
    whole = [float(one[5]) for one in found if float(one[5]) != part_bytes]
    c.need(
        not whole,
        f"On a worker, the state of `self.optimizer` has {max(whole, default=0):g} bytes. But the "
        f"state for this worker's part of the parameters must have {part_bytes} bytes.",
        "make one parameter for this worker's part, and give only this parameter to make_optimizer",
    )
    part = math.ceil(float(found[0][2]) / workers)
    more = [float(one[6]) for one in found if float(one[6]) > part]
    c.need(
        not more,
        f"A worker gave {max(more, default=0):g} numbers to make_optimizer, but its part has "
        f"{part} numbers.",
        "call make_optimizer once, with only the parameter that holds this worker's part",
    )
    other = [float(one[1]) for one in found if float(one[1]) != part_bytes]
    c.expect(
        not other,
        f"each worker holds 1/{workers} of the optimizer's state",
        f"state_bytes() returned {max(other, default=0):g}, but the state for a worker's part has "
        f"{part_bytes} bytes",
        "in the state of `self.optimizer`, add up the bytes of all tensors with more than one "
        "number. The check uses AdamW with amsgrad=True. For each parameter, its state has one "
        "more tensor than the state of Adam",
    )
    names = [[str(name) for name in one[3]] for one in found]
    c.expect(
        all(sorted(one) == ["all_gather", "reduce_scatter"] for one in names),
        "a step uses one reduce-scatter and one all-gather",
        "a step must call link.reduce_scatter and link.all_gather once each, but its calls were: "
        f"{', '.join(names[0]) or 'none'}",
        "flatten all gradients first, so that one reduce_scatter is enough, and collect the new "
        "parts with one all_gather. An all_reduce sends twice as much as a reduce_scatter"
        if set(names[0]) & {"all_reduce", "reduce_scatter"} and "a function of dist" not in names[0]
        else "send only with the methods of `link`",
    )


@exercise("11.4", "A checkpoint for any number of workers", where="the engines")
def saved_state(c: Check) -> None:
    """Save after three steps, load into a new object, and train on. Compare with one AdamW."""
    have(c, "SavedZero1", "Zero1", "flatten")
    found = c.ask(_LINK + _STATE + _LOOK, hint=_RAISED)
    c.need(
        all(one is not None for one in found),
        "`whole_state()` did not return a dictionary.",
        "fill in `whole_state` and `load`; `whole_state` returns a dictionary of tensors",
    )
    lost = [str(name) for name in found[0][2]]
    c.need(
        not lost,
        f"The dictionary of `whole_state()` lacks entries of the optimizer's state: "
        f"{', '.join(lost)}.",
        "go through all items of the state and keep their names: the check uses AdamW with "
        "amsgrad=True, which has one entry more than Adam",
    )
    for sizes, *_ in found:
        for name, length, wanted in sizes:
            c.need(
                wanted > 1 or length == 1,
                f"The saved `{name}` has {length} numbers, but `{name}` is a single number.",
                "save a single number unchanged: its value is the same on all workers",
            )
            c.need(
                length == wanted,
                f"The saved `{name}` has {length} numbers, but the model has {wanted} parameters.",
                "collect the parts of all workers, and cut off the padding at the end",
            )
    off = max(float(one[1]) for one in found)
    c.need(
        off < 1e-10,
        f"The saved state differs by {off:.2g} from the state of an ordinary AdamW.",
        "save every entry of the state under its name, and put the parts in the order of the ranks",
    )
    c.expect(True, "the saved state equals the state of an ordinary AdamW", "")
    c.need(
        all(one[4] for one in found),
        "The dictionary of `whole_state()` changed when the training continued.",
        "copy each tensor with .clone(), because the optimizer changes its own tensors in place",
    )
    again = max(float(one[3]) for one in found)
    c.need(
        again < 1e-10,
        f"After `load` and two more steps, the weights differ by {again:.2g} from those of an "
        "uninterrupted run.",
        "`load` must write two things into self.optimizer.state: this worker's part of the "
        "moments, and `step`",
    )
    c.expect(True, "after `load`, training gives the same weights as an uninterrupted run", "")


@exercise("11.5", "Two conjugate operators", where="the engines")
def conjugate(c: Check) -> None:
    """Apply both operators. Compare results and gradients with sums over the workers."""
    workers = have(c, "CopyIn", "SumOut")
    written = "getattr(one, name) is not getattr(torch.autograd.Function, name)"
    there = c.ask(
        f"_labs_answer = all({written} for one in (CopyIn, SumOut) "
        "for name in ('forward', 'backward'))"
    )
    c.need(
        all(there),
        "`CopyIn` or `SumOut` has no method forward, or no method backward.",
        "write both as static methods: forward(ctx, x) and backward(ctx, gradient)",
    )
    found = c.ask(_CONJUGATE + _LOOK, hint=_RAISED)
    c.need(
        all(one is not None for one in found),
        "`CopyIn.apply(x)` or `SumOut.apply(x)` did not return a tensor.",
        "forward must be a static method that returns a tensor",
    )
    total = sum(10.0**rank for rank in range(workers))
    weights = np.array([1.0, 2.0, 3.0])
    all_weights = weights * sum(range(1, workers + 1))
    for rank, one in enumerate(found):
        own = np.arange(3) + 10.0**rank
        values = [floats(c, one[place], "apply", (3,)) for place in (0, 1, 3, 4)]
        wanted = [own, all_weights, workers * np.arange(3) + total, weights * (rank + 1)]
        words = [
            ("CopyIn.forward", "the forward pass of CopyIn is the identity"),
            ("CopyIn.backward", "the backward pass of CopyIn adds up all workers' gradients"),
            ("SumOut.forward", "the forward pass of SumOut adds up all workers' inputs"),
            ("SumOut.backward", "the backward pass of SumOut is the identity"),
        ]
        for value, true, (name, hint) in zip(values, wanted, words, strict=True):
            c.need(
                bool(np.allclose(value, true)),
                f"`{name}` returned {value} on worker {rank}, but it must return {true}.",
                hint,
            )
        c.need(
            bool(one[2]) and bool(one[5]),
            "`CopyIn` or `SumOut` changed its input, or the gradient that it received.",
            "copy the tensor with .clone() before dist.all_reduce",
        )
    c.expect(
        True,
        "CopyIn copies in the forward pass and sums over all workers in the backward pass; SumOut "
        "does the opposite",
        "",
    )


def _divided(
    c: Check, rank: int, workers: int, parts: list[Any], off_later: float, kept: str
) -> None:
    """End the check if the parts of a divided module, or their gradients, are not right."""
    held, squares, everywhere, numbers, bias = (float(one) for one in parts[:5])
    biases = (everywhere - numbers) / bias
    c.need(
        held <= numbers / workers + bias and biases in range(1, workers + 1),
        f"Worker {rank} holds {held:.0f} parameters, and all workers together hold "
        f"{everywhere:.0f}. The layers have {numbers:.0f} parameters if the last bias is not "
        f"counted. Each worker must hold {numbers / workers:.0f} of them.",
        f"keep only this worker's part as parameters: {kept}; the last bias may be on every worker "
        "or on only one worker",
    )
    whole, *other = (int(one) for one in parts[7])
    c.need(
        not other,
        f"Worker {rank} sent a tensor with {max(other, default=0)} numbers. But a worker may send "
        "only two tensors. The first is the tensor that it adds to the result. The second is the "
        f"gradient that it computes for the input. Each of these two tensors has {whole} numbers.",
        "do not send weights: apply CopyIn to the input, and SumOut to the tensor that this worker "
        "adds to the result",
    )
    divided, last = (float(one) for one in parts[5])
    c.need(
        any(
            math.isclose(squares, divided + count * last, rel_tol=1e-9)
            for count in range(1, int(biases) + 1)
        ),
        "The gradients of the parts differ from the gradients of the undivided layers.",
        "every weight and bias of a part must be a parameter with its own gradient. The backward "
        "pass of SumOut must not add up gradients. Do not add bias / N on each worker: otherwise "
        "each copy of the bias gets only 1/N of its gradient",
    )
    c.need(
        off_later < 1e-10,
        f"After a step of SGD, the result on worker {rank} is wrong: it differs by {off_later:.2g} "
        "from the result of the undivided layers.",
        "add the whole bias once, on one worker. Suppose that each of N workers has the "
        "parameter bias / N instead. Then each of these parameters gets the full gradient. So a "
        "step changes their sum N times as much as it should",
    )
    c.need(
        bool(parts[6]),
        f"On worker {rank}, a step of SGD also changed the layers that `__init__` received.",
        "make new parameters, and copy the numbers into them with .clone(): without a copy, a "
        "parameter and its layer use the same memory",
    )


def _returned(c: Check, found: list[Any], name: str) -> None:
    c.need(
        all(one is not None for one in found),
        f"`{name}(...)(x)` did not return a tensor.",
        "fill in __init__ and forward, and return the result",
    )
    kinds = [one for one in found if isinstance(one, str)]
    c.need(
        not kinds,
        f"A parameter of `{name}` has the type {''.join(kinds[:1])}, but the layers of the check "
        "have the type float64.",
        "give each parameter the type of the layer that it comes from",
    )


@exercise("11.6", "The divided MLP", where="the engines")
def mlp(c: Check) -> None:
    """Call `ParallelMLP` forward and backward. Compare with the undivided layers."""
    have(c, "ParallelMLP", "CopyIn", "SumOut")
    found = c.ask(SENT + PARTS + MLP + _LOOK, hint=_RAISED)
    _returned(c, found, "ParallelMLP")
    for rank, (off, off_input, off_later, *parts) in enumerate(found):
        c.need(
            float(off) < 1e-10,
            f"On worker {rank} the result is wrong: it differs by {float(off):.2g} from the result "
            "of the undivided MLP.",
            "use `gelu` between the layers, as in second(gelu(first(x))), and add the bias of the "
            "second layer once, after the sum over the workers",
        )
        c.need(
            float(off_input) < 1e-10,
            f"On worker {rank} the gradient of the input is wrong: it differs by "
            f"{float(off_input):.2g} from the gradient that the undivided MLP gives.",
            "every worker used x, so the gradients of all workers must be added up: apply CopyIn "
            "to x",
        )
        kept = "rows of first.weight and first.bias, and columns of second.weight"
        _divided(c, rank, len(found), parts, float(off_later), kept)
    c.expect(True, "the result and all gradients are the same as with the undivided MLP", "")


@exercise("11.7", "Divided heads", where="the engines")
def attention(c: Check) -> None:
    """Call `ParallelAttention` forward and backward. Compare with all heads on one worker."""
    have(c, "ParallelAttention", "CopyIn", "SumOut")
    found = c.ask(SENT + PARTS + ATTENTION + _LOOK, hint=_RAISED)
    _returned(c, found, "ParallelAttention")
    for rank, (off, off_input, off_later, *parts) in enumerate(found):
        c.need(
            float(off) < 1e-10,
            f"On worker {rank} the result is wrong: it differs by {float(off):.2g} from the result "
            "of the undivided attention (all heads on one worker).",
            "queries, keys and values are three blocks of rows in qkv.weight: take the rows of "
            "this worker's heads from each block. Use the causal mask. Add the bias of `out` once",
        )
        c.need(
            float(off_input) < 1e-10,
            f"On worker {rank} the gradient of the input is wrong: it differs by "
            f"{float(off_input):.2g} from the gradient that the undivided attention gives.",
            "apply CopyIn to the input, and SumOut after the product with the weight of `out`",
        )
        kept = "the rows of `qkv` and the columns of `out` for this worker's heads"
        _divided(c, rank, len(found), parts, float(off_later), kept)
    c.expect(True, "the result and all gradients are the same as with the undivided attention", "")


@exercise("11.8", "What autograd saves", where="the engines")
def saved(c: Check) -> None:
    """Call `saved_bytes` with a model and with functions whose saved tensors are known."""
    have(c, "saved_bytes")
    hint = "your code must also work if `function` is a plain Python function: such a function "
    hint += "has no method parameters()"
    answers: list[list[Any]] = c.ask(_SAVED + _LOOK, hint=hint)[0]
    (net, net_true), (square, square_true), (twice, twice_true), (plus, plus_true), *more = answers
    (views, views_true), (deep, deep_true) = more
    c.need(
        float(net) >= 0,
        "`saved_bytes` returned None.",
        "add up the bytes of all tensors that autograd saves, and return the sum",
    )
    c.need(
        float(square) == float(square_true),
        f"For z * z, autograd saves z: ten float64 numbers, which have 80 bytes. But `saved_bytes` "
        f"returned {float(square):g}.",
        "autograd saves the same tensor z twice. If tensors have the same data_ptr(), count only "
        "one of them. element_size() is the number of bytes of one number",
    )
    c.need(
        float(net) == float(net_true),
        f"For an MLP with 16 samples, `saved_bytes` returned {float(net):g}. But the input of "
        "the MLP, the input of GELU and the output of GELU have "
        f"{float(net_true):g} bytes in total.",
        "autograd saves weights too, but weights are not activations. Do not count a tensor if its "
        "data_ptr() is that of a parameter"
        if float(net) > float(net_true)
        else "if two tensors have different data_ptr(), count both, even if their shapes are equal",
    )
    c.need(
        float(plus) == float(plus_true),
        f"For z + 1, autograd saves nothing, but `saved_bytes` returned {float(plus):g}.",
        "count only tensors that autograd saves",
    )
    c.need(
        float(views) == float(views_true),
        "For z.view(5, 2) * z.view(5, 2), autograd saves two views of z, which share the 80 "
        f"bytes of z. But `saved_bytes` returned {float(views):g}.",
        "the two views are different Python objects with the same memory: compare data_ptr(), and "
        "not id()",
    )
    c.need(
        float(deep) == float(deep_true),
        f"For six linear layers with GELU, autograd saves {float(deep_true):g} bytes, but "
        f"`saved_bytes` returned {float(deep):g}.",
        "the first function in saved_tensors_hooks(...) must return the tensor that it gets. "
        "Otherwise PyTorch can use the tensor's memory again, and then different tensors have the "
        "same data_ptr()",
    )
    c.expect(
        float(twice) == float(twice_true),
        "each activation counts once, and parameters do not count",
        f"For exp(z) * exp(z), autograd saves both results of exp(z), which have 160 bytes in "
        f"total. But `saved_bytes` returned {float(twice):g}",
        "count each data_ptr() once: the two results of exp(z) have different data_ptr()",
    )
