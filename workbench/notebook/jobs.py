"""`wb.job`, `wb.submit`, `wb.follow`, `wb.jobs`: from the notebook to a job, and back.

A run, a plan or a cell becomes a folder (`job`), which torchrun starts anywhere. `submit` gives the
folder to a platform, and `follow` shows the run while it trains there.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..cookbook.recipe import Recipe
from ..errors import PlanError, RunError, nearest, unknown
from ..execution import registry
from ..execution.allocator import notebook_framework
from ..execution.requests import to_recipe
from ..execution.run import Run
from ..export.envelopes import JobFacts, Resources, write_envelope
from ..export.folder import JobFolder, job_of, read_job
from ..export.published import ENVELOPES
from ..history.folders import runs_root
from ..jobs.followed import BEGIN_S, LOOK_S, FollowedJob
from ..jobs.followed import follow as follow_place
from ..jobs.submitted import Submitted, jobs
from ..shared.members import Member
from ..shared.plan import Plan, plan_of
from ..shared.run_request import ARGUMENTS, from_arguments
from ..views.blocks import Blocks, in_notebook, notebook_publisher, show
from ..views.output import OutputBoard
from ..views.text import nothing_done
from .run_view import RunView
from .session import session

What = Plan | Run | Recipe | str | Callable[..., Any]
FOLDERS = "jobs"
"""Folder next to the runs, for jobs that were submitted without a folder name."""
ENVELOPE_OF = {"kubernetes": "trainjob", "local": ""}
"""The job file of a platform's client if it has another name; empty: the client takes no file."""
DRAW_S, STILL_S = 0.5, 2.0
"""Shortest and longest time between two frames of a dashboard."""
MOST_RANKS = 16
"""The rank whose output is shown below a dashboard; `run.printed(rank)` has that of each rank."""
OUTPUT_BYTES = 64 << 10
"""Size of the output that the notebook keeps, at most twice this."""
_RESOURCES = frozenset(one.name for one in fields(Resources))


def job(
    what: What,
    folder: str | os.PathLike[str],
    *,
    on: str | Sequence[str] = (),
    plain: bool = False,
    files: Sequence[str | os.PathLike[str]] = (),
    replace: bool = False,
    strategy: str = "",
    args: tuple[Any, ...] = (),
    **asked: Any,
) -> Path:
    """Write a job folder, from which torchrun or a platform can start the training.

    Args:
        what: A run to repeat, a plan, the source of a cell, or a function.
        folder: The job folder. If it already holds a job, the job is overwritten, but its runs
            stay.
        on: Platforms for which their files are also written: `slurm`, `trainjob`, `ray`,
            `skypilot`, ...
        plain: Whether to write a script that does not use Workbench; its runs are not recorded.
        files: Files that the cell reads. They are copied next to the script.
        replace: Whether to overwrite a `train.py` that was changed by hand.
        strategy: The strategy, if `what` is a source or a function.
        args: The arguments, if `what` is a function.
        asked: Resources on the platforms (`nodes=2, partition="gpu"`), and further arguments of
            `cluster.run` (`workers=4, epochs=2`).

    Returns:
        The path of the folder.

    Raises:
        PlanError: The cell cannot run outside of the notebook, or the platform cannot run it.
    """
    resources, rest = _parted(asked)
    names = (on,) if isinstance(on, str) else on
    platforms = [found for name in names if (found := ENVELOPE_OF.get(name, name))]
    for name in platforms:
        if name not in ENVELOPES:
            raise unknown("platform", name, ENVELOPES)
    told: dict[str, Any] = {"plain": plain, "files": [Path(f) for f in files], "replace": replace}
    planned = _planned(what, strategy, args, rest)
    if isinstance(planned, Plan) and planned.init_from:
        told["initial"] = Path(registry.weights_folder(planned.init_from))
    path = job_of(planned, folder, names=_names(), **told)
    for name in platforms:
        _envelope(name, path, resources)
    return path


def job_line(folder: Path) -> str:
    """Return the text about a written job folder: how to start the job."""
    known = read_job(folder)
    processes = int(known.launch["processes"])
    start = f"torchrun --standalone --nproc-per-node {processes} train.py"
    if known.plan.framework != "torch":
        start = "python train.py" if processes == 1 else "workbench run ."
    near = os.path.relpath(folder)
    name = os.fspath(folder) if near.startswith("..") else near
    nodes = 2 if processes % 2 == 0 else 1
    return (
        f"The job is in {name}. To start the job, run in this folder:\n    {start}\n"
        f"To submit the job to a platform instead, run in this notebook:\n    "
        f"wb.submit({name!r}, on='slurm', nodes={nodes})\n"
        + ("The job is not recorded because it runs without Workbench." if known.plain else
           f"To follow a job that you started in this folder, run in this notebook:\n    "
           f"wb.follow({name!r})")
    )  # fmt: skip


