"""Which of several ranks' errors is the reason, and what is said of the others; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..messages import CellOutcome, Outcomes

_TELLING = (
    r"Connection closed by peer|Connection reset(?: by peer)?|Broken pipe|Socket closed|Timed out"
    r"|Collective ops is aborted"
)
COLLATERAL = re.compile(
    rf"{_TELLING}|KeyboardInterrupt|DistBackendError|DistNetworkError|DistStoreError|gloo"
    r"|DeadlineExceededError|UnavailableError",
    re.IGNORECASE,
)
"""What libraries say when another rank has gone: never the reason that is shown first."""
MAX_WORDS = 100


def is_collateral(outcome: CellOutcome) -> bool:
    """Whether the rank only felt another one's end.

    That is certain where its connections were cut so that it stopped waiting, and where our own
    links have `felt` it; of a library's errors the words tell.
    """
    certain = outcome.cut_off or bool(outcome.felt)
    return certain or COLLATERAL.search(outcome.words) is not None


def root_cause(outcomes: Outcomes, first_failed: int, lost: Iterable[int] = ()) -> int:
    """Return the engine whose error is not just a consequence of another's.

    Args:
        outcomes: In the order of the ranks.
        first_failed: Who failed first.
        lost: Engines whose death the others survived.
    """
    failed = [i for i, o in outcomes.items() if o.status in ("died", "error")]
    failed = [i for i in failed if i not in set(lost) and not outcomes[i].ended]
    died = [i for i in failed if outcomes[i].status == "died"]
    own = [i for i in failed if not is_collateral(outcomes[i])]
    silent = [i for i, o in outcomes.items() if o.ended]
    if silent and not (own or died):
        return silent[0]  # the others had waited for it
    if died:
        # Who died later may have been ended because it waited for the first.
        return first_failed if first_failed in died else died[0]
    return first_failed if first_failed in own or not own else own[0]


def with_it(outcomes: Outcomes, engines: Iterable[int], called: Callable[[list[int]], str]) -> str:
    """Return what became of the others in one line.

    Args:
        engines: Those that ended because of another one.
        called: Returns `ranks 0, 2`.
    """
    groups: dict[str, list[int]] = {}
    for engine in engines:
        groups.setdefault(_shortly(outcomes[engine]), []).append(engine)
    return "; ".join(f"{called(members)}: {what}" for what, members in groups.items())


def _shortly(outcome: CellOutcome) -> str:
    if outcome.ended:
        return outcome.ended
    if outcome.status == "interrupted":
        return "interrupted"
    if outcome.status == "died":
        return outcome.evalue
    if outcome.felt:
        return outcome.felt
    if told := re.search(_TELLING, outcome.evalue, re.IGNORECASE):
        return told[0]
    line = outcome.words.splitlines()[0]
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 1] + "…"
