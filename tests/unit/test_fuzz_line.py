"""Any text above a cell is a plan or an error that says what to do, and takes no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fuzz_profile import tries
from hypothesis import example, given
from hypothesis import strategies as st

from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.errors import WorkbenchError
from workbench.shared.faults import parse_fault
from workbench.shared.magic_args import (
    cluster_parser,
    parse_cluster_line,
    parse_ranks,
    strip_comment,
)
from workbench.shared.plan import Plan, make_plan
from workbench.shared.run_request import cell_parser, parse_cell_line

LIMIT_S = 0.05
FLAGS = sorted(
    {
        flag
        for parser in (cell_parser(), cluster_parser())
        for action in parser._actions
        for flag in action.option_strings
    }
)
OPTIONS = sorted({o.name for f in catalog.FRAMEWORKS for e in catalog.strategies(f)
                  for o in e.options})  # fmt: skip
NAMES = sorted({e.name for f in catalog.FRAMEWORKS for e in catalog.strategies(f)} | {"ddp", "ps"})
NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["²", "٣", "-", "--5", "+1", "1_000", "0x10", "1e3", "9" * 5000, "1" * 40, ""]),
)
RANGES = st.one_of(
    st.tuples(NUMBERS, NUMBERS).map("-".join),
    st.lists(NUMBERS, max_size=4).map(lambda parts: "[" + ",".join(parts) + "]"),
    st.sampled_from(["0-99999999999", "[[0]]", "0-", ",", "0,,1", "²-³", "5-1"]),
)
FAULTS = st.one_of(
    st.tuples(
        st.sampled_from(["slow", "jitter", "kill", "bandwidth", "latency", "clear", "odd"]),
        st.sampled_from(["=", "", "=="]),
        st.one_of(NUMBERS, RANGES),
        st.sampled_from(["", ":50ms", "@3", "MB/s", "ms", ":3x", ":3x/loader", ":", "@", ":1e9x"]),
    ).map("".join),
    st.text(max_size=12),
)
WORDS = st.one_of(
    st.sampled_from(FLAGS),
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(NAMES), max_size=3).map(",".join),
    st.tuples(st.sampled_from([*OPTIONS, "odd", ""]), st.sampled_from(["=", ""]), NUMBERS).map(
        "".join
    ),
    st.tuples(st.sampled_from(FLAGS), NUMBERS | RANGES | FAULTS).map("=".join),
    NUMBERS,
    RANGES,
    FAULTS,
    st.text(max_size=8),
    st.sampled_from(["start", "stop", "logs", "#", "# no", "'", '"', "\\", "--", "-", "%s", "\0"]),
)
LINES = st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=8).map(" ".join))


def quickly(call: Callable[..., Any], *args: Any) -> Any:
    """Return what a call gives, None for an error that it may raise; it took no more than 50 ms."""
    best_s = float("inf")
    for _ in range(3):  # a collection of garbage may fall into one of them
        began = time.thread_time()
        try:
            answer = call(*args)
        except WorkbenchError:
            answer = None
        best_s = min(best_s, time.thread_time() - began)
        if best_s < LIMIT_S:
            return answer
    raise AssertionError(f"{best_s:.3f} s for {args!r:.200}")


@tries(100)
@given(LINES)
@example("mirrored -n ²")
@example("-r 0-99999999999")
@example("--inject kill=٣@²")
def test_any_line_above_a_cell_is_read_or_refused(line: str) -> None:
    quickly(parse_cell_line, line)


@tries(100)
@given(LINES)
@example("start ²")
@example("logs 0-99999999999")
def test_any_cluster_line_is_read_or_refused(line: str) -> None:
    quickly(parse_cluster_line, line)


@tries(80)
@given(RANGES | st.text(max_size=20))
def test_ranks_come_out_small_and_unique(text: str) -> None:
    ranks = quickly(parse_ranks, text)
    if ranks is not None:
        assert len(set(ranks)) == len(ranks) <= 10_000
        assert all(type(rank) is int and rank >= 0 for rank in ranks)


@tries(80)
@given(st.text(max_size=60))
def test_a_line_without_its_comment_is_the_beginning_of_the_line(line: str) -> None:
    stripped = strip_comment(line)
    assert line.startswith(stripped)
    assert strip_comment(stripped) == stripped


@tries(100)
@given(FAULTS)
@example("slow=1:50ms")
@example("slow=1:50ms@10-20")
@example("kill=2@60")
@example("latency=10ms")
@example("bandwidth=10MB/s")
def test_a_fault_that_is_read_says_itself_again(text: str) -> None:
    fault = quickly(parse_fault, text)
    if fault is not None:
        assert parse_fault(fault.text) == fault


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), NUMBERS, RANGES,
    st.lists(st.integers(), max_size=3),
)  # fmt: skip


@pytest.mark.parametrize("framework", catalog.FRAMEWORKS)
def test_anything_asked_for_is_a_plan_that_travels_or_an_error(framework: str) -> None:
    entries = {entry.name: entry for entry in catalog.strategies(framework)}

    @tries(80)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        entry = entries[data.draw(st.sampled_from(sorted(entries)))]
        known = [option.name for option in entry.options]
        names = st.sampled_from([*known, "odd"]) if known else st.just("odd")
        options = data.draw(st.dictionaries(names, VALUES, max_size=3))
        overrides = data.draw(
            st.dictionaries(st.sampled_from(["epochs", "steps", "batch_size", "seed", "odd"]),
                            VALUES, max_size=2)
        )  # fmt: skip
        workers = data.draw(st.integers(-2, 12) | VALUES)

        def plan() -> Plan:
            return make_plan(
                Recipe("wb.fit()"), entry.name, framework=framework, workers=workers,
                options=options, overrides=overrides,
            )  # fmt: skip

        made = quickly(plan)
        if made is not None:
            assert made.workers >= 1
            assert Plan.from_wire(made.to_wire()) == made

    check()
