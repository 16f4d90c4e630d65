"""Events: one class each, the same on the wire, on disk and in the kernel."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from workbench.shared import events
from workbench.shared.events import EVENTS, FROM_ENGINES, UnknownEventError, read
from workbench.shared.messages import BadMessageError
from workbench.shared.protocol import Packet, decode_up

SOURCES = Path(events.__file__).parents[1]
ENGINES = ("engine", "strategies")
"""Folders of the engines' side; the rest is the kernel's."""
FULL = (
    events.RunStarted(rank=1, t_s=2.5, total_steps=10, batch_size=64, device="cpu"),
    events.Evaluated(step=3, values={"accuracy": 0.5}, seconds=0.25),
    events.Noted(rank=1, text="so", topic="loss_lost", value=7, deaths=[2]),
    events.WasCut(stages=[{"stage": 0}], schedule="1f1b", microbatches=8, ideal_bubble=0.2),
    events.EngineDied(text="gone", engine=4, rank=None),
    events.Injected(faults=["slow=1:50ms"]),
)


def made_by(side: str) -> set[str]:
    """Return the names of the events that one side, `engines` or `kernel`, makes."""
    kinds = {kind.__name__: name for name, kind in EVENTS.items()}
    found = set()
    for path in SOURCES.rglob("*.py"):
        inside = path.relative_to(SOURCES).as_posix()
        if path.name == "events.py" or inside.startswith(ENGINES) != (side == "engines"):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                called = getattr(call.func, "attr", getattr(call.func, "id", ""))
                found |= {kinds[called]} if called in kinds else set()
    # `session.paused.Paused` and `messages.Left` are no events.
    return found - ({"paused"} if side == "kernel" else {"left"})


def test_engines_make_every_event_of_theirs_and_none_of_the_kernels() -> None:
    assert made_by("engines") == FROM_ENGINES


def test_the_kernel_makes_its_own_events_and_notes() -> None:
    assert made_by("kernel") == {name for name in EVENTS if name not in FROM_ENGINES} | {"note"}


@pytest.mark.parametrize("event", [*FULL, *(kind() for kind in EVENTS.values())], ids=repr)
def test_an_event_is_the_same_after_its_way(event: events.Event) -> None:
    again = read(event.name, json.loads(json.dumps(event.to_wire())))
    assert again.to_wire() == json.loads(json.dumps(event.to_wire()))
    assert type(again) is type(event)


def test_what_was_not_said_does_not_travel() -> None:
    assert events.Noted(text="so").to_wire() == {"text": "so", "deaths": ()}


def test_other_versions_fields_are_left_out_and_theirs_have_defaults() -> None:
    assert read("epoch", {"epoch": 2, "t_s": 1.0, "invented": 3}) == events.EpochBegan(epoch=2)


def test_an_unknown_event_is_refused_and_so_is_one_of_the_kernels_from_an_engine() -> None:
    with pytest.raises(UnknownEventError, match=r"WB-RUN-034[\s\S]*run_started"):
        read("invented", {})
    for name in ("invented", "death", "inject"):
        with pytest.raises(BadMessageError, match=name):
            decode_up(Packet("event", {"run": 1, "name": name}))
