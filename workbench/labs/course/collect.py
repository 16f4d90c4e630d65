"""What students handed in: notebooks in the layouts of learning platforms, sorted by student.

    STUDENT/lab_3/lab_3.ipynb                            nbgrader, and what is written here
    STUDENT/lab_3.ipynb, STUDENT_lab_3.ipynb             plain folders and files
    Ada Lovelace_4711_assignsubmission_file_/lab_3.ipynb Moodle
    lovelaceada_12_345_lab_3.ipynb                       Canvas

Each of them may lie in a zip file. Of a zip only the bytes of its notebooks are read, and the names
in it are never used as paths.
"""

from __future__ import annotations

import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Literal

from ...errors import PlanError
from ..grading.reading import MOST_BYTES, Unreadable, read

State = Literal["new", "unchanged", "replaced", "older", "kept", "unreadable"]

SAID: dict[State, str] = {
    "new": "collected",
    "unchanged": "collected before",
    "replaced": "collected; the previous notebook is kept, with .before in its name",
    "older": "not collected: the student also handed in a newer notebook for this lab",
    "kept": "not collected: for this lab, another notebook of this student was collected earlier; "
    "use --replace to replace that notebook by this one",
    "unreadable": "not collected",
}
MOST_MEMBERS = 20_000
"""Files in one zip file; a class has fewer."""

_LAB = re.compile(r"lab_(\d+)")
_MOODLE = re.compile(r"(.+?)_\d+_assignsubmission_file_?$")
_CANVAS = re.compile(r"([^_]+)(?:_late|_LATE)?_\d+_\d+_.+")
_HIDDEN = (".ipynb_checkpoints", "__MACOSX")


@dataclass(frozen=True)
class HandedIn:
    """A notebook that was found.

    Attributes:
        place: Where it was found, for people.
        path: The names above it and its own, from the folder or zip that was given.
        at: When it was last changed, in seconds since 1970.
    """

    place: str
    path: PurePosixPath
    at: float
    content: bytes


@dataclass(frozen=True)
class Collected:
    """What became of a notebook.

    Attributes:
        lab: Its lab; None if that is not known.
        path: Where it is now; None if it was not collected.
        why: Why it could not be read.
    """

    place: str
    student: str
    lab: int | None
    state: State
    path: Path | None = None
    why: str = ""


def collect(places: Sequence[Path], to: Path, *, replace: bool = False) -> list[Collected]:
    """Copy notebooks to `TO/STUDENT/lab_N/lab_N.ipynb`; return what became of each.

    Args:
        places: Folders, zip files and notebooks.
        replace: Whether a notebook that is here already is replaced by a different one. It is
            kept as `lab_N.ipynb.before`, `.before-2`, ...

    Raises:
        PlanError: A place does not exist, or is neither a folder nor a zip file nor a notebook.
    """
    for place in places:
        if not (place.is_dir() or (place.suffix in (".zip", ".ipynb") and place.is_file())):
            raise PlanError(
                "This is not a folder, a zip file or a notebook."
                if place.exists()
                else "This file or folder does not exist.",
                seen=str(place),
                allowed="a folder, a .zip file or an .ipynb file",
                code="WB-PLAN-336",
            )
    found = [one for place in places for one in _handed_in(place, to)]
    newest: dict[tuple[str, int], HandedIn] = {}
    results, known = [], []
    for one in found:
        student = student_of(one.path)
        lab, why = _lab_of(one)
        if lab is None:
            results.append(Collected(one.place, student, None, "unreadable", why=why))
            continue
        known.append((one, student, lab))
        if one.at >= newest.setdefault((student, lab), one).at:
            newest[student, lab] = one
    for one, student, lab in known:
        if newest[student, lab] is not one:
            results.append(Collected(one.place, student, lab, "older"))
        else:
            results.append(_store(one, student, lab, to, replace=replace))
    return results


def student_of(path: PurePosixPath) -> str:
    """Return whose notebook this is, by its name and the folders above it."""
    *above, name = path.parts
    stem = PurePosixPath(name).stem
    for part in reversed(above):
        if moodle := _MOODLE.match(part):
            return _id(moodle[1])
    while above and _LAB.fullmatch(above[-1]):
        above.pop()
    if _LAB.fullmatch(stem) and above:
        return _id(above[-1])
    if canvas := _CANVAS.fullmatch(stem):
        return _id(canvas[1])
    own = _LAB.sub("", stem).strip("_- ")
    return _id(own or (above[-1] if above else stem))


def _id(name: str) -> str:
    """Return a name as the name of a folder."""
    return re.sub(r"[^\w.@+-]+", "-", name).strip("-.") or "unknown"


def _handed_in(place: Path, to: Path) -> Iterator[HandedIn]:
    if place.is_file():
        yield from _of_file(place, PurePosixPath(place.name))
        return
    inside = to.resolve()
    for path in sorted(place.rglob("*")):
        shown = path.relative_to(place)
        hidden = any(part in _HIDDEN or part.startswith(".") for part in shown.parts)
        if hidden or not path.is_file() or path.is_symlink() or inside in path.resolve().parents:
            continue
        yield from _of_file(path, PurePosixPath(*shown.parts))


def _of_file(path: Path, shown: PurePosixPath) -> Iterator[HandedIn]:
    if path.suffix == ".ipynb":
        size = path.stat().st_size  # a larger one is refused when it is read
        content = path.read_bytes() if size <= MOST_BYTES else b""
        yield HandedIn(str(path), shown, path.stat().st_mtime, content)
    elif path.suffix == ".zip":
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()[:MOST_MEMBERS]
                for member in members:
                    within = PurePosixPath(member.filename)
                    if within.suffix == ".ipynb" and not set(within.parts) & set(_HIDDEN):
                        at = datetime(*member.date_time).timestamp()
                        content = _unzipped(archive, member)
                        yield HandedIn(f"{path}: {within}", shown.parent / within, at, content)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            yield HandedIn(str(path), shown, 0.0, b"")


def _unzipped(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes; none if it is larger than a notebook may be, or damaged."""
    try:
        with archive.open(member) as file:
            content = file.read(MOST_BYTES + 1)  # its directory may give a wrong size
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError):
        return b""
    return content if len(content) <= MOST_BYTES else b""


def _lab_of(one: HandedIn) -> tuple[int | None, str]:
    """Return the lab of a notebook, or None and why that is not known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "handed-in.ipynb")
        path.write_bytes(one.content)
        try:
            book = read(path)
        except Unreadable as error:
            return None, str(error)
    lab = book.lab if book.lab is not None else book.guessed_lab()
    why = (
        "The notebook belongs to no lab: there is no lab number in its metadata, and no cell has a "
        "line such as `# YOUR CODE 1.2`."
    )
    return lab, why


def _store(one: HandedIn, student: str, lab: int, to: Path, *, replace: bool) -> Collected:
    target = to / student / f"lab_{lab}" / f"lab_{lab}.ipynb"
    state: State = "new"
    if target.exists():
        if target.read_bytes() == one.content:
            return Collected(one.place, student, lab, "unchanged", target)
        if not replace:
            return Collected(one.place, student, lab, "kept")
        target.rename(_free(target))
        state = "replaced"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(one.content)
    return Collected(one.place, student, lab, state, target)


def _free(target: Path) -> Path:
    """Return a name for the notebook that was here."""
    names = ("before", *(f"before-{number}" for number in range(2, 1000)))
    candidates = (target.with_name(f"{target.name}.{name}") for name in names)
    return next(path for path in candidates if not path.exists())