def submit(
    what: What | os.PathLike[str],
    on: str,
    *,
    folder: str | os.PathLike[str] = "",
    follow: bool = True,
    plot: str = "auto",
    venv: str | os.PathLike[str] | None = None,
    address: str = "",
    context: str = "",
    **asked: Any,
) -> Submitted:
    """Submit a job to a platform, and show its run below the cell when the run begins.

    Args:
        what: A value as for `wb.job`, or the path of a job folder.
        on: `slurm`, `ssh`, `ray`, `kubernetes`, `skypilot` or `local`.
        folder: The job folder; by default a new folder in Workbench's data folder. Under Slurm all
            nodes must see this folder.
        follow: Whether to wait until the run begins, and then show it. An interrupt ends only this
            wait. A job with `plain` is not recorded, so `submit` does not wait for it.
        plot: How the run is shown, as for `--plot`.
        venv: For `slurm` and `ssh`: a virtual environment that exists on the nodes. Under Slurm the
            default is the environment of the notebook. If it is empty, the job makes an environment
            from its requirements.
        address: The address of a Ray cluster; by default the environment variable
            `RAY_ADDRESS`.
        context: The context of `kubectl`; by default the current context.
        asked: Arguments as for `wb.job`: `nodes=2, time_s=600, partition="gpu"`, `strategy=`,
            `workers=`.

    Returns:
        The job, with `.state`, `.reason`, `.logs()`, `.cancel()` and `.follow()`. It is also in
        `wb.jobs`.

    Raises:
        PlanError: The job or a setting is not valid.
        ClusterError: The platform's client is missing or refuses the job.
    """
    resources, rest = _parted(asked)
    path = given = _folder_of(what)
    if path is None:
        path = Path(folder) if folder else _new_folder(what)
        job(what, path, **rest)  # type: ignore[arg-type]
    elif rest or folder:
        rest |= {"folder": folder} if folder else {}
        raise PlanError(
            "These arguments have no effect because the folder already defines the job.",
            seen=", ".join(rest),
            allowed="resources: " + ", ".join(sorted(_RESOURCES)),
            next_step="write the folder again with these arguments: wb.job(...)",
            code="WB-PLAN-198",
        )
    named = read_job(path).plan.name or (path.resolve().name if folder or path == given else "")
    if name := ENVELOPE_OF.get(on, on):
        _envelope(name, path, resources)
    if venv is None and on == "slurm":
        venv = sys.prefix
    options = {"venv": os.fspath(venv or ""), "address": address, "context": context}
    given_options = {k: v for k, v in options.items() if v}
    handed = jobs.submit(path, on, resources, name=named, **given_options)
    if follow and read_job(path).plain:
        sys.stdout.write(
            "The job runs without Workbench, so its training cannot be shown here. "
            f"wb.jobs[{handed.name!r}] shows the job's state and its logs.\n"
        )
    elif follow:
        try:
            _show_when_begun(handed, plot)
        except KeyboardInterrupt:
            sys.stdout.write(
                f"The job continues. To show its run: wb.jobs[{handed.name!r}].follow()\n"
            )
    return handed


def follow(
    place: str | os.PathLike[str] | Sequence[str] | Submitted,
    *,
    plot: str = "auto",
    wait_s: float | None = BEGIN_S,
    control: Sequence[str] | None = None,
) -> FollowedJob:
    """Show a run of another machine or process, with all methods of a run of this notebook.

    The records arrive with a delay of at most two seconds. They are read from the beginning of the
    run, so no record is missing if the notebook was closed meanwhile. Stop, Pause, single steps and
    faults are sent to the run.

    Args:
        place: The folder of a job or of a run; `ssh://[user@]host[:port]/folder`; a command whose
            output contains the records as marked lines, such as `kubectl logs -f POD`; or a
            submitted job.
        plot: How the run is shown, as for `--plot`.
        wait_s: How many seconds to wait for a run that has not begun; None waits without a limit.
        control: If `place` is a command: the command that sends orders to the run.

    Returns:
        The run, which is running or has ended. It is also in `wb.runs`.

    Raises:
        RunError: There is no run, the run did not begin in time, or its place cannot be reached.
        PlanError: The place is not valid.
    """
    if isinstance(place, Submitted):
        return _show_when_begun(place, plot)
    if isinstance(place, os.PathLike):
        place = os.fspath(place)
    run = follow_place(place, wait_s=wait_s, control=control)
    _show(run, plot)
    return run


