"""Starts the server as Binder does, runs notebooks through it, and measures time and memory.

`binder/check` calls this with the Python of the environment that it has built. Every process that
is started from here carries a mark in its environment, so that forked and orphaned ones are found.

    python binder/drive.py notebooks/lab_1.ipynb
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from memory import MB, Memory
from server import ROOT, CheckError, Kernel, Server

CELL_LIMIT_S = 300
STARTS_ENGINES = re.compile(r"%cluster start|labs\.begin\(")
SPARE_CELLS = """\
%load_ext workbench
%cluster start 3
---
%%distributed mirrored --steps 200 --name binder
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                      nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(), batch_size=192,
       optimizer=lambda p: torch.optim.Adam(p, 1e-3))
---
%cluster stop
"""


def cells_of(path: Path) -> list[tuple[str, bool]]:
    """Return the source of each code cell of a notebook, and whether it may fail."""
    cells = json.loads(path.read_text())["cells"]
    return [
        ("".join(cell["source"]), "raises-exception" in cell["metadata"].get("tags", []))
        for cell in cells
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip()
    ]


@dataclass
class Played:
    """What running one notebook from top to bottom took.

    Attributes:
        engines_s: From its kernel's start to the end of the first cell that starts engines.
    """

    name: str
    cells: int
    seconds: float
    engines_s: float | None
    peak_bytes: int
    parts: dict[str, int]


async def play(server: Server, name: str, cells: list[tuple[str, bool]]) -> Played:
    """Run cells in a kernel of their own, and shut it down.

    Raises:
        CheckError: A cell that may not fail did, or took too long.
    """
    engines_s = None
    with Memory(server.mark) as memory:
        began = time.monotonic()
        kernel = await Kernel.start(server, name)
        try:
            for number, (source, may_fail) in enumerate(cells, 1):
                try:
                    error = await asyncio.wait_for(kernel.execute(source), CELL_LIMIT_S)
                except asyncio.TimeoutError:
                    error = f"still running after {CELL_LIMIT_S} s"
                if error and not may_fail:
                    raise CheckError(f"{name}, code cell {number}: {error}\n{source}")
                if engines_s is None and STARTS_ENGINES.search(source):
                    engines_s = time.monotonic() - began
            seconds = time.monotonic() - began
        finally:
            await kernel.close()
    return Played(name, len(cells), seconds, engines_s, memory.peak_bytes, memory.parts)


def table(server_s: float, played: list[Played]) -> str:
    """Return what was measured as lines for a person."""
    lines = [
        f"the server answers after {server_s:.1f} s",
        f"{'notebook':20s} {'cells':>5s} {'time':>7s} {'engines at':>10s} {'most memory':>11s}",
    ]
    for one in played:
        engines = "" if one.engines_s is None else f"{one.engines_s:.1f} s"
        parts = sorted(one.parts.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{role} {size / MB:.0f}" for role, size in parts)
        lines.append(
            f"{Path(one.name).stem:20s} {one.cells:5d} {one.seconds:5.0f} s {engines:>10s} "
            f"{one.peak_bytes / MB:8.0f} MB  ({shares})"
        )
    return "\n".join(lines)


def judge(server_s: float, played: list[Played], start_limit_s: float, limit_mb: float) -> str:
    """Hold what was measured against what is promised; return a line that says it is kept.

    Raises:
        CheckError: It took too long or held too much.
    """
    if played[0].engines_s is None:
        raise CheckError(f"{played[0].name} starts no engines, so its start cannot be measured")
    ready_s = server_s + played[0].engines_s
    if ready_s >= start_limit_s:
        raise CheckError(f"engines after {ready_s:.0f} s; allowed: {start_limit_s:.0f} s")
    most = max(played, key=lambda one: one.peak_bytes)
    if not 0 < most.peak_bytes < limit_mb * MB:
        raise CheckError(
            f"{most.name} held {most.peak_bytes / MB:.0f} MB; allowed: {limit_mb:.0f} MB"
        )
    return (
        f"kept: engines {ready_s:.1f} s after the server was launched (limit {start_limit_s:.0f}), "
        f"at most {most.peak_bytes / MB:.0f} MB (limit {limit_mb:.0f})"
    )


async def drive(options: argparse.Namespace) -> None:
    """Start the server, run everything, print and judge what was measured."""
    wanted = [(str(path), cells_of(ROOT / path)) for path in options.notebooks]
    wanted.append(("notebooks/three_engines", [(one, False) for one in SPARE_CELLS.split("---\n")]))
    played: list[Played] = []
    with Server() as server:
        server_s = await server.wait(options.start_limit_s)
        for name, cells in wanted:
            played.append(await play(server, name, cells))
            sys.stdout.write(f"{name}: {played[-1].seconds:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(table(server_s, played) + "\n")
    if options.json:
        found = {"server_s": server_s, "notebooks": [vars(one) for one in played]}
        options.json.write_text(json.dumps(found, indent=1))
    verdict = judge(server_s, played, options.start_limit_s, options.limit_mb)
    sys.stdout.write(verdict + "\n")


def main() -> int:
    """Run the check; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path, help="relative to the repository")
    parser.add_argument("--limit-mb", type=float, default=2000)
    parser.add_argument("--start-limit-s", type=float, default=60)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then
    try:
        asyncio.run(drive(parser.parse_args()))
    except CheckError as error:
        sys.stderr.write(f"binder/check: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
