"""Parts of the lines of all magics: words, whole numbers, ranks, a comment at the end.

The line of `%cluster` is parsed here too. This module only parses and has no side effects.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..errors import PlanError, unknown


class Parser(argparse.ArgumentParser):
    """Raises PlanError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        flag = re.search(r"unrecognized arguments: (.*)", message)
        if flag:
            raise PlanError(
                f"{self.prog} does not accept this flag or value.",
                seen=flag[1],
                allowed=self.format_usage().replace("usage: ", "").strip(),
                next_step=f"{self.prog}? shows its help",
                code="WB-PLAN-155",
            )
        raise PlanError(
            f"{self.prog}: {message}.", next_step=f"{self.prog}? shows its help", code="WB-PLAN-156"
        )


def tokens(line: str) -> Sequence[str]:
    """Split a line into words as a shell does, its comment left out.

    Raises:
        PlanError: A quotation mark is missing.
    """
    try:
        return shlex.split(strip_comment(line))
    except ValueError as error:
        is_open = "quotation" in str(error)
        raise PlanError(
            "A quotation mark in the line is not closed."
            if is_open
            else "The line ends with a backslash.",
            seen=line,
            next_step="add the second quotation mark; for an apostrophe in a text, write \\'"
            if is_open
            else "remove the backslash at the end",
            code="WB-PLAN-157",
        ) from None


def strip_comment(line: str) -> str:
    """Return the line without a trailing `# ...`, which must follow a space or begin the line."""
    quoted = ""
    for at, char in enumerate(line):
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line.rstrip()


def whole_number(what: str, text: str, least: int = 1) -> int:
    """Read a number that counts something.

    Raises:
        PlanError: It is not a whole number, or too small.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        allowed = f"a whole number, at least {least}"
        raise PlanError(
            f"{what} must be a whole number of at least {least}.",
            seen=_short(text),
            allowed=allowed,
            code="WB-PLAN-158",
        )
    return int(text)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read `0,2`, `0-2` or `[0,2]`.

    Raises:
        PlanError: It has none of these forms.
    """
    found: list[int] = []
    for part in text.strip().strip("[]").split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", part)
        if not match:
            raise PlanError(
                "The ranks are not valid.",
                seen=_short(text),
                allowed="0,2 or 0-2 or [0,2], with numbers up to 9999",
                code="WB-PLAN-159",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError(
                "The first rank of a range must be the smaller rank.",
                seen=part.strip(),
                allowed=f"{last}-{first}",
                code="WB-PLAN-160",
            )
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


ACTIONS = ("start", "status", "restart", "logs", "stacks", "debug", "free", "attach", "stop")


@dataclass(frozen=True)
class ClusterLine:
    """The parsed line of `%cluster`.

    Attributes:
        launch: Where engines are started, as arguments of `wb.Cluster`; only what was typed.
    """

    action: str
    count: int | None = None
    ranks: tuple[int, ...] = ()
    devices: str | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)
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
    add(
        "values",
        nargs="*",
        help="start: number of engines; attach: id of a cluster; other actions: engine ids",
    )
    add("--devices", help="`auto`, `cpu`, `cuda`, or GPU numbers such as 0,1")
    add("--framework", metavar="NAME", help="framework to preload: torch or tensorflow")
    keep = "start: engines continue after this notebook ends; `attach` connects to them again"
    add("--keep", action="store_true", help=keep)
    add(
        "--idle-timeout",
        metavar="T",
        help="start: the cluster ends after this time without work, for example `30m`; or `never`",
    )
    add(
        "--take",
        action="store_true",
        help="attach: take the cluster even if another notebook owns it",
    )
    _launch_flags(add)
    _debug_flags(add)
    return parser


LAUNCH = ("launcher", "on", "nodes", "gpus_per_node", "time", "partition", "account", "setup",
          "launcher_options", "listen", "ports", "start_timeout")  # fmt: skip
"""Flags that say where engines are started, as arguments of `wb.Cluster`."""


