"""Checkpoints on disk, as both sides see them: where they are, which is the last good one.

    DIR/
      run.json            the run's plan: what `wb.resume(DIR)` starts again
      step-120/           written as `step-120.tmp`, flushed to disk, then renamed
        checkpoint.json   step, world size, strategy, and a checksum of every file beside it
        state/            model, optimizer, scheduler, in the framework's own format
        rank-0/ ...       what only one worker has: random states, its own replica
      step-240/

A folder that is called `step-N` is whole: a crash while writing leaves a `.tmp` behind, which
nobody reads and the next checkpoint removes. What a disk, a copy or a hand does to it later is
found by the checksums before anything is loaded; checkpoints of versions that wrote none load as
they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checksums
from .errors import PlanError, RunError

EVERY = 100
"""Steps between checkpoints where the line does not say."""
KEEP = 2
"""Whole checkpoints that are kept in a folder."""
MANIFEST, RUN = "checkpoint.json", "run.json"
VERSION = 1
ON_FAILURE = ("stop", "continue", "replace")
_NEEDED = ("version", "step", "training", "base", "world_size", "strategy")
_SHARED = "state/"
_MOST_FAULTS = 3  # named in an error
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
        RunError: There is none, another version wrote it, or its manifest is damaged.
    """
    whole = Path(path).expanduser().absolute()
    match = _STEP.fullmatch(whole.name)
    if match is not None and (whole / MANIFEST).is_file():
        return checked(_read(whole, int(match[1])))
    last = latest(whole)
    if last is not None:
        return checked(last)
    if match is not None and whole.is_dir():
        raise refusal(Checkpoint(str(whole), int(match[1])), [f"{MANIFEST} is missing"])
    raise RunError(
        "There is no checkpoint here.",
        seen=str(path),
        allowed="a folder that --checkpoint DIR wrote to, or one of its step-N",
        code="WB-RUN-001",
    )


def checked(one: Checkpoint) -> Checkpoint:
    """Return a checkpoint of this version whose manifest is as it was written.

    Raises:
        RunError: Another version wrote it, or its manifest is damaged.
    """
    if fault := _manifest_fault(one):
        raise refusal(one, [fault])
    if one.about["version"] != VERSION:
        raise RunError(
            "The checkpoint cannot be read by this version of Workbench.",
            seen=f"version {one.about['version']} at {one.path}",
            allowed=f"version {VERSION}",
            next_step="go on with the version that wrote it",
            code="WB-RUN-002",
        )
    return one


def faults(one: Checkpoint, *, own: bool = True) -> list[str]:
    """Return what is damaged in a checkpoint, file by file; empty where it is as it was written.

    Reads every file: about as long as loading it takes.

    Args:
        own: Whether what each rank alone had is needed too: as many ranks go on, alike.
    """
    if fault := _manifest_fault(one):
        return [fault]
    files = one.about.get("files") or {}
    needed = {name: sums for name, sums in files.items() if own or name.startswith(_SHARED)}
    return checksums.faults(Path(one.path), needed)


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether `DIR/step-N` is a checkpoint that is as it was written."""
    match = _STEP.fullmatch(Path(path).name)
    return match is not None and not faults(_read(Path(path), int(match[1])))


def refusal(one: Checkpoint, found: Sequence[str]) -> RunError:
    """Return the error that names what is damaged, and the last checkpoint that is whole."""
    more = f", and {len(found) - _MOST_FAULTS} more" if len(found) > _MOST_FAULTS else ""
    return RunError(
        f"The checkpoint of step {one.step} is damaged.",
        seen=f"{one.path}: {', '.join(found[:_MOST_FAULTS])}{more}",
        allowed="a checkpoint whose files are as they were written",
        next_step=_instead(one, found),
        code="WB-RUN-003",
    )


def last_whole(folder: str | os.PathLike[str], but: str = "") -> Checkpoint | None:
    """Return the last checkpoint of a folder that is as it was written; None where there is none.

    Args:
        but: Path of one that is out of the question.
    """
    others = (one for one in reversed(found(folder)) if one.path != but)
    return next((one for one in others if not faults(one)), None)


def _instead(one: Checkpoint, found: Sequence[str]) -> str:
    """Return what can be done without a checkpoint that is damaged."""
    ways = []
    if other := last_whole(Path(one.path).parent, but=one.path):
        ways.append(f"wb.resume({other.path!r}) goes on from the last whole one")
    if all(name.startswith("rank-") for name in found):  # what stands for all ranks is whole
        workers = 1 if one.about["world_size"] > 1 else 2
        ways.append(
            f"wb.resume({one.path!r}, workers={workers}) goes on without what each rank alone "
            "had (random states)"
        )
    return "; ".join(ways) or "there is no other whole one: begin anew in another --checkpoint DIR"


def _manifest_fault(one: Checkpoint) -> str:
    """Return what is wrong with a manifest; empty where it says what was written."""
    if not one.about:
        return f"{MANIFEST} cannot be read"
    if not checksums.is_as_sealed(one.about):
        return f"{MANIFEST} is not what was written (its checksum differs)"
    if isinstance(version := one.about.get("version"), int) and version != VERSION:
        return ""  # what another version needs to say is not known
    if missing := [key for key in _NEEDED if key not in one.about]:
        return f"{MANIFEST} does not say: {', '.join(missing)}"
    if one.about["step"] != one.step:
        return f"{MANIFEST} is of step {one.about['step']}"
    return ""


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
            "--on-failure was not understood.",
            seen=on_failure,
            allowed=", ".join(ON_FAILURE),
            code="WB-PLAN-012",
        )
    if every and not folder:
        raise PlanError(
            "How often to write checkpoints was said, but not where.",
            seen=f"checkpoint_every={every}",
            next_step="add --checkpoint DIR",
            code="WB-PLAN-013",
        )
    if on_failure == "replace" and not folder:
        raise PlanError(
            "A run can go on in a fresh engine only from a checkpoint.",
            seen="on_failure='replace' without a checkpoint folder",
            next_step="add --checkpoint DIR",
            code="WB-PLAN-014",
        )
    if not folder:
        return "", 0, on_failure or "stop"
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise PlanError(
            "checkpoint_every counts steps.",
            seen=every,
            allowed="a whole number, at least 1",
            code="WB-PLAN-015",
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
            code="WB-PLAN-016",
        )
    there = path
    while not there.exists():
        there = there.parent
    if reason := _why_not(there):
        raise PlanError(
            "Checkpoints cannot be written there.",
            seen=f"{there} ({reason})",
            allowed="a folder that this user may write to",
            code="WB-PLAN-017",
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
