"""The answer's side of a check: what it can be asked for, in the process where its cells ran.

`answers.Check` asks. In the notebook it asks here directly; in `workbench grade` it asks by
messages, from another process. Questions and answers are plain data, as `plain` makes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..errors import WorkbenchError
from . import plain
from .limit import Late, at_most

_ANSWER = "_labs_answer"
_PLAIN = f"""
def _labs_plain(value):
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    if hasattr(value, "numpy") and not isinstance(value, type):
        return value.numpy()
    if isinstance(value, dict):
        return {{key: _labs_plain(v) for key, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_labs_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    import numpy
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value
    return "<" + type(value).__name__ + ">"
{_ANSWER} = _labs_plain({_ANSWER})
del _labs_plain
"""

COLUMNS = ("rank", "step", "step_s", "start_s", "compute_s", "sync_wait_s", "transfer_s",
           "samples", "loss", "blamed_rank")  # fmt: skip
"""The columns of a run's history that checks may ask for."""

_FIGURES = ("workers", "samples_per_s", "sent_step_bytes", "memory_bytes", "servers")
_MOST_WEIGHTS_BYTES = 2_000_000

Wire = dict[str, Any]


class Side(Protocol):
    """The side that a check asks; each answer is a dictionary of plain data."""

    def value(self, name: str) -> Wire:
        """`value` and `words`, its `repr`; empty if there is no such name."""

    def call(self, name: str, args: list[Any], limit_s: float) -> Wire:
        """`value` and `words`; or `late`; or `raised`."""

    def ask(self, source: str, limit_s: float, framework: str | None) -> Wire:
        """`values`, by rank; or `late`; or `wrong` and `hint`."""

    def run(self, name: str) -> Wire:
        """What `facts` returns for a run; empty if there is none."""

    def play(self, name: str) -> Wire:
        """What was sealed and run of a blind case; empty if it was not opened."""


class Here:
    """The side of this very process.

    Args:
        names: The notebook's.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def value(self, name: str) -> Wire:
        """See `Side`."""
        return _told(self._names[name]) if name in self._names else {}

    def call(self, name: str, args: list[Any], limit_s: float) -> Wire:
        """See `Side`."""
        given = [self._given(plain.unpack(one)) for one in args]
        try:
            with at_most(limit_s):
                return _told(self._names[name](*given))
        except Late:
            return {"late": True}
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {_words(error)}"}
        except SystemExit as error:  # it would end the notebook's cell without a message
            return {"raised": f"SystemExit: {_words(error)}"}

    def _given(self, value: Any) -> Any:
        from ..execution.registry import runs

        if not isinstance(value, plain.NamedRun):
            return value
        run = runs[value.name]
        return _as_if_of(run, value.workers, value.sent_bytes) if value.workers else run

    def ask(self, source: str, limit_s: float, framework: str | None) -> Wire:
        """See `Side`."""
        from ..notebook.session import session

        try:
            cluster = session.need_cluster()
            task = cluster.execute(source + "\n" + _PLAIN, framework=framework)
        except WorkbenchError as error:
            return {"wrong": error.what, "hint": error.next_step or ""}
        in_time = False
        try:
            in_time = task.over.wait(limit_s)
        finally:  # also if the check is stopped: else the task would keep the engines busy
            if not in_time:
                task.interrupt()
                task.over.wait()
        if not in_time:
            return {"late": True}
        if (failure := task.failure()) is not None:
            words = f"On the engines: {failure.what.splitlines()[0]}"
            return {"wrong": words, "hint": failure.next_step or ""}
        found = cluster.pull([_ANSWER], task.ids)
        values = [plain.pack(found[engine].get(_ANSWER)) for engine in task.ids]
        return {"values": values, "lost": cluster.pool.lost_workers}

    def run(self, name: str) -> Wire:
        """See `Side`."""
        from ..execution.registry import runs

        return facts(runs[name]) if name in runs else {}

    def play(self, name: str) -> Wire:
        """See `Side`."""
        from . import blind

        play = blind.latest(name)
        if play is None:
            return {}
        number = len(blind.plays(name)) - 1
        sealed = {"strategy": play.strategy, "predicted": play.predicted, "honest": play.honest}
        measured = {name: float(rate) for name, rate in play.measured.items()}
        drawn = {"attempt": number, "student": blind.student_now(), "numbers": play.case.numbers}
        return {"play": plain.pack({**drawn, **sealed, "measured": measured})}


def facts(run: Any) -> Wire:
    """Return everything that a check may ask about a run."""
    known: dict[str, Any] = {
        "state": str(run.state), "began": float(getattr(run, "began", math.nan)),
        "strategy": run.plan.strategy, "workers": run.plan.workers,
        "options": dict(run.plan.options), "recipe": run.plan.recipe.digest,
        "engines": len(run.engines),
    }  # fmt: skip
    if run.state == "finished":
        summary = run.summarise()
        known["figures"] = {name: _figure(getattr(summary, name)) for name in _FIGURES}
        columns = [name for name in COLUMNS if name in run.history]
        known["history"] = {name: np.asarray(run.history[name]) for name in columns}
        known["weights"] = _weights(run)
    return {"facts": plain.pack(known)}


def _figure(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_figure(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def _weights(run: Any) -> Any:
    try:
        found = run.weights()
    except (WorkbenchError, OSError, ValueError):
        return None
    size_bytes = sum(one.nbytes for one in found.values())
    return found if size_bytes <= _MOST_WEIGHTS_BYTES else None


def _as_if_of(run: Any, workers: int, sent_bytes: float) -> Any:
    """Return a run as it would be with this many workers, with gradients of the same size."""
    from ..history.store import RunHistory
    from ..shared.record import RECORD

    steps = len(plain.EXPOSED_S)
    rows = np.zeros((steps, workers), RECORD)
    rows["step"], rows["rank"] = np.arange(steps)[:, None], np.arange(workers)
    rows["start_s"] = rows["step"]
    rows["ready_s"], rows["end_s"] = rows["start_s"] + 0.5, rows["start_s"] + 1.0
    rows["samples"], rows["compute_s"], rows["sent_bytes"] = 8, 0.5, sent_bytes
    rows["exposed_s"] = np.array(plain.EXPOSED_S)[:, None]
    for name in ("wait_s", "staleness", "bubble_s"):
        rows[name] = math.nan
    rows["waited_for"] = -1
    made = copy.copy(run)
    made.history = RunHistory(range(workers))
    made.history.append(rows.reshape(-1))
    made.plan = replace(run.plan, workers=workers)
    return made


def _told(value: Any) -> Wire:
    return {"value": plain.pack(value), "words": _shown(value)}


def _shown(value: Any) -> str:
    try:
        words = plain.shown(value)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception:
        words = f"<{type(value).__name__}>"
    return words[:2000].encode("utf-8", "replace").decode("utf-8")


def _words(error: BaseException) -> str:
    try:
        return str(error)[:2000].encode("utf-8", "replace").decode("utf-8")
    except Exception:
        return ""
