"""Lab 12, sections 6 to 9: federated branches, noise, and masks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ...answers import Check, exercise
from .on_engines import SENT, Floats, floats, have

LIMIT_S = 25.0
"""For an answer that hangs on the engines."""

_BRANCH = """
def _labs_look():
    draw = np.random.default_rng([126, rank])
    rows = 5 + 2 * rank
    x = torch.tensor(draw.normal(size=(rows, 8)))
    y = torch.tensor((draw.random(rows) < 0.5).astype(float))
    w = torch.tensor({begun!r}).double()
    office = Office()
    gradient = logistic_gradient(w, x, y)
    after = client_update(w, x, y, 2, 4, 0.5)
    same = bool((w == torch.tensor({begun!r}).double()).all())
    with _LabsSent() as once:
        Office().add_up(torch.zeros(9).double())
    with _LabsSent() as sent:
        models = fedavg(x, y, 3, 2, 4, 0.5, office)
    sizes = [list(one.shape) for one in office.seen]
    around = len(sent.sizes) - 3 * len(once.sizes)
    return [gradient, after, same, models, office.sent_bytes, sizes, around]
_labs_answer = _labs_look()
del _labs_look, _LabsSent
"""

_BEGUN = [0.3, -0.2, 0.5, -0.4, 0.2, 0.0, 0.35, -0.1, 0.1]

_ROWS = """
_labs_answer = [list(rows_x.shape), rows_x[0].tolist(), float(rows_y.sum())]
"""


_LOAD = "section 6 has a cell that makes `rows_x` and `rows_y`: run this cell again"


@exercise("12.6", "Federated averaging", where="the engines")
def fedavg(c: Check) -> None:
    """The gradient, a branch's rounds and the weighted mean; rows stay where they are."""
    n = have(c, "Office", "logistic_gradient", "client_update", "fedavg")
    found = c.ask(
        SENT + _BRANCH.format(begun=_BEGUN),
        limit_s=LIMIT_S,
        hint="in each round, call `office.add_up` once with one vector of at most 10 numbers",
    )
    rows = [_branch(rank) for rank in range(n)]
    begun = np.array(_BEGUN)
    for rank, ((gradient, after, same, *_), (x, y)) in enumerate(zip(found, rows, strict=True)):
        seen = floats(c, gradient, "logistic_gradient", (9,))
        c.need(
            bool(np.allclose(seen, _gradient(begun, x, y))),
            f"`logistic_gradient` returned a wrong gradient on branch {rank}.",
            "return the gradient of the mean loss over the rows: divide by len(y) exactly once",
        )
        c.need(
            bool(np.allclose(floats(c, after, "client_update", (9,)), _update(begun, x, y))),
            f"`client_update` returned wrong weights on branch {rank}, with {len(y)} rows in "
            "batches of 4.",
            "in every pass over the rows, take all batches in order: do not drop the last batch, "
            "which may be smaller",
        )
        c.need(
            same,
            "`client_update` changed its argument `w` in place.",
            "work on a copy: w = w.clone()",
        )
    c.expect(True, "`logistic_gradient` and `client_update` are right on every branch", "")
    counts = np.array([len(y) for _, y in rows], dtype=float)
    w, truth = np.zeros(9), []
    for _ in range(3):
        mine = np.array([_update(w, x, y) for x, y in rows])
        w = (counts[:, None] * mine).sum(0) / counts.sum()
        truth.append(w)
    for _, _, _, models, sent_bytes, *_ in found:
        seen = _models(c, models, "fedavg")
        c.need(
            bool(np.allclose(seen, truth)),
            "`fedavg` returned a wrong mean of the branches' weights: each branch must count in "
            "proportion to its number of rows.",
            "all vectors in the list are equal: did you append the same tensor in every round?"
            if np.array_equal(seen, seen[[-1]].repeat(3, axis=0))
            else "a branch with r rows sends r * weights and r in one vector. Then divide the sum "
            "of r * weights by the sum of r. Each round begins with the mean of the previous round",
        )
        c.need(
            sent_bytes <= 3 * 8 * 10,
            f"A branch sent {sent_bytes} bytes in three rounds, but {3 * 8 * 10} bytes are enough.",
            "send one vector in each round: the weights and one additional number",
        )
    calls = len(found[0][5])
    c.need(
        calls == 3,
        f"In three rounds `fedavg` called `office.add_up` {calls} times, but exactly one call in "
        "each round is right.",
        "in each round, put everything that a branch sends to the office into one vector",
    )
    c.need(
        not any(one[6] for one in found),
        "`fedavg` sent messages that did not go through the office.",
        "do not use `dist` in `fedavg`: put the number of rows into the vector for the office",
    )
    c.expect(True, "`fedavg` returns the weighted means, and sends one vector in each round", "")
    data = c.ask(_ROWS, limit_s=LIMIT_S, hint=_LOAD)
    firsts = [tuple(one[1]) for one in data]
    c.expect(
        [one[0][0] for one in data] == [400, 350, 300, 250, 200][:n] and len(set(firsts)) == n,
        "each branch holds only its own rows",
        "a branch holds rows that are not its own",
        _LOAD,
    )


