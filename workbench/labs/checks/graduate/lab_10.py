"""Lab 10: data parallelism from hooks.

Answers run on the engines with a model and a wire of the check's own, so that a cell that was
changed cannot decide what is right.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ...answers import exercise
from ...plain import EXPOSED_S, NamedRun
from .on_engines import filled, floats, have

if TYPE_CHECKING:
    from ...answers import Check

_WIRE = """
class _LabsSent:
    def __init__(self, wire, work):
        self.wire, self.work, self.open = wire, work, True
        wire.sent.append(self)
    def wait(self):
        self.wire.waits += 1
        self.open = False
        return self.work.wait()

class _LabsWire:
    def __init__(self):
        self.messages, self.sizes, self.begun, self.during = 0, [], [], None
        self.sent = []
        self.waits = 0  # how often the worker waited for a message that it began
    def all_reduce(self, x):
        self.begin(x).wait()
    def begin(self, x):
        self.messages += 1
        self.sizes.append(x.numel() * x.element_size())
        self.begun.append(None if self.during is None else self.during())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(sizes, torch.tensor([self.sizes[-1]]))
        sizes = [int(size) for size in sizes]
        if len(set(sizes)) > 1:  # gloo would end the process
            sent = ", ".join(f"worker {r} sends {size} bytes" for r, size in enumerate(sizes))
            raise ValueError(f"message {self.messages} has different sizes on the workers: {sent}")
        return _LabsSent(self, dist.all_reduce(x.detach(), async_op=True))
    def broadcast(self, x, source=0):
        dist.broadcast(x, source)

class _LabsCrossed(torch.nn.Sequential):
    def forward(self, x):  # the last module is used second: its gradients come late
        for place in (0, 4, 1, 2, 3):
            x = self[place](x)
        return x

def _labs_net(seed, crossed=False):
    torch.manual_seed(seed)
    if crossed:
        net = _LabsCrossed(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3),
            torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(7)).double()
        net[2].bias.requires_grad_(False)
        return net
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 3),
        torch.nn.Linear(3, 2)).double()
    net[3].bias.requires_grad_(False)
    return net

def _labs_grads(net):
    return [torch.zeros(1) if p.grad is None else p.grad.detach().clone()
            for p in net.parameters() if p.requires_grad]

def _labs_data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(6, 2, generator=generator, dtype=torch.float64)
"""
_ORDER = (
    "which line raises the error? If the error is about sizes: all workers must send the same "
    "messages in the same order. If a .grad is None, send zeros of the parameter's shape and type"
)

_FORGET = """
del _LabsSent, _LabsWire, _LabsCrossed, _labs_net, _labs_grads, _labs_data, _labs_look
"""

_SAME = """
def _labs_look():
    net, wire = _labs_net(rank), _LabsWire()
    net[1].running_mean.fill_(float(rank) + 1)
    net[1].num_batches_tracked.fill_(rank + 1)  # a whole number: buffers may have other types
    same_weights(net, wire)
    tensors = [*net.parameters(), *net.buffers()]
    return torch.cat([t.detach().double().reshape(-1) for t in tensors])
_labs_answer = _labs_look()
"""

_NAIVE = """
def _labs_look():
    net, wire = _labs_net(0), _LabsWire()
    before = []
    for place, p in enumerate(p for p in net.parameters() if p.requires_grad):
        p.grad = None if (place == 1 and rank == 0) else torch.full_like(p, place + 10.0 ** rank)
    average_naive(net, wire)
    missing = sum(p.grad is None for p in net.parameters() if p.requires_grad)
    return [torch.cat([g.reshape(-1) for g in _labs_grads(net)]), [wire.messages, missing]]
_labs_answer = _labs_look()
"""

_FLAT = """
def _labs_look():
    wire = _LabsWire()
    shapes = [(3, 4), (1,), (2, 2, 2), ()]
    given = [torch.full(s, i + 0.1 + 10.0 ** rank, dtype=torch.float64)
             for i, s in enumerate(shapes)]
    kept = list(given)  # the tensors must change, not the list
    average_flat(given, wire)
    return [torch.cat([g.reshape(-1) for g in kept]), [wire.messages]]
