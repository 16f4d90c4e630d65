"""Parses the line above a `%%distributed` cell; knows words and flags, touches nothing."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import catalog
from .errors import PlanError
from .faults import Fault, parse_fault
from .targets import parse_targets
from .windows import Window, parse_window
from .words import Parser, parse_ranks, tokens, whole_number

PLOTS = ("auto", "widget", "svg", "text", "off")
TRACEBACKS = ("short", "full")

Add = Callable[..., Any]
"""`ArgumentParser.add_argument`."""


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
    traceback: str = "short"


@functools.cache
def cell_parser(prog: str = "%%distributed") -> argparse.ArgumentParser:
    """Return the parser of `%%distributed`, whose help is made from the catalog."""
    parser = Parser(
        prog=prog,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the cell on the engines; with a strategy, train under it.",
        epilog=_strategies_and_options(),
    )
    for flags in (_who_flags, _override_flags, _run_flags, _trial_flags, _failure_flags):
        flags(parser.add_argument)
    return parser


def _strategies_and_options() -> str:
    return "\n\n".join(
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


def _who_flags(add: Add) -> None:
    """What trains: the strategy, its options, on which engines."""
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


def _override_flags(add: Add) -> None:
    """What the cell says, and the line may say in its place."""
    for flag, what in (
        ("--epochs", "epochs"),
        ("--steps", "optimizer steps, instead of epochs"),
        ("--batch-size", "global batch size"),
    ):
        add(flag, metavar="N", help=f"overrides the cell's {what}")
    add("--seed", metavar="N", help="overrides the cell's seed")
    add("--seeds", metavar="K", help="run each strategy with seeds 0..K-1")


def _run_flags(add: Add) -> None:
    """What is run, where, and under which name."""
    add("--name", default="", metavar="NAME", help="name of the run in wb.runs")
    add(
        "--recipe",
        metavar="NAME",
        help="train an earlier run's cell again, a @wb.recipe, or a built-in one",
    )
    add("--init-from", default="", metavar="RUN", help="start from the weights a run ended with")
    add("--local", action="store_true", help="also run the cell in the notebook's kernel")
    add("--background", action="store_true", help="return at once")


def _trial_flags(add: Add) -> None:
    """What is done to the run, and how it is watched."""
    add(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="slow=1:50ms, jitter=20ms, kill=2@100",
    )
    add("--plot", default="auto", choices=PLOTS, help="how the live dashboard is shown")
    add(
        "--traceback",
        default="short",
        choices=TRACEBACKS,
        help="show your own lines of an error, or every frame",
    )
    add("--profile", metavar="A:B", help="profile steps A to B-1 on every rank")
    add(
        "--log",
        action="append",
        default=[],
        metavar="KIND:PLACE",
        help="also write the run to tensorboard:DIR or mlflow:URI",
    )


def _failure_flags(add: Add) -> None:
    """What is kept, and what happens when an engine dies."""
    add("--checkpoint", default="", metavar="DIR", help="write checkpoints into this folder")
    add("--checkpoint-every", metavar="N", help="steps between two checkpoints (100)")
    add(
        "--on-failure",
        default="",
        metavar="WHAT",
        help="when an engine dies: stop, continue with fewer, or replace it (with --checkpoint)",
    )


def parse_cell_line(line: str, prog: str = "%%distributed") -> CellLine:
    """Read the line above a cell.

    Raises:
        PlanError: Saying what was not understood and what is allowed.
    """
    given = vars(cell_parser(prog).parse_args(tokens(line)))
    whole = {
        key: whole_number(f"--{key.replace('_', '-')}", text, least=0 if key == "seed" else 1)
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
        traceback=given["traceback"],
    )


def _strategies(text: str, framework: str | None) -> tuple[str, ...]:
    return tuple(
        catalog.canonical(name.strip(), framework) for name in text.split(",") if name.strip()
    )


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise PlanError("An option has a name and a value.", seen=text, allowed="-o bucket_mb=10")
    return key.strip(), value.strip()