def _models(c: Check, value: Any, name: str, rounds: int = 3) -> Floats:
    """Return the weights after each round."""
    found = floats(c, value, name)
    c.need(
        found.shape == (rounds, 9),
        f"For {rounds} rounds `{name}` returned a result of the shape {found.shape}, but its shape "
        f"must be {(rounds, 9)}.",
        "return a list with one vector of 9 numbers for each round. The weights before the first "
        "round are zeros: leave these zeros out of the list",
    )
    return found


def _branch(rank: int) -> tuple[Floats, Floats]:
    """Return the rows of a branch, as `_BRANCH` makes them."""
    draw = np.random.default_rng([126, rank])
    rows = 5 + 2 * rank
    return draw.normal(size=(rows, 8)), (draw.random(rows) < 0.5).astype(float)


def _gradient(w: Floats, x: Floats, y: Floats) -> Floats:
    d = (1 / (1 + np.exp(-(x @ w[:-1] + w[-1]))) - y) / len(y)
    return np.concatenate([x.T @ d, [d.sum()]])


def _update(w: Floats, x: Floats, y: Floats) -> Floats:
    """Return a branch's weights after two passes in batches of four."""
    for _ in range(2):
        for first in range(0, len(y), 4):
            batch = slice(first, first + 4)
            w = w - 0.5 * _gradient(w, x[batch], y[batch])
    return w


_PRIVATE = """
def _labs_look():
    def begin(seed):
        return torch.Generator().manual_seed(seed)
    v = torch.tensor([3.0, -4.0, 0.0]).double()
    clips = [clip(one, norm) for one, norm in ((v, 2.5), (v, 10.0), (torch.zeros(3).double(), 1.0))]
    same = v.tolist() == [3.0, -4.0, 0.0]
    generator, ones = begin(rank), torch.ones(4000).double()
    noisy, later = [private_update(ones, 2.0, 1.5, generator) for _ in range(2)]
    first = private_update(ones, 2.0, 1.5, begin(rank))
    short = private_update(0 * ones, 2.0, 1.5, begin(rank))
    quiet = private_update(v, 2.5, 0.0, begin(rank))
    x = torch.tensor(np.random.default_rng([126, rank]).normal(size=(5 + 2 * rank, 8)))
    y = (x[:, 0] > 0).double()
    rounds = []
    for z, count in ((0.0, 3), (1.0, 12)):
        office = Office()
        models = dp_fedavg(x, y, count, 2, 4, 0.5, 0.1, z, begin(rank), office)
        rounds.append([models, office.seen])
    again = []
    for seed in (rank, rank, 1000 + rank):
        again.append(dp_fedavg(x, y, 1, 2, 4, 0.5, 0.1, 1.0, begin(seed), Office()))
    eps = [epsilon(z, t, d) for z, t, d in ((1.0, 1, 1e-5), (2.0, 30, 1e-6))]
    return [clips, same, [noisy, later, first, short], quiet, rounds, eps, again]
_labs_answer = _labs_look()
del _labs_look
"""


