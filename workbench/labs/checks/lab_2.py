"""Lab 2: all-reduce by hand.

The checks run a student's all-reduce on the engines. On each worker, the number at place i of the
tensor is `(i % 9 + 1) * 10**rank`. A result divided by `i % 9 + 1` is a decimal number with one
digit for each worker: this digit says how often the sum contains the worker's part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..answers import exercise

if TYPE_CHECKING:
    from ..answers import Check

EXACT = 1e-5
"""How far weights may differ: rounding changes them by about 1e-7, a wrong mean by about 1e-2."""

_TRAIN = """
def _labs_look(weights, batches):
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).double()
    with torch.no_grad():
        for parameter, given in zip(net.parameters(), weights):
            parameter.copy_(torch.tensor(given, dtype=torch.float64))
    seen, calls = [], []
    def looked_at(_layer, given):
        if torch.is_grad_enabled():
            seen.append(given[0].detach())
    def counted(*given, **named):
        calls.append(1)
        return dist.all_reduce(*given, **named)
    net[0].register_forward_pre_hook(looked_at)
    train(net, [(torch.tensor(x, dtype=torch.float64), torch.tensor(y)) for x, y in batches],
          counted)
    rows = len(torch.unique(torch.cat(seen), dim=0)) if seen else 0
    return [torch.nn.utils.parameters_to_vector(net.parameters()), [rows, len(calls)]]
