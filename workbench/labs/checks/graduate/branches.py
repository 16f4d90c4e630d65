"""Lab 12, sections 6 to 9: federated branches, noise, and masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...answers import Check, exercise
from .on_engines import Floats, floats, have

LIMIT_S = 25.0
"""For an answer that hangs on the engines."""

_BRANCH = """
def _labs_look():
    draw = np.random.default_rng([126, rank])
    rows = 5 + 2 * rank
    x = torch.tensor(draw.normal(size=(rows, 3)))
    y = torch.tensor((draw.random(rows) < 0.5).astype(float))
    w = torch.tensor([0.3, -0.2, 0.5, 0.1]).double()
    office = Office()
    gradient = logistic_gradient(w, x, y)
    after = client_update(w, x, y, 2, 4, 0.5)
    same = bool((w == torch.tensor([0.3, -0.2, 0.5, 0.1]).double()).all())
    models = fedavg(x, y, 3, 2, 4, 0.5, office)
    sizes = [list(one.shape) for one in office.seen]
    return [gradient, after, same, models, office.sent_bytes, sizes]
_labs_answer = _labs_look()
del _labs_look
"""

_ROWS = """
_labs_answer = [list(rows_x.shape), rows_x[0].tolist(), float(rows_y.sum())]
"""


@exercise("12.6", "Federated averaging", where="the engines")
def fedavg(c: Check) -> None:
    """The gradient, a branch's rounds and the weighted mean; rows stay where they are."""
    n = have(c, "Office", "logistic_gradient", "client_update", "fedavg")
    found = c.ask(_BRANCH, limit_s=LIMIT_S, hint="the office takes one vector in each round")
    rows = [_branch(rank) for rank in range(n)]
    begun = np.array([0.3, -0.2, 0.5, 0.1])
    for rank, ((gradient, after, same, _, _, _), (x, y)) in enumerate(
        zip(found, rows, strict=True)
    ):
        seen = floats(c, gradient, "logistic_gradient", (4,))
        c.need(
            bool(np.allclose(seen, _gradient(begun, x, y))),
            f"logistic_gradient is wrong on branch {rank}.",
            "the gradient of the mean over the rows: divide by len(y), once",
        )
        c.need(
            bool(np.allclose(floats(c, after, "client_update", (4,)), _update(begun, x, y))),
            f"client_update is wrong on branch {rank}, with {len(y)} rows in batches of 4.",
            "every pass takes all batches in their order, also the last one, which is smaller",
        )
        c.need(
            same,
            "client_update changed the weights of its caller.",
            "work on a copy: w = w.clone()",
        )
    c.expect(True, "`logistic_gradient` and `client_update` are right on every branch", "")
    counts = np.array([len(y) for _, y in rows], dtype=float)
    w, truth = np.zeros(4), []
    for _ in range(3):
        mine = np.array([_update(w, x, y) for x, y in rows])
        w = (counts[:, None] * mine).sum(0) / counts.sum()
        truth.append(w)
    for _, _, _, models, sent_bytes, sizes in found:
        seen = floats(c, models, "fedavg", (3, 4))
        c.need(
            bool(np.allclose(seen, truth)),
            "fedavg does not return the means of the branches, weighted by their rows.",
            "send rows * weights and rows in one vector, then divide the sums; each round begins "
            "with the mean of the previous round",
        )
        c.need(
            sent_bytes <= 3 * 8 * 6,
            f"A branch sent {sent_bytes} bytes in three rounds.",
            "send one vector in each round: the weights and one more number",
        )
        c.need(
            all(one[-1] <= 6 for one in sizes),
            "The office received more than a model.",
            "rows must not leave a branch",
        )
    c.expect(True, "`fedavg` is the mean over rows, with one vector for each round", "")
    data = c.ask(_ROWS, limit_s=LIMIT_S, hint="run the cell of section 6 again")
    firsts = [tuple(one[1]) for one in data]
    c.expect(
        [one[0][0] for one in data] == [400, 350, 300, 250, 200][:n] and len(set(firsts)) == n,
        "each branch holds only its own rows",
        "a branch holds other rows than its own",
        "run the cell of section 6 that loads `rows_x` again",
    )