@exercise("12.7", "Clip and add noise", where="the engines")
def private(c: Check) -> None:
    """The norm of an update, the size of the noise, and the privacy that it gives."""
    n = have(c, "Office", "clip", "private_update", "dp_fedavg", "epsilon", "client_update")
    found = c.ask(
        _PRIVATE,
        limit_s=LIMIT_S,
        hint="which line raises the error? To find this line, call each function with a small "
        "vector in a new cell that begins with %%distributed",
    )
    clips = [floats(c, one, "clip", (3,)) for one in found[0][0]]
    c.need(
        bool(np.allclose(clips[0], [1.5, -2.0, 0.0])),
        f"clip([3, -4, 0], 2.5) returned {clips[0].round(3).tolist()}, which is not the clipped "
        "update.",
        "the result must have the norm 2.5 and the direction of the update",
    )
    c.need(
        bool(np.allclose(clips[1], [3, -4, 0]) and np.allclose(clips[2], 0)) and found[0][1],
        "`clip` changed an update with a norm below the limit, or it changed its argument `update` "
        "in place.",
        "return a new tensor: `update` times min(1, limit / length). The limit is the argument "
        "`norm`. The length is update.norm()",
    )
    c.expect(True, "`clip` keeps the direction and limits the norm", "")
    _noise(c, found, n)
    _dp_rounds(c, found, n)
    for at, (z, t, delta) in enumerate(((1.0, 1, 1e-5), (2.0, 30, 1e-6))):
        rho = t / (2 * z * z)
        truth = rho + 2 * math.sqrt(rho * math.log(1 / delta))
        seen = float(floats(c, found[0][5][at], "epsilon", ()))
        c.need(
            math.isclose(seen, truth, rel_tol=1e-6),
            f"epsilon({z:g}, {t}, {delta:g}) returned {seen:.4g}, which is not right.",
            "section 8 has two formulas. Compute rho from `z` and `rounds`, and then compute "
            "epsilon from rho and `delta`. Use the natural logarithm",
        )
    c.expect(True, "`epsilon` follows the formula", "")


def _noise(c: Check, found: list[Any], n: int) -> None:
    """Look at the noise of `private_update`: its size, and where it comes from."""
    first = floats(c, found[0][3], "private_update", (3,))
    c.need(
        bool(np.allclose(first, [1.5, -2.0, 0.0])),
        f"private_update([3, -4, 0], 2.5, 0, generator) returned {first.round(3).tolist()}, which "
        "is not the clipped update.",
        "with z = 0 there is no noise: return the clipped update",
    )
    clipped = 2.0 / math.sqrt(4000)
    drawn = [[floats(c, one, "private_update", (4000,)) for one in worker[2]] for worker in found]
    noise = np.array([one[0] for one in drawn]) - clipped
    asked = 1.5 * 2.0 / math.sqrt(n)
    c.need(
        abs(float(noise.std()) / asked - 1) < 0.03 and abs(float(noise.mean())) < 0.1 * asked,
        "The noise of a branch has a wrong mean or a wrong standard deviation. With the arguments "
        f"norm=2 and z=1.5, the noise has the mean {float(noise.mean()):.3g} and the standard "
        f"deviation {float(noise.std()):.3g}.",
        "clip first, then add noise with the mean 0 and the standard deviation z * norm / "
        "sqrt(number of branches)",
    )
    c.need(
        abs(float((np.abs(noise) < asked).mean()) - 0.6827) < 0.02,
        "The noise of `private_update` has the right standard deviation, but it is not Gaussian.",
        "draw the noise with torch.randn: the formula of epsilon is valid only for Gaussian noise",
    )
    short = np.array([one[3] for one in drawn])
    c.need(
        abs(float(short.std()) / asked - 1) < 0.03,
        "The check ran `private_update` on an update of zeros, with norm=2 and z=1.5. The noise of "
        f"a branch then has the standard deviation {float(short.std()):.3g}, which is not right.",
        "add noise to every update: the size of the noise depends on the arguments `norm` and "
        "`z`, but not on the numbers in the update",
    )
    c.need(
        all(np.array_equal(noisy, again) for noisy, _, again, _ in drawn),
        "`private_update` does not draw its noise from its argument `generator`.",
        "pass the generator on to torch.randn",
    )
    c.need(
        abs(float(noise.sum(0).std()) / (1.5 * 2.0) - 1) < 0.06
        and not any(np.array_equal(noisy, later) for noisy, later, *_ in drawn),
        "Two branches, or two calls on one branch, add the same noise.",
        "use `generator` as it is: do not set its seed in the function",
    )
    c.expect(True, "the noise in the sum of all updates has the standard deviation z * norm", "")