_labs_answer = _labs_look({weights!r}, {batches!r})
del _labs_look
"""
"""The right result is computed here: the process of an answer only gets the task."""


@exercise("2.1", "Reduce to one", where="the engines")
def reduce_to_one(c: Check) -> None:
    """Run `reduce_to_one` on the engines. Check the sums, and the bytes that each worker sends."""
    workers = ready(c, "reduce_to_one")
    found = added_up(c, "reduce_to_one")
    if not sums(c, found, [f"With a tensor of {size} numbers" for size in SIZES]):
        return
    through_mail(c, found)
    sent = {SIZES[k]: [worker[k][1] for worker in found] for k in range(len(SIZES))}
    times = [workers - 1] + [1] * (workers - 1)
    off = [size for size in SIZES if sent[size] != [size * NUMBER_BYTES * n for n in times]]
    shown = off[0] if off else SIZES[0]
    other = sent[shown].index(max(sent[shown]))
    c.need(
        not off or sorted(sent[shown]) != sorted(shown * NUMBER_BYTES * n for n in times),
        f"Worker {other} adds up the tensors and sends the sum, but worker 0 must do this.",
        "the sum is right, but in this exercise worker 0 must receive the tensors of all other "
        "workers, add them up, and send the sum",
    )
    c.expect(
        not off,
        "worker 0 adds up the tensors and sends the sum, and each of the other workers sends its "
        "tensor once",
        f"with a tensor of {shown * NUMBER_BYTES} bytes, workers {_ranks(workers)} sent "
        f"{sent[shown]} bytes, which is not right for 'reduce to one'",
        "every worker except worker 0 sends its tensor once, to worker 0. Worker 0 sends the sum "
        "once to each of the other workers",
    )
    matrices(c, "reduce_to_one", LIKE_X)
    fewer(c, "reduce_to_one")


@exercise("2.2", "The ring", where="the engines")
def ring(c: Check) -> None:
    """Run `ring` on the engines. Check the sums, the receivers and the bytes of each worker."""
    workers = ready(c, "ring")
    found = added_up(c, "ring")
    if not sums(c, found, [f"With a tensor of {size} numbers" for size in SIZES]):
        return
    through_mail(c, found)
    astray = min((_not_around(found, turn) for turn in (1, -1)), key=len)
    c.expect(
        not astray,
        "all messages go in the same direction around the ring",
        f"worker {astray[0][0] if astray else 0} sent a message to worker "
        f"{astray[0][1] if astray else 0}, but in a ring all messages go in the same direction",
        "in a ring a worker has two neighbours: it always sends to the same neighbour, and always "
        "receives from the other neighbour",
    )
    sent = {SIZES[k]: max(worker[k][1] for worker in found) for k in range(len(SIZES))}
    rounds = 2 * (workers - 1)
    off = [s for s in SIZES if sent[s] > rounds * math.ceil(s / workers) * NUMBER_BYTES]
    shown = off[0] if off else SIZES[0]
    c.expect(
        not off,
        "no worker sends more than one chunk in a round",
        f"with a tensor of {shown * NUMBER_BYTES} bytes, a worker sent {sent[shown]} bytes in all "
        "rounds together. This is more than one chunk in each round",
        "each message must be one chunk of the tensor, not the whole tensor. The reduce-scatter "
        "and the all-gather must have N-1 rounds each",
    )
    matrices(c, "ring", "Receive each chunk into torch.empty_like(chunk)")
    fewer(c, "ring")


def _ranks(workers: int) -> str:
    return ", ".join(map(str, range(workers)))


def _not_around(found: list[Any], turn: int) -> list[tuple[int, int]]:
    """Return (worker, receiver) of messages that do not go to the neighbour on that side."""
    workers = len(found)
    return [
        (rank, int(to))
        for rank, worker in enumerate(found)
        for trial in worker
        for to in trial[2]
        if int(to) != (rank + turn) % workers
    ]


def groupings(workers: int) -> list[Groups]:
    """Return ways to group workers: unequal ones, one group, and with a member of rank 0."""
    ranks = list(range(workers))
    if workers < 2:
        return [[ranks]]
    turned = ranks[::-1]
    half = (workers + 1) // 2
    return [
        [ranks[:half], ranks[half:]],
        [ranks[:1], ranks[1:]],
        [turned[: workers - 1], turned[workers - 1 :]],
        [one for one in ([ranks[1], ranks[0]], ranks[2:]) if one],
        [ranks],
        [[rank] for rank in ranks],
    ]


@exercise("2.3", "The hierarchical all-reduce", where="the engines")
def hierarchical(c: Check) -> None:
    """Run `hierarchical` with several groupings. Check the sums, the receivers and the bytes."""
    workers = ready(c, "hierarchical")
    tried = groupings(workers)
    found = added_up(c, "hierarchical", tried)
    trials = [(groups, size) for groups in tried for size in SIZES]
    named = [f"With groups {one} and a tensor of {size} numbers" for one, size in trials]
    if not sums(c, found, named):
        return
    through_mail(c, found)
    for place, (groups, size) in enumerate(trials):
        for rank, worker in enumerate(found):
            sent = {int(to): size_bytes for to, size_bytes in worker[place][2].items()}
            _within(c, groups, rank, sent, size * NUMBER_BYTES)
    c.expect(
        True,
        "in every grouping that the check tried, a worker that is not a leader sends only to its "
        "leader",
        "",
    )
    c.expect(
        True,
        "with m groups, each leader sends at most (m-1) M bytes to other leaders (M is the size of "
        "the tensor)",
        "",
    )
    matrices(c, "hierarchical", LIKE_X, tried[:1])


def _within(c: Check, groups: Groups, rank: int, sent: dict[int, int], size_bytes: int) -> None:
    """End the check when a worker sent something that it must not send."""
    mine = next(group for group in groups if rank in group)
    leaders = [group[0] for group in groups]
    if rank != mine[0]:
        others = [to for to in sent if to != mine[0]]
        c.need(
            not others,
            f"With groups {groups}, worker {rank} sent a message to worker "
            f"{others[0] if others else 0}, which is not its leader.",
            "a worker that is not a leader sends only to the first rank of its own group",
        )
        return
    far = [to for to in sent if to not in mine and to not in leaders]
    c.need(
        not far,
        f"With groups {groups}, worker {rank} sent a message to worker {far[0] if far else 0}. "
        f"Worker {far[0] if far else 0} is in another group, and it is not the leader of that "
        "group.",
        "only the leader of a group may send to the other members of this group",
    )
    across = sum(sent[to] for to in sent if to not in mine)
    c.need(
        across <= (len(groups) - 1) * size_bytes,
        f"With groups {groups} and a tensor of {size_bytes} bytes, leader {rank} sent {across} "
        f"bytes to other leaders, but at most {(len(groups) - 1) * size_bytes} bytes are allowed.",
        "each leader first adds up the tensors of its group, then the leaders send only these sums",
    )


@exercise("2.4", "The size at which 'reduce to one' and the ring take the same time")
def crossing(c: Check) -> None:
    """Call `crossing_bytes`, and compare the times of both algorithms at the returned size."""
    for n, latency_s, bytes_per_s in ((3, 0.01, 2e6), (4, 1e-3, 1e9), (64, 5e-5, 1e8)):
        m_bytes = c.number_from("crossing_bytes", n, latency_s, bytes_per_s)
        one_s = n * (latency_s + m_bytes / bytes_per_s)
        ring_s = 2 * (n - 1) * (latency_s + m_bytes / (n * bytes_per_s))
        c.need(
            m_bytes > 0 and math.isclose(one_s, ring_s, rel_tol=1e-3),
            f"crossing_bytes({n}, {latency_s:g}, {bytes_per_s:g}) returned {m_bytes:.4g}. With "
            f"this size, 'reduce to one' takes {one_s:.4g} s and the ring takes {ring_s:.4g} s, "
            "but both times must be equal.",
            "set both formulas equal. Then move the terms with M to one side, and the terms with λ "
            "to the other side",
        )
    c.expect(
        True,
        "at the size that `crossing_bytes` returns, 'reduce to one' and the ring take the same "
        "time",
        "",
    )


@exercise("2.5", "Mirrored training by hand", where="the engines")
def train(c: Check) -> None:
    """Run `train` on the engines. Compare the weights with each other and with one device."""
    have = c.ask(
        "_labs_answer = [callable(globals().get(n)) for n in ('train', 'loss_fn', 'Mail')]"
    )
    c.need(
        all(all(one) for one in have),
        "At least one of `train`, `loss_fn` and `Mail` is missing on the engines.",
        "run the cells of sections 2 and 9 in order, then the cell of exercise 2.5",
    )
    c.need_all_engines()
    weights, batches = _task(len(have))
    found = c.ask(
        _TRAIN.format(
            weights=[one.tolist() for one in weights],
            batches=[(x.tolist(), y.tolist()) for x, y in batches],
        ),
        limit_s=LIMIT_S,
        hint="all workers must call `all_reduce` equally often, in the same order",
    )
    together = [np.asarray(worker[0], dtype=float) for worker in found]
    begun, alone = _flat(weights), _flat(_alone(weights, batches))
    c.need(
        all(weights.shape == alone.shape and np.isfinite(weights).all() for weights in together),
        "After training, some weights are missing or are not finite numbers.",
        "change only the gradients of the model, in place",
    )
    c.need(
        not np.array_equal(together[0], begun),
        "The training has not changed the weights.",
        "keep the line `optimizer.step()` in the loop",
    )
    apart = max(float(np.abs(weights - together[0]).max()) for weights in together)
    c.expect(
        apart <= EXACT,
        "all workers end with the same weights",
        f"after training, the workers' weights differ by up to {apart:.1g}",
        "each worker computes only the gradient of its own share. Before `optimizer.step()`, each "
        "worker also needs the gradients of the other workers",
    )
    off = float(np.abs(together[0] - alone).max())
    c.expect(
        off <= EXACT,
        "the weights equal those of one device that trains with whole batches",
        f"the weights of worker 0 differ by up to {off:.1g} from those of one device",
        "a worker's gradient is a mean over its own samples, so a share of 22 samples must count "
        "more than a share of 21. Multiply each worker's gradient by a factor. Compute this factor "
        "from len(own_x) and len(x), because the batches of the check do not have 64 samples. The "
        "factors of all workers must add up to 1",
    )
    if len(found) > 1 and apart <= EXACT and off <= EXACT:
        whole = sum(len(x) for x, _ in batches)
        _shared_out(c, [worker[1] for worker in found], whole)


def _shared_out(c: Check, counts: list[Any], whole: int) -> None:
    """End the check where the weights are right, but each worker has done all the work itself."""
    for rank, (rows, calls) in enumerate(counts):
        c.need(
            rows < whole,
            f"Worker {rank} computed with all {whole} samples of the batches, but it must compute "
            "only with its own share.",
            "use only `own_x` and `own_y`",
        )
        c.need(
            calls > 0,
            f"Worker {rank} never called `all_reduce`.",
            "`train` gets a function as its argument `all_reduce`. Call this function to add up "
            "the gradients",
        )


Arrays = list[NDArray[Any]]


def _task(workers: int) -> tuple[Arrays, list[tuple[NDArray[Any], NDArray[Any]]]]:
    """Return a network 6 - 5 - 3 and batches that cannot be shared equally."""
    draw = np.random.default_rng(5)
    weights = [draw.uniform(-0.4, 0.4, shape).round(4) for shape in ((5, 6), (5,), (3, 5), (3,))]
    sizes = (8 * workers + 1, 2 * workers + 1, 8 * workers + 1)
    return weights, [(draw.normal(size=(n, 6)).round(3), draw.integers(0, 3, n)) for n in sizes]


def _alone(weights: Arrays, batches: list[tuple[NDArray[Any], NDArray[Any]]]) -> Arrays:
    """Return the weights of one device that takes whole batches."""
    w1, b1, w2, b2 = (one.copy() for one in weights)
    velocity = [np.zeros_like(one) for one in weights]
    for x, y in batches:
        hidden = np.tanh(x @ w1.T + b1)
        out = hidden @ w2.T + b2
        share = np.exp(out - out.max(1, keepdims=True))
        error = (share / share.sum(1, keepdims=True) - np.eye(3)[y]) / len(x)
        back = (error @ w2) * (1 - hidden**2)
        gradients = (back.T @ x, back.sum(0), error.T @ hidden, error.sum(0))
        for parameter, speed, gradient in zip((w1, b1, w2, b2), velocity, gradients, strict=True):
            speed *= 0.9
            speed += gradient
            parameter -= 0.5 * speed
    return [w1, b1, w2, b2]


def _flat(weights: Arrays) -> NDArray[Any]:
    return np.concatenate([one.reshape(-1) for one in weights])


LIMIT_S = 20.0
"""Longer than `Mail` waits for a message: an answer can also hang without using `Mail`."""

SIZES = (12, 7, 1)
"""Numbers in the tensors: divisible by three workers, not divisible, fewer than workers."""

NUMBER_BYTES = 4

LIKE_X = "Receive into a tensor of the same shape and type as `x`: torch.empty_like(x)"

STEP_BY_STEP = (
    "write down the messages on paper. Each send needs a receive of the same size on the other "
    "worker. A worker that waits cannot send or receive anything else"
)

_ADD_UP = """
def _labs_look():
    found = []
    for groups in {groups!r}:
        for size in {sizes!r}:
            x = (torch.arange(size) % 9 + 1).float() * 10**rank
            mail = Mail()
            try:
                {name}(x, mail, *groups)
            except (TimeoutError, ValueError) as error:
                if not groups:
                    raise
                raise type(error)(f"with groups {{groups[0]}}: {{error}}") from None
            found.append([x, mail.sent_bytes, dict(mail.sent_to)])
    return found
