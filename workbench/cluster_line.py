"""Parses the line of `%cluster`; knows words and flags, touches nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import PlanError, unknown
from .words import Parser, parse_ranks, tokens, whole_number

ACTIONS = ("start", "status", "restart", "logs", "stacks", "debug", "free", "attach", "stop")


@dataclass(frozen=True)
class ClusterLine:
    """What a `%cluster` line asks for."""

    action: str
    count: int | None = None
    ranks: tuple[int, ...] = ()
    devices: str = "auto"
    launcher: str = "local"
    hosts: str = ""
    framework: str | None = None
    commands: tuple[str, ...] = ()
    port: int | None = None
    follow: bool = False
    lines: int | None = None
    keep: bool = False
    idle_timeout: str | None = None
    take: bool = False
    cluster: str = ""


def cluster_parser() -> argparse.ArgumentParser:
    """Return the parser of `%cluster`."""
    parser = Parser(prog="%cluster", add_help=False, description="Start, show and stop engines.")
    add = parser.add_argument
    add("action", nargs="?", default="status", help=", ".join(ACTIONS))
    add("values", nargs="*", help="start: number of engines; else: engine ids")
    add("--devices", default="auto", help="auto, cpu, cuda, or GPU numbers 0,1")
    add("--launcher", default="local", help="local; others of ipyparallel's: not yet")
    add("--hosts", default="", help="interface to listen on; other hosts: not yet")
    add("--framework", metavar="NAME", help="framework to have ready: torch or tensorflow")
    add("--keep", action="store_true", help="start: outlive this notebook; attach finds it again")
    add("--idle-timeout", metavar="T", help="start: end when nothing ran for so long: 30m, never")
    add("--take", action="store_true", help="attach: also from a notebook that has it")
    _debug_flags(add)
    return parser


def _debug_flags(add: Callable[..., Any]) -> None:
    add(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="CMD",
        help="debug: a command of pdb or an expression, instead of a prompt; may be repeated",
    )
    add("--port", metavar="P", help="debug: serve debugpy on loopback; 0 takes any free port")
    add("-f", "--follow", action="store_true", help="logs: go on showing lines until interrupted")
    add("-n", "--lines", metavar="N", help="logs: how many lines to begin with (40)")


def parse_cluster_line(line: str) -> ClusterLine:
    """Read a `%cluster` line.

    Raises:
        PlanError: Saying what was not understood and what is allowed.
    """
    given = vars(cluster_parser().parse_intermixed_args(tokens(line)))
    action, values = given["action"], given["values"]
    if action not in ACTIONS:
        raise unknown("%cluster action", action, ACTIONS)
    count = None
    if action == "start" and values:
        count = whole_number("the number of engines", values[0])
    if action == "attach" and len(values) != 1:
        raise PlanError(
            "Which cluster?",
            allowed="%cluster attach ID",
            next_step="workbench ps, in a terminal, lists them",
            code="WB-PLAN-026",
        )
    numbers = () if action in ("start", "attach") else values
    ranks = tuple(i for text in numbers for i in parse_ranks(text))
    return ClusterLine(
        action,
        count,
        ranks,
        given["devices"],
        given["launcher"],
        given["hosts"],
        given["framework"],
        tuple(given["command"]),
        None if given["port"] is None else _port(given["port"]),
        given["follow"],
        None if given["lines"] is None else whole_number("--lines", given["lines"], least=0),
        keep=given["keep"],
        idle_timeout=given["idle_timeout"],
        take=given["take"],
        cluster=values[0] if action == "attach" else "",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        allowed = "1024 to 65535, or 0 for any that is free"
        raise PlanError("--port is no port.", seen=text, allowed=allowed, code="WB-PLAN-027")
    return int(text)
