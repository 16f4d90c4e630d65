"""Tests ask for the code of an error and for the values it names, never for its sentences.

The same holds for notes, verdicts, labels and other texts: their names, numbers and flags.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import generator

TESTS = Path(__file__).resolve().parents[1]
PROSE = re.compile(r"(?<![\w-])[A-Za-z][a-z']*(?: [a-z][a-z']*){2,}(?![\w-])")
"""Three plain words in a row: names, numbers and flags are none."""

CODE = re.compile(r"WB-[A-Z]+-")
ESCAPES = re.compile(r"\\[a-zA-Z]|[\\^$()|?*+.\[\]]+")
"""What makes a regular expression of words."""

TEXTS = {"value", "error", "failure", "message", "what", "seen", "allowed", "next_step"}
"""The attributes by which a test holds an error or a part of one."""

OTHERS: dict[tuple[str, str], str] = {
    ("cluster/test_jobs.py", "no data here"): "the cell raises it",
    ("cluster/test_scaling.py", "two is too many"): "the cell raises it",
    ("cluster/test_warm.py", "broken on purpose"): "the framework that is made up raises it",
    ("contract/test_averaging.py", "Connection closed by peer"): "said as gloo says it",
    ("contract/test_large_models.py", "no such file"): "the model raises it",
    ("hosts/test_jobs_slurm.py", "no data on this node"): "the cell raises it",
    ("unit/test_export_script.py", "pip install torch"): "a line of the cell",
    ("unit/test_far_files.py", "No space left"): "the system says it",
    ("unit/test_history_disk.py", "No space left on device"): "the system says it",
    ("unit/test_launch_settings.py", "No module named"): "Python says it",
    ("unit/test_platforms.py", "Unable to contact"): "Slurm says it",
    ("unit/test_platforms.py", "Could not resolve"): "ssh says it",
    ("unit/test_task.py", "Connection closed by peer"): "gloo says it",
    ("unit/test_task.py", "he is gone"): "the outcome that the test makes says it",
}
"""Sentences that are not ours to word, by file, and whose they are."""


NAMED: dict[tuple[str, str], str] = {
    ("cluster/test_cells.py", "most recent call last"): "Python says it",
    ("cluster/test_fail_fast.py", "Connection closed by peer"): "gloo says it",
    ("contract/test_layouts.py", "in the optimizer"): "a key of the cell",
    ("labs/test_grading.py", "The square of the rank"): "an exercise's title",
    ("labs/test_grading_exploits.py", "a case's hidden numbers"): "the column of a table",
    ("labs/test_grading_exploits.py", "the grader's names"): "the column of a table",
    ("unit/test_labs_check.py", "The crossing point"): "an exercise's title",
    ("unit/test_debug_parts.py", "No space left on device"): "the system says it",
    ("unit/test_doctor.py", "no such file"): "the fake machine says it",
    ("unit/test_export_script.py", "import workbench as wb"): "code",
    ("unit/test_far_files.py", "No module named"): "Python says it",
    ("unit/test_full_disk.py", "No space left on device"): "the system says it",
    ("unit/test_full_disk.py", "No space left"): "the system says it",
    ("unit/test_full_places.py", "No space left on device"): "the system says it",
    ("unit/test_labs_source.py", "for one in"): "code",
    ("unit/test_peers.py", "Connection closed by peer"): "said as gloo says it",
    ("unit/test_cloud_platforms.py", "ray job list"): "a command",
    ("unit/test_cloud_platforms.py", "ray job submit"): "a command",
    ("unit/test_recipes.py", "what it is"): "the recipe's own summary",
    ("unit/test_torch_imports.py", "to the end"): "the test's own mark",
    ("unit/test_tracebacks.py", "most recent call last"): "Python says it",
}
"""Words of other texts that are not ours to word, or that are a name."""


@functools.cache
def ours() -> frozenset[str]:
    maker = generator("make_error_codes")
    return frozenset(maker.kinds(maker.package().values()))


@functools.cache
def tests() -> dict[str, ast.Module]:
    """Return the syntax trees of the tests' files, by path from `tests/` on."""
    return {
        str(path.relative_to(TESTS)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
    }


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def pieces(node: ast.AST) -> str:
    """Return the words of a text; what is filled in while running is a gap."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(pieces(one) or "{}" for one in node.values)
    if isinstance(node, ast.BinOp):
        return pieces(node.left) + pieces(node.right)
    return ""


def listed(node: ast.AST) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else []


def columns(names: list[str], rows: list[ast.expr], wanted: str) -> Iterator[ast.expr]:
    """Return what each row of a table gives to one of its names."""
    place = names.index(wanted)
    for row in rows:
        if isinstance(row, ast.Call) and name_of(row.func) == "param":
            row = ast.Tuple(row.args)
        if len(names) == 1 and not isinstance(row, ast.Tuple):
            yield row
        elif len(listed(row)) > place:
            yield listed(row)[place]


def given_to(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """Return what a name of a test stands for: its parameters, its loops, what is set."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and name_of(node.func) == "parametrize":
            head = node.args[0]
            told = pieces(head).split(",") if pieces(head) else map(pieces, listed(head))
            names = [one.strip() for one in told]
            if name in names:
                yield from columns(names, listed(node.args[1]), name)
        elif isinstance(node, (ast.For, ast.comprehension)):
            names = [name_of(one) for one in listed(node.target) or [node.target]]
            if name in names:
                yield from columns(names, listed(node.iter), name)
        elif isinstance(node, ast.Assign) and name in map(name_of, node.targets):
            yield node.value


def texts(node: ast.AST, scope: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield from map(pieces, given_to(node.id, scope))
    else:
        yield pieces(node)


def of_an_error(node: ast.AST) -> bool:
    """Whether this is `str(caught.value)` or the like."""
    if not (isinstance(node, ast.Call) and name_of(node.func) == "str" and node.args):
        return False
    held = node.args[0]
    held = held.func if isinstance(held, ast.Call) else held
    return name_of(held) in TEXTS


def asked(scope: ast.AST) -> Iterator[tuple[int, str]]:
    """Return line and text of what is asked of our errors' words, codes left out."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and name_of(node.func) in ("raises", "warns") and node.args:
            kinds = {name_of(one) for one in listed(node.args[0]) or [node.args[0]]}
            for keyword in node.keywords if kinds & ours() else ():
                if keyword.arg == "match":
                    for text in texts(keyword.value, scope):
                        if not CODE.search(text):
                            yield node.lineno, ESCAPES.sub(" ", text)
        elif isinstance(node, ast.Compare) and any(map(of_an_error, node.comparators)):
            for text in texts(node.left, scope):
                yield node.lineno, text


def told(path: str, tree: ast.Module) -> list[tuple[str, int, str]]:
    """Return the sentences of errors that a test's file asks for: file, line, words."""
    scopes = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [
        (path, line, found[0])
        for scope in scopes
        for line, text in sorted(asked(scope))
        if (found := PROSE.search(text))
    ]


@pytest.fixture(scope="module")
def sentences() -> list[tuple[str, int, str]]:
    return [one for name, tree in tests().items() for one in told(name, tree)]


def test_no_test_asks_for_a_sentence_of_ours(sentences: list[tuple[str, int, str]]) -> None:
    wrong = [f"{path}:{line}: {words}" for path, line, words in sentences
             if (path, words) not in OTHERS]  # fmt: skip
    assert not wrong, "ask for the code, and for values that are named: " + "\n".join(["", *wrong])


def test_no_exception_is_kept_that_nobody_needs(sentences: list[tuple[str, int, str]]) -> None:
    assert not OTHERS.keys() - {(path, words) for path, _, words in sentences}


@functools.cache
def said() -> str:
    """Return all texts of the package: its strings, without docstrings."""
    found = []
    for tree in generator("make_error_codes").package().values():
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [pieces(node) for node in ast.walk(tree) if id(node) not in alone
                  if isinstance(node, (ast.Constant, ast.JoinedStr))]  # fmt: skip
    return "\n".join(found)


def asserted(tree: ast.Module, texts: str) -> list[tuple[int, str]]:
    """Return words in a row that a file's assertions share with these texts: line, words."""
    checks = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return sorted({
        (node.lineno, words)
        for check in checks for node in ast.walk(check)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for words in PROSE.findall(node.value) if words in texts
    })  # fmt: skip


@pytest.fixture(scope="module")
def asserted_words() -> list[tuple[str, int, str]]:
    return [
        (name, line, words)
        for name, tree in tests().items() if name != f"unit/{Path(__file__).name}"
        for line, words in asserted(tree, said())
    ]  # fmt: skip


def test_no_assertion_asks_for_words_of_ours(asserted_words: list[tuple[str, int, str]]) -> None:
    known = OTHERS.keys() | NAMED.keys()
    wrong = [f"{path}:{line}: {words}" for path, line, words in asserted_words
             if (path, words) not in known]  # fmt: skip
    assert not wrong, "ask for names, numbers and flags: " + "\n".join(["", *wrong])


def test_no_name_is_kept_that_nobody_asks_for(asserted_words: list[tuple[str, int, str]]) -> None:
    left = NAMED.keys() - {(path, words) for path, _, words in asserted_words}
    assert sorted(left) == []


def test_what_an_assertion_shares_with_our_texts() -> None:
    source = 'def test():\n    assert "2 of them wait for each other" in text'
    tree = ast.parse(source)
    assert asserted(tree, "they wait for each other; a b") == []
    assert asserted(tree, "of them wait for each other") == [(2, "of them wait for each other")]


SOURCE = """
import pytest
from workbench.errors import PlanError

@pytest.mark.parametrize(("given", "says"), [(1, "WB-PLAN-001"), (2, "must not be two")])
def test_a(given, says):
    with pytest.raises(PlanError, match=says):
        plan(given)

def test_b():
    with pytest.raises(PlanError, match=rf"(?s)WB-PLAN-001.*is no good{3}"):
        plan(3)
    with pytest.raises(PlanError, match=r"It is no .*") as caught:
        plan(4)
    assert f"is not {4} but five of them" in str(caught.value)
    assert "--seed 4, or 1 to 8" in str(caught.value)
    with pytest.raises(OSError, match="No space left"):
        write()
    for given, words in ((5, "five"), (6, "there are six")):
        with pytest.warns(errors.WorkbenchWarning, match=words):
            plan(given)
"""


def test_what_is_found_in_a_source() -> None:
    assert told("a.py", ast.parse(SOURCE)) == [
        ("a.py", 7, "must not be two"),
        ("a.py", 13, "It is no"),
        ("a.py", 15, "but five of them"),
        ("a.py", 20, "there are six"),
    ]
