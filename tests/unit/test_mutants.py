"""The table of mutants fits the files that it breaks, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, Mutant

TESTS = Path(mutants.__file__).parent
each = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def test_there_are_at_least_twenty_each_with_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@each
def test_a_mutant_has_one_place_and_changes_it(mutant: Mutant) -> None:
    assert mutants.stale(mutant) == ""
    assert mutant.new != mutant.old
    broken = (mutants.ROOT / mutant.path).read_text().replace(mutant.old, mutant.new)
    compile(broken, mutant.file, "exec")


@each
def test_the_tests_that_should_notice_exist(mutant: Mutant) -> None:
    assert mutant.caught_by
    for one in mutant.caught_by:
        file, _, function = one.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function.partition("[")[0] in names | {""}


def test_a_text_that_is_not_there_once_makes_a_mutant_stale(tmp_path: Path) -> None:
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "some.py").write_text("a = 1\na = 1\n")

    def why(old: str, file: str = "some.py") -> str:
        return mutants.stale(Mutant("x", "", file, old, "", ()), tmp_path)

    assert why("a = 1\n") == "its text is 2 times in workbench/some.py, not once"
    assert "0 times" in why("b")
    assert why("a", "other.py") == "workbench/other.py is not there"


@pytest.mark.parametrize(
    ("code", "text", "verdict", "by"),
    [
        (0, "3 passed in 0.1s", "passed", ""),
        (1, "FAILED tests/unit/test_a.py::test_b[x - y] - assert 1 == 2", "failed",
         "unit/test_a.py::test_b[x - y]"),
        (1, "ERROR tests/unit/test_a.py::test_b - RuntimeError", "failed",
         "unit/test_a.py::test_b"),
        (1, '+++ Timeout +++\n  File "/x/tests/unit/test_a.py", line 3, in test_b\n', "failed",
         "unit/test_a.py::test_b"),
        (1, "", "broken", ""),
        (5, "no tests ran", "broken", ""),
        (None, "", "hung", ""),
    ],
)  # fmt: skip
def test_only_a_test_that_fails_kills_a_mutant(
    code: int | None, text: str, verdict: str, by: str
) -> None:
    found = mutants.read(code, text, 0.0)
    assert (found.verdict, found.by) == (verdict, by)
