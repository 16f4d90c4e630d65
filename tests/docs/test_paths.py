"""Files that the pages and the docstrings name are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from doc_pages import REPOSITORY, name_of, pages

PACKAGE = REPOSITORY / "workbench"
PATH = re.compile(r"`([\w./<>*-]+\.(?:py|js))(?::[^`]*)?`")
"""A file in backquotes, with or without a line of it or a name in it."""
THEIRS = ("train.py", "tools/launch.py")
"""A user's own, and another project's."""
LIBRARIES = ("tensorflow/python/", "keras/src/", "tensorboard/summary/")
PATTERN = re.compile(r"[<>*]|\b(?:NAME|lab_N)\b")
"""Stands for several files: at least one fits."""


def known() -> list[str]:
    """Return the files of the repository, those that are not committed yet too."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in listed.stdout.splitlines() if (REPOSITORY / line).exists()]


FILES = known()


def is_there(path: str) -> bool:
    """Return whether a file of the repository ends in this path, or fits this pattern.

    Scripts of platforms are made from templates of the same name.
    """
    if path in THEIRS or path.startswith(LIBRARIES):
        return True
    if PATTERN.search(path):
        part = r"[\w-]+"
        pattern = part.join(map(re.escape, re.split(r"<\w+>|\*|NAME|(?<=lab_)N", path)))
        return any(re.search(rf"(?:^|/){pattern}$", file) for file in FILES)
    return any(f"/{file}".endswith((f"/{path}", f"/templates/{path}.in")) for file in FILES)


def missing(text: str) -> list[str]:
    """Return the files that a text names and that are not there."""
    return [path for path in PATH.findall(text) if not is_there(path)]


TEXTS = [
    *pages(), REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "binder" / "README.md",
    *sorted((REPOSITORY / "notebooks" / "solutions").glob("*.md")),
]  # fmt: skip


@pytest.mark.parametrize("page", [pytest.param(one, id=name_of(one)) for one in TEXTS])
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"```diff\n.*?\n```", "", page.read_text("utf-8"), flags=re.DOTALL)
    assert missing(text) == []


def test_files_that_the_package_s_sources_name_are_there() -> None:
    named = {
        path.relative_to(PACKAGE).as_posix(): missing(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: files for path, files in named.items() if files} == {}


def test_files_that_are_not_there_are_found() -> None:
    right = "`execution/run.py`, `run.py:Run`, `panels/NAME.py`, `lab_N.py`, `train.py:3 in f`"
    assert missing(right) == []
    wrong = ["execution/words.py", "nothing.py", "nothing/NAME.py", "un.py", "kept.js"]
    assert missing(", ".join(f"`{one}`" for one in wrong)) == wrong
