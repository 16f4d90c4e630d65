"""Measures the structure of the code: `python tests/house.py` prints each measure and its limit.

All written imports count, also imports for types only and imports within functions. A circle is a
set of modules in which each module reaches all others by imports. The longest chain is counted over
the imports that Python makes when it loads a module; a circle counts as one module.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "workbench"
Graph = Mapping[str, set[str]]
LINES = 630
THEIRS = frozenset((
    "_parameters", "_buffers", "_values", "_value", "_handle", "_cluster", "_actions", "_engines",
    "_closed", "_send", "_repr_mimebundle_",
))  # fmt: skip
"""Names that other libraries have too: torch.nn.Module, Keras' and TensorFlow's variables and
coordinator, argparse, ipyparallel's client, IPython's display."""


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree; most measures look at all of them."""
    return tuple(ast.walk(tree))


def modules() -> dict[str, ast.Module]:
    """Return every module of the package, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
            path.read_text(encoding="utf-8")
        )
    return found


def imported(name: str, tree: ast.Module, known: Iterable[str], *, loading: bool) -> set[str]:
    """Return which modules of the package a module imports.

    Args:
        loading: Only what is imported when it is loaded.
    """
    is_package = (PACKAGE.parent / Path(*name.split(".")) / "__init__.py").exists()
    nodes: Iterable[ast.AST] = tree.body if loading else nodes_of(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if is_package else name.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            start = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:  # a module of a package, or a name of a module
                found.add(inner if (inner := f"{start}.{alias.name}") in known else start)
    return {one for one in found if one in known and one != name}


def circles(graph: Graph) -> list[set[str]]:
    """Return the sets of modules that reach each other (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(one: str) -> None:
        order[one] = low[one] = len(order)
        stack.append(one)
        for other in sorted(graph[one]):
            if other not in order:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], order[other])
        if low[one] == order[one]:
            circle = set()
            while one not in circle:
                circle.add(stack.pop())
            found.append(circle)

    for one in graph:
        if one not in order:
            visit(one)
    return [circle for circle in found if len(circle) > 1]


def longest(graph: Graph) -> int:
    """Return how many modules the longest chain of imports has."""
    known: dict[str, int] = {}

    def length(one: str, above: frozenset[str]) -> int:
        if one not in known:
            below = [length(o, above | {one}) for o in graph[one] if o not in above]
            known[one] = 1 + max(below, default=0)
        return known[one]

    return max(length(one, frozenset()) for one in graph)


def foreign_privates(trees: Mapping[str, ast.Module]) -> int:
    """Return how often a module uses `x._name` where it defines no `_name` itself."""
    count = 0
    for tree in trees.values():
        mine = {
            node.attr for node in nodes_of(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        }  # fmt: skip
        mine |= {
            node.name for node in nodes_of(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }  # fmt: skip
        everybodys = _defined(trees) - THEIRS
        count += sum(
            isinstance(node, ast.Attribute) and node.attr.startswith("_")
            and not node.attr.startswith("__") and node.attr in everybodys and node.attr not in mine
            for node in nodes_of(tree)
        )  # fmt: skip
    return count


_names: set[str] = set()


def _defined(trees: Mapping[str, ast.Module]) -> set[str]:
    """Return the private names that classes of the package have."""
    if not _names:
        for tree in trees.values():
            for node in nodes_of(tree):
                if isinstance(node, ast.FunctionDef):
                    _names.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    _names.update({node.attr} if getattr(node.value, "id", "") == "self" else ())
    return _names


def sliced(trees: Mapping[str, ast.Module]) -> list[str]:
    """Return classes that are only a part of another class, in a separate file.

    Such a base has one subclass, in a module of the same folder. No code makes an instance of it,
    and no string names it.
    """
    where: dict[str, str] = {}
    below: dict[str, list[str]] = defaultdict(list)
    used = set()
    for name, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name] = name
                for base in node.bases:
                    below[getattr(base, "id", getattr(base, "attr", ""))].append(name)
            elif isinstance(node, ast.Call):
                used.add(getattr(node.func, "id", getattr(node.func, "attr", "")))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value.rpartition(":")[2])
    return [
        base for base, home in where.items()
        if base not in used and len(below[base]) == 1 and below[base][0] != home
        and below[base][0].rpartition(".")[0] == home.rpartition(".")[0]
    ]  # fmt: skip


def mutual(graph: Graph) -> list[str]:
    """Return the pairs of folders, none within the other, that import each other."""

    def folder(name: str) -> str:
        inside = (ROOT / Path(*name.split("."))).is_dir()
        return name if inside else name.rpartition(".")[0]

    arrows = {(folder(one), folder(other)) for one in graph for other in graph[one]}
    return [
        f"{a} and {b}" for a, b in sorted(arrows)
        if a < b and (b, a) in arrows and not b.startswith(f"{a}.")
    ]  # fmt: skip


def edits(heading: str) -> int:
    """Return how many places a walk of CONTRIBUTING.md changes; a test applies its lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return section.count("\n@@")


class Measure(NamedTuple):
    """One count, its limit, and where it was found."""

    name: str
    count: int
    most: int
    where: str = ""


def measures(trees: Mapping[str, ast.Module]) -> list[Measure]:
    """Return all measures of the package."""
    every, loaded = (
        {name: imported(name, tree, trees, loading=loading) for name, tree in trees.items()}
        for loading in (False, True)
    )
    folders = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    )
    fullest, modules_in_it = folders.most_common(1)[0]
    found = [", ".join(sorted(one)) for one in circles(every)]
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    large = [f"{path.name} {count}" for path, count in lines.items() if count > LINES]
    rest, pairs = sliced(trees), mutual(every)
    return [
        Measure("modules in a folder", modules_in_it, 12, fullest),
        Measure("circles, all imports counted", len(found), 0, "; ".join(found)),
        Measure("folders that import each other", len(pairs), 0, "; ".join(pairs)),
        Measure("longest import chain", longest(loaded), 14),
        Measure("Python files", len(trees), 420),
        Measure('"the rest of it" base classes', len(rest), 0, ", ".join(rest)),
        Measure("private access across modules", foreign_privates(trees), 0),
        Measure(f"files over {LINES} lines", len(large), 0, ", ".join(large)),
        Measure("places for a new flag", edits("Add a flag"), 3),
        Measure("places for a new column", edits("Add a measured number"), 4),
        Measure("places for a new strategy", edits("Add a strategy"), 2),
    ]


def main() -> None:
    """Print the measures."""
    for one in measures(modules()):
        print(f"{one.name:32} {one.count:4}   at most {one.most:3}   {one.where}".rstrip())


if __name__ == "__main__":
    main()
