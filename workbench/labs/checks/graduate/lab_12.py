"""Lab 12: fewer bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....data import digits_arrays
from ...answers import Check, exercise
from . import branches
from .on_engines import SENT, Floats, filled, floats, have

LIMIT_S = 25.0
"""For an answer that hangs on the engines."""

BUDGET_SHARE = 0.10
"""How far the bytes of a run may be from those of `dense`."""

EXACT = 1e-5
"""Float32 sums of workers, in another order."""

FEDERATED = branches.__name__
"""The module with exercises 12.6 to 12.8, which this import registers."""

_PACK = """
def _labs_look():
    found = []
    for v in {vectors!r}:
        v = torch.tensor(v)
        kept = v.clone()
        message = {pack}(v{more})
        if message is None:
            return [None]
        back = {unpack}(message, len(v))
        same, kind = bool((v == kept).all()), str(getattr(back, "dtype", None))
        found.append([str(message.dtype), list(message.shape), back, same, kind])
    return found
_labs_answer = _labs_look()
del _labs_look
"""


@exercise("12.1", "Three compressors", where="the engines")
def compressors(c: Check) -> None:
    """The bytes of each message, and what the receiver reads."""
    have(c, "Post", "pack_top_k", "unpack_top_k", "pack_int8", "unpack_int8", "pack_sign",
          "unpack_sign")  # fmt: skip
    draw = np.random.default_rng(121)
    vectors = [draw.normal(size=size).astype(np.float32) for size in (200, 37, 5)]
    vectors.append(np.zeros(9, np.float32))
    vectors.append((1e-6 * draw.normal(size=23)).astype(np.float32))  # late gradients are small
    vectors.append(np.array([2, -3, 0, 0.5, 0, -1, 0, 0, 0.25, 0.75, -0.125], np.float32))
    trials: tuple[tuple[str, str, Any, Any], ...] = (
        ("top_k", ", 0.1", lambda v: 8 * max(1, int(0.1 * len(v))), lambda v: _top_k(v, 0.1)),
        ("top_k", "", lambda v: 8 * max(1, int(0.01 * len(v))), lambda v: _top_k(v, 0.01)),
        ("int8", "", lambda v: 4 + len(v), None),
        ("sign", "", lambda v: 4 - (-len(v) // 8), lambda v: _sign(v)),
    )
    for name, more, size_bytes, truth in trials:
        source = _PACK.format(
            vectors=[one.tolist() for one in vectors], pack=f"pack_{name}", unpack=f"unpack_{name}",
            more=more,
        )  # fmt: skip
        hint = f"which line raises the error? Call pack_{name}(torch.randn(7)) in a new cell that "
        found = c.ask(source, limit_s=LIMIT_S, hint=hint + "begins with %%distributed")[0]
        for v, one in zip(vectors, found, strict=False):
            filled(c, one, f"pack_{name}")
            _one_message(c, name, v, one, size_bytes(v), truth)
    c.expect(
        True,
        "all messages have the right number of bytes, and the receiver reads the right numbers",
        "",
    )


def _one_message(
    c: Check, name: str, v: NDArray[np.float32], one: Any, size_bytes: int, truth: Any
) -> None:
    dtype, shape, back, same, kind = one
    c.need(same, f"`pack_{name}` changed its argument in place.", "work on a new tensor")
    c.need(
        dtype == "torch.uint8" and len(shape) == 1,
        f"`pack_{name}` returned a tensor with the type {dtype} and the shape {tuple(shape)}, but "
        "it must return a vector of torch.uint8.",
        "tensor.view(torch.uint8) returns the bytes of a tensor, as torch.uint8",
    )
    c.need(
        shape[0] == size_bytes,
        f"For {len(v)} numbers, the message of `pack_{name}` has {shape[0]} bytes, which is not "
        "the number of bytes in the table.",
        "an index (int32) or a float32 number takes 4 bytes, an int8 number takes 1 byte"
        + ("; the text of the exercise says what k is" if name == "top_k" else ""),
    )
    read = floats(c, back, f"unpack_{name}", v.shape)
    c.need(
        kind.endswith("float32"),
        f"`unpack_{name}` returned numbers of the type {kind}, but it must return torch.float32.",
        "convert the result to float32, the type of the sender's numbers",
    )
    if truth is None:  # 8 bits: no number is off by more than half a step
        step = float(np.abs(v).max()) / 127
        off = float(np.abs(read - v).max(initial=0.0))
        c.need(
            off <= 0.5 * step * 1.001,
            f"After pack_int8 and unpack_int8, a number is wrong by {off:.3g}; the largest "
            f"allowed error is half the scale, {step / 2:.3g}.",
            "do you compute the scale exactly as in the table? Round to the nearest whole number; "
            "do not cut off the fraction"
            if off <= step * 1.01
            else "the scale s depends on the largest magnitude: which number of the vector [2, -3] "
            "has the largest magnitude?",
        )
        return
    expected = truth(v)
    worst = int(np.abs(read - expected).argmax())
    c.need(
        bool(np.allclose(read, expected, rtol=1e-5, atol=0)),
        f"After pack_{name} and unpack_{name}, a number is wrong: v[{worst}] is {v[worst]:.3g}, "
        f"and the unpacked vector has {read[worst]:.3g} at this index.",
        "send the numbers that are largest in magnitude: a large negative number counts too"
        if name == "top_k"
        else "the scale is the mean of all magnitudes; the table says which numbers have the bit 1",
    )


def _top_k(v: NDArray[np.float32], fraction: float) -> Floats:
    kept = np.argsort(-np.abs(v), kind="stable")[: max(1, int(fraction * len(v)))]
    found = np.zeros(len(v))
    found[kept] = v[kept]
    return found


def _sign(v: NDArray[np.float32]) -> Floats:
    return np.where(v >= 0, 1.0, -1.0) * float(np.abs(v).mean())


_FEEDBACK = """
def _labs_look():
    def pack_largest(v):  # the largest number of the vector, and its place
        place = v.abs().argmax().reshape(1)
        return torch.cat([place.int().view(torch.uint8), v[place].contiguous().view(torch.uint8)])
    def unpack_largest(message, size):
        v = torch.zeros(size)
        v[message[:4].view(torch.int32).long()] = message[4:].view(torch.float32)
        return v
    def pack_halves(v):  # every number, as a multiple of 1/2
        return (2 * v).round().to(torch.int8).view(torch.uint8)
    def unpack_halves(message, size):
        return message.view(torch.int8).float() / 2
    found = []
    for pack, unpack, size in ((pack_largest, unpack_largest, 6), (pack_halves, unpack_halves, 4)):
        for feedback in (True, False):
            post = Post()
            sender = Sender(pack, unpack, size, feedback)
            first = None if sender.error is None else np.array(sender.error)
            means, kept, calls = [], True, 0
            for step in {gradients!r}:
                g = torch.tensor(step[rank][:size])
                with _LabsSent() as sent:
                    mean = sender.mean(g, post)
                calls += len(sent.sizes)
                kept = kept and bool((g == torch.tensor(step[rank][:size])).all())
                means.append(None if mean is None else mean.clone())
            found.append([means, sender.error, kept, post.sent_bytes, first, calls])
    return found
