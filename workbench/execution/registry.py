"""The runs and clusters of this process: `wb.runs`, names, and cleanup when the kernel exits.

`wb.load` brings a saved run back, with its history, evaluations and weights.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import PlanError, RunDamagedWarning, RunError, unknown
from ..history import disk, folders, store
from ..history.analysis.comparison import BASELINE
from ..history.analysis.rows import RUN_COLORS
from ..shared.events import Noted, Topic
from ..shared.plan import Plan
from .run import Run


class Closable(Protocol):
    """The methods of a cluster that are needed at the notebook's end."""

    @property
    def busy(self) -> object:
        """The current task, or the last one."""

    def release(self) -> None:
        """Release a kept cluster; stop any other cluster."""


class Runs(Mapping[str, Run]):
    """All runs by name or position: `runs["base"]`, `runs[-1]` (the newest run).

    If a new run has the name of an older run, the older run is renamed to `name@1`. It keeps its
    position.

    A thread can read the runs while another thread adds a run. The reading thread then does not see
    the new run.
    """

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}  # replaced, never changed
        self._lock = threading.Lock()
        self._colors: list[tuple[Hashable, set[Any], int]] = []

    def add(self, run: Run) -> None:
        """Keep a run under its name and give it a colour."""
        if run.color is None:
            run.color = self.color(run.plan)
        with self._lock:
            runs = self._runs
            older = runs.get(run.name)
            if older is not None:
                free = (f"{run.name}@{number}" for number in itertools.count(1))
                older.name = next(name for name in free if name not in runs)
                runs = {older.name if one is older else key: one for key, one in runs.items()}
            self._runs = {**runs, run.name: run}

    def remove(self, name: str) -> None:
        """Forget a run; its folder stays.

        Raises:
            PlanError: There is no run with this name, or the run has not ended.
        """
        run = self[name]
        if not run.is_over:
            raise PlanError(
                f"Run {name} has not ended.",
                seen=run.state,
                next_step=f"stop the run first: wb.runs[{name!r}].stop()",
                code="WB-PLAN-113",
            )
        with self._lock:
            self._runs = {key: one for key, one in self._runs.items() if one is not run}

    def clear(self) -> None:
        """Forget all runs; their folders stay."""
        with self._lock:
            self._runs, self._colors = {}, []

    def color(self, plan: Plan) -> int:
        """Return the colour number for a new run of a plan; the run keeps this colour.

        Runs on one device are grey (0). Each other run takes the next colour. Runs that differ only
        in the seed share a colour, because they are one row of a comparison.
        """
        if plan.strategy == BASELINE:
            return 0
        given = {key: value for key, value in plan.overrides.items() if key != "seed"}
        faults = [fault.text for fault in plan.faults]
        same = (plan.recipe.digest, plan.framework, plan.strategy, plan.workers,
                repr(sorted({**plan.options, **plan.values}.items())), repr(sorted(given.items())),
                repr(faults))  # fmt: skip
        seed = plan.overrides.get("seed")
        with self._lock:
            for key, seeds, known in reversed(self._colors):
                if key == same and seed not in seeds:
                    seeds.add(seed)
                    return int(known)
            number: int = 1 + len(self._colors) % (RUN_COLORS - 1)
            self._colors.append((same, {seed}, number))
            return number

    @property
    def latest(self) -> Run | None:
        """The newest run; None if there is no run."""
        return next(reversed(self._runs.values()), None)

    def __getitem__(self, name: str | int) -> Run:
        found = self._runs
        if isinstance(name, int):
            names = list(found)
            if -len(names) <= name < len(names):
                return found[names[name]]
        elif isinstance(name, str) and name in found:
            return found[name]
        raise MissingRunError(name, list(found))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        lines = [f"  {name}: {run!r}" for name, run in self._runs.items()]
        return "\n".join(["runs:", *lines]) if lines else "there are no runs yet"


class MissingRunError(KeyError, PlanError):
    """There is no run with this name."""

    def __init__(self, name: object, names: Sequence[str]) -> None:
        if not names:
            told = PlanError(
                "There is no run yet.",
                seen=name,
                next_step="run a cell that trains, for example with %%distributed mirrored",
                code="WB-PLAN-114",
            )
        elif isinstance(name, str):
            told = unknown("run", name, names)
        else:
            told = PlanError(
                "There is no run with this name or position.",
                seen=name,
                allowed=f"a name: {', '.join(sorted(names))}; or a position: -{len(names)} to "
                f"{len(names) - 1}, where -1 is the newest run",
                next_step="wb.runs.latest is the newest run",
                code="WB-PLAN-115",
            )
        PlanError.__init__(self, told.what, code=told.code, seen=told.seen, allowed=told.allowed,
                           next_step=told.next_step)  # fmt: skip

    def __str__(self) -> str:
        return str(self.args[0])


