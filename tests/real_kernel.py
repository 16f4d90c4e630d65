"""A Jupyter kernel in a separate process, whose cells can be run and read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

REPOSITORY = Path(__file__).resolve().parents[1]
CELL_LIMIT_S = 120


@dataclass
class Shown:
    """The output of a cell: all visible text, and its error, empty if there is none."""

    text: str
    error: str


class Kernel:
    """Runs cells one after the other, as a notebook's Run All does: no input is possible."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, source: str) -> Shown:
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            said.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        try:
            answer = self._client.execute_interactive(
                source, timeout=CELL_LIMIT_S, allow_stdin=False, output_hook=hear
            )["content"]
        except TimeoutError:
            self._manager.interrupt_kernel()
            self._client.execute_interactive("", timeout=CELL_LIMIT_S)  # aborted: it was queued
            return Shown("".join(said), f"the cell takes longer than {CELL_LIMIT_S} s")
        error = f"{answer['ename']}: {answer['evalue']}" if answer["status"] == "error" else ""
        return Shown("".join(said), error or ("aborted" if answer["status"] != "ok" else ""))

    def ok(self, source: str) -> str:
        """Run a cell that must not fail; return what it shows."""
        shown = self.run(source)
        assert not shown.error, f"{shown.error}\n{shown.text}"
        return shown.text


@contextlib.contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Start a kernel that works in a folder; the kernel and its processes end with the context."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=env)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