_labs_answer = _labs_look()
del _labs_look, _LabsSent
"""


@exercise("12.2", "Error feedback", where="the engines")
def feedback(c: Check) -> None:
    """The mean of what was sent, and the memory of what was not, with two compressors."""
    workers = have(c, "Post", "Sender")
    draw = np.random.default_rng(122)
    gradients = draw.normal(size=(7, workers, 6)).round(3) + 3e-4  # no sum lies between two halves
    source = SENT + _FEEDBACK.format(gradients=gradients.tolist())
    hint = "use the formulas of section 2, in the order in which they stand there"
    found = c.ask(source, limit_s=LIMIT_S, hint=hint)
    trials = [(kind, used) for kind in ("largest", "halves") for used in (True, False)]
    for place, (kind, used) in enumerate(trials):
        size, message_bytes = (6, 8) if kind == "largest" else (4, 4)
        memory = np.zeros((workers, size))
        words = f"With a compressor {_KINDS[kind]}, and feedback={used}"
        for step, g in enumerate(gradients[:, :, :size]):
            wanted = g + memory
            sent = np.where(_largest(wanted), wanted, 0.0)
            sent = sent if kind == "largest" else np.rint(2 * wanted) / 2
            memory = wanted - sent if used else memory
            for worker in found:
                mean = floats(c, worker[place][0][step], "Sender.mean", (size,))
                c.need(
                    bool(np.allclose(mean, sent.mean(0), atol=EXACT)),
                    f"{words}: in step {step} `mean` returned a wrong vector.",
                    "does Sender call the `pack` and `unpack` that it was given? Does it return "
                    "the mean over all workers?"
                    if not step
                    else "what must self.error hold after a step?"
                    if used
                    else "without feedback, self.error must stay zero",
                )
        for rank, worker in enumerate(found):
            error = floats(c, worker[place][1], "Sender.error", (size,))
            c.need(
                bool(np.allclose(error, memory[rank], atol=EXACT)),
                f"{words}: `error` of worker {rank} is wrong after {len(gradients)} steps.",
                "test this on one worker: add up the unpacked messages of all steps, and add "
                "self.error after the last step. The result must be the sum of this worker's "
                "gradients"
                if used
                else "without feedback, self.error must stay zero",
            )
            begun = worker[place][4]
            c.need(
                begun is not None and not floats(c, begun, "Sender.error", (size,)).any(),
                f"{words}: before the first step, `error` is not a vector of {size} zeros.",
                "set self.error in `__init__`",
            )
            c.need(
                worker[place][2],
                "`mean` changed its argument `gradient` in place.",
                "make a new tensor: gradient + self.error, not gradient += ...",
            )
            c.need(
                worker[place][3] == len(gradients) * (workers - 1) * message_bytes
                and worker[place][5] == len(gradients),
                "`mean` did not send exactly one message in each call.",
                "in `mean`, call post.gather(message) exactly once",
            )
    c.expect(
        True,
        "with feedback, for each worker: (sum of its unpacked messages over all steps) + (its last "
        "`error`) = (sum of its gradients)",
        "",
    )


_KINDS = {"largest": "that sends one number", "halves": "that rounds every number"}


def _largest(v: Floats) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.abs(v) == np.abs(v).max(axis=1, keepdims=True)
    return found


_LOOPS = """
class _LabsTask:
    batch = 0
    def begin(self):
        return torch.tensor([1.0, -1.0, 2.0])
    def gradient(self, w):
        self.batch += 1
        return (rank + 1) * 0.1 * (w - rank - 0.2 * self.batch)
    def loss(self, w):
        return float((w**2).sum())
