"""Every folder of the package says what is in it: its docstring ends in a list of its modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from workbench.catalog import CATALOG

PACKAGE = Path(__file__).resolve().parents[2] / "workbench"
FOLDERS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
MOST = 12
MAY_HOLD_MORE = {PACKAGE / "labs" / "checks"}
"""A file per lab."""
STRATEGIES = {
    PACKAGE.parent / Path(*entry.module.partition(":")[0].split(".")) for entry in CATALOG
}
"""They stand in the catalog, so one that is new needs no line."""
LINE = re.compile(r" {4}(\w+/?) {2,}\S.*")


def listed(docstring: str) -> list[str]:
    """Return the names in the last indented block of a docstring; a folder's ends in a slash."""
    blocks = re.findall(r"(?:^ {4}.*\n?)+", docstring, re.MULTILINE)
    lines = blocks[-1].rstrip("\n").split("\n") if blocks else []
    return [match[1] if (match := LINE.fullmatch(line)) else line for line in lines]


def held(folder: Path) -> set[str]:
    """Return the modules of a folder and the packages in it, as they are listed."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return modules | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda one: one.relative_to(PACKAGE).as_posix())
def test_a_folder_lists_its_modules_once_and_is_small(folder: Path) -> None:
    source = (folder / "__init__.py").read_text("utf-8")
    names = listed(ast.get_docstring(ast.parse(source)) or "")
    assert len(names) == len(set(names)), "a module is listed twice"
    named = {path.name for path in STRATEGIES if path.parent == folder}
    assert held(folder) - named <= set(names) <= held(folder)
    modules = [name for name in names if not name.endswith("/")]
    assert len(modules) <= MOST or folder in MAY_HOLD_MORE


def test_all_folders_with_modules_are_packages() -> None:
    assert {path.parent for path in PACKAGE.rglob("*.py")} == set(FOLDERS)


def test_the_last_block_counts_and_a_line_that_is_none_is_seen() -> None:
    text = (
        "Head.\n\n    a picture\n\nWords.\n\n    one    what it is\n    two/   other\n      more\n"
    )
    assert listed(text) == ["one", "two/", "      more"]
    assert listed("Head.") == []