runs = Runs()
_clusters: list[Closable] = []
_told: list[str] = []
"""Printed with the first run only: the folder of the runs if it is not the user's folder."""
AWAKE = 10
"""Number of newest runs in memory; data of older runs is read from disk when needed."""


def new_run(
    plan: Plan,
    *,
    number: int,
    engines: Sequence[int],
    devices: Sequence[str],
    resume_from: str = "",
) -> Run:
    """Create a run with a folder and keep it in `runs`."""
    name = plan.name or plan.strategy
    initial = weights_folder(plan.init_from) if plan.init_from else ""
    with contextlib.suppress(OSError):  # a full or read-only disk: the run continues in memory
        folders.prune(protect=[run.folder for run in runs.values()])
    let_rest(newest=AWAKE - 1)
    folder = folders.new_run_dir(name)
    run = Run(
        plan, number=number, name=name, engines=engines, devices=devices, folder=folder,
        init_from=initial, resume_from=resume_from,
    )  # fmt: skip
    runs.add(run)
    if not _told and (words := folders.moved()):
        _told.append(words)
        run.note(words)
    return run


def let_rest(newest: int = AWAKE) -> None:
    """Free the memory of old runs, except a cluster's last run; their data is on disk."""
    last = [cluster.busy for cluster in _clusters]
    for run in list(runs.values())[:-newest]:
        if run not in last:
            run.rest()


def weights_folder(name: str) -> str:
    """Return the folder that holds a run's final weights.

    Raises:
        PlanError: There is no such run, or it has no final weights.
    """
    run = runs[name]
    if not any(run.folder.glob("weights*.npz")):
        raise PlanError(
            f"Run {name} has no final weights to start from.",
            seen=f"the run is {run.state}",
            allowed="a run that saved its weights when it finished or was stopped",
            next_step="use another run"
            if run.is_over
            else f"wait for the end of the run: wb.runs[{name!r}].wait()",
            code="WB-PLAN-116",
        )
    return str(run.folder)


def add_cluster(cluster: Closable) -> None:
    """Register a cluster, so that it ends with the process at the latest."""
    _clusters.append(cluster)


def remove_cluster(cluster: Closable) -> None:
    """Remove a cluster that is being stopped."""
    with contextlib.suppress(ValueError):
        _clusters.remove(cluster)


def running_clusters() -> list[Any]:
    """Clusters that have not been stopped."""
    return list(_clusters)


@atexit.register
def _stop_all() -> None:
    for cluster in running_clusters():
        with contextlib.suppress(Exception):
            cluster.release()


def load(path: str | Path) -> Run:
    """Return a run from the folder that `run.save(path)` wrote.

    `load` also reads the folder of a run whose notebook died, because the engines wrote every
    record into it. If files are damaged or missing, a warning and a note of the run name these
    files. The other files can still be used.

    Args:
        path: The run's folder.

    Raises:
        RunError: There is no run in this folder.
    """
    folder = Path(path)
    meta, history = store.read_run(folder)
    if "plan" not in meta:
        raise RunError(
            "The run cannot be loaded, because its folder does not contain run.json, the file with "
            "the run's settings.",
            seen=str(folder),
            code="WB-RUN-072",
        )
    run = Run(
        Plan.from_wire(meta["plan"]),
        number=int(meta.get("number", 0)),
        name=str(meta["name"]),
        engines=history.engines,
        devices=meta.get("devices", ()),
        folder=folder,
    )
    run.restore(history, meta)
    if damaged := _damage(run, meta):
        text = f"The loaded run is damaged: {'; '.join(damaged)}."
        history.event(Noted(rank=0, text=text, topic=Topic.DAMAGED, value=damaged))
        warnings.warn(RunDamagedWarning(_words(run, damaged), code="WB-WARN-002"), stacklevel=2)
    run.color = runs.color(run.plan)
    return run


def _damage(run: Run, meta: Mapping[str, Any]) -> list[str]:
    """Return the damage in a run's folder; for an older version only rows are checked."""
    found = disk.faults(run.folder, meta)
    if not found and run.state == "finished":
        rows = run.history.totals.rows
        found = [f"rank {rank} has no recorded step" for rank in range(len(rows)) if not rows[rank]]
    return found


def _words(run: Run, damaged: Sequence[str]) -> str:
    steps = run.history.totals.steps
    return (
        f"Run {run.name} is damaged on disk; figures, plots and comparisons show the undamaged "
        "part.\n"
        f"  seen:    {run.folder}: {'; '.join(damaged)} ({steps} complete steps can be read)\n"
        "  allowed: the unchanged files that Workbench wrote\n"
        "  next:    load another copy of the folder, or train again: run.to_cell() returns the cell"
    )
