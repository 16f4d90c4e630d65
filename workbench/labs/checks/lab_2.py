"""Lab 2: all-reduce by hand.

A student's all-reduce is tried out on the engines. Tensors under test hold `10**rank` times a
number that identifies its place, so each decimal digit of a quotient says how often a worker's
part is in a sum.
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
"""How far weights may differ: a share in single precision is 1e-7 off, a mean of means 1e-2."""

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
    if not sums(c, found, [f"With {size} numbers" for size in SIZES]):
        return
    through_mail(c, found)
    sent = {SIZES[k]: [worker[k][1] for worker in found] for k in range(len(SIZES))}
    times = [workers - 1] + [1] * (workers - 1)
    off = [size for size in SIZES if sent[size] != [size * NUMBER_BYTES * n for n in times]]
    shown = off[0] if off else SIZES[0]
    other = sent[shown].index(max(sent[shown]))
    c.need(
        not off or sorted(sent[shown]) != sorted(shown * NUMBER_BYTES * n for n in times),
        f"Worker {other} adds up the tensors and sends out the sum.",
        "this works, but here all workers must send to worker 0",
    )
    c.expect(
        not off,
        "one worker adds up and sends out the sum, the others send once",
        f"with a tensor of {shown * NUMBER_BYTES} bytes the workers sent {sent[shown]} bytes",
        "every worker except worker 0 sends the tensor once, to worker 0, and worker 0 answers "
        "each of them once",
    )


@exercise("2.2", "The ring", where="the engines")
def ring(c: Check) -> None:
    """Run `ring` on the engines. Check the sums, the receivers and the bytes of each worker."""
    workers = ready(c, "ring")
    found = added_up(c, "ring")
    if not sums(c, found, [f"With {size} numbers" for size in SIZES]):
        return
    through_mail(c, found)
    astray = min((_not_around(found, turn) for turn in (1, -1)), key=len)
    c.expect(
        not astray,
        "every worker sends to the next one in the circle",
        f"worker {astray[0][0] if astray else 0} sent to worker {astray[0][1] if astray else 0}",
        "in a ring a worker has two neighbours: it always sends to the same one, and receives "
        "from the other",
    )
    sent = {SIZES[k]: max(worker[k][1] for worker in found) for k in range(len(SIZES))}
    rounds = 2 * (workers - 1)
    off = [s for s in SIZES if sent[s] > rounds * math.ceil(s / workers) * NUMBER_BYTES]
    shown = off[0] if off else SIZES[0]
    c.expect(
        not off,
        "no worker sends more than one chunk in a round",
        f"with a tensor of {shown * NUMBER_BYTES} bytes a worker sent {sent[shown]} bytes",
        "a message is one chunk of the tensor, not the whole tensor",
    )
    matrices = c.ask(
        _MATRIX, limit_s=LIMIT_S, hint="receive each chunk into torch.empty_like(chunk)"
    )
    whole = sum(10.0**rank for rank in range(workers))
    c.expect(
        all((np.asarray(one, dtype=float) == whole).all() for one in matrices),
        "a matrix in double precision is added up too, like a gradient",
        "a matrix of float64 is not added up",
        "receive each chunk into torch.empty_like(chunk)",
    )


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
    """Return ways to group workers: unequal ones, leaders that are not the lowest, one group."""
    ranks = list(range(workers))
    if workers < 2:
        return [[ranks]]
    turned = ranks[::-1]
    half = (workers + 1) // 2
    return [
        [ranks[:half], ranks[half:]],
        [ranks[:1], ranks[1:]],
        [turned[: workers - 1], turned[workers - 1 :]],
        [ranks],
        [[rank] for rank in ranks],
    ]


@exercise("2.3", "Hierarchical", where="the engines")
def hierarchical(c: Check) -> None:
    """Run `hierarchical` with several groupings. Check the sums, the receivers and the bytes."""
    workers = ready(c, "hierarchical")
    tried = groupings(workers)
    found = added_up(c, "hierarchical", tried)
    trials = [(groups, size) for groups in tried for size in SIZES]
    if not sums(c, found, [f"Groups {groups}, {size} numbers" for groups, size in trials]):
        return
    through_mail(c, found)
    for place, (groups, size) in enumerate(trials):
        for rank, worker in enumerate(found):
            sent = {int(to): size_bytes for to, size_bytes in worker[place][2].items()}
            _within(c, groups, rank, sent, size * NUMBER_BYTES)
    c.expect(True, "members send only to their leader, whatever its rank", "")
    c.expect(True, "no leader sends more to other groups than allowed", "")


def _within(c: Check, groups: Groups, rank: int, sent: dict[int, int], size_bytes: int) -> None:
    """End the check when a worker sent something that it must not send."""
    mine = next(group for group in groups if rank in group)
    leaders = [group[0] for group in groups]
    if rank != mine[0]:
        others = [to for to in sent if to != mine[0]]
        c.need(
            not others,
            f"Groups {groups}: worker {rank} sent to worker {others[0] if others else 0}.",
            "it is not a leader, so it sends only to the first rank of its own group",
        )
        return
    far = [to for to in sent if to not in mine and to not in leaders]
    c.need(
        not far,
        f"Groups {groups}: worker {rank} sent to worker {far[0] if far else 0}, a member of "
        "another group.",
        "only a group's own leader sends to its members",
    )
    across = sum(sent[to] for to in sent if to not in mine)
    c.need(
        across <= (len(groups) - 1) * size_bytes,
        f"Groups {groups}: leader {rank} sent {across} bytes to other leaders. The tensor has "
        f"{size_bytes} bytes.",
        "each leader first adds up its own group, then the leaders compute one sum of these sums",
    )


@exercise("2.4", "Where both all-reduces take the same time")
def crossing(c: Check) -> None:
    """Call `crossing_bytes`, and compare the times of both algorithms at the returned size."""
    for n, latency_s, bytes_per_s in ((3, 0.01, 2e6), (4, 1e-3, 1e9), (64, 5e-5, 1e8)):
        m_bytes = c.number_from("crossing_bytes", n, latency_s, bytes_per_s)
        one_s = n * (latency_s + m_bytes / bytes_per_s)
        ring_s = 2 * (n - 1) * (latency_s + m_bytes / (n * bytes_per_s))
        c.need(
            m_bytes > 0 and math.isclose(one_s, ring_s, rel_tol=1e-3),
            f"crossing_bytes({n}, {latency_s:g}, {bytes_per_s:g}) returned {m_bytes:.4g}. With "
            f"this size reduce to one takes {one_s:.4g} s and the ring {ring_s:.4g} s.",
            "set both times equal, move the terms with M to one side and those with λ to the other",
        )
    c.expect(True, "with this size both take the same time", "")


@exercise("2.5", "Mirrored training by hand", where="the engines")
def train(c: Check) -> None:
    """Run `train` on the engines. Compare the weights with each other and with one device."""
    have = c.ask(
        "_labs_answer = [callable(globals().get(n)) for n in ('train', 'loss_fn', 'Mail')]"
    )
    c.need(
        all(all(one) for one in have),
        "The engines do not have `train`, or something that it needs.",
        "run the cells of sections 2 and 9 in order, then the cell of exercise 2.5",
    )
    weights, batches = _task(len(have))
    found = c.ask(
        _TRAIN.format(
            weights=[one.tolist() for one in weights],
            batches=[(x.tolist(), y.tolist()) for x, y in batches],
        ),
        limit_s=LIMIT_S,
        hint="all workers must call all_reduce equally often, in the same order",
    )
    together = [np.asarray(worker[0], dtype=float) for worker in found]
    begun, alone = _flat(weights), _flat(_alone(weights, batches))
    c.need(
        all(weights.shape == alone.shape and np.isfinite(weights).all() for weights in together),
        "After training, weights are missing or not finite.",
        "change only the gradients of the model, in place",
    )
    c.need(
        not np.array_equal(together[0], begun),
        "The weights have not changed.",
        "leave optimizer.step() where it is",
    )
    apart = max(float(np.abs(weights - together[0]).max()) for weights in together)
    c.expect(
        apart <= EXACT,
        "all workers end with the same weights",
        f"the workers' weights differ by up to {apart:.1g}",
        "each worker knows only the gradient of its own share, and before optimizer.step() it "
        "needs the gradients of all",
    )
    off = float(np.abs(together[0] - alone).max())
    c.expect(
        off <= EXACT,
        "the weights equal those of one device that takes whole batches",
        f"the weights of worker 0 differ by up to {off:.1g} from those of one device",
        "a worker's gradient is a mean over its own samples, so a share of 22 samples must count "
        "more than a share of 21",
    )
    if len(found) > 1 and apart <= EXACT and off <= EXACT:
        whole = sum(len(x) for x, _ in batches)
        _shared_out(c, [worker[1] for worker in found], whole)


def _shared_out(c: Check, counts: list[Any], whole: int) -> None:
    """End the check where the weights are right, but each worker has done all the work itself."""
    for rank, (rows, calls) in enumerate(counts):
        c.need(
            rows < whole,
            f"Worker {rank} computed all {whole} samples of the batches.",
            "a worker computes only with its own share: `own_x` and `own_y`",
        )
        c.need(
            calls > 0,
            f"Worker {rank} never called `all_reduce`.",
            "add up with the function that `train` gets as `all_reduce` (later it is your ring)",
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
"""Beyond what `Mail` waits for messages, for an answer that hangs without them."""

SIZES = (12, 7, 1)
"""Numbers in the tensors: divisible by three workers, not divisible, fewer than workers."""

NUMBER_BYTES = 4

STEP_BY_STEP = (
    "follow the messages on paper: each send needs a receive of the same size on the other "
    "worker, and a worker that waits does nothing else"
)

_ADD_UP = """
def _labs_look():
    found = []
    for groups in {groups!r}:
        for size in {sizes!r}:
            x = (torch.arange(size) % 9 + 1).float() * 10**rank
            mail = Mail()
            {name}(x, mail, *groups)
            found.append([x, mail.sent_bytes, dict(mail.sent_to)])
    return found