class Printed:
    """The output of a followed job's ranks and its error, below its dashboard.

    The data comes from another machine, so only the end of long outputs is kept.
    """

    def __init__(self, run: FollowedJob) -> None:
        ranks = range(min(len(run.engines), MOST_RANKS))
        self._run, self._blocks = run, Blocks()
        self._board = OutputBoard({rank: Member.of_ranks(rank) for rank in ranks})
        self._at = dict.fromkeys(ranks, 0)  # bytes taken so far
        self._kept = dict.fromkeys(ranks, 0)
        self._words = {rank: getincrementaldecoder("utf-8")("replace") for rank in ranks}
        self._looked_s = float("-inf")

    def update(self, final: bool = False) -> None:
        """Show the output of the last second, or all output."""
        now = time.monotonic()
        if not final and now - self._looked_s < 1.0:
            return
        self._looked_s = now
        came = [rank for rank in self._at if self._take(rank)]
        if final and self._run.error is not None:
            self._board.say_with_it(str(self._run.error))
        if came or final:
            self._blocks.update(self._board, final=final)

    def _take(self, rank: int) -> bool:
        path, at = self._run.output_of(rank), self._at[rank]
        try:
            size = path.stat().st_size
            if size <= at:
                return False
            with path.open("rb") as file:
                file.seek(max(at, size - OUTPUT_BYTES))
                packed = file.read(OUTPUT_BYTES)
        except OSError:
            return False
        missed = size - OUTPUT_BYTES > at
        if missed or self._kept[rank] > OUTPUT_BYTES:
            self._board.message(rank, "clear_output", {"wait": False})
            self._say(rank, f"... earlier output is in {path}\n")
            self._kept[rank] = 0
        self._at[rank] = size
        self._kept[rank] += len(packed)
        self._say(rank, self._words[rank].decode(packed))
        return True

    def _say(self, rank: int, text: str) -> None:
        self._board.message(rank, "stream", {"name": "stdout", "text": text})


class JobView(RunView):
    """The dashboard of a followed job; its figures and its output stay below it."""

    def __init__(self, run: FollowedJob, plot: str) -> None:
        self._printed, self._followed = Printed(run), run
        self._drawn: tuple[Any, ...] = ()
        self._drawn_s = time.monotonic()
        self._table = notebook_publisher() if in_notebook() and plot != "off" else None
        super().__init__(run, plot)

    def _draw(self) -> None:
        """Draw new data. Rows arrive several times a second, and pictures are expensive."""
        run, now = self._followed, time.monotonic()
        seen, since_s = (run.heard, run.state, run.banner), now - self._drawn_s
        if since_s > DRAW_S and (seen != self._drawn or since_s > STILL_S):
            self._drawn, self._drawn_s = seen, now
            super()._draw()
        self._printed.update()

    def _finish(self) -> None:
        super()._finish()
        self._printed.update(final=True)
        if self._table is not None and self.run.history.totals.steps:
            bundle = self.run.summary()._repr_mimebundle_()
            self._table(bundle, f"workbench-job-{uuid.uuid4().hex}", False)


def _show(run: FollowedJob, plot: str) -> None:
    if not run.is_over:
        JobView(run, plot).follow()
        return
    if not nothing_done(run.snapshot()):
        show(run.plot())
    Printed(run).update(final=True)
    if run.history.totals.steps:
        show(run.summary())


def _show_when_begun(handed: Submitted, plot: str = "auto") -> FollowedJob:
    """Show the platform's state of a job until its run begins, then show the run."""
    said = ""

    def gone() -> str:
        nonlocal said
        now = handed.look()
        words = f"{handed.name} ({handed.platform} {handed.id}): {now.state}"
        words += f", {now.reason}" if now.reason and now.state == "pending" else ""
        if words != said and now.state == "pending":
            said = words
            sys.stdout.write(f"{words}\n")
        return (now.reason or now.state) if now.state in ENDED else ""

    gone()
    try:
        run = follow_place(_place_of(handed, gone), wait_s=None, gone=gone)
    except RunError as error:
        if handed.look().state != "failed":
            raise
        raise RunError(
            f"Job {handed.name} failed before its run began.",
            seen=f"{handed.look().reason or error.seen}\n"
            f"End of the job's output:\n{handed.logs(20)}",
            next_step="fix the error and submit the job again",
            code="WB-RUN-107",
        ) from error
    _show(run, plot)
    return run