_labs_answer = _labs_look()
"""

_BUCKETS = """
def _labs_look(sizes, frozen, limit, of_one):
    shapes = [(size // 2, 2) if size // 2 * 2 == size else (size,) for size in sizes]
    kind = {4: torch.float32, 8: torch.float64}[of_one]
    given = [torch.nn.Parameter(torch.zeros(shape, dtype=kind), i not in frozen)
             for i, shape in enumerate(shapes)]
    found = make_buckets(iter(given) if frozen else given, limit)
    if found is None:
        return None
    place = {id(p): i for i, p in enumerate(given)}
    return [[place.get(id(p), -1) for p in bucket] for bucket in found]
_labs_answer = [_labs_look(*one) for one in %r]
del _labs_look
"""
_TRIALS = [
    ([4, 4, 4, 4], [], 64, 8), ([4, 4, 4, 4], [1], 64, 8), ([1, 50, 2, 3], [], 64, 8),
    ([8], [], 8, 8), ([2, 2, 2, 2, 2, 2, 2], [0, 3], 48, 8), ([3, 3, 3], [], 10_000, 8),
    ([4, 4, 4, 4, 4], [], 32, 4), ([4, 4, 4, 4], [2], 64, 8),
]  # fmt: skip
"""Sizes of the parameters, which are frozen, the limit in bytes, and the bytes of one number."""

_PARALLEL = """
def _labs_look(kind, limit, steps, quiet, unused, keep, crossed):
    net, wire = _labs_net(rank, crossed), _LabsWire()
    parallel = kind(net, wire, limit)
    weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    told, done, waits, left = [], [], 0, 0
    net[0].weight.register_hook(lambda gradient: done.append(1))
    wire.during = lambda: len(done)
    for step in range(steps):
        net.zero_grad(set_to_none=not keep)
        x, y = _labs_data(10 * step + rank)
        def loss(part):
            out = parallel(x[part])
            left_out = rank == 0 and (
                unused is True or (unused == "step 0" and step == 0)
                or (unused == "pass 2" and part.start == 3))
            out = out.detach() * net[0].weight.sum() if left_out else out
            return ((out - y[part]) ** 2).mean()
        wire.messages, wire.sizes, wire.begun, wire.waits, wire.sent = 0, [], [], 0, []
        done.clear()
        if quiet:
            with parallel.no_sync():
                loss(slice(0, 3)).backward()
            told.append(wire.messages)
            done.clear()
            loss(slice(3, 6)).backward()
        else:
            loss(slice(0, 6)).backward()
        early = sum(1 for one in wire.begun if one == 0)
        waits += wire.waits  # before finish: the backward pass stood still
        parallel.finish()
        left += sum(one.open for one in wire.sent)
        told += [wire.messages, early, sum(wire.sizes)]
    grads = torch.cat([g.reshape(-1) for g in _labs_grads(net)])
    net2 = _labs_net(0, crossed)
    mine = []
    for other in range(world_size):
        x, y = _labs_data(10 * (steps - 1) + other)
        net2.zero_grad(set_to_none=True)
        for p, q in zip(net2.buffers(), _labs_net(0, crossed).buffers()):
            p.copy_(q)
        parts = [slice(0, 3), slice(3, 6)] if quiet else [slice(0, 6)]
        for part in parts:
            out = net2(x[part])
            left_out = other == 0 and (unused is True or (unused == "pass 2" and part.start == 3))
            out = out.detach() * net2[0].weight.sum() if left_out else out
            ((out - y[part]) ** 2).mean().backward()
        mine.append([torch.zeros_like(p) if p.grad is None else p.grad.clone()
                     for p in net2.parameters() if p.requires_grad])
    true = torch.cat([sum(parts).reshape(-1) / world_size for parts in zip(*mine)])
    return [weights, grads, true, told, waits, left]
_labs_answer = _labs_look(KIND, LIMIT, STEPS, QUIET, UNUSED, KEEP, CROSSED)
"""
"""A step's gradients by the answer, and those of one device that computes all shares."""

_EMPTY = """
_labs_answer = getattr(getattr(DataParallel, "finish", None), "__code__", None)
_labs_answer = "still empty" in str(getattr(_labs_answer, "co_consts", ""))
"""
"""Whether the method is still the one of the cell that students get."""

_SMALL, _LARGE = 1, 1 << 20
"""Limits in bytes: every parameter in a bucket of its own; all in one."""

_CASES = (
    (8, 33e3, 0.012, 0.006, 5e6), (4, 1.0, 0.1, 0.5, 2.0), (12, 10.0, 1.0, 0.0, 1e9),
    (6, 3.0, 0.01, 1.0, 1.0),
)  # fmt: skip
"""Blocks, bytes of each, its backward time, latency and bandwidth: what is tried."""


def _true_s(way: str, blocks: int, of_block: float, backward: float, latency: float,
            speed: float, buckets: int) -> float:  # fmt: skip
    messages = {"naive": 2 * blocks, "flat": 1, "bucketed": buckets}
    if way in messages:
        return messages[way] * latency + blocks * of_block / speed
    each = blocks // buckets
    free = 0.0
    for bucket in range(1, buckets + 1):
        free = max(free, bucket * each * backward) + latency + each * of_block / speed
    return free - blocks * backward


@exercise("10.1", "The predicted time of each version")
def predicted(c: Check) -> None:
    """Call `exposed_s` with several wires. Compare its results with a walk over the messages."""
    for way in ("naive", "flat", "bucketed", "overlapped"):
        for blocks, of_block, backward, latency, speed in _CASES:
            for buckets in (1, 2, blocks):
                asked = (way, blocks, of_block, backward, latency, speed, buckets)
                found = c.number_from("exposed_s", *asked)
                true = _true_s(*asked)
                c.need(
                    math.isclose(found, true, rel_tol=1e-6, abs_tol=1e-9),
                    f"exposed_s{asked} returned {found:.4g} s, but the exposed time is "
                    f"{true:.4g} s.",
                    "go through the messages in order. When are the gradients of a message ready? "
                    "When does the previous message arrive? The message begins at the later of "
                    "these two times"
                    if way == "overlapped"
                    else "add one latency for each message, and the time to send all bytes",
                )
        c.expect(True, f"`{way}`: the exposed time is right in all cases that the check tried", "")


@exercise("10.2", "The same weights on all workers, and naive averaging", where="the engines")
def naive(c: Check) -> None:
    """Call both functions on the engines. Compare the tensors, and count the messages."""
    workers = have(c, "same_weights", "average_naive")
    found = c.ask(_WIRE + _SAME + _FORGET, hint=_ORDER)
    first = floats(c, found[0], "same_weights")
    off = [rank for rank, one in enumerate(found) if not np.array_equal(np.asarray(one), first)]
    c.need(
        not off,
        f"After `same_weights`, the model of worker {off[0] if off else 0} differs from the model "
        "of worker 0.",
        "send the parameters of worker 0 and also its buffers, such as BatchNorm's running mean",
    )
    again = c.ask(_WIRE + _SAME.replace("same_weights(net, wire)", "pass") + _FORGET)
    c.expect(
        np.array_equal(first, np.asarray(again[0], dtype=float)),
        "all workers have the weights and buffers of worker 0",
        "`same_weights` changed the values of worker 0",
        "a broadcast from worker 0 does not change the values of worker 0",
    )
    found = c.ask(_WIRE + _NAIVE + _FORGET, hint=_ORDER)
    missing = [rank for rank, one in enumerate(found) if int(one[1][1])]
    c.need(
        not missing,
        f"After `average_naive`, a `.grad` of worker {missing[0] if missing else 0} is still None.",
        "a worker that sent zeros needs the mean too: write the mean into its `.grad`",
    )
    _mean_of(c, "average_naive", found, workers, _naive_truth(workers))
    c.expect(
        all(int(one[1][0]) == 7 for one in found),
        "`average_naive` sends one message for each parameter that needs a gradient",
        f"the workers sent {[int(one[1][0]) for one in found]} messages, but 7 parameters need a "
        "gradient",
        "send no message for a frozen parameter, and send zeros for a missing gradient",
    )


def _naive_truth(workers: int) -> np.ndarray[Any, Any]:
    counts = (35, 7, 7, 7, 21, 6, 2)  # of the net's parameters without the frozen bias
    total = sum(10.0**rank for rank in range(workers))
    found = []
    for place, count in enumerate(counts):
        whole = workers * place + total
        missing = (place + 1.0) if place == 1 else 0.0
        found += [(whole - missing) / workers] * count
    return np.array(found)


def _mean_of(
    c: Check, name: str, found: list[Any], workers: int, true: np.ndarray[Any, Any]
) -> None:
    """End the check unless every worker has the mean."""
    for rank, one in enumerate(found):
        values = floats(c, one[0], name, true.shape)
        off = int(np.argmax(np.abs(values - true)))
        c.need(
            bool(np.allclose(values, true, rtol=1e-9)),
            f"After `{name}`, a gradient of worker {rank} is {values[off]:.10g}, but the mean over "
            f"{workers} workers is {true[off]:.10g}.",
            "these gradients are float64, and float32 has only about seven digits: the message "
            "must have the type of the gradients"
            if np.allclose(values, true, rtol=1e-6)
            else "divide the sum by the number of all workers, and write the mean back into the "
            "gradient; a worker without a gradient sends zeros, and is counted too",
        )
    c.expect(True, f"`{name}` gives every worker the mean", "")


@exercise("10.3", "One message", where="the engines")
def flat(c: Check) -> None:
    """Call `average_flat` with tensors of several shapes. Compare the means, count the messages."""
    workers = have(c, "average_flat")
    found = c.ask(
        _WIRE + _FLAT + _FORGET,
        hint=f"{_ORDER}. One tensor in the check has the shape (), because it is a single number: "
        "`copy_` also works with this shape",
    )
    total = sum(10.0**rank for rank in range(workers)) / workers
    true = np.array(
        [total + i + 0.1 for i, count in enumerate((12, 1, 8, 1)) for _ in range(count)]
    )
    _mean_of(c, "average_flat", found, workers, true)
    c.expect(
        all(int(one[1][0]) == 1 for one in found),
        "one message carries all gradients",
        f"the workers sent {[int(one[1][0]) for one in found]} messages, but each must send 1",
        "copy all gradients into one tensor with torch.cat, and send this tensor",
    )


@exercise("10.4", "Buckets", where="the engines")
def buckets(c: Check) -> None:
    """Call `make_buckets` with several parameters and limits. Compare the order and the sizes."""
    have(c, "make_buckets")
    answers = c.ask(
        _BUCKETS % (_TRIALS,),
        hint="`parameters` is a list or an iterator: `list(parameters)` works with both",
    )[0]
    for (sizes, frozen, limit, of_one), found in zip(_TRIALS, answers, strict=True):
        filled(c, found, "make_buckets")
        got = [[int(place) for place in bucket] for bucket in found]
        wanted = _buckets(sizes, frozen, limit // of_one)
        case = f"The parameters have {[of_one * n for n in sizes]} bytes (float{8 * of_one}), and "
        case += f"the limit is {limit} bytes. "
        case += f"The parameters at positions {frozen} are frozen. " if frozen else ""
        case += f"`make_buckets` returned buckets with the parameters at positions {got}"
        order, right = list(chain.from_iterable(got)), list(chain.from_iterable(wanted))
        c.need(
            sorted(order) == sorted(right),
            f"{case}. A parameter is missing or appears twice, or a bucket holds a parameter that "
            "is frozen or is not in `parameters`.",
            "put each parameter that needs a gradient into exactly one bucket, and put no frozen "
            "parameter into a bucket",
        )
        c.need(
            order == right,
            f"{case}. The order of the parameters is not right.",
            "the first bucket holds the last parameters, because their gradients are ready first",
        )
        c.need(
            got == wanted,
            f"{case}. A bucket begins at the wrong parameter, or a bucket is empty.",
            "begin a new bucket if the next parameter would make the bucket larger than the limit",
        )
    c.expect(
        True,
        "the parameters are in reverse order, and each bucket is as full as the limit allows",
        "",
    )


def _buckets(sizes: list[int], frozen: list[int], limit: int) -> list[list[int]]:
    found: list[list[int]] = []
    size = 0
    for place in reversed(range(len(sizes))):
        if place in frozen:
            continue
        if not found or size + sizes[place] > limit:
            found.append([])
            size = 0
        found[-1].append(place)
        size += sizes[place]
    return found


def _trained(
    c: Check, kind: str, limit: int, *, quiet: bool = False, unused: bool | str = False,
    keep: bool = False, crossed: bool = False, steps: int = 2,
) -> list[Any]:  # fmt: skip
    """Return what steps of an answer's class gave, after checking weights and gradients.

    Args:
        unused: Whether worker 0 does not use a layer; or "step 0" or "pass 2", if only then.
        keep: Whether the gradients of the previous step become zeros, not None.
        crossed: Whether the model uses its layers in another order than it lists them.
    """
    source = _PARALLEL
    given = {"KIND": kind, "LIMIT": limit, "STEPS": steps, "QUIET": quiet,
             "UNUSED": repr(unused), "CROSSED": crossed, "KEEP": keep}  # fmt: skip
    for name, value in given.items():
        source = source.replace(name, str(value))
    found = c.ask(_WIRE + source + _FORGET, hint=_ORDER)
    first = floats(c, found[0][0], kind)
    for rank, (weights, *_) in enumerate(found):
        c.need(
            np.array_equal(np.asarray(weights, dtype=float), first),
            f"After `{kind}(...)`, worker {rank} does not have the same weights as worker 0.",
            "`__init__` must make the weights of all workers equal",
        )
    for rank, (_, grads, true, *_) in enumerate(found):
        values, truth = floats(c, grads, "finish"), np.asarray(true, dtype=float)
        where = "worker 0 did not use a layer" if unused else f"the limit was {limit} bytes"
        where += f" in {unused.replace('pass', 'backward pass')}" if isinstance(unused, str) else ""
        where += ", and the model did not use its layers in the listed order" if crossed else ""
        where += ", after zero_grad(set_to_none=False)" if keep else ""
        where += ", with two backward passes" if quiet else ""
        c.need(
            values.shape == truth.shape and bool(np.allclose(values, truth, atol=1e-10)),
            f"After `finish()`, worker {rank} does not have the means of the gradients ({where}).",
            "the gradients of a bucket can arrive in any order. Register a hook for each "
            "parameter. Begin the message of a bucket when the hooks of all its parameters have run"
            if crossed
            else "if a bucket is still incomplete after the backward pass, `finish` must send the "
            "bucket's message, and must reset this bucket for the next step"
            if unused == "step 0"
            else "if a parameter gets no gradient in the last backward pass, its .grad still has "
            "the gradient of an earlier pass: send this .grad, and not zeros"
            if unused == "pass 2"
            else "in every backward pass, count how many gradients of a bucket have arrived. Do "
            "not use .grad for this count: a .grad can have old values from before this pass"
            if keep or (quiet and limit != _SMALL)
            else "after two backward passes, each .grad must be the sum of both passes, averaged "
            "over the workers. So no_sync() must keep the gradients of the first pass in .grad"
            if quiet
            else "divide by world_size, write each part of a message back into the .grad of its "
            "parameter, and remove the messages of the previous step",
        )
    return found


@exercise("10.5", "Hooks and overlap", where="the engines")
def parallel(c: Check) -> None:
    """Train two steps with several limits. Compare gradients, messages, and when they begin."""
    have(c, "DataParallel", "make_buckets", "same_weights")
    c.need(
        not any(c.ask(_EMPTY)),
        "`finish` of `DataParallel` is still empty.",
        "write the class in the cell of exercise 10.5, and remove the line with `raise`",
    )
    small = _trained(c, "DataParallel", _SMALL)
    c.expect(True, "weights and averaged gradients equal those of one device", "")
    told = [[int(one) for one in worker[3]] for worker in small]
    c.need(
        all(one[0] == one[3] == 7 for one in told),
        f"With a limit of {_SMALL} byte, each of the 7 parameters that need a gradient is in a "
        f"bucket of its own, but a step sent {told[0][0]} messages.",
        "send one message for each bucket in each step",
    )
    early = [min(one[step] for one in told) for step in (1, 4)]
    c.expect(
        min(early) >= 4,
        "messages begin while the backward pass is still running",
        "at least 4 of 7 messages must begin before the backward pass reaches the first layer. In "
        f"the first step, {early[0]} messages began early enough. In the second step, "
        f"{early[1]} messages began early enough",
        "when a hook gets the last gradient of a bucket, begin the bucket's message in this hook. "
        "At the end of `finish`, prepare the buckets for the next training step",
    )
    waits = max(int(worker[4]) for worker in small)
    c.expect(
        not waits,
        "the backward pass never waits for a message",
        f"during the backward passes of two steps, a worker waited for {waits} messages, but it "
        "must wait for none",
        "a hook must only begin a message; call wait() in `finish`",
    )
    left = max(int(worker[5]) for worker in small)
    c.need(
        not left,
        f"In two training steps, a worker began messages for which `finish` did not wait: {left}.",
        "call wait() on the result of each wire.begin(...): if a message failed, wait() says why",
    )
    whole = _trained(c, "DataParallel", _LARGE)
    messages = [int(worker[3][0]) for worker in whole]
    c.expect(
        all(one == 1 for one in messages),
        "with a large limit, a step sends one message",
        f"with a limit of {_LARGE} bytes a step sent {messages[0]} messages, but it must send 1",
        "the message of a bucket is one tensor with all gradients of the bucket",
    )
    _trained(c, "DataParallel", 200, keep=True)
    for limit in (_SMALL, 200):
        _trained(c, "DataParallel", limit, unused=True)
    _trained(c, "DataParallel", _LARGE, unused="step 0")
    _trained(c, "DataParallel", 200, crossed=True)
    crossed = _trained(c, "DataParallel", _SMALL, crossed=True)
    earliest = min(int(worker[3][step]) for worker in crossed for step in (1, 4))
    c.need(
        earliest >= 4,
        "The check also used a model that does not use its layers in the listed order: it uses the "
        "layer that is listed last directly after the first one. In the backward pass of this "
        "model, some other buckets are complete before bucket 0. But messages must keep the order "
        "of the buckets. At least 4 of 7 messages must begin before the backward pass reaches the "
        f"first layer. In one of the steps, only {earliest} of the 7 messages began early enough.",
        "when a message begins, look at the next bucket: if it is complete, begin its message too",
    )
    c.expect(True, "the means are right even if one worker did not use a layer", "")


@exercise("10.6", "Accumulation without messages", where="the engines")
def accumulating(c: Check) -> None:
    """Train with two backward passes in a step. Count the messages of each, compare the sums."""
    have(c, "Accumulating")
    there = c.ask("_labs_answer = callable(getattr(Accumulating, 'no_sync', None))")
    c.need(
        all(there),
        "`Accumulating` has no method `no_sync`.",
        "write `no_sync` with @contextlib.contextmanager: set a flag before the `yield`, and "
        "reset this flag after the `yield`",
    )
    found = _trained(c, "Accumulating", _SMALL, quiet=True)
    told = [[int(one) for one in worker[3]] for worker in found]
    c.expect(
        all(one[0] == 0 and one[4] == 0 for one in told),
        "a backward pass inside no_sync() sends nothing",
        f"inside no_sync() a step sent {told[0][0]} messages, but it must send none",
        "inside no_sync(), a hook must do nothing",
    )
    early = min(one[step] for one in told for step in (2, 6))
    c.expect(
        all(one[1] == one[5] == 7 for one in told) and early >= 4,
        "the backward pass after no_sync() adds its gradients to the earlier gradients. Messages "
        "with the added gradients begin during this backward pass",
        f"after no_sync(), the first step sent {told[0][1]} messages and the second step sent "
        f"{told[0][5]}. Each step must send 7 messages, and at least 4 must begin before the "
        f"backward pass reaches the first layer. In one step, {early} messages began early enough",
        "after no_sync() has ended, the hooks must begin messages again",
    )
    _trained(c, "Accumulating", 200, quiet=True)
    _trained(c, "Accumulating", _SMALL, quiet=True, unused="pass 2")
    _trained(c, "Accumulating", _SMALL)
    c.expect(True, "without no_sync(), the gradients of every backward pass are averaged", "")


@exercise("10.8", "Exposed time in Workbench")
def exposed(c: Check) -> None:
    """Call `exposed_of` with the run of `mirrored` and a made-up run, and compare the medians."""
    run = c.run("ddp")
    found = c.number_from("exposed_of", run)
    history = run.history
    both = np.asarray(history["sync_wait_s"]) + np.asarray(history["transfer_s"])
    true = float(np.median(both[np.asarray(history["step"]) >= 2]))
    c.need(
        math.isclose(found, true, rel_tol=1e-6),
        f"exposed_of(run) returned {found:.4g} s, but the median of the exposed times is "
        f"{true:.4g} s.",
        "add `sync_wait_s` and `transfer_s` in each row, leave out steps 0 and 1, and take the "
        "median",
    )
    made = c.number_from("exposed_of", NamedRun(run.name, 3))
    wanted = float(np.median(EXPOSED_S[2:]))
    c.expect(
        math.isclose(made, wanted, rel_tol=1e-6),
        "`exposed_of` adds wait time and transfer time in each row, leaves out steps 0 and 1, and "
        "returns the median of the sums",
        f"the check made a run with four steps: their exposed times are {list(EXPOSED_S)} s. For "
        f"this run, `exposed_of` returned {made:.4g} s, but the median of steps 2 and 3 is "
        f"{wanted:.4g} s",
        'leave out all rows of steps 0 and 1: `run.history["step"]` is the step of each row',
    )


_UNEQUAL = (
    ([33e3] * 8, [0.012] * 8, 0.006, 5e6),
    ([1e3, 1e3, 9e5, 1e3, 1e3, 1e3], [0.01, 0.01, 0.2, 0.01, 0.01, 0.01], 0.004, 1e7),
    ([5e4] * 12, [0.002] * 12, 0.02, 1e8),
    ([4e5, 1e4, 1e4, 1e4], [0.001, 0.05, 0.05, 0.05], 0.001, 1e7),
    ([1e4, 2e4, 5e4, 2e5, 4e5, 4e5], [0.05, 0.04, 0.02, 0.01, 0.005, 0.002], 0.006, 5e6),
    ([1e4, 5e4, 1e4, 5e4, 1e4], [0.01, 0.002, 0.05, 0.002, 0.01], 0.005, 5e6),
)  # fmt: skip
"""Bytes and backward times of blocks, from the first to the last; latency and bandwidth."""


def _exposed_s(
    sizes: list[float], backward: list[float], latency: float, speed: float, k: int
) -> float:
    ready = free = 0.0
    pairs = list(zip(sizes, backward, strict=True))[::-1]
    for first in range(0, len(pairs), k):
        part = pairs[first : first + k]
        ready += sum(seconds for _, seconds in part)
        free = max(free, ready) + latency + sum(size for size, _ in part) / speed
    return free - ready


@exercise("10.7", "How large a bucket should be")
def best(c: Check) -> None:
    """Call `best_blocks` with several models and wires, and compare with all possible buckets."""
    for sizes, backward, latency, speed in _UNEQUAL:
        found = c.number_from("best_blocks", sizes, backward, latency, speed)
        times = {
            k: _exposed_s(sizes, backward, latency, speed, k) for k in range(1, len(sizes) + 1)
        }
        case = f"best_blocks({sizes}, {backward}, {latency:g}, {speed:g})"
        c.need(
            found in times,
            f"{case} returned {found:g}, which is not a possible number of blocks.",
            f"return a whole number of blocks, from 1 to {len(sizes)}",
        )
        least = min(times.values())
        c.need(
            times[int(found)] <= least * (1 + 1e-9),
            f"{case} returned {found:g}. With this number of blocks, the exposed time is "
            f"{times[int(found)]:.4g} s. With another number of blocks, it is only {least:.4g} s.",
            "try every number of blocks. Fill the buckets from the last block to the first: only "
            "the bucket that is filled last may hold fewer blocks than the others. A message "
            "begins when its blocks have their gradients and the previous message has arrived",
        )
    c.expect(True, "with the result of `best_blocks`, the exposed time is the shortest", "")
