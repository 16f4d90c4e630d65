"""A run's life as a pure state machine: events in, the next state out."""

from __future__ import annotations

from typing import Literal

State = Literal[
    "pending", "starting", "running", "paused", "recovering", "stopping", "finished", "stopped",
    "failed",
]  # fmt: skip
Event = Literal["submit", "start", "pause", "resume", "recover", "stop", "finish", "fail"]
"""`recover`: an engine died, and the run goes on without it or with another in its place."""

OVER: frozenset[State] = frozenset({"finished", "stopped", "failed"})

_NEXT: dict[State, dict[Event, State]] = {
    "pending": {"submit": "starting", "fail": "failed", "stop": "stopped"},
    "starting": {
        "start": "running", "recover": "recovering", "fail": "failed", "stop": "stopping",
        "finish": "finished",
    },
    "running": {
        "pause": "paused", "recover": "recovering", "stop": "stopping", "finish": "finished",
        "fail": "failed",
    },
    "paused": {
        "resume": "running", "recover": "recovering", "stop": "stopping", "fail": "failed",
        "finish": "finished",
    },
    "recovering": {"start": "running", "stop": "stopping", "fail": "failed", "finish": "finished"},
    "stopping": {"finish": "stopped", "fail": "failed"},
}  # fmt: skip


class InvalidTransitionError(Exception):
    """An event that makes no sense in the present state; tells the run's story."""


def step(state: State, event: Event, story: tuple[str, ...] = ()) -> State:
    """Return the state after `event`.

    Events that repeat what already holds (a second Stop, a start while running) change nothing.

    Raises:
        InvalidTransitionError: The event cannot happen in this state.
    """
    following = _NEXT.get(state, {}).get(event)
    if following is not None:
        return following
    if (state, event) in _REPEATS or (
        state in OVER and event in ("stop", "finish", "fail", "pause", "resume")
    ):
        return state
    raise InvalidTransitionError(
        f"{event!r} in state {state!r}; so far: {' > '.join(story) or 'nothing'}"
    )


_REPEATS: frozenset[tuple[State, Event]] = frozenset(
    {
        ("running", "start"),
        ("running", "resume"),
        ("paused", "pause"),
        ("paused", "start"),
        ("recovering", "recover"),
        ("recovering", "resume"),
        ("stopping", "stop"),
        ("stopping", "start"),
        ("stopping", "pause"),
        ("stopping", "resume"),
    }
)
