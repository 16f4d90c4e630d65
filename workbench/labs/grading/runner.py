"""The process that grades one notebook: reads it, merges it, runs it, settles every exercise.

It takes what it is to do as JSON on standard input, and writes what it knows to standard output, a
line each time that it knows more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from . import processes
from .environment import remove
from .isolation import NOTHING, Isolation
from .limits import Limits
from .merging import Merged, merge
from .outcome import OVER, Graded, Outcome, from_wire
from .reading import Book, Unreadable, read
from .settling import Grading, Tell

_WATCH_PARENT_S = 1.0


def grade(
    path: Path,
    canonical: Path | None,
    notebooks: Path,
    folder: Path,
    limits: Limits,
    *,
    until: float,
    earlier: Mapping[str, Any] | None = None,
    tell: Tell = lambda graded, running: None,
    isolation: Isolation = NOTHING,
) -> Graded:
    """Grade one notebook.

    Args:
        canonical: The lab as it was handed out; by default found in `notebooks`.
        folder: For its kernels; private, and removed by somebody else.
        until: When it must be over, by `time.monotonic`.
        earlier: What another runner had found when one of the notebook's cells ended it.
        tell: Told what is known so far, and the exercise whose cells run next.
    """
    began = time.monotonic()
    graded = Graded(str(path), versions=versions())
    try:
        merged = _prepare(path, canonical, notebooks, graded)
    except Unreadable as why:
        graded.problems.append(str(why))
        return graded
    if earlier is not None:
        known = from_wire(earlier)
        graded.outcomes, graded.problems = known.outcomes, known.problems
        graded.restarts = known.restarts + 1
    tell(graded, "")
    Grading(merged, graded, folder, limits, until, tell, isolation).run()
    graded.seconds = time.monotonic() - began
    return graded


def _prepare(path: Path, canonical: Path | None, notebooks: Path, graded: Graded) -> Merged:
    handed_in = read(path)
    graded.lab = handed_in.lab if handed_in.lab is not None else handed_in.guessed_lab()
    if canonical is None:
        if graded.lab is None:
            raise Unreadable("It is of no lab: it names none, and has no cell `# YOUR CODE`.")
        canonical = notebooks / f"lab_{graded.lab}.ipynb"
        if not canonical.is_file():
            raise Unreadable(f"It is of lab {graded.lab}, which does not exist.")
    lab = lab_of(canonical)
    wanted = lab.lab if lab.lab is not None else lab.guessed_lab()
    merged = merge(lab, handed_in)
    if wanted != graded.lab and len(merged.untouched) == len(merged.exercises):
        theirs = "no lab" if graded.lab is None else f"lab {graded.lab}"
        raise Unreadable(f"It is of {theirs}; lab {wanted} is asked for.")
    graded.lab = wanted
    graded.outcomes = [Outcome(number) for number in merged.exercises]
    graded.notes = merged.notes
    return merged


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": sys.version.split()[0]}
    for name in ("distributed-workbench", "torch", "tensorflow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def lab_of(path: Path) -> Book:
    """Return a lab as handed out, to see that it can be used.

    Raises:
        Unreadable: It is none.
    """
    lab = read(path)
    if lab.version == "solved":  # an empty notebook would be given the solutions
        raise Unreadable("It has the solutions: name the students' notebook of this lab.")
    if not any(cell.check for cell in lab.cells):
        raise Unreadable("It has no checks: name a student's notebook that `workbench labs` made.")
    return lab


def _end_with(parent: int, folder: Path) -> None:
    """End all and ourselves when the process that started us is no more."""
    while os.getppid() == parent:
        time.sleep(_WATCH_PARENT_S)
    processes.starting.acquire()  # for good: no other kernel is started
    processes.end(lambda: processes.below(os.getpid()))
    for _ in range(100):
        remove(folder)
        if not folder.exists():  # else the main thread was about to make a kernel's
            break
        time.sleep(0.05)
    os._exit(1)


def main() -> None:
    """Grade the notebook that standard input names."""
    given = json.loads(sys.stdin.readline())
    processes.adopt()
    processes.hide()  # what a cell writes to our standard output would be taken for our word
    ending = (given["parent"], Path(given["folder"]))
    ender = threading.Thread(target=_end_with, args=ending, daemon=True)
    ender.start()
    try:
        _grade(given)
    finally:
        if os.getppid() != given["parent"]:
            ender.join()  # nobody reads what we say: it clears away, and ends us


def _grade(given: dict[str, Any]) -> None:
    canonical = given["canonical"]
    graded = grade(
        Path(given["path"]), None if canonical is None else Path(canonical),
        Path(given["notebooks"]), Path(given["folder"]), Limits(**given["limits"]),
        until=given["until"], earlier=given["earlier"], tell=_tell,
        isolation=Isolation(**given["isolation"]),
    )  # fmt: skip
    _tell(graded, OVER)


def _tell(graded: Graded, running: str) -> None:
    sys.stdout.write(json.dumps({"running": running, **graded.to_wire()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
