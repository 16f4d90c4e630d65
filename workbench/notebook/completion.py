"""The names that Tab and `dir` offer for a run, a cluster and a history: those for users.

These classes have more methods, which other parts of Workbench call.
"""

from __future__ import annotations

from typing import Any

from ..execution.run import Run
from ..history.store import RunHistory
from ..session.cluster import Cluster

OFFERED: dict[type, tuple[str, ...]] = {
    Run: (
        "name", "plan", "state", "is_over", "error", "history", "evals", "events", "recoveries",
        "faults", "results", "engines", "devices", "folder", "wait", "stop", "pause", "resume",
        "step", "scale", "inject", "interrupt", "weights", "load_into", "save", "discard", "log_to",
        "summary", "summarise", "plot", "blame", "what_if", "predict", "step_picture", "trace",
        "profiles", "to_cell", "to_job", "meta", "clock_bound_s", "trained_before",
    ),
    Cluster: (
        "run", "execute", "push", "pull", "stop", "restart", "add", "free", "status", "logs",
        "stacks", "debug", "queue", "use", "release", "ids", "worker_ids", "is_busy", "engines",
    ),
    RunHistory: (
        "columns", "totals", "evals", "changes", "phases", "stride", "unmeasured", "together",
        "to_pandas", "keys", "items", "values", "get",
    ),
}  # fmt: skip


def limit_completion() -> None:
    """Let `dir` list only the names for users; the other names can still be called."""
    for kind, names in OFFERED.items():
        kind.__dir__ = _lister(names)  # type: ignore[method-assign]


def _lister(names: tuple[str, ...]) -> Any:
    def listed(self: object) -> list[str]:
        return list(names)

    return listed