_labs_answer = _labs_look()
del _labs_look
"""

_MATRIX = """
def _labs_look():
    x = torch.full((4, 3), 10.0**rank, dtype=torch.float64)
    {name}(x, Mail(), *{groups!r})
    return x
_labs_answer = _labs_look()
del _labs_look
"""
"""A matrix of float64: in section 9, such gradients are added up."""

_FEWER = """
def _labs_look():
    global world_size
    whole, x = world_size, torch.full((3,), 10.0**rank)
    world_size = min(2, whole)
    try:
        if rank < world_size:
            {name}(x, Mail())
    finally:
        world_size = whole
    return x
_labs_answer = _labs_look()
del _labs_look
"""
"""The first two workers alone: an answer may be written for one number of workers only."""

Groups = list[list[int]]


def ready(c: Check, function: str) -> int:
    """End the check unless the engines have the function and the post office; count them."""
    have = c.ask(f"_labs_answer = [callable(globals().get(n)) for n in ('Mail', {function!r})]")
    c.need(
        all(one[0] for one in have),
        "The engines have no class `Mail`.",
        f"run the cell of section 2 that defines `Mail`, then the cell of exercise {c.number} "
        "again",
    )
    c.need(
        all(one[1] for one in have),
        f"The engines have no function `{function}`.",
        f"run the cell of exercise {c.number}: it begins with %%distributed",
    )
    c.need_all_engines()
    return len(have)


def added_up(c: Check, function: str, groupings: list[Groups] | None = None) -> list[Any]:
    """Run an all-reduce on the engines; return by engine its results, one for each trial."""
    groups = [[]] if groupings is None else [[one] for one in groupings]
    source = _ADD_UP.format(groups=groups, sizes=SIZES, name=function)
    return c.ask(source, limit_s=LIMIT_S, hint=STEP_BY_STEP)


def matrices(c: Check, function: str, hint: str, groups: list[Groups] | None = None) -> None:
    hint = f"the check also tries a matrix of type float64, like the gradients in section 9. {hint}"
    found = c.ask(_MATRIX.format(name=function, groups=groups or []), limit_s=LIMIT_S, hint=hint)
    c.expect(
        _are_sums(found),
        "the function also works for a matrix of type float64, like the gradients in section 9",
        "if `x` is a matrix of type float64, the result is not the sum",
        hint,
    )


def fewer(c: Check, function: str) -> None:
    hint = "the check sets `world_size` to 2: compute ranks and rounds from `world_size` and `rank`"
    found = c.ask(_FEWER.format(name=function), limit_s=LIMIT_S, hint=hint)[:2]
    c.expect(
        _are_sums(found),
        "the function also works for two workers",
        "with two workers, the result is not the sum",
        hint,
    )


def _are_sums(found: list[Any]) -> bool:
    """Whether each worker holds the sum of the tensors, which are 10 ** rank."""
    whole = sum(10.0**rank for rank in range(len(found)))
    return all((np.asarray(one, dtype=float) == whole).all() for one in found)


def sums(c: Check, found: list[Any], trials: list[str]) -> bool:
    """Say whether every worker has the sum in every trial; show the first wrong result."""
    workers = len(found)
    whole = sum(10**rank for rank in range(workers))
    for place, trial in enumerate(trials):
        parts = [_parts(worker[place][0]) for worker in found]
        size = SIZES[place % len(SIZES)]
        c.need(
            all(one.shape == (size,) for one in parts),
            f"{trial}: the function changed the shape of the tensor.",
            "change only the numbers of `x`, in place",
        )
        changed = any((parts[rank] != 10**rank).any() for rank in range(workers))
        for rank in range(workers):
            if not (parts[rank] == whole).all():
                said = _unlike(rank, workers, parts[rank], whole, trial, changed)
                return c.expect(False, "", *said)
    return c.expect(
        True, "every worker has the sum, for every size of the tensor that the check tried", ""
    )


def _parts(x: Any) -> Any:
    """Return whose parts are in each number: a decimal digit for each worker."""
    numbers = np.asarray(x, dtype=float)
    return numbers / (np.arange(len(numbers)) % 9 + 1)


def _unlike(
    rank: int, workers: int, parts: Any, whole: int, trial: str, others_changed: bool
) -> tuple[str, str]:
    """Return what is wrong with a worker's result, and a hint."""
    if (parts == 10**rank).all():
        hints = (
            "change `x` in place: `x += y` does this, but `x = x + y` makes a new tensor",
            f"a worker that has the sum must send the sum to worker {rank}, and worker {rank} must "
            "receive the sum into `x`",
        )
        words = f"{trial}: worker {rank} still holds only its own numbers."
        return words, hints[others_changed]
    if np.allclose(parts * workers, whole):
        words = f"{trial}: worker {rank} holds the mean of all tensors, but it must hold the sum."
        return (
            words,
            "do not divide by the number of workers: in this lab an all-reduce only adds up",
        )
    at = int(np.flatnonzero(parts != whole)[0])
    value = parts[at]
    words = f"{trial}: the number at place {at} on worker {rank} is not the sum"
    digits = f"{value:.0f}".zfill(workers)[::-1]
    if np.isfinite(value) and value == round(value) and len(digits) == workers:
        times = [f"{digit} × the number of worker {r}" for r, digit in enumerate(digits)]
        words += f"; it is {' + '.join(times)}"
    hint = (
        "the sum must contain each worker's number once: follow one number through all rounds on "
        "paper"
    )
    return f"{words}.", hint


def through_mail(c: Check, found: list[Any]) -> None:
    sent = sum(trial[1] for worker in found for trial in worker)
    c.need(
        sent > 0 or len(found) == 1,
        "The workers sent no message through `mail`.",
        "use `mail.send`, `mail.receive` and `mail.exchange`",
    )
