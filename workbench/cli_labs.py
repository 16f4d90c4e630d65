"""`workbench labs`: the labs' notebooks made from their sources."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_commands(commands: Any) -> None:
    """Add the commands to the parser of `workbench`."""
    labs = commands.add_parser(
        "labs", help="make the students' and the instructors' notebooks from the labs' sources"
    )
    labs.add_argument("sources", nargs="+", type=Path, help="files lab_N.md")
    labs.add_argument("--to", type=Path, default=Path("notebooks"), help="the students' notebooks")
    labs.add_argument(
        "--solved-to", type=Path, help="the instructors' (default: where the source is)"
    )
    labs.add_argument(
        "--run", action="store_true", help="run each lab with its solutions and keep the outputs"
    )


def run(given: argparse.Namespace) -> int:
    """Do what one of these commands asks for; return the exit status."""
    return _make(given)


def _make(given: argparse.Namespace) -> int:
    import time

    from .labs.build import build

    for source in given.sources:
        began = time.perf_counter()
        made = build(source, given.to, given.solved_to or source.parent, run=given.run)
        took = f" ({time.perf_counter() - began:.0f} s)" if given.run else ""
        print(f"{source}: {', '.join(map(str, made))}{took}")
    return 0