def _launch_flags(add: Callable[..., Any]) -> None:
    add(
        "--launcher",
        metavar="NAME",
        help="start: what launches the engines (local, ssh, slurm, mpi, or an ipyparallel "
        "launcher)",
    )
    add(
        "--on",
        metavar="HOSTS",
        help="ssh: each host with its number of engines: node1:4,user@node2:4",
    )
    add("--nodes", metavar="N", help="slurm: number of nodes of the job")
    add("--gpus-per-node", metavar="N", help="slurm: number of GPUs on each node")
    add(
        "--time",
        metavar="T",
        help="slurm: time limit of the job: 90 (minutes), 1:30:00, 2-12 (days-hours)",
    )
    add("--partition", metavar="NAME", help="slurm: partition of the job")
    add("--account", metavar="NAME", help="slurm: account of the job")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="a shell line that each host runs before its engines start; "
        "a line '#SBATCH ...' sets an option of the Slurm job",
    )
    add(
        "--launcher-option",
        action="append",
        default=[],
        dest="launcher_options",
        metavar="KEY=VALUE",
        help="an option of sbatch, ssh or mpiexec; python=... sets the Python interpreter on the "
        "hosts",
    )
    add(
        "--hosts",
        "--listen",
        dest="listen",
        metavar="WHERE",
        help="engines on other hosts connect to this address of the notebook's machine. Give an IP "
        "address, a host name or a network interface of this machine. Or give a network that "
        "contains an address of this machine, such as 10.0.0.0/8",
    )
    add(
        "--ports",
        metavar="A-B",
        help="range of ports on which Workbench listens. gloo and NCCL do not use this range: they "
        "use any free port",
    )
    add(
        "--start-timeout",
        metavar="T",
        help="how long the start may take, including the wait in the scheduler's queue: "
        "for example 10m",
    )


def _debug_flags(add: Callable[..., Any]) -> None:
    add(
        "-c",
        "--command",
        action="append",
        default=[],
        metavar="CMD",
        help="debug: run this pdb command or expression, and open no prompt; you can give this "
        "flag several times",
    )
    add("--port", metavar="P", help="debug: start debugpy on this loopback port; 0: any free port")
    add(
        "-f",
        "--follow",
        action="store_true",
        help="logs: show new lines until you interrupt the cell",
    )
    add(
        "-n",
        "--lines",
        metavar="N",
        help="logs: number of lines to show from the end of each log; by default 40",
    )


def parse_cluster_line(line: str) -> ClusterLine:
    """Read a `%cluster` line.

    Raises:
        PlanError: The line is not valid; the error says what is allowed.
    """
    given = vars(cluster_parser().parse_intermixed_args(tokens(line)))
    action, values = given["action"], given["values"]
    if action not in ACTIONS:
        raise unknown("%cluster action", action, ACTIONS)
    count = None
    if action == "start" and values:
        count = whole_number("The number of engines", values[0])
    if action == "attach" and len(values) != 1:
        raise PlanError(
            "%cluster attach needs the id of one cluster.",
            allowed="%cluster attach ID",
            next_step="in a terminal, `workbench ps` lists the clusters",
            code="WB-PLAN-026",
        )
    numbers = () if action in ("start", "attach") else values
    ranks = tuple(i for text in numbers for i in parse_ranks(text))
    return ClusterLine(
        action,
        count,
        ranks,
        given["devices"],
        _launch(given),
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


def _launch(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the typed flags that say where engines are started."""
    found = {name: given[name] for name in LAUNCH if given[name] not in (None, [])}
    for name, least in (("nodes", 1), ("gpus_per_node", 0)):
        if name in found:
            flag = f"--{name.replace('_', '-')}"
            found[name] = whole_number(flag, found[name], least)
    for name in ("setup", "launcher_options"):
        if name in found:
            found[name] = tuple(found[name])
    return found


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        allowed = "1 to 65535, or 0 for any free port"
        raise PlanError(
            "--port must be a port number.", seen=text, allowed=allowed, code="WB-PLAN-027"
        )
    return int(text)


Window = tuple[int, int]
"""First step, and the step before which the profile ends."""


def parse_window(text: str) -> Window:
    """Read `10:15`.

    Raises:
        PlanError: It is not a range of steps.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*:\s*(\d{1,12})\s*", text, re.ASCII)
    if match is None:
        raise PlanError(
            "--profile must be a range of steps, START:STOP.",
            seen=text,
            allowed="START:STOP, counted from 0; STOP is not included, so 10:15 means five steps",
            code="WB-PLAN-152",
        )
    start, stop = int(match[1]), int(match[2])
    if start >= stop:
        raise PlanError(
            "The end of --profile must be greater than its start.",
            seen=text,
            allowed=f"{stop}:{max(start, stop + 1)}",
            code="WB-PLAN-153",
        )
    return start, stop


def check_window(window: Window | None, steps: int | None) -> None:
    """Raise PlanError if a run of this many steps ends before the window does."""
    if window is None or steps is None or window[1] <= steps:
        return
    last = max(0, steps - 5)
    raise PlanError(
        "--profile includes steps that the run does not have.",
        seen=f"{window[0]}:{window[1]} of {steps} steps",
        allowed=f"START:STOP, where STOP is at most {steps}",
        next_step=f"use --profile {last}:{steps}, or train for more steps",
        code="WB-PLAN-154",
    )