def _dp_rounds(c: Check, found: list[Any], n: int) -> None:
    rows = []
    for rank in range(n):
        x = np.random.default_rng([126, rank]).normal(size=(5 + 2 * rank, 8))
        rows.append((x, (x[:, 0] > 0).astype(float)))

    def clipped(w: Floats) -> Floats:
        updates = np.array([_update(w, x, y) - w for x, y in rows])
        lengths = np.linalg.norm(updates, axis=1, keepdims=True)
        short: Floats = updates * np.minimum(1, 0.1 / lengths)
        return short

    w, truth = np.zeros(9), []
    for _ in range(3):
        w = w + clipped(w).sum(0) / n
        truth.append(w)
    for one in found:
        c.need(
            bool(np.allclose(_models(c, one[4][0][0], "dp_fedavg"), truth)),
            "With z = 0, `dp_fedavg` does not add the mean of the clipped updates to the weights.",
            "send the clipped *update* (new weights minus old weights). Divide the office's sum by "
            "world_size, and add the result to the old weights",
        )
    messages = [_received(c, found[0][4][at][1], n, (3, 12)[at]) for at in (0, 1)]
    c.need(
        float(np.linalg.norm(messages[0], axis=2).max()) <= 0.1 * (1 + 1e-6),
        "With z = 0, the office received an update with a norm above the limit.",
        "clip the update before you send it",
    )
    models = _models(c, found[0][4][1][0], "dp_fedavg", 12)
    before = np.concatenate([np.zeros((1, 9)), models[:-1]])
    noise = np.array([got - clipped(w) for got, w in zip(messages[1], before, strict=True)])
    sizes = noise.std(axis=(1, 2)) / (0.1 / math.sqrt(n))
    c.need(
        bool((np.abs(sizes - 1) < 0.45).all()) and abs(float(np.mean(sizes)) - 1) < 0.15,
        "With z = 1, the noise in the messages to the office has a wrong standard deviation. For "
        f"rounds 0 to {len(sizes) - 1}, the ratios of the measured to the right standard deviation "
        f"are {', '.join(f'{one:.2f}' for one in sizes)}. In each round, this ratio must be near "
        "1.",
        "in each round, a branch adds its part of the noise once, before it sends the update",
    )
    c.need(
        not np.allclose(noise[0], noise[1]),
        "Two rounds of `dp_fedavg` have the same noise.",
        "use `generator` as it is: do not set its seed in a round",
    )
    first, same, other = (_models(c, one, "dp_fedavg", 1) for one in found[0][6])
    c.need(
        bool(np.allclose(first, same) and not np.allclose(first, other)),
        "`dp_fedavg` does not draw its noise from its argument `generator`.",
        "pass `generator` on to private_update; make no generator of your own",
    )
    c.need(
        bool(np.allclose(models, before + messages[1].sum(1) / n)),
        "With z = 1, `dp_fedavg` returned wrong weights. They must be the old weights plus the "
        "mean of the messages that the office received.",
        "the messages already contain the noise: divide the office's sum by world_size, and add "
        "the result to the old weights",
    )
    c.expect(True, "`dp_fedavg` adds the clipped, noisy updates to the weights", "")


