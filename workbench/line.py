"""Parses the lines of the magics; knows words and flags, touches nothing."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import catalog
from .errors import PlanError, unknown
from .faults import Fault, parse_fault
from .targets import parse_targets
from .windows import Window, parse_window

PLOTS = ("auto", "widget", "svg", "text", "off")


class _Parser(argparse.ArgumentParser):
    """Raises PlanError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        flag = re.search(r"unrecognized arguments: (.*)", message)
        if flag:
            raise PlanError(
                f"{self.prog} does not know that.",
                seen=flag[1],
                allowed=self.format_usage().replace("usage: ", "").strip(),
                next_step=f"{self.prog}? shows the help",
            )
        raise PlanError(f"{self.prog}: {message}.", next_step=f"{self.prog}? shows the help")


@dataclass(frozen=True)
class CellLine:
    """What the line above a `%%distributed` cell asks for."""

    strategies: tuple[str, ...] = ()
    workers: int | None = None
    ranks: tuple[int, ...] | None = None
    framework: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    seeds: int | None = None
    name: str = ""
    local: bool = False
    background: bool = False
    faults: tuple[Fault, ...] = ()
    plot: str = "auto"
    recipe: str | None = None
    init_from: str = ""
    checkpoint: str = ""
    checkpoint_every: int | None = None
    on_failure: str = ""
    profile: Window | None = None
    log: tuple[str, ...] = ()


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


@functools.cache
def cell_parser(prog: str = "%%distributed") -> argparse.ArgumentParser:
    """Return the parser of `%%distributed`, whose help is made from the catalog."""
    described = "\n\n".join(
        f"strategies ({framework}):\n"
        + "\n".join(f"  {e.name:<14} {e.summary}" for e in catalog.strategies(framework))
        + "\n\noptions (-o):\n"
        + "\n".join(
            f"  {e.name}: {o.name}={o.default}  {o.help} ({o.allowed})"
            for e in catalog.strategies(framework)
            for o in e.options
        )
        for framework in catalog.FRAMEWORKS
    )
    parser = _Parser(
        prog=prog,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the cell on the engines; with a strategy, train under it.",
        epilog=described,
    )
    add = parser.add_argument
    add("strategy", nargs="?", default="", help="one of the strategies, or several with commas")
    add("-n", "--workers", metavar="N", help="number of workers (replicas)")
    add("-r", "--ranks", metavar="IDS", help="run on some engines only: 0,2 or 0-2 or [0,2]")
    add("--framework", metavar="NAME", help="torch or tensorflow")
    add(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the strategy",
    )
    for flag, what in (
        ("--epochs", "epochs"),
        ("--steps", "optimizer steps, instead of epochs"),
        ("--batch-size", "global batch size"),
    ):
        add(flag, metavar="N", help=f"overrides the cell's {what}")
    add("--seed", metavar="N", help="overrides the cell's seed")
    add("--seeds", metavar="K", help="run each strategy with seeds 0..K-1")
    add("--name", default="", metavar="NAME", help="name of the run in wb.runs")
    add(
        "--recipe",
        metavar="NAME",
        help="train an earlier run's cell again, a @wb.recipe, or a built-in one",
    )
    add("--init-from", default="", metavar="RUN", help="start from the weights a run ended with")
    add("--local", action="store_true", help="also run the cell in the notebook's kernel")
    add("--background", action="store_true", help="return at once")
    add(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="slow=1:50ms, jitter=20ms, kill=2@100",
    )
    add("--plot", default="auto", choices=PLOTS, help="how the live dashboard is shown")
    add("--profile", metavar="A:B", help="profile steps A to B-1 on every rank")
    add(
        "--log",
        action="append",
        default=[],
        metavar="KIND:PLACE",
        help="also write the run to tensorboard:DIR or mlflow:URI",
    )
    add("--checkpoint", default="", metavar="DIR", help="write checkpoints into this folder")
    add("--checkpoint-every", metavar="N", help="steps between two checkpoints (100)")
    add(
        "--on-failure",
        default="",
        metavar="WHAT",
        help="when an engine dies: stop, continue with fewer, or replace it (with --checkpoint)",
    )
    return parser


