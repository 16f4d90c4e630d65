"""The grader's work in the kernel that runs students' cells: it restores names, asks checks.

A student's cell can redefine anything: `labs`, `print`, the checks' own functions. Before a check,
this module restores everything that it saw before the first cell of the student.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import time
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import psutil

from ..side import Here
from .isolation import PLACES

_OTHERS = ("math", "cmath", "numbers", "operator", "itertools", "statistics", "json", "re", "numpy")
_LABS = "workbench.labs"
_KINDS = (FunctionType, BuiltinFunctionType, type)
_IN_CLASSES = (FunctionType, property, staticmethod, classmethod)
_MOST_CHARACTERS = 2000
_SETTLE_S = 0.05
"""The time until a process that was just killed is seen to be dead."""
_NAMED = 6


def load() -> None:
    """Import the modules that the lab's own cells need: they are restored later."""
    from .. import answers, asking, blind  # noqa: F401  # noqa: F401


class Guard:
    """The builtins, the checks and their modules as they were before the first student's cell."""

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
        """Restore what was changed; return the names."""
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

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        load()
        self._guard = Guard()
        self._folder = os.getcwd()
        self._places = [self._folder, *(os.environ[n] for n in PLACES if n in os.environ)]
        self._streams = (sys.stdout, sys.stderr)
        self._imported: dict[str, ModuleType] = {}

    def after_step(self) -> dict[str, Any]:
        """Remember which modules the lab's own cells have imported, and under which names."""
        self._imported = {
            name: value for name, value in self._names.items() if isinstance(value, ModuleType)
        }
        _without_limit()  # `labs.begin` has set one; the grader has its own
        return {"engines": _engines(), "runs": _runs()}

    def mend(self) -> dict[str, Any]:
        """After a student's cell: restore what the lab's next cells need."""
        said = self._guard.restore()
        if (sys.stdout, sys.stderr) != self._streams:
            sys.stdout, sys.stderr = self._streams
            said.append("sys.stdout")
        gone = [place for place in self._places if not os.path.isdir(place)]
        with contextlib.suppress(OSError):
            for place in gone:
                os.makedirs(place, exist_ok=True)
            os.chdir(self._folder)
        for name, module in self._imported.items():
            if self._names.get(name) is not module:
                self._names[name] = module
                said.append(name)
        more = [f"and {len(said) - _NAMED} more"] if len(said) > _NAMED else []
        time.sleep(_SETTLE_S)
        found = {"engines": _engines(), "runs": _runs(), "removed": bool(gone)}
        return {"put_back": [*said[:_NAMED], *more], **found}

    # -- what a check asks for: plain data --------------------------------------------------------

    def _here(self) -> Here:
        return Here(dict(self._names))

    def value(self, name: str) -> dict[str, Any]:
        """See `side.Side`, as the next ones."""
        return self._here().value(name)

    def call(self, name: str, args: list[Any], limit_s: float) -> dict[str, Any]:
        """Call a function of the answer."""
        return self._here().call(name, args, limit_s)

    def run_on_engines(self, source: str, limit_s: float, framework: str | None) -> dict[str, Any]:
        """Run code of a check on the engines."""
        return self._here().ask(source, limit_s, framework)

    def run(self, name: str) -> dict[str, Any]:
        """Describe a run."""
        return self._here().run(name)

    def play(self, name: str) -> dict[str, Any]:
        """Describe what was done with a blind case."""
        return self._here().play(name)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what the grader asks for."""
        do = asked.pop("do")
        try:
            found: dict[str, Any] = getattr(self, do)(**asked)
        except KeyboardInterrupt:
            _free_engines()
            raise
        return found


def _without_limit() -> None:
    from IPython.core.getipython import get_ipython

    from .. import limit

    limit.install(get_ipython(), None)  # type: ignore[no-untyped-call,unused-ignore]


def _engines() -> int:
    """Return the number of engines whose process lives; -1 without a cluster."""
    from ...notebook.session import session

    with contextlib.suppress(Exception):
        if session.cluster is None:
            return -1
        known = set(session.cluster.worker_ids)
        return sum(_lives(one.pid) for one in session.cluster.engines if one.id in known)
    return -1


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def _runs() -> dict[str, float]:
    """Return the start time of each finished run, by name."""
    from ...execution.registry import runs

    with contextlib.suppress(Exception):
        return {name: float(run.began) for name, run in runs.items() if run.state == "finished"}
    return {}


def _free_engines() -> None:
    """End the code that an interrupted check has left running on the engines."""
    from ...notebook.session import session

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
