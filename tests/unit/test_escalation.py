"""The table of what happens after how many seconds holds together."""

from __future__ import annotations

import re

from workbench.shared import events
from workbench.shared.events import (
    AGAIN_S,
    BREAK_OUT_S,
    CLEARING_S,
    GROUP_GONE_S,
    HEARD_S,
    KILL_ON_DEVICE_S,
    KILL_S,
    SETTLE_S,
)


def test_the_table_names_every_time_and_no_other() -> None:
    named = set(re.findall(r"^ {4,}([A-Z][A-Z_]+_S)\b", events.__doc__ or "", re.MULTILINE))
    assert named == {name for name in vars(events) if name.endswith("_S")}


LOST_S = 5.0
"""`engine.torch.support.LOST_S`, which is not loaded here: torch would be, too."""


def test_an_engine_that_does_what_it_can_is_not_ended_for_it() -> None:
    """A group that does not go takes twice its time; only then may the engine be killed."""
    assert 2 * GROUP_GONE_S < KILL_S
    assert CLEARING_S < KILL_S
    assert GROUP_GONE_S + 2 * GROUP_GONE_S + LOST_S < KILL_ON_DEVICE_S


def test_the_notebook_waits_for_an_engine_on_a_gpu_that_nothing_reaches() -> None:
    assert KILL_ON_DEVICE_S + HEARD_S < SETTLE_S


def test_what_blocks_is_broken_before_the_interrupt_comes_again() -> None:
    assert 2 * BREAK_OUT_S < AGAIN_S < KILL_S