def cluster_parser() -> argparse.ArgumentParser:
    """Return the parser of `%cluster`."""
    parser = _Parser(prog="%cluster", add_help=False, description="Start, show and stop engines.")
    add = parser.add_argument
    add("action", nargs="?", default="status", help=", ".join(ACTIONS))
    add("values", nargs="*", help="start: number of engines; else: engine ids")
    add("--devices", default="auto", help="auto, cpu, cuda, or GPU numbers 0,1")
    add("--launcher", default="local", help="local, or one of ipyparallel's: slurm, ssh, mpi, ...")
    add("--hosts", default="", help="interface to listen on when engines run on other hosts")
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


ACTIONS = ("start", "status", "restart", "logs", "stacks", "debug", "free", "attach", "stop")


def parse_cell_line(line: str, prog: str = "%%distributed") -> CellLine:
    """Read the line above a cell.

    Raises:
        PlanError: Saying what was not understood and what is allowed.
    """
    given = vars(cell_parser(prog).parse_args(_tokens(line)))
    whole = {
        key: _whole(f"--{key.replace('_', '-')}", text, least=0 if key == "seed" else 1)
        for key in ("workers", "epochs", "steps", "batch_size", "seed", "seeds", "checkpoint_every")
        if (text := given[key]) is not None
    }
    return CellLine(
        strategies=_strategies(given["strategy"], given["framework"]),
        workers=whole.pop("workers", None),
        ranks=parse_ranks(given["ranks"]) if given["ranks"] else None,
        framework=given["framework"],
        options=dict(_option(text) for text in given["option"]),
        seeds=whole.pop("seeds", None),
        checkpoint_every=whole.pop("checkpoint_every", None),
        overrides=whole,
        name=given["name"],
        local=given["local"],
        background=given["background"],
        faults=tuple(parse_fault(text) for text in given["inject"]),
        plot=given["plot"],
        recipe=given["recipe"],
        init_from=given["init_from"],
        checkpoint=given["checkpoint"],
        on_failure=given["on_failure"],
        profile=parse_window(given["profile"]) if given["profile"] else None,
        log=parse_targets(given["log"]),
    )


def parse_cluster_line(line: str) -> ClusterLine:
    """Read a `%cluster` line.

    Raises:
        PlanError: Saying what was not understood and what is allowed.
    """
    given = vars(cluster_parser().parse_intermixed_args(_tokens(line)))
    action, values = given["action"], given["values"]
    if action not in ACTIONS:
        raise unknown("%cluster action", action, ACTIONS)
    count = None
    if action == "start" and values:
        count = _whole("the number of engines", values[0])
    if action == "attach" and len(values) != 1:
        raise PlanError(
            "Which cluster?",
            allowed="%cluster attach ID",
            next_step="workbench ps, in a terminal, lists them",
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
        None if given["lines"] is None else _whole("--lines", given["lines"], least=0),
        keep=given["keep"],
        idle_timeout=given["idle_timeout"],
        take=given["take"],
        cluster=values[0] if action == "attach" else "",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) < 1 << 16:
        allowed = "1024 to 65535, or 0 for any that is free"
        raise PlanError("--port is no port.", seen=text, allowed=allowed)
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
                "Ranks were not understood.",
                seen=_short(text),
                allowed="0,2 or 0-2 or [0,2], with numbers up to 9999",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise PlanError("A range of ranks goes upwards.", seen=part.strip(), allowed="0-2")
        found.extend(range(first, last + 1))
    return tuple(dict.fromkeys(found))


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


def _tokens(line: str) -> Sequence[str]:
    try:
        return shlex.split(strip_comment(line))
    except ValueError as error:
        raise PlanError("The line was not understood.", seen=line, allowed=str(error)) from None


def _whole(what: str, text: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        allowed = f"a whole number, at least {least}"
        raise PlanError(f"{what} must count something.", seen=_short(text), allowed=allowed)
    return int(text)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _strategies(text: str, framework: str | None) -> tuple[str, ...]:
    return tuple(
        catalog.canonical(name.strip(), framework) for name in text.split(",") if name.strip()
    )


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise PlanError("An option has a name and a value.", seen=text, allowed="-o bucket_mb=10")
    return key.strip(), value.strip()