def _place_of(handed: Submitted, gone: Callable[[], str]) -> Any:
    """Return the place of the job's run; if the folder has older runs, after the run has begun."""
    has_older = handed.ticket.extra.get("runs_before", "0") != "0"
    while has_older and str(handed.place) == str(handed.folder) and not gone():
        time.sleep(LOOK_S)
    return handed.place


jobs.follower = lambda handed: _show_when_begun(handed)
ENDED = ("failed", "cancelled", "finished")
# The package with the same name is imported by now, and `wb.jobs` would be this package.
vars(sys.modules["workbench"])["jobs"] = jobs


# -- from the arguments -----------------------------------------------------------------


def _parted(asked: Mapping[str, Any]) -> tuple[Resources, dict[str, Any]]:
    """Return the resources among the arguments, and the rest."""
    given = {name: value for name, value in asked.items() if name in _RESOURCES}
    for name in ("hosts", "secrets"):
        if isinstance(given.get(name), (list, str)):
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    return Resources(**given), {n: value for n, value in asked.items() if n not in _RESOURCES}


def _planned(
    what: What, strategy: str, args: tuple[Any, ...], asked: Mapping[str, Any]
) -> Plan | Run:
    if isinstance(what, (Plan, Run)):
        for name in asked:
            if name not in ARGUMENTS and nearest(name, _RESOURCES) is not None:
                raise unknown("resource", name, _RESOURCES)
        if asked or strategy:
            raise PlanError(
                "A run or a `Plan` object already has its strategy and settings, so you cannot "
                "give them again.",
                seen=", ".join([*(["strategy"] if strategy else []), *asked]),
                allowed="resources: " + ", ".join(sorted(_RESOURCES)),
                next_step="pass the cell's source or a function, and add strategy='mirrored'",
                code="WB-PLAN-199",
            )
        return what
    if isinstance(what, str) and what in registry.runs:
        return _planned(registry.runs[what], strategy, args, asked)
    if not strategy:
        raise PlanError(
            "There is no run with this name. If you passed a cell's source, add a strategy."
            if isinstance(what, str) and "\n" not in what
            else "The job has no strategy.",
            seen=what if isinstance(what, str) else getattr(what, "__name__", type(what).__name__),
            allowed="a run, a run's name, or a plan. If you also pass a strategy (such as "
            "strategy='mirrored'), a cell's source or a function is allowed, too. wb.submit also "
            "takes the path of a job folder",
            next_step="wb.job(source, folder, strategy='mirrored', workers=2)",
            code="WB-PLAN-200",
        )
    cluster = session.cluster
    return plan_of(
        from_arguments(strategy, asked),
        to_recipe(what, args),
        framework=notebook_framework(),
        workers=2 if cluster is None else max(1, len(cluster.worker_ids)),
    )


def _names() -> Mapping[str, object] | None:
    """Return the notebook's namespace, for errors about names; None outside a notebook."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return None if shell is None else shell.user_ns


def _envelope(name: str, path: Path, resources: Resources) -> list[Path]:
    known = read_job(path)
    return write_envelope(name, path, _facts(known), resources)


def _facts(known: JobFolder) -> JobFacts:
    return JobFacts(
        name=known.name,
        framework=known.plan.framework,
        workers=int(known.launch["workers"]),
        servers=int(known.launch["servers"]),
        processes=int(known.launch["processes"]),
        python=str(known.pins.get("python", "")),
        packages=dict(known.pins.get("packages") or {}),
        plain=known.plain,
    )


def _folder_of(what: object) -> Path | None:
    """Return the named job folder; None if the argument is not a folder."""
    if isinstance(what, os.PathLike):
        return Path(what)
    if isinstance(what, str) and "\n" not in what and what not in registry.runs:
        path = Path(what).expanduser()
        return path if path.is_dir() else None
    return None


def _new_folder(what: object) -> Path:
    name = getattr(what, "name", "") or getattr(what, "__name__", "") or "job"
    root = runs_root().parent / FOLDERS
    stamp = time.strftime("%Y%m%d-%H%M%S")
    found = root / f"{''.join(c if c.isalnum() or c in '-_' else '-' for c in name)[:40]}-{stamp}"
    return found
