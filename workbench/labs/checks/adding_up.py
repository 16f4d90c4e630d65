"""An all-reduce that students wrote, tried out on the engines.

Tensors under test hold `10**rank` times a number that tells its place, so that each decimal digit
of a quotient says how often a worker's part is in a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..answers import Check

LIMIT_S = 20.0
"""Beyond what `Mail` waits for messages, for an answer that hangs without them."""

SIZES = (12, 7, 1)
"""Numbers in the tensors: divisible by three workers, not divisible, fewer than workers."""

NUMBER_BYTES = 4

STEP_BY_STEP = (
    "follow the messages on paper: to each send belongs a receive of the same size on the other "
    "worker, and while one waits for the other nothing else happens on both"
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

Groups = list[list[int]]


def ready(c: Check, function: str) -> int:
    """End the check unless the engines have the function and the post office; count them."""
    have = c.ask(f"_labs_answer = [callable(globals().get(n)) for n in ('Mail', {function!r})]")
    c.need(
        all(one[0] for one in have),
        "The engines have no `Mail`.",
        "run the cell of section 2 that defines it, then the exercise's cell again",
    )
    c.need(
        all(one[1] for one in have),
        f"The engines have no function `{function}`.",
        f"run the cell of exercise {c.number}; it begins with %%distributed",
    )
    return len(have)


def added_up(c: Check, function: str, groupings: list[Groups] | None = None) -> list[Any]:
    """Run an all-reduce on the engines; return by engine its results, one for each trial."""
    groups = [[]] if groupings is None else [[one] for one in groupings]
    source = _ADD_UP.format(groups=groups, sizes=SIZES, name=function)
    return c.ask(source, limit_s=LIMIT_S, hint=STEP_BY_STEP)


def sums(c: Check, found: list[Any], trials: list[str]) -> bool:
    """Say whether every worker has the sum in every trial; of the first wrong one, what it has."""
    workers = len(found)
    whole = sum(10**rank for rank in range(workers))
    for place, trial in enumerate(trials):
        parts = [_parts(worker[place][0]) for worker in found]
        size = SIZES[place % len(SIZES)]
        c.need(
            all(one.shape == (size,) for one in parts),
            f"{trial}: the tensor has another shape afterwards.",
            "change the numbers of `x` in place, and not its shape",
        )
        changed = any((parts[rank] != 10**rank).any() for rank in range(workers))
        for rank in range(workers):
            if not (parts[rank] == whole).all():
                said = _unlike(rank, workers, parts[rank], whole, trial, changed)
                return c.expect(False, "", *said)
    return c.expect(True, "every worker has the sum, whatever the tensor's size", "")


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
            "the function changes `x` itself: `x += y` does, `x = x + y` makes another tensor",
            "the sum is made; who has it hands it on, and this worker has to receive it into `x`",
        )
        words = f"{trial}: worker {rank} still holds its own numbers only."
        return words, hints[others_changed]
    at = int(np.flatnonzero(parts != whole)[0])
    value = parts[at]
    words = f"{trial}: number {at} of worker {rank} is not the sum"
    digits = f"{value:.0f}".zfill(workers)[::-1]
    if np.isfinite(value) and value == round(value) and len(digits) == workers:
        ranks = ", ".join(map(str, range(workers)))
        words += f"; the parts of workers {ranks} are in it {', '.join(digits)} times"
    hint = "each part belongs into each number once; follow one number through the rounds on paper"
    return f"{words}.", hint


def through_mail(c: Check, found: list[Any]) -> None:
    sent = sum(trial[1] for worker in found for trial in worker)
    c.need(
        sent > 0 or len(found) == 1,
        "Nothing was sent through `mail`.",
        "write it with mail.send, mail.receive and mail.exchange",
    )
