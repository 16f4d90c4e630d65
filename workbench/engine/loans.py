"""Variables for an engine that took another one's place: what its cell needs, from one that lives.

A fresh engine has none of what earlier cells defined. Functions, classes and data travel by value,
through the kernel, which never looks inside.
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Mapping

import cloudpickle

from .entry import IPythonShell, variables

MOST_BYTES = 1 << 30


def names_in(source: str) -> set[str]:
    """Return the names that a cell mentions; none where it is no plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell with magics: everything may be needed
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def lend(source: str) -> dict[str, bytes]:
    """Return the user's variables that a cell mentions, packed; empty where one cannot travel.

    What is larger than `MOST_BYTES` in all stays here as well: it is faster loaded anew.
    """
    wanted, space = names_in(source), IPythonShell().namespace
    packed: dict[str, bytes] = {}
    left_bytes = MOST_BYTES
    for name in variables():
        if wanted and name not in wanted:
            continue
        try:
            data = cloudpickle.dumps(space[name])
        except Exception:  # a lock, a file, a generator: objects raise what they like
            data = b""
        packed[name] = data if len(data) <= left_bytes else b""
        left_bytes -= len(packed[name])
    return packed


def borrow(packed: Mapping[str, bytes]) -> list[str]:
    """Take over variables that another engine lent; return the names that could not be."""
    space, missing = IPythonShell().namespace, []
    for name, data in packed.items():
        try:
            space[name] = pickle.loads(data)
        except Exception:  # noqa: PERF203 - not packed, or of a module that is not here
            missing.append(name)
    return missing