_labs_answer = _labs_look()
del _labs_look
"""

_MATRIX = """
def _labs_look():
    x = torch.full((4, 3), 10.0**rank, dtype=torch.float64)
    ring(x, Mail())
    return x
_labs_answer = _labs_look()
del _labs_look
"""
"""What section 9 does with gradients."""

Groups = list[list[int]]


def ready(c: Check, function: str) -> int:
    """End the check unless the engines have the function and the post office; count them."""
    have = c.ask(f"_labs_answer = [callable(globals().get(n)) for n in ('Mail', {function!r})]")
    c.need(
        all(one[0] for one in have),
        "The engines have no `Mail`.",
        "run the cell of section 2 that defines `Mail`, then the exercise's cell again",
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
    return c.expect(True, "every worker has the sum, for each size of the tensor", "")


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
            "change `x` itself: `x += y` does this, `x = x + y` makes a new tensor",
            "another worker has the sum and must send it to this worker, which receives it "
            "into `x`",
        )
        words = f"{trial}: worker {rank} still holds only its own numbers."
        return words, hints[others_changed]
    at = int(np.flatnonzero(parts != whole)[0])
    value = parts[at]
    words = f"{trial}: number {at} of worker {rank} is not the sum"
    digits = f"{value:.0f}".zfill(workers)[::-1]
    if np.isfinite(value) and value == round(value) and len(digits) == workers:
        ranks = ", ".join(map(str, range(workers)))
        words += f"; the parts of workers {ranks} are in it {', '.join(digits)} times"
    hint = "each sum must contain each part once: follow one number through the rounds on paper"
    return f"{words}.", hint


def through_mail(c: Check, found: list[Any]) -> None:
    sent = sum(trial[1] for worker in found for trial in worker)
    c.need(
        sent > 0 or len(found) == 1,
        "Nothing was sent through `mail`.",
        "use mail.send, mail.receive and mail.exchange",
    )