class _LabsSender:
    def mean(self, gradient, post):
        return post.mean(gradient) / 2
_labs_answer = [
    compressed_sgd(_LabsTask(), _LabsSender(), 4, 0.5, Post()),
    local_sgd(_LabsTask(), 3, 4, 0.5, Post()),
]
del _LabsTask, _LabsSender
"""


@exercise("12.3", "Local steps", where="the engines")
def loops(c: Check) -> None:
    """Both loops, on a task whose result is known."""
    n = have(c, "Post", "compressed_sgd", "local_sgd")
    found = c.ask(_LOOPS, limit_s=LIMIT_S, hint="both loops begin with w = task.begin()")
    pulls, goals = 0.1 * np.arange(1, n + 1)[:, None], np.arange(n)[:, None]
    ring_bytes = 2 * (n - 1) / n * 4 * 3
    for place, (name, every) in enumerate((("compressed_sgd", 1), ("local_sgd", 3))):
        unit = "step" if every == 1 else "round"
        w, points, batch = np.array([1.0, -1.0, 2.0]), [], 0
        lr = 0.25 if name == "compressed_sgd" else 0.5  # the sender returns half of each mean
        for turn in range(4):
            copies = np.repeat(w[None], n, axis=0)
            for _ in range(every):
                batch += 1
                copies = copies - lr * pulls * (copies - goals - 0.2 * batch)
            w = copies.mean(0)
            points.append([(turn + 1) * ring_bytes, float((w**2).sum())])
        for worker in found:
            answer = filled(c, worker[place], name)
            c.need(
                isinstance(answer, (list, tuple)) and len(answer) == 2,
                f"`{name}` must return two things: the weights and the curve.",
                "return w, curve",
            )
            weights = floats(c, answer[0], name, (3,))
            c.need(
                bool(np.allclose(weights, w, atol=1e-4)),
                f"In a test with {4 * every} steps, `{name}` returned the weights "
                f"{weights.round(3).tolist()}, which are wrong.",
                "each worker takes `every` steps on its own copy, with a new gradient for each "
                "step; then all workers take the mean of their copies"
                if every > 1
                else "in each step, compute one gradient, average it with sender.mean, and change "
                "w by -lr times this mean",
            )
            curve = floats(c, answer[1], f"{name}'s curve")
            c.need(
                curve.shape == (4, 2),
                f"The curve of `{name}` has the shape {curve.shape}, but the shape must be (4, 2).",
                f"append [post.sent_bytes, task.loss(w)] after each {unit}",
            )
            c.need(
                bool(np.allclose(curve[:, 0], np.array(points)[:, 0], rtol=1e-3)),
                f"In a test, the curve of `{name}` has wrong numbers of bytes: "
                f"{curve[:, 0].round(1).tolist()}.",
                "the first number of each point is post.sent_bytes: all bytes that this worker "
                f"has sent so far. In each {unit}, send only one message",
            )
            c.need(
                bool(np.allclose(curve[:, 1], np.array(points)[:, 1], rtol=1e-3)),
                f"In a test, the curve of `{name}` has wrong losses: "
                f"{curve[:, 1].round(3).tolist()}.",
                "the second number of each point is task.loss(w): the loss of the weights that "
                f"every worker has after this {unit}",
            )
    c.expect(True, "both loops return the right weights and the right curves", "")


_CURVES = {
    "slow": [[100.0, 2.0], [200.0, 1.5], [300.0, 1.2]],
    "fast": [[50.0, 1.9], [150.0, 1.7], [260.0, 0.4], [400.0, 0.5]],
    "late": [[250.0, 0.1]],
}


@exercise("12.4", "At equal bytes")
def equal_bytes(c: Check) -> None:
    """Curves read at a budget, and three runs that sent as much as each other."""
    for name, budget, truth in (("slow", 200, 1.5), ("slow", 299, 1.5), ("fast", 1000, 0.5),
                                ("fast", 270, 0.4)):  # fmt: skip
        seen = c.number_from("loss_at", _CURVES[name], budget)
        c.need(
            math.isclose(seen, truth),
            f"loss_at({_CURVES[name]}, {budget}) returned {seen:g}, which is wrong.",
            "look only at points whose bytes are not above the budget. Return the loss of the last "
            "of these points, even if an earlier point has a lower loss",
        )
    c.need(
        c.call("loss_at", _CURVES["late"], 200) == math.inf,
        "If every point of a curve has more bytes than the budget, `loss_at` must return infinity, "
        "but it does not.",
        'return float("inf") if every point used more bytes than the budget',
    )
    for budget, order in ((170, ["fast", "slow", "late"]), (255, ["late", "slow", "fast"])):
        found = c.call("ranking", _CURVES, budget)
        c.need(
            list(found) == order,
            f"ranking({_CURVES}, {budget}) returned {list(found)}, which is the wrong order.",
            "sort the names by loss_at(curve, budget_bytes), with the lowest loss first",
        )
    c.expect(True, "`loss_at` and `ranking` are right", "")
    dense = c.run("dense")
    sent = {}
    for name, option in (("dense", "compress"), ("topk", "compress"), ("local", "every")):
        run = c.run(name)
        steps = int(run.history["step"].max(initial=-1)) + 1
        sent[name] = steps * run.summarise().sent_step_bytes
        if name == "dense":
            continue
        value = str(run.plan.options.get(option))
        c.need(
            run.plan.workers == dense.plan.workers
            and run.plan.strategy == ("local_sgd" if name == "local" else "mirrored")
            and value in ("topk:0.01", "16"),
            f"The run {name!r} used {run.plan.strategy} with {run.plan.workers} workers and "
            f"{option}={value}, which is not what the exercise asks for.",
            "use five workers, and the strategy and the option in the text of the exercise",
        )
        c.need(
            {k: v.shape for k, v in run.weights().items()}
            == {k: v.shape for k, v in dense.weights().items()},
            f"The run {name!r} did not train the same model as 'dense'.",
            "use --recipe dense",
        )
        c.expect(
            abs(sent[name] / sent["dense"] - 1) <= BUDGET_SHARE,
            f"the run {name!r} sent as many bytes as 'dense'",
            f"in the run {name!r} all workers together sent {sent[name]:.0f} bytes, but in "
            f"'dense' they sent {sent['dense']:.0f} bytes",
            "for 'topk', divide the bytes of 'dense' by the bytes of one step of 'topk': the "
            "result is the number of steps. For 'local', divide the bytes of 'dense' by the bytes "
            "of one round of 'local': the result is the number of rounds. Each round has 16 steps",
        )
    losses = {name: _final_loss(c, name) for name in sent}
    c.expect(
        c.text("winner", tuple(losses)) == min(losses, key=lambda name: losses[name]),
        "`winner` is the run with the lowest loss",
        "`winner` is not the run with the lowest loss",
        "compare final_loss(wb.runs[name]) for the three runs",
    )


def _final_loss(c: Check, name: str) -> float:
    """Return the loss of a run's final weights over the digits, as the lab computes it."""
    x, y = digits_arrays("train", False)
    w1, b1, w2, b2 = (np.asarray(one, dtype=float) for one in c.run(name).weights().values())
    out = np.tanh(np.asarray(x, dtype=float).reshape(len(x), -1) @ w1.T + b1) @ w2.T + b2
    out -= out.max(1, keepdims=True)
    rows = np.arange(len(y))
    return float((np.log(np.exp(out).sum(1)) - out[rows, np.asarray(y, dtype=int)]).mean())