def _received(c: Check, seen: Any, n: int, rounds: int) -> Floats:
    """Return what the office received: by round, branch and number."""
    shapes = [np.shape(one) for one in seen]
    c.need(
        shapes == [(n, 9)] * rounds,
        f"In {rounds} rounds of `dp_fedavg` each branch sent {len(shapes)} vectors with the "
        f"lengths {sorted({shape[-1] for shape in shapes})}. A branch must send one vector of 9 "
        "numbers in each round.",
        "in each round a branch sends the result of `private_update` and nothing else",
    )
    return floats(c, seen, "office.seen")


_SECURE = """
def _labs_look():
    global pair_seed
    secret, asked = pair_seed, []
    def pair_seed(a, b, number):
        asked.append([sum((int(a), int(b))) - rank, int(number)])
        return secret(a, b, number)
    def partners():  # of this branch, and the rounds, since the previous call
        found = [sorted(set(column)) for column in zip(*asked)] or [[], []]
        asked.clear()
        return found
    try:
        v = torch.tensor({vectors!r}[rank]).double()
        plain = encode(v.clone())
        kind, back = str(getattr(plain, "dtype", None)), None
        if plain is not None:
            plain = plain.clone()
            back = [decode(plain.clone()), decode(torch.tensor([0, 2**31 - 1, 2**31, R - 1]))]
        if back is None or back[0] is None:
            return [plain, *[None] * 5, back, kind, None]
        first, pairs = masked(plain.clone(), {turn}), partners()
        if first is None:
            return [plain, *[None] * 5, back, kind, None]
        second = masked(plain.clone(), {turn} + 1)
        zeros = masked(torch.zeros(2000, dtype=torch.int64), {turn} + 2)
        partners()
        office = Office()
        with _LabsSent() as once:
            Office().add_up(plain.clone())
        with _LabsSent() as sent:
            total = secure_sum(v.clone(), {turn} + 3, office)
        later = partners()
        right = masked(plain.clone(), {turn} + 3)
        around = len(sent.sizes) - len(once.sizes)
        return [plain, first, second, zeros, total, list(office.seen), back, kind, [pairs, later],
                right, around]
    finally:
        pair_seed = secret
_labs_answer = _labs_look()
del _labs_look, _LabsSent
"""

_R = 2**32
_TURNS = itertools.count(100, 10)
"""Numbers of rounds that no check has used: an answer may keep the masks of a round."""


_INTEGERS = (
    "from the result of `encode` to the input of `decode`, all numbers must have the type "
    "torch.int64"
)


