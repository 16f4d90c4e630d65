"""What the grader does in the kernel that runs students' cells: puts names back, asks checks.

A student's cell can redefine whatever it likes: `labs`, `print`, the checks' own functions. Before
a check is asked, what this module has seen before the first of their cells is put back.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import sys
import time
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_OTHERS = ("math", "cmath", "numbers", "operator", "itertools", "statistics", "json", "re", "numpy")
_LABS = "workbench.labs"
_KINDS = (FunctionType, BuiltinFunctionType, type)
_IN_CLASSES = (FunctionType, property, staticmethod, classmethod)
_MOST_FINDINGS, _MOST_CHARACTERS = 50, 2000
_NAMED = 6


def load(lab: int) -> dict[str, str]:
    """Import all that a lab's checks need; return the titles of its exercises."""
    from .. import answers, asking, beginning  # noqa: F401 - they are put back later
    from ..exercise import exercises

    return {one.number: one.title for one in exercises(lab)}


class Guard:
    """What builtins, the checks and the modules they use were before the first student's cell."""

    def __init__(self) -> None:
        ours = {name for name in sys.modules if name.partition(".")[0] == "workbench"}
        names = ["builtins", *(name for name in _OTHERS if name in sys.modules), *sorted(ours)]
        self._modules = {name: sys.modules[name] for name in names}
        self._held = [
            (name, vars(module), key, value)
            for name, module in self._modules.items()
            for key, value in list(vars(module).items())
            if (isinstance(value, _KINDS) if name in ours else callable(value))
        ]
        classes = {
            value
            for name, _, _, value in self._held
            if isinstance(value, type) and value.__module__.startswith("workbench.")
        }
        self._attributes = [
            (one, key, value)
            for one in classes
            for key, value in list(vars(one).items())
            if isinstance(value, _IN_CLASSES)
        ]
        self._own = {one: set(vars(one)) for one in classes if one.__module__.startswith(_LABS)}
        functions = [value for *_, value in (*self._held, *self._attributes)]
        self._codes = [
            (one, one.__code__, one.__defaults__, one.__kwdefaults__)
            for one in functions
            if isinstance(one, FunctionType) and one.__module__.startswith("workbench.")
        ]

    def restore(self) -> list[str]:
        """Put back what was changed; return the names."""
        changed = [
            f"{name}.{key}" for name, names, key, value in self._held
            if names.get(key, self) is not value
        ]  # fmt: skip
        for _, names, key, value in self._held:
            names[key] = value
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
                changed.append(name)
        for one, key, value in self._attributes:
            if vars(one).get(key) is not value:
                setattr(one, key, value)
                changed.append(f"{one.__module__}.{one.__name__}.{key}")
        for one, keys in self._own.items():
            for key in set(vars(one)) - keys:
                if isinstance(vars(one)[key], _IN_CLASSES):
                    delattr(one, key)
                    changed.append(f"{one.__module__}.{one.__name__}.{key}")
        return changed + self._restore_codes()

    def _restore_codes(self) -> list[str]:
        changed = []
        for one, code, defaults, keywords in self._codes:
            now = (one.__code__, one.__defaults__, one.__kwdefaults__)
            if now != (code, defaults, keywords) or now[0] is not code:
                one.__code__, one.__defaults__, one.__kwdefaults__ = code, defaults, keywords
                changed.append(f"{one.__module__}.{one.__qualname__}")
        return changed


class Inside:
    """The grader's own work in a kernel.

    Args:
        names: The notebook's names.
    """

    def __init__(self, lab: int, names: dict[str, Any]) -> None:
        self._names = names
        self.titles = load(lab)
        self._guard = Guard()
        self._folder = os.getcwd()
        self._streams = (sys.stdout, sys.stderr)
        self._imported: dict[str, ModuleType] = {}

    def after_step(self) -> dict[str, Any]:
        """Remember which modules the lab's own cells have imported, and under which names."""
        self._imported = {
            name: value for name, value in self._names.items() if isinstance(value, ModuleType)
        }
        _without_limit()  # `labs.begin` has set one; the grader has its own
        return {"engines": _engines()}

    def mend(self) -> dict[str, Any]:
        """After a student's cell: put back what the lab's next cells need."""
        said = self._guard.restore()
        if (sys.stdout, sys.stderr) != self._streams:
            sys.stdout, sys.stderr = self._streams
            said.append("sys.stdout")
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, exist_ok=True)
            os.chdir(self._folder)
        for name, module in self._imported.items():
            if self._names.get(name) is not module:
                self._names[name] = module
                said.append(name)
        more = [f"and {len(said) - _NAMED} more"] if len(said) > _NAMED else []
        return {"put_back": [*said[:_NAMED], *more], "engines": _engines()}

    def check(self, number: str) -> dict[str, Any]:
        """Look at an answer with the check as it was handed out."""
        asking = importlib.import_module(f"{_LABS}.asking")
        began = time.perf_counter()
        try:
            report = asking.check(number, dict(self._names))
            found = {"where": report.where, **report.to_wire()}
        except KeyboardInterrupt:
            _free_engines()
            words = "The check was stopped at the time limit: code of the answer did not end."
            found = _refused(number, words, "does every loop and every receive end?")
        except BaseException as error:  # SystemExit from an answer must not end the kernel
            words = f"The answer could not be looked at: {type(error).__name__}: {error}"
            found = _refused(number, words, "")
        found["findings"] = [_cut(one) for one in found["findings"][:_MOST_FINDINGS]]
        return {"report": found, "seconds": time.perf_counter() - began, **self.mend()}


def _refused(number: str, words: str, hint: str) -> dict[str, Any]:
    finding = {"right": False, "words": words, "hint": hint}
    return {"exercise": number, "passed": False, "findings": [finding]}


def _cut(finding: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(finding[key])[:_MOST_CHARACTERS] for key in ("words", "hint")}
    return {"right": bool(finding["right"]), **texts}


def _without_limit() -> None:
    from IPython.core.getipython import get_ipython

    from .. import limit

    limit.install(get_ipython(), None)  # type: ignore[no-untyped-call,unused-ignore]


def _engines() -> int:
    """How many engines live; -1 without a cluster."""
    from ...session.state import session

    with contextlib.suppress(Exception):
        return -1 if session.cluster is None else len(session.cluster.worker_ids)
    return -1


def _free_engines() -> None:
    """End what a check that was interrupted has left running on the engines."""
    from ...session.state import session

    with contextlib.suppress(Exception):
        task = session.cluster.last_task if session.cluster is not None else None
        if task is not None and not task.is_over:
            task.interrupt()
            task.over.wait(20)


def cut(words: object, most: int = _MOST_CHARACTERS) -> str:
    """Return words as text of bounded length."""
    with contextlib.suppress(Exception):
        text = builtins.str(words)
        return text if len(text) <= most else text[: most - 3] + "..."
    return ""
