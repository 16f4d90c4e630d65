"""Modules that are named in strings exist, and hold what is named in them; nothing is imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import workbench
from workbench.catalog import FRAMEWORKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(workbench.__file__).parents[1]
NAMED = re.compile(r"workbench(\.[A-Za-z_]\w*)+(:[A-Za-z_]\w*)?")
OPTIONAL = {"workbench.strategies.tensorflow.parts.watched": "wb.watch is for loops of PyTorch's"}
"""Modules that are looked for, and need not be there."""
TAGS = {"workbench.state": "what a run of MLflow's is tagged with"}
NO_MODULES = {
    "getLogger": "a logger may have any name",
    "set_tag": "MLflow's tags are named as we like",
    "import_from_nowhere": "the tests of this file name some that are not there",
}
"""Functions whose argument looks like a module, and is none."""


def sources() -> list[Path]:
    return [path for folder in ("workbench", "tests") for path in (ROOT / folder).rglob("*.py")]


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return the strings that may name a module, with their lines; `{framework}` is filled in."""
    skipped = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in NO_MODULES
        for argument in call.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skipped:
                yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant)
                else "{framework}" if ast.unparse(part.value).endswith("framework") else "{}"
                for part in node.values
                if isinstance(part, (ast.Constant, ast.FormattedValue))
            ]  # fmt: skip
            for framework in FRAMEWORKS:
                yield node.lineno, "".join(map(str, parts)).replace("{framework}", framework)


def named(path: Path) -> list[tuple[str, str]]:
    """Return where a file names modules, and how."""
    found = strings(ast.parse(path.read_text()))
    return [
        (f"{path.relative_to(ROOT)}:{line}", text) for line, text in found if NAMED.fullmatch(text)
    ]


@cache
def file_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.exists()), None)


@cache
def names_in(module: str) -> frozenset[str]:
    """Return what a module binds at its top, however deep in conditions."""
    path = file_of(module)
    found: set[str] = set()

    def look(statements: list[ast.stmt]) -> None:
        for one in statements:
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(one.name)
                continue
            if isinstance(one, (ast.Import, ast.ImportFrom)):
                found.update((a.asname or a.name.partition(".")[0]) for a in one.names)
            targets = getattr(one, "targets", [getattr(one, "target", None)])
            found.update(n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name))
            for block in ("body", "orelse", "finalbody"):
                look(getattr(one, block, []))
            for handler in getattr(one, "handlers", []):
                look(handler.body)

    if path is not None:
        look(ast.parse(path.read_text()).body)
    return frozenset(found)


def wrong(name: str) -> str:
    """Return what is wrong with a name: `module`, `module:name`, `module.name`; empty: nothing."""
    module, colon, attribute = name.partition(":")
    if file_of(module) is not None:
        known = attribute in names_in(module) or file_of(f"{module}.{attribute}") is not None
        missing = attribute and not known
        return f"{module} has no {attribute}" if missing else ""
    if colon:
        return f"there is no module {module}"
    parent, _, last = module.rpartition(".")
    while parent and file_of(parent) is None:  # what is patched may be an attribute's attribute
        parent, _, last = parent.rpartition(".")
    if parent.count(".") and last in names_in(parent):
        return ""
    return f"there is no {module}"


@pytest.mark.parametrize("folder", ["workbench", "tests"])
def test_modules_that_are_named_in_strings_exist(folder: str) -> None:
    found = [one for path in (ROOT / folder).rglob("*.py") for one in named(path)]
    assert len(found) > 20
    mistakes = [
        f"{where}: {text!r}: {why}"
        for where, text in found
        if text not in {*OPTIONAL, *TAGS} and (why := wrong(text))
    ]
    assert not mistakes, "\n".join(mistakes)


def test_modules_of_both_frameworks_are_named_by_their_framework() -> None:
    found = {text for path in sources() for _, text in named(path)}
    for framework in FRAMEWORKS:
        assert f"workbench.engine.{framework}.support" in found
    for name in OPTIONAL:
        assert name in found
        assert wrong(name), f"{name} is there now"


@pytest.mark.parametrize("name", sorted(set(workbench._LAZY) - {"data"}))
def test_names_of_the_package_are_where_it_looks_for_them(name: str) -> None:
    assert not wrong(f"{workbench._LAZY[name]}:{name}")


def test_what_pyproject_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    points = [*project["project"]["scripts"].values()]
    points += [p for group in project["project"]["entry-points"].values() for p in group.values()]
    modules = [
        name
        for contract in project["tool"]["importlinter"]["contracts"]
        for key in ("source_modules", "forbidden_modules", "layers")
        for entry in contract.get(key, [])
        for name in entry.split(" | ")
    ]
    modules += [name for one in project["tool"]["mypy"]["overrides"] for name in one["module"]]
    ours = [name.removesuffix(".*") for name in modules if name.startswith("workbench")]
    assert len(points) >= 2
    assert len(ours) > 40
    mistakes = {name: why for name in [*points, *ours] if (why := wrong(name))}
    assert mistakes == {}


@pytest.mark.parametrize(
    "text",
    [
        "import_from_nowhere('workbench.engine.runtim')",
        "import_from_nowhere('workbench.engine.entry:atach')",
        "import_from_nowhere(f'workbench.engine.{framework}.suport')",
        "import_from_nowhere('workbench.execution.requests.instaled')",
        "import_from_nowhere('workbench.nothing')",
    ],
)
def test_a_mistyped_name_is_found(text: str) -> None:
    tree = ast.parse(text.replace("import_from_nowhere", "load"))
    found = [name for _, name in strings(tree) if NAMED.fullmatch(name)]
    assert found
    assert all(wrong(name) for name in found)


def test_what_is_right_is_not_called_wrong() -> None:
    for name in (
        "workbench.engine",
        "workbench.engine.runtime:run_cell",
        "workbench.execution.requests.installed",
        "workbench.cluster.folders.tempfile.tempdir",
    ):
        assert wrong(name) == ""
