"""Checks Workbench's events by the rules of the Trace Event Format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

# "cname: A fixed color name to associate with the event", names as in catapult's color_scheme.html.
COLORS = {
    "thread_state_uninterruptible", "thread_state_iowait", "thread_state_running",
    "thread_state_runnable", "thread_state_sleeping", "thread_state_unknown",
    "background_memory_dump", "light_memory_dump", "detailed_memory_dump",
    "vsync_highlight_color", "generic_work", "good", "bad", "terrible", "black", "grey", "white",
    "yellow", "olive", "rail_response", "rail_animation", "rail_idle", "rail_load", "startup",
    "heap_dump_stack_frame", "heap_dump_object_type", "heap_dump_child_node_arrow",
    "cq_build_running", "cq_build_passed", "cq_build_failed", "cq_build_abandoned",
    "cq_build_attempt_runnig", "cq_build_attempt_passed", "cq_build_attempt_failed",
}  # fmt: skip
METADATA = {
    "process_name": {"name": str}, "process_labels": {"labels": str},
    "process_sort_index": {"sort_index": int}, "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}  # fmt: skip
COMMON = {"name", "cat", "ph", "ts", "pid", "tid", "args", "cname"}
KEYS = {"X": COMMON | {"dur"}, "C": COMMON, "i": COMMON | {"s"}, "M": COMMON}
NEEDED = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid"}, "C": {"name", "ph", "ts", "pid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"}, "M": {"name", "ph", "pid", "args"},
}  # fmt: skip


def ns(microseconds: float) -> int:
    """Return a time as viewers hold it: whole nanoseconds."""
    return round(microseconds * 1000)


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> dict[str, Any]:
    """Return a trace as strict JSON."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return json.loads(text, parse_constant=_no_constant)


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check a trace in the JSON object format; return its events."""
    assert isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    for event in trace["traceEvents"]:
        check_event(event)
    check_nesting(trace["traceEvents"])
    return trace["traceEvents"]


def check_event(event: dict[str, Any]) -> None:
    """Check one event by itself."""
    phase = event["ph"]
    assert phase in KEYS, event
    assert NEEDED[phase] <= set(event) <= KEYS[phase], event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert all(isinstance(event[k], int) for k in ("pid", "tid") if k in event), event
    for key in ("ts", "dur"):
        if key in event:
            assert isinstance(event[key], (int, float)), event
            assert math.isfinite(event[key]), event
            assert event[key] >= 0, event
    assert event.get("cname", "good") in COLORS, event
    assert isinstance(event.get("args", {}), dict), event
    if phase == "i":
        assert event["s"] in ("g", "p", "t"), event
    if phase == "C":
        assert event["args"], event
        assert all(type(v) in (int, float) and math.isfinite(v) for v in event["args"].values())
    if phase == "M":
        assert event["name"] in METADATA, event
        wanted = METADATA[event["name"]]
        assert {k: type(v) for k, v in event["args"].items()} == wanted, event


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Check that the slices of each thread are nested correctly, in their order."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        stack: list[int] = []  # ends of the slices that are open
        before = 0
        for one in slices:
            begin = ns(one["ts"])
            end = begin + ns(one["dur"])
            assert begin >= before, ("slices of a thread come in the order of time", one)
            before = begin
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1], ("a slice ends inside its parent", one)
            stack.append(end)


def nested(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the phases of each step by (rank, step), from their places in time."""
    steps = [e for e in events if e.get("cat") == "step"]
    phases = [e for e in events if e.get("cat") == "phase"]
    found = {}
    for step in steps:
        begin = ns(step["ts"])
        end = begin + ns(step["dur"])
        inside = [
            p
            for p in phases
            if p["tid"] == step["tid"] and begin <= ns(p["ts"]) and ns(p["ts"] + p["dur"]) <= end
        ]
        found[step["args"]["rank"], step["args"]["step"]] = inside
    return found
