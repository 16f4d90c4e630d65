"""Keeps a file with all that is known so far, from the first notebook on."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .isolation import Isolation
from .outcome import Graded
from .showing import to_json


class Saved:
    """A JSON file that is whole at any time, and written anew whenever a notebook is graded.

    Args:
        file: Where it is; what is no regular file, such as a pipe, is written at the end only.
        paths: All that is to be graded, in the order of the file.
        limits, isolation: As the file names them.
    """

    def __init__(
        self,
        file: Path,
        paths: Sequence[Path],
        limits: dict[str, Any],
        isolation: Isolation | None = None,
    ) -> None:
        self._file, self._limits = Path(os.path.realpath(file)), limits
        self._isolation = isolation
        self._known = [Graded(str(path), problems=["It was not reached."]) for path in paths]
        self._waiting = list(range(len(self._known)))
        self._lock = threading.Lock()

    def add(self, graded: Graded) -> None:
        """Take in what came out of a notebook.

        Raises:
            OSError: It could not be written; what is there stays.
        """
        with self._lock:
            for i in self._waiting:
                if self._known[i].file == graded.file:
                    self._known[i] = graded
                    self._waiting.remove(i)
                    break
            if not self._file.exists() or self._file.is_file():
                self._write(to_json(self._known, self._limits, self._isolation))

    def finish(self, content: str) -> None:
        """Write what came out of all.

        Raises:
            OSError: It could not be written; what is there stays.
        """
        with self._lock:
            self._write(content)

    def _write(self, content: str) -> None:
        if self._file.exists() and not self._file.is_file():
            self._file.write_text(content, encoding="utf-8")
            return
        beside = self._file.with_name(f".{self._file.name[:200]}.{os.getpid()}")
        try:
            beside.write_text(content, encoding="utf-8")
            beside.replace(self._file)
        finally:
            beside.unlink(missing_ok=True)
