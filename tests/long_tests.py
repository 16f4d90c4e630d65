"""The tests that only `./run-tests --long` runs, and the case of each mechanism that stays.

The rules are in `long_tests.txt`. A rule names tests by `file::test[case]`; `*` means any text. All
of them move, except those that `stays` names. If all cases of a test move, `stays` names another
test of the mechanism. A rule that matches no test, or that leaves its mechanism without a test,
ends the collection.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Rule:
    """Tests that take long and add little to the quick suite.

    Attributes:
        moves: Pattern of the tests' ids, from `tests/` on.
        stays: Patterns of those that do not move.
    """

    moves: str
    stays: tuple[str, ...]


def read(text: str) -> list[Rule]:
    """Return the rules of a table: under a file's name, `moves <- stays & stays`.

    If `stays` names no file, it is the file of `moves`.
    """
    found, file = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            file = line.strip("[]")
        elif line and not line.startswith("#"):
            moves, _, rest = line.partition(" <- ")
            stays = (s if "::" in s else f"{file}::{s}" for s in rest.split(" & "))
            found.append(Rule(f"{file}::{moves}", tuple(stays)))
    return found


RULES = read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def mark(items: Iterable[pytest.Item], whole: bool) -> None:
    """Mark the tests that rules move as `long`.

    Args:
        whole: Whether all tests of the files are there, so that rules can be checked.

    Raises:
        pytest.UsageError: A rule matches no test of its file, or leaves its mechanism without one.
    """
    by_file: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        by_file.setdefault(name.partition("::")[0], {})[name] = item
    wrong, moved = [], set()
    for rule in RULES:
        stays = [_expression(pattern) for pattern in rule.stays]
        found = _fitting(rule.moves, by_file)
        if not found and _file(rule.moves) in by_file:
            wrong.append(f"{rule.moves} moves, but is no test")
        moved.update(name for name in found if not any(one.fullmatch(name) for one in stays))
    for name in moved:
        by_file[_file(name)][name].add_marker(pytest.mark.long)
    wrong += [
        f"{pattern} stays, but no such test does"
        for rule in RULES
        for pattern in rule.stays
        if _file(pattern) in by_file and not _fitting(pattern, by_file) - moved
    ]
    if wrong and whole:
        raise pytest.UsageError("tests/long_tests.txt: " + "; ".join(wrong))


def _fitting(pattern: str, by_file: dict[str, dict[str, pytest.Item]]) -> set[str]:
    expression = _expression(pattern)
    return {name for name in by_file.get(_file(pattern), {}) if expression.fullmatch(name)}


def _file(name: str) -> str:
    return name.partition("::")[0]


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL)