@exercise("12.8", "Secure aggregation", where="the engines")
def secure(c: Check) -> None:
    """Masks cancel in the sum of all messages, and in no other sum."""
    n = have(c, "Office", "encode", "decode", "masked", "secure_sum", "pair_seed")
    vectors = np.random.default_rng(128).normal(size=(n, 9)).round(3)
    turn = next(_TURNS)
    source = SENT + _SECURE.format(vectors=vectors.tolist(), turn=turn)
    found = c.ask(source, limit_s=LIMIT_S, hint=_INTEGERS)
    plain = np.array([floats(c, one[0], "encode", (9,)) for one in found])
    off = np.abs(plain - np.rint(vectors * 2**16) % _R)
    c.need(
        not off.any(),
        "`encode` did not return round(2**16 * v) modulo R.",
        "round to the nearest whole number; do not cut off the fraction"
        if 0 < np.minimum(off, _R - off).max() <= 1
        else "a negative number becomes R minus its magnitude: % R does this",
    )
    c.need(
        found[0][7] == "torch.int64",
        f"`encode` returned numbers of the type {found[0][7]}, but it must return torch.int64.",
        "masks work only with whole numbers: convert the result to torch.int64",
    )
    backs = np.array([floats(c, one[6][0], "decode", (9,)) for one in found])
    c.need(
        bool(np.allclose(backs, vectors, atol=1e-4)),
        "decode(encode(v)) is not equal to v.",
        "values from R/2 upwards stand for negative numbers: subtract R from these values",
    )
    ends = floats(c, found[0][6][1], "decode", (4,))
    c.need(
        bool(np.array_equal(ends, np.array([0, 2**31 - 1, -(2**31), -1]) / 2**16)),
        f"`decode` of [0, R/2 - 1, R/2, R - 1] returned {ends.tolist()}, which is not right.",
        "which of these four values stand for negative numbers? Do all your tensors have the type "
        "torch.int64 or torch.float64?",
    )
    c.expect(True, "`encode` and `decode` are right, for negative numbers too", "")
    first, second = (
        np.array([floats(c, one[at], "masked", (9,)) for one in found]) for at in (1, 2)
    )
    c.need(
        bool((first >= 0).all() and (first < _R).all()),
        "`masked` returned numbers below 0 or above R - 1.",
        "take the result modulo R",
    )
    c.need(
        bool(np.array_equal(first.sum(0) % _R, plain.sum(0) % _R)),
        "The masks do not cancel in the sum of all messages.",
        "in each pair of branches, the branch with the lower rank adds the mask, and the other "
        "branch subtracts the same mask",
    )
    for rank, one in enumerate(found):
        others = [other for other in range(n) if other != rank]
        masks = [other for other in one[8][0][0] if other in others]
        c.need(
            masks == others,
            f"`masked` on branch {rank} called pair_seed only for the branches {masks}.",
            "the formula of section 9 needs one mask for each of the other branches",
        )
        c.need(
            not one[8][1][1] or turn + 3 in one[8][1][1],
            f"secure_sum(v, {turn + 3}, office) used the masks of the rounds {one[8][1][1]}, "
            f"but it must use the masks of round {turn + 3}.",
            "pass `number` on to `masked`. If a branch uses the same masks in two rounds, the "
            "office can subtract the branch's message of one round from its message of the other "
            "round. Then the masks cancel",
        )
    noise = np.array([floats(c, one[3], "masked", (2000,)) for one in found]) / _R
    uniform = np.abs(np.sort(noise, axis=1) - np.linspace(0, 1, 2000)).max()
    c.need(
        n == 1 or float(uniform) < 0.06,
        "For a vector of zeros, `masked` did not return random numbers.",
        "add or subtract a mask for each of the other branches",
    )
    four = (noise[:-1].sum(0)) % 1.0  # what remains is the last branch's mask
    c.need(
        n == 1 or float(np.abs(np.sort(four) - np.linspace(0, 1, 2000)).max()) < 0.06,
        "If one message is missing, the sum of the other messages must look random. It does not.",
        "each pair of branches needs its own mask",
    )
    c.need(
        not np.array_equal(first, second),
        "In two different rounds, `masked` used the same masks.",
        "pass the number of the round to pair_seed",
    )
    c.expect(True, "the masks cancel in the sum of all messages, and in no other sum", "")
    truth = vectors.sum(0)
    for one in found:
        c.need(
            bool(np.allclose(floats(c, one[4], "secure_sum", (9,)), truth, atol=1e-4)),
            "`secure_sum` did not return the sum of the branches' vectors.",
            "first encode the vector, then mask it, then call office.add_up, then decode the sum",
        )
    seen = found[0][5]
    c.need(
        len(seen) == 1,
        f"`secure_sum` called `office.add_up` {len(seen)} times, but exactly one call is right.",
        "send the masked message, and nothing else",
    )
    c.need(
        not any(one[10] for one in found),
        "`secure_sum` sent messages that did not go through the office.",
        "do not use `dist` in `secure_sum`: the other branches must not see this branch's vector",
    )
    got = floats(c, seen[0], "office.seen", (n, 9))
    right = np.array([floats(c, one[9], "masked", (9,)) for one in found])
    c.expect(
        bool(np.array_equal(got, right)),
        "the office received only masked messages, and the sum is right",
        "the messages that the office received differ from `masked(encode(v), number)`",
        "first encode, then mask. If you mask first, the lower 16 bits of each number in the "
        "message have no mask, so the office can read them",
    )
