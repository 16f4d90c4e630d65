"""The architecture page's table of folders is true of the imports."""

from __future__ import annotations

import re
from collections.abc import Mapping

import house
from doc_pages import DOCS

PAGE = (DOCS / "architecture.md").read_text("utf-8")


def allowed() -> dict[str, set[str]]:
    """Return what each folder may import, by the table; what it may use includes what that may."""
    table = PAGE.partition("| folder | what is in it | it may use |\n|---|---|---|\n")[2]
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].split("\n")]
    found: dict[str, set[str]] = {}
    for folders, _, uses in rows:
        names = [name.removesuffix(".py") for name in re.findall(r"`([\w.]+)/?`", folders)]
        below = set(re.findall(r"[\w/]+", uses.replace("`", "").replace(".py", ""))) & set(found)
        if uses == "all of the above":
            below = set(found)
        for name in below.copy():
            below |= found[name]
        found |= dict.fromkeys(names, below | set(names))
    return found


def part_of(module: str) -> str:
    """Return the folder of the package that a module is in."""
    return module.partition(".")[2].partition(".")[0]


def forbidden(graph: Mapping[str, set[str]], may: Mapping[str, set[str]]) -> set[str]:
    """Return imports that the table does not allow; the package's own names are lazy."""
    return {
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if part_of(module) and part_of(other) not in may[part_of(module)]
        and not (part_of(module) == "engine" and other == "workbench.history.disk")
    }  # fmt: skip


def test_every_folder_stands_in_the_table_and_imports_what_it_may() -> None:
    trees, may = house.modules(), allowed()
    assert {part_of(name) for name in trees} - {""} == set(may)
    graph = {name: house.imported(name, tree, trees, loading=False) for name, tree in trees.items()}
    assert forbidden(graph, may) == set()


def test_an_import_upwards_is_found() -> None:
    may = allowed()
    assert "history" in may["views"]
    assert "views" not in may["history"]
    upwards = {"workbench.history.store": {"workbench.views.text", "workbench.errors"}}
    assert forbidden(upwards, may) == {"workbench.history.store imports workbench.views.text"}
    across = {"workbench.engine.entry": {"workbench.history.disk", "workbench.history.store"}}
    assert forbidden(across, may) == {"workbench.engine.entry imports workbench.history.store"}
