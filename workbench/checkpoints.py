"""Checkpoints on disk, as both sides see them: where they are, which is the last good one.

    DIR/
      run.json            the run's plan: what `wb.resume(DIR)` starts again
      step-120/           written as `step-120.tmp`, flushed to disk, then renamed
        checkpoint.json   step, world size, strategy; what only belongs to the whole is beside it
        state/            model, optimizer, scheduler, in the framework's own format
        rank-0/ ...       what only one worker has: random states, its own replica
      step-240/

A folder that is called `step-N` is whole: a crash while writing leaves a `.tmp` behind, which
nobody reads and the next checkpoint removes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PlanError, RunError

EVERY = 100
"""Steps between checkpoints where the line does not say."""
KEEP = 2
"""Whole checkpoints that are kept in a folder."""
MANIFEST, RUN = "checkpoint.json", "run.json"
VERSION = 1
ON_FAILURE = ("stop", "continue", "replace")
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)(?:\.(.+))?\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that is whole.

    Attributes:
        path: Its folder, `DIR/step-N`.
        step: Steps done when it was taken: the next step is number `step`.
        about: What its manifest says.
    """

    path: str
    step: int
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)


def found(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the whole checkpoints in a folder, oldest first; none where there is no folder."""
    whole = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        match = _STEP.fullmatch(name)
        path = Path(folder) / name
        if match is None or not (path / MANIFEST).is_file():
            continue
        whole.append(int(match[1]))
    return [_read(Path(folder) / f"step-{step}", step) for step in sorted(whole)]


def token(prefix: str, run_id: str = "run") -> str:
    """Return what tells one launch's unfinished folders from others': `step-N.<token>.tmp`."""
    return (prefix or run_id or "run").strip("/").replace("/", "-")


def sweep(folder: str | os.PathLike[str], doomed: Callable[[int, str], bool]) -> None:
    """Remove unfinished folders for which `doomed(step, token)` is true."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = _UNFINISHED.fullmatch(name)
        if match is not None and doomed(int(match[1]), match[2] or ""):
            shutil.rmtree(Path(folder) / name, ignore_errors=True)


def latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the last good checkpoint in a folder, None where there is none."""
    whole = found(folder)
    return whole[-1] if whole else None


def at(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at a path: that of `DIR/step-N`, or the last one of `DIR`.

    Raises:
        RunError: There is none, or another version wrote it.
    """
    whole = Path(path).expanduser().absolute()
    match = _STEP.fullmatch(whole.name)
    if match is not None and (whole / MANIFEST).is_file():
        return checked(_read(whole, int(match[1])))
    last = latest(whole)
    if last is None:
        raise RunError(
            "There is no checkpoint here.",
            seen=str(path),
            allowed="a folder that --checkpoint DIR wrote to, or one of its step-N",
        )
    return checked(last)


def checked(one: Checkpoint) -> Checkpoint:
    """Return a checkpoint of this version.

    Raises:
        RunError: Another version wrote it, or its manifest is damaged.
    """
    if one.about.get("version") != VERSION:
        raise RunError(
            "The checkpoint cannot be read by this version of Workbench.",
            seen=f"version {one.about.get('version')} at {one.path}",
            allowed=f"version {VERSION}",
        )
    return one


def settings(folder: str, every: object, on_failure: str) -> tuple[str, int, str]:
    """Check what a line says about checkpoints and failures; return it complete.

    Args:
        folder: Where checkpoints go; empty for none.
        every: Steps between two of them; 0 or None for the default.
        on_failure: One of `ON_FAILURE`; empty for the default.

    Returns:
        The folder as an absolute path, the steps (0 without checkpoints), what a failure does.

    Raises:
        PlanError: Naming the value seen and what is allowed.
    """
    if on_failure and on_failure not in ON_FAILURE:
        raise PlanError(
            "--on-failure was not understood.", seen=on_failure, allowed=", ".join(ON_FAILURE)
        )
    if every and not folder:
        raise PlanError(
            "How often to write checkpoints was said, but not where.",
            seen=f"checkpoint_every={every}",
            next_step="add --checkpoint DIR",
        )
    if on_failure == "replace" and not folder:
        raise PlanError(
            "A run can go on in a fresh engine only from a checkpoint.",
            seen="on_failure='replace' without a checkpoint folder",
            next_step="add --checkpoint DIR",
        )
    if not folder:
        return "", 0, on_failure or "stop"
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise PlanError(
            "checkpoint_every counts steps.", seen=every, allowed="a whole number, at least 1"
        )
    return _writable(folder), int(every or EVERY), on_failure or "replace"


def _writable(folder: str) -> str:
    """Return the folder's absolute path; nothing is made before the run begins."""
    path = Path(os.path.expanduser(folder)).absolute()
    if path.exists() and not path.is_dir():
        raise PlanError(
            "Checkpoints go into a folder, and this is a file.",
            seen=str(path),
            next_step="name another folder",
        )
    there = path
    while not there.exists():
        there = there.parent
    if reason := _why_not(there):
        raise PlanError(
            "Checkpoints cannot be written there.",
            seen=f"{there} ({reason})",
            allowed="a folder that this user may write to",
        )
    return str(path)


def _why_not(folder: Path) -> str:
    """Return why nothing can be made in a folder, empty where it can.

    Tried out: what `os.access` says does not hold for root, who may write everywhere but in
    `/proc`, nor for disks of other hosts.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".workbench-", dir=folder))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _read(path: Path, step: int) -> Checkpoint:
    try:
        about = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        about = {}
    return Checkpoint(str(path), step, about if isinstance(about, dict) else {})