def _branch(rank: int) -> tuple[Floats, Floats]:
    """Return the rows of a branch, as `_BRANCH` makes them."""
    draw = np.random.default_rng([126, rank])
    rows = 5 + 2 * rank
    return draw.normal(size=(rows, 3)), (draw.random(rows) < 0.5).astype(float)


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
    v = torch.tensor([3.0, -4.0, 0.0]).double()
    clips = [clip(one, norm) for one, norm in ((v, 1.0), (v, 10.0), (torch.zeros(3).double(), 1.0))]
    same = v.tolist() == [3.0, -4.0, 0.0]
    generator = torch.Generator().manual_seed(rank)
    noisy = private_update(torch.ones(4000).double(), 2.0, 1.5, generator)
    x = torch.tensor(np.random.default_rng([126, rank]).normal(size=(5 + 2 * rank, 3)))
    y = (x[:, 0] > 0).double()
    office = Office()
    generator = torch.Generator().manual_seed(rank)
    models = dp_fedavg(x, y, 3, 2, 4, 0.5, 0.1, 0.0, generator, office)
    seen = torch.cat(office.seen) if office.seen else None
    office = Office()
    again = dp_fedavg(x, y, 3, 2, 4, 0.5, 0.1, 1.0, torch.Generator().manual_seed(rank), office)
    eps = [epsilon(z, t, d) for z, t, d in ((1.0, 1, 1e-5), (2.0, 30, 1e-6))]
    return [clips, same, noisy, models, seen, again, eps]
_labs_answer = _labs_look()
del _labs_look
"""


@exercise("12.7", "Clip and add noise", where="the engines")
def private(c: Check) -> None:
    """The norm of an update, the size of the noise, and the privacy that it gives."""
    n = have(c, "Office", "clip", "private_update", "dp_fedavg", "epsilon", "client_update")
    found = c.ask(_PRIVATE, limit_s=LIMIT_S, hint="call each function with a small vector first")
    clips = [floats(c, one, "clip", (3,)) for one in found[0][0]]
    c.need(
        bool(np.allclose(clips[0], [0.6, -0.8, 0.0])),
        f"clip([3, -4, 0], 1) returned {clips[0].round(3).tolist()}.",
        "shorten the whole vector to the norm, and keep its direction",
    )
    c.need(
        bool(np.allclose(clips[1], [3, -4, 0]) and np.allclose(clips[2], 0)) and found[0][1],
        "clip changes an update that is short enough, or the tensor of its caller.",
        "multiply by min(1, norm / length): a short update stays as it is",
    )
    c.expect(True, "`clip` keeps the direction and limits the norm", "")
    clipped = 2.0 / math.sqrt(4000)
    noise = np.array([floats(c, one[2], "private_update", (4000,)) - clipped for one in found])
    asked = 1.5 * 2.0 / math.sqrt(n)
    c.need(
        abs(float(noise.std()) / asked - 1) < 0.03 and abs(float(noise.mean())) < 0.1 * asked,
        f"With norm 2 and z = 1.5, the noise of a branch has a standard deviation of "
        f"{float(noise.std()):.3g}.",
        "clip first, then add noise; its standard deviation is z * norm / sqrt(number of branches)",
    )
    c.need(
        abs(float(noise.sum(0).std()) / (1.5 * 2.0) - 1) < 0.06,
        "The noise of the sum is not z * norm.",
        "each branch draws its own noise: use the generator that the function is given",
    )
    c.expect(True, "the noise of the sum has the standard deviation z S", "")
    _dp_rounds(c, found, n)
    for at, (z, t, delta) in enumerate(((1.0, 1, 1e-5), (2.0, 30, 1e-6))):
        rho = t / (2 * z * z)
        truth = rho + 2 * math.sqrt(rho * math.log(1 / delta))
        seen = float(floats(c, found[0][6][at], "epsilon", ()))
        c.need(
            math.isclose(seen, truth, rel_tol=1e-6),
            f"epsilon({z:g}, {t}, {delta:g}) returned {seen:.4g}.",
            "rho grows with the number of rounds; use the natural logarithm",
        )
    c.expect(True, "`epsilon` follows the formula", "")


def _dp_rounds(c: Check, found: list[Any], n: int) -> None:
    rows = []
    for rank in range(n):
        x = np.random.default_rng([126, rank]).normal(size=(5 + 2 * rank, 3))
        rows.append((x, (x[:, 0] > 0).astype(float)))
    w, truth = np.zeros(4), []
    for _ in range(3):
        updates = np.array([_update(w, x, y) - w for x, y in rows])
        lengths = np.linalg.norm(updates, axis=1, keepdims=True)
        w = w + (updates * np.minimum(1, 0.1 / lengths)).sum(0) / n
        truth.append(w)
    for one in found:
        seen = floats(c, one[3], "dp_fedavg", (3, 4))
        c.need(
            bool(np.allclose(seen, truth)),
            "Without noise, dp_fedavg does not give the mean of the clipped updates.",
            "send the clipped *update* (new weights minus old weights), and add the sum divided by "
            "world_size to the weights",
        )
    received = floats(c, found[0][4], "office.seen")
    c.need(
        float(np.linalg.norm(received, axis=1).max()) <= 0.1 * (1 + 1e-6),
        "The office received an update that is longer than the norm.",
        "clip before you send",
    )
    again = floats(c, found[0][5], "dp_fedavg", (3, 4))
    c.need(
        float(np.abs(again - truth).max()) > 1e-3,
        "With z = 1, dp_fedavg gives the same weights as without noise.",
        "call private_update in each round",
    )
    c.expect(True, "`dp_fedavg` adds clipped and noisy updates", "")


_SECURE = """
def _labs_look():
    v = torch.tensor({vectors!r}[rank]).double()
    plain = encode(v)
    back = None if plain is None else decode(plain)
    if back is None or masked(plain, 1) is None:
        return [plain, *[None] * 5, back]
    first, second = masked(plain, 1), masked(plain, 2)
    zeros = masked(torch.zeros(2000, dtype=torch.int64), 3)
    office = Office()
    total = secure_sum(v, 4, office)
    seen = office.seen[0] if office.seen else None
    return [plain, first, second, zeros, total, seen, back]
