"""Parses the line above a `%%distributed` cell; knows words and flags, touches nothing."""

from __future__ import annotations

import argparse
import functools

from . import catalog
from .run_request import FLAGS, RunRequest, from_line
from .words import Parser, tokens


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
    for flag in FLAGS.values():
        parser.add_argument(*flag.names, **flag.option)
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


def parse_cell_line(line: str, prog: str = "%%distributed") -> RunRequest:
    """Read the line above a cell.

    Raises:
        PlanError: Saying what was not understood and what is allowed.
    """
    return from_line(vars(cell_parser(prog).parse_args(tokens(line))))