@exercise("12.5", "Gossip")
def gossip(c: Check) -> None:
    """The mixing matrix, its second eigenvalue, and what a measured decay says."""
    for n in (3, 5, 8):
        matrix = _matrix(c, c.call("ring_matrix", n), f"ring_matrix({n})", n)
        one = np.eye(n)
        truth = (one + np.roll(one, 1, axis=1) + np.roll(one, -1, axis=1)) / 3
        c.need(
            bool(np.allclose(matrix, truth)),
            f"ring_matrix({n}) is not the mixing matrix of a ring. Its rows sum to "
            f"{matrix.sum(1).round(2).tolist()}.",
            "a ring has no ends: worker 0 and worker n-1 are neighbours"
            if not np.allclose(matrix.sum(1), 1)
            else "section 5 says which numbers stand in each row of a ring's matrix, and in which "
            "columns",
        )
    c.expect(True, "`ring_matrix` is right", "")
    swap = np.array([[0.1, 0.9], [0.9, 0.1]])
    ring = np.array([[2, 1, 0, 1], [1, 2, 1, 0], [0, 1, 2, 1], [1, 0, 1, 2]]) / 4
    exchange = np.array([[0.0, 1.0], [1.0, 0.0]])
    rows = [0.1, 0.45, 0.0, 0.45]  # the eigenvalues are 1, 0.1, 0.1 and -0.8
    alternating = np.array([np.roll(rows, place) for place in range(4)])
    for matrix, second in ((swap, 0.8), (ring, 0.5), (exchange, 1.0), (alternating, 0.8)):
        found = c.number_from("second_eigenvalue", matrix)
        c.need(
            math.isclose(found, second, abs_tol=1e-6),
            f"second_eigenvalue({matrix.tolist()}) returned {found:.4g}. But among "
            "the magnitudes of the eigenvalues, this is not the second largest.",
            "sort the magnitudes of the eigenvalues: an eigenvalue of -0.8 counts as 0.8",
        )
    for matrix, factor, rounds in (
        (swap, 0.1, 11),
        (ring, 0.1, 4),
        (ring, 0.45, 2),
        (ring, 0.6, 1),
    ):
        found = c.number_from("rounds_to", matrix, factor)
        c.need(
            found == rounds,
            f"rounds_to({matrix.tolist()}, {factor}) returned {found:g}, which is not the "
            "smallest number of rounds for this factor.",
            "return the smallest whole number t >= 1 with second_eigenvalue(matrix) ** t <= factor",
        )
    c.expect(True, "`second_eigenvalue` and `rounds_to` are right", "")
    for n in (2, 8):
        found = c.call("exponential_matrices", n)
        c.need(
            isinstance(found, (list, tuple, np.ndarray)) and len(found) == int(math.log2(n)),
            f"exponential_matrices({n}) did not return a list of {int(math.log2(n))} matrices.",
            "append one matrix for each distance 2**j: 1, 2, 4, ...",
        )
        for place, one in enumerate(found):
            matrix = _matrix(c, one, f"exponential_matrices({n})[{place}]", n)
            truth = (np.eye(n) + np.roll(np.eye(n), 2**place, axis=0)) / 2
            c.need(
                bool(np.allclose(matrix, truth)),
                f"exponential_matrices({n})[{place}] is wrong in row "
                f"{int(np.abs(matrix - truth).sum(1).argmax())}.",
                "in matrix number j, row i has 1/2 in column i, and 1/2 in column (i - 2**j) % n",
            )
    c.expect(True, "`exponential_matrices` is right", "")
    for factor, noise, count in ((0.5, 0.0, 8), (0.9, 0.3, 11)):
        t = np.arange(count)
        spreads = 3.0 * factor**t * np.exp(noise * np.cos(3.0 * t))
        slope = float(np.exp(np.polyfit(t, np.log(spreads), 1)[0]))
        found = c.number_from("decay", spreads.tolist())
        c.need(
            math.isclose(found, slope, rel_tol=1e-3),
            f"decay({spreads.round(3).tolist()}) returned {found:.4g}. But a round does not "
            "multiply the spread by this number.",
            "fit a straight line through the logarithms of all spreads, and return exp(slope)",
        )
    c.expect(True, "`decay` is right", "")


def _matrix(c: Check, value: Any, name: str, n: int) -> Floats:
    try:
        found = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        c.wrong(f"{name} is not an array of numbers.", "begin with np.zeros((n, n))")
    c.need(
        found.shape == (n, n),
        f"{name} has the shape {found.shape}, but the shape must be {(n, n)}.",
        "the matrix has one row and one column for each worker",
    )
    return found