_labs_answer = _labs_look()
del _labs_look
"""

_R = 2**32


@exercise("12.8", "Secure aggregation", where="the engines")
def secure(c: Check) -> None:
    """Masks cancel in the sum of all messages, and in no other sum."""
    n = have(c, "Office", "encode", "decode", "masked", "secure_sum", "pair_seed")
    vectors = np.random.default_rng(128).normal(size=(n, 9)).round(3)
    source = _SECURE.format(vectors=vectors.tolist())
    found = c.ask(source, limit_s=LIMIT_S, hint="work with torch.int64 until decode")
    plain = np.array([floats(c, one[0], "encode", (9,)) for one in found])
    c.need(
        bool(np.allclose(plain, np.rint(vectors * 2**16) % _R, atol=1)),
        "encode does not return round(2**16 * v) modulo R.",
        "a negative number becomes R minus its magnitude: % R does this",
    )
    backs = np.array([floats(c, one[6], "decode", (9,)) for one in found])
    c.need(
        bool(np.allclose(backs, vectors, atol=1e-4)),
        "decode(encode(v)) is not v.",
        "values from R/2 upwards are negative numbers: subtract R",
    )
    c.expect(True, "`encode` and `decode` are right, for negative numbers too", "")
    first, second = (
        np.array([floats(c, one[at], "masked", (9,)) for one in found]) for at in (1, 2)
    )
    c.need(
        bool((first >= 0).all() and (first < _R).all()),
        "A masked message has numbers outside of 0 .. R - 1.",
        "take the result modulo R",
    )
    c.need(
        bool(np.array_equal(first.sum(0) % _R, plain.sum(0) % _R)),
        "The masks do not cancel in the sum of all messages.",
        "of each pair, the lower rank adds the mask and the higher rank subtracts the same mask",
    )
    noise = np.array([floats(c, one[3], "masked", (2000,)) for one in found]) / _R
    uniform = np.abs(np.sort(noise, axis=1) - np.linspace(0, 1, 2000)).max()
    c.need(
        n == 1 or float(uniform) < 0.06,
        "A masked vector of zeros is not random.",
        "add a mask for every other branch",
    )
    four = (noise[:-1].sum(0)) % 1.0  # what remains is the last branch's mask
    c.need(
        n == 1 or float(np.abs(np.sort(four) - np.linspace(0, 1, 2000)).max()) < 0.06,
        "The sum of all messages except one is not random.",
        "each pair of branches needs a mask of its own",
    )
    c.need(
        not np.array_equal(first, second),
        "Two rounds have the same masks.",
        "pass the number of the round to pair_seed",
    )
    c.expect(True, "only the sum of all messages is free of masks", "")
    truth = vectors.sum(0)
    for one in found:
        c.need(
            bool(np.allclose(floats(c, one[4], "secure_sum", (9,)), truth, atol=1e-3)),
            "secure_sum does not return the sum of the vectors.",
            "encode, mask, add up, decode",
        )
    seen = floats(c, found[0][5], "office.seen", (n, 9))
    c.expect(
        bool((np.abs(seen - plain) > 1).mean() > 0.9),
        "the office received only masked messages, and the sum is right",
        "the office received messages without masks",
        "mask the message before office.add_up",
    )
