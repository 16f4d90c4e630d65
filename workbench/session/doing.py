"""What each engine does, from what the kernel knows of its cell or run: a state and words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.vitals import State
from ..members import Member
from ..messages import Whereabouts

Doing = tuple[State, str]


@dataclass(frozen=True)
class Scene:
    """What goes on on the cluster.

    Attributes:
        unfinished: Engines that are at the cell, and which part they take; empty when nothing goes
            on.
        run_state: Of the run it belongs to (`lifecycle.State`); empty of a cell without a strategy.
        places: Where engines say that they are (`engine.stacks.where`), of those that were asked.
    """

    unfinished: Mapping[int, Member]
    run_state: str
    places: Mapping[int, Whereabouts]


def doing(engine: int, state: str, exit_words: str, scene: Scene, *, starting: bool) -> Doing:
    """Return what an engine does.

    Args:
        state: What is known of its process: idle, busy, dead.
        exit_words: How it ended, in short; empty while it lives.
    """
    if starting:
        return "starting", "starting"
    if state == "dead":
        return "dead", f"dead ({exit_words})" if exit_words else "dead"
    if engine not in scene.unfinished:
        return ("busy", "busy") if state == "busy" and not scene.unfinished else ("idle", "idle")
    place = scene.places.get(engine)
    if place is not None and place.state == "paused":
        return "paused", "paused at a debugger"
    if scene.run_state == "paused" or (place is not None and place.state == "held"):
        return "paused", "paused"
    if place is not None and place.state == "waits":
        return "waiting", f"waiting {place.waits_in}"
    who = scene.unfinished[engine]
    if not scene.run_state:
        return "cell", "in a cell"
    if who.role == "helper":
        return "serving", f"at work as {who}"
    verb = "about to train" if scene.run_state == "starting" else "training"
    return "training", f"{verb} as {who}"
