"""Writes docs/error-codes.md from the places of the package that make an error or a warning.

    python docs/make_error_codes.py

Code, kind and words are read from the sources, which are not imported. A part of a message that is
filled in at run time is written as `{name}`. A code that was removed from the sources must be in
`RETIRED` (`workbench/errors.py`), so that its number is never used again.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "workbench"
PAGE = REPOSITORY / "docs" / "error-codes.md"
CODE = re.compile(r"WB-([A-Z]+)-(\d{3})")

PREFIXES: dict[str, str] = {
    "WorkbenchError": "GEN",
    "PlanError": "PLAN",
    "FitError": "FIT",
    "ClusterError": "CLUSTER",
    "RunError": "RUN",
    "DataError": "DATA",
    "WorkbenchWarning": "WARN",
}
"""Per class: the middle part of its codes. A subclass has the middle part of its base."""

PARTS: dict[str, str] = {
    "PLAN": "A request that cannot be run; no engine was used",
    "FIT": "A training that is not possible in this way",
    "RUN": "A run that failed, was interrupted, or cannot be read",
    "CLUSTER": "Engines that are missing, could not start, or died",
    "DATA": "A request for data that does not exist",
    "GEN": "Other errors",
    "WARN": "Warnings",
}
"""The parts of the page: the middle of the codes, and the title."""

TOLD: dict[str, str] = {
    "WB-CLUSTER-010": "{why this notebook no longer owns the cluster}",
    "WB-CLUSTER-024": "{the error of the server that starts engines, and the end of its log}",
    "WB-FIT-136": "{why rank 0 could not measure the model's layers}",
    "WB-RUN-049": "{why a rank could not show its names to the labs' page}",
    "WB-RUN-052": "{rank} failed: {its NameError; the name exists in the notebook}",
    "WB-RUN-064": "{why the run could not begin}",
    "WB-RUN-066": "{rank} failed: {its error} / {rank} died: {how} / {rank} stalled",
    "WB-RUN-068": "{the notebook that has the run now}",
    "WB-RUN-070": "{why no new engine could replace a spent engine}",
    "WB-RUN-082": "{rank} died: {how, and why the run did not continue without it}",
    "WB-RUN-083": "{rank} died: {how, and why the run could not start again}",
    "WB-RUN-084": "{rank} died: {how, and the error when the run started again}",
    "WB-RUN-085": "{the error of a stored run}",
}
"""The text on the page for messages that are composed elsewhere."""

HEAD = """# All errors by code

<!-- Written by make_error_codes.py. -->

Each error and warning of Workbench has a code, at the end of its first line and as `error.code`:
`There is no strategy with this name. [WB-PLAN-...]`. The code stays the same if the words change.
So search for the code on this page. In your own programs, test `error.code`, not the words. If an
error in the notebook reports an error of a rank, both errors have the same code. Words in braces,
such as `{name}`, stand for values that are filled in at run time.
[errors.md](errors.md) shows the most frequent errors in full, with the step that solves each one.
"""


class Site(NamedTuple):
    """A place that makes an error.

    Attributes:
        where: `workbench/plan.py:12`.
        kind: The class that is made.
        given: Its code as written there; None if the code is missing or is not a literal.
        words: What is wrong, as written there.
    """

    where: str
    kind: str
    given: str | None
    words: str


def kinds(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the middle of the codes for each error class of the package."""
    found = dict(PREFIXES)
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    size = 0
    while size != len(found):
        size = len(found)
        for one in classes:
            for base in map(name_of, one.bases):
                if base in found:
                    found.setdefault(one.name, found[base])
    return found


def name_of(node: ast.expr) -> str:
    """Return the last word of `errors.PlanError`; empty if the node is not a name."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def sites(trees: Mapping[str, ast.Module]) -> list[Site]:
    """Return every place of these modules that makes an error.

    A class with its own words passes its code to `__init__` of its base. This call is its place.

    Args:
        trees: Their syntax trees, by path.
    """
    known = kinds(trees.values())
    wordy = {
        one.name
        for tree in trees.values()
        for one in ast.walk(tree)
        if isinstance(one, ast.ClassDef) and one.name in known and _codes_inside(one)
    }
    found = []
    for path, tree in trees.items():
        for kind, call, scopes in _calls(tree, (tree,), ""):
            if kind in known and kind not in wordy:
                found.append(_site(path, kind, call, scopes))
            elif kind.startswith("super of ") and kind[9:] in wordy:
                found.append(_site(path, kind[9:], call, scopes))
    return found


def _codes_inside(one: ast.ClassDef) -> bool:
    """Whether a class's `__init__` sets the code of its errors, and has no `code` argument."""
    for method in one.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            taken = [*method.args.args, *method.args.kwonlyargs]
            return method.args.kwarg is None and all(arg.arg != "code" for arg in taken)
    return False


