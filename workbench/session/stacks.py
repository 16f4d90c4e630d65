"""`%cluster stacks`: where every thread of every engine is, now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from ..messages import AskStacks, Whereabouts
from .hangs import ANSWER_S, place_words

if TYPE_CHECKING:
    from .access import ClusterAccess


@dataclass(frozen=True)
class Stack:
    """One engine's threads.

    Attributes:
        name: `rank 1 (engine 1, pid 2600)`.
        place: Where its main thread is, and what it waits in.
        text: Its threads, the main thread's first; lines of the user begin with `>`. Empty where
            the engine did not answer.
    """

    engine: int
    name: str
    place: str
    text: str


class Stacks(tuple[Stack, ...]):
    """The engines' stacks; shown as text, in a notebook with a fold for each engine."""

    def __repr__(self) -> str:
        return "\n\n".join(
            f"--- {one.name}: {one.place}" + (f"\n{one.text}" if one.text else "") for one in self
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        style = "margin:0;padding:1px 4px;white-space:pre-wrap"
        blocks = (
            f"<details><summary>{escape(one.name)}: {escape(one.place)}</summary>"
            f'<pre style="{style}">{escape(one.text or "no answer")}</pre></details>'
            for one in self
        )
        return {"text/html": "".join(blocks), "text/plain": repr(self)}


def gather(cluster: ClusterAccess, ids: Iterable[int] | None = None) -> Stacks:
    """Ask engines where they are; works while a cell or a run goes on.

    Args:
        ids: Which engines; by default all that live.

    Raises:
        ClusterError: There is no engine of that id.
    """
    engines = cluster.engine_set
    wanted = [engines.known(i).id for i in ids] if ids is not None else cluster.ids
    living = [i for i in wanted if i in cluster.ids]
    found = engines.router.questions.ask(AskStacks, living, ANSWER_S)
    workers = cluster.worker_ids
    return Stacks(
        Stack(
            i,
            f"{f'rank {workers.index(i)}' if i in workers else 'server'} "
            f"(engine {i}, pid {engines.engines[i].pid})",
            _words(found.get(i)) if i in living else f"dead ({engines.engines[i].exit})",
            found[i].text if i in found else "",
        )
        for i in wanted
    )


def _words(answer: Whereabouts | None) -> str:
    words = place_words(answer)
    if answer is None or not answer.waits_in:
        return words
    return f"{words}; waits {answer.waits_in}"
