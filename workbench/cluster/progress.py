"""The progress of a start of engines: stages in a fixed order, a share of the whole, and a text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

log = logging.getLogger("workbench.cluster")

Stage: TypeAlias = Literal[
    "controller", "job", "queue", "hosts", "framework", "fork", "connect", "ready"
]

_BEGINS: dict[Stage, float] = {
    "controller": 0.0, "job": 0.6, "queue": 0.61, "hosts": 0.62, "framework": 0.66,
    "fork": 0.7, "connect": 0.8, "ready": 1.0,
}  # fmt: skip
"""Share of a cold start that is over when a stage begins; where all was prepared ahead the first
ones take no time, and `job`, `queue` and `hosts` are of engines on other machines. Measured with 4
PyTorch engines on 2 cores: they measure time, not numbers of things. The wait in a queue is
unknown, so it does not change the share (`endless`).
"""
_ORDER = tuple(_BEGINS)
_CONTROLLER = "ipyparallel's controller"


@dataclass(frozen=True)
class Progress:
    """One moment of a start; as text it is what the notebook's line says.

    Attributes:
        stage: `controller` (ipyparallel's starts, while the warm parent imports the framework),
            `job` (a launcher is asked for hosts), `queue` (the job waits for its turn), `hosts`
            (they report), `framework` (only the import is waited for), `fork`, `connect` (engines
            register), `ready`.
        done, total: Within the stage: hosts that reported, engines forked or connected, of how
            many.
        text: In words: `connecting engines: 3 of 8`.
    """

    stage: Stage
    done: int
    total: int
    text: str

    @property
    def fraction(self) -> float:
        """Share of the start that is over, 0..1; never falls during one start."""
        if self.stage == "ready":
            return 1.0
        begins, ends = _BEGINS[self.stage], _BEGINS[_ORDER[_ORDER.index(self.stage) + 1]]
        return begins + (ends - begins) * min(1.0, self.done / max(1, self.total))

    @property
    def endless(self) -> bool:
        """Whether the duration of this stage is unknown."""
        return self.stage == "queue"

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
            "fraction": round(self.fraction, 4),
            "endless": self.endless,
            "text": self.text,
        }

    def __str__(self) -> str:
        return self.text


Report: TypeAlias = Callable[[Progress], object]


def quiet(progress: Progress) -> None:
    """Tell nobody."""


def steady(report: Report) -> Report:
    """Return a report that skips repetitions and whose errors do not stop the start."""
    last: list[Progress] = []

    def tell(progress: Progress) -> None:
        if last == [progress]:
            return
        last[:] = [progress]
        try:
            report(progress)
        except Exception:
            log.exception("A listener failed on: %s", progress)

    return tell


def preparing(controller: bool, client: bool, imports: str) -> Progress:
    """Return the stage in which controller and framework are made ready, side by side.

    Args:
        controller: Whether the controller's process runs.
        client: Whether it has answered us.
        imports: The framework that the warm parent still imports; empty: none.
    """
    parts = [] if client else [f"{'waiting for' if controller else 'starting'} {_CONTROLLER}"]
    parts += [f"importing {imports}"] if imports else []
    done = controller + client + (not imports)
    return Progress("controller", done, 3, ", ".join(parts) or f"{_CONTROLLER} is ready")


def asking(what: str) -> Progress:
    """Return the stage in which a launcher is asked for hosts.

    Args:
        what: In words: `asking Slurm for a job`, `connecting to 3 hosts`.
    """
    return Progress("job", 0, 1, what)


def queued(state: str, reason: str = "", position: int = 0, waited_s: float = 0.0) -> Progress:
    """Return the stage in which a job waits for its turn.

    Args:
        state, reason: The job's state and its reason, in the scheduler's words.
        position: The place of the job among the waiting jobs; 0: not known.
    """
    parts = [state.lower() or "waiting", f"({reason})" if reason else ""]
    place = f", at position {position}" if position else ""
    waited = f", {_waited(waited_s)} so far" if waited_s >= 1 else ""
    return Progress(
        "queue", 0, 1, f"job in the queue: {' '.join(filter(None, parts))}{place}{waited}"
    )


def _waited(seconds: float) -> str:
    """Return a time to the second; its changes show that the start is still running."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if hours or minutes else ""]
    return " ".join(filter(None, [*parts, f"{whole % 60} s"]))


def hosts(found: int, wanted: int) -> Progress:
    """Return how many hosts have reported; `wanted` is 0 while the number is unknown."""
    of = f" of {wanted}" if wanted else ""
    return Progress("hosts", found, wanted, f"hosts that answer: {found}{of}")


def importing(framework: str) -> Progress:
    """Return the stage in which the warm parent imports the framework."""
    return Progress("framework", 0, 1, f"importing {framework}")


def starting(count: int) -> Progress:
    """Return the stage in which engines are started, of which none is yet."""
    return Progress("fork", 0, count, f"starting {count} engine{'s' if count != 1 else ''}")


def forked(done: int, total: int) -> Progress:
    """Return how many engines exist as processes."""
    return Progress("fork", done, total, f"starting engines: {done} of {total}")


def connected(done: int, total: int) -> Progress:
    """Return how many engines have registered with the controller."""
    return Progress("connect", done, total, f"connecting engines: {done} of {total}")


def ready(count: int) -> Progress:
    """Return the end of a start."""
    return Progress("ready", count, count, f"{count} engine{'s' if count != 1 else ''} ready")