def _calls(
    node: ast.AST, scopes: tuple[ast.AST, ...], inside: str
) -> Iterator[tuple[str, ast.Call, tuple[ast.AST, ...]]]:
    """Yield each call below: what is called, the call, the module and functions around it."""
    if isinstance(node, ast.ClassDef):
        inside = node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        scopes = (*scopes, node)
    if isinstance(node, ast.Call):
        kind = name_of(node.func)
        if kind == "__init__" and isinstance(node.func, ast.Attribute):
            base = node.func.value
            kind = "super of " + inside if isinstance(base, ast.Call) else ""
        yield kind, node, scopes
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, scopes, inside)


def _site(path: str, kind: str, call: ast.Call, scopes: tuple[ast.AST, ...]) -> Site:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    code = given.get("code")
    literal = isinstance(code, ast.Constant) and isinstance(code.value, str)
    what = call.args[0] if call.args else given.get("what")
    words = [one.split("\n")[0] for one in _words(what, scopes)] if what is not None else []
    return Site(
        where=f"{path}:{call.lineno}",
        kind=kind,
        given=code.value if literal else None,  # type: ignore[union-attr]
        words=" / ".join(dict.fromkeys(one for one in words if one)),
    )


def _words(node: ast.expr, scopes: tuple[ast.AST, ...], depth: int = 0) -> list[str]:
    """Return the texts that an expression can have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(value) for value in node.values)]
    if isinstance(node, ast.IfExp):
        return _words(node.body, scopes, depth) + _words(node.orelse, scopes, depth)
    if isinstance(node, ast.BoolOp):
        return [words for value in node.values for words in _words(value, scopes, depth)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [
            a + b
            for a in _words(node.left, scopes, depth)
            for b in _words(node.right, scopes, depth)
        ]
    if isinstance(node, ast.Name | ast.Call) and depth < 2:
        found = [one for value in _meant(node, scopes) for one in _words(value, scopes, depth + 1)]
        if found:
            return found
    return ["{" + ast.unparse(node) + "}"]


def _piece(value: ast.expr) -> str:
    """Return a piece of an f-string."""
    if isinstance(value, ast.FormattedValue):
        return "{" + ast.unparse(value.value) + "}"
    assert isinstance(value, ast.Constant)
    return str(value.value)


def _meant(node: ast.Name | ast.Call, scopes: tuple[ast.AST, ...]) -> list[ast.expr]:
    """Return the values that a name was set to, or that a function of the module returns."""
    if isinstance(node, ast.Call):
        return [
            one.value
            for function in ast.iter_child_nodes(scopes[0])
            if isinstance(function, ast.FunctionDef) and function.name == name_of(node.func)
            for one in ast.walk(function)
            if isinstance(one, ast.Return) and one.value is not None
        ]
    around = ast.walk(scopes[-1]) if len(scopes) > 1 else iter(())
    return _set(node.id, around) or _set(node.id, ast.iter_child_nodes(scopes[0]))


def _set(name: str, nodes: Iterable[ast.AST]) -> list[ast.expr]:
    found: list[ast.expr] = []
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if name_of(target) == name:
                found.append(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=False)
                found += [value for one, value in pairs if name_of(one) == name]
    return found


@functools.cache
def package() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's modules by path."""
    return {
        str(path.relative_to(REPOSITORY)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def places() -> list[Site]:
    """Return every place of the package that makes an error."""
    return sites(package())


def retired() -> frozenset[str]:
    """Return the codes of errors that were removed."""
    from workbench.errors import RETIRED

    return RETIRED


def all_codes() -> set[str]:
    """Return the codes that are or were in use."""
    return {site.given for site in places() if site.given} | retired()


def next_free(codes: Iterable[str]) -> dict[str, str]:
    """Return the code to give next, per middle of codes."""
    highest = dict.fromkeys(PARTS, 0)
    for code in codes:
        if (found := CODE.fullmatch(code)) and found[1] in highest:
            highest[found[1]] = max(highest[found[1]], int(found[2]))
    return {middle: f"WB-{middle}-{most + 1:03d}" for middle, most in highest.items()}


def make_page(page: str) -> str:
    """Return the page with its current content.

    Args:
        page: The old page: each code on it must be in the sources or in `RETIRED`.

    Raises:
        ValueError: A code is in neither of them, or `TOLD` has words for an error that does not
            need them.
    """
    found = {site.given: site for site in places() if site.given}
    old = {match[0] for match in CODE.finditer(page)}
    if lost := sorted(old - set(found) - retired()):
        raise ValueError(f"no longer in the sources, put them in errors.RETIRED: {lost}")
    if odd := [code for code in TOLD if code not in found or "{" not in found[code].words]:
        raise ValueError(f"no place of these codes needs words of TOLD: {odd}")
    blocks = [HEAD]
    for middle, title in PARTS.items():
        mine = sorted(code for code in found if code.startswith(f"WB-{middle}-"))
        lines = [
            f"{code}  {found[code].kind}: {TOLD.get(code, found[code].words)}" for code in mine
        ]
        blocks.append(f"## {title}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    if gone := sorted(retired()):
        blocks.append("## No longer in use\n\n```text\n" + "\n".join(gone) + "\n```\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text(make_page(before), encoding="utf-8")
