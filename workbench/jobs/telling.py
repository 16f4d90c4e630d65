"""A run's output for programs: figures, progress lines, comparison with another run.

`ABOUT`, `METRICS`, `PROGRESS` and `END` are the keys of the JSON that `workbench run`, `compare`
and `follow` print, `JOB` those of `workbench jobs`; `docs/programs.md` has them as tables.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import PlanError, WorkbenchError
from ..shared.events import OVER

if TYPE_CHECKING:
    from ..execution.run import Run
    from ..history.analysis.summary import RunSummary
    from ..history.snapshot import Snapshot
    from .submitted import Submitted

WELL, FAILED, NOT_CHECKED, INTERRUPTED = 0, 1, 2, 130
"""Exit status of the commands."""
LINE_S = 1.0
"""Shortest time between two lines of progress."""
FORMAT = "workbench-job/1"
_ALIVE_S = 30.0

ABOUT = {
    "run": "the run's name. If the command reads several runs with the same name, the first run "
    "keeps its name. Workbench adds a number to the names of the other runs: `train (2)`",
    "name": "the run's own name. Unlike `run`, it never contains a number that Workbench added",
    "place": "the place of the run, as you wrote it in the command. One exception: inside the key "
    "`figures`, `place` is the run folder. The last line of `workbench run --json` and of "
    "`workbench follow --json` has this key",
    "folder": "the run folder that was read",
    "strategy": "the name of the strategy",
    "framework": "`torch` or `tensorflow`",
    "state": "`finished`, `stopped` or `failed`; if the run has not ended, `running` or another "
    "state",
    "error": "the error of a failed run",
    "seed": "the run's seed, if you gave one",
    "diverged": "whether the loss became NaN or infinite",
}
"""The description of a run, by key of the JSON; these values are not compared between runs."""

METRICS = {
    "workers": "number of workers",
    "steps": "number of steps that every worker completed; under asynchronous strategies, the "
    "largest number of steps that one worker took",
    "warm_up_steps": "number of warm-up steps at the start of the run. `all_samples_per_s` "
    "includes these steps. All other rates, step times and `..._share` values do not include these "
    "steps",
    "samples_per_s": "samples per second of all workers together, after the warm-up steps",
    "samples_per_s_low": "lower end of the 95 % interval of `samples_per_s`",
    "samples_per_s_high": "upper end of the 95 % interval of `samples_per_s`",
    "all_samples_per_s": "samples per second of all workers together, over all steps",
    "step_s": "mean duration of a worker's step in seconds, after the warm-up steps",
    "step_median_s": "median duration of a worker's step in seconds, after the warm-up steps",
    "wall_s": "seconds from the start of the first step to the end of the last step, without "
    "pauses",
    "data_wait_share": "fraction of a step's time that the worker spends waiting for data, "
    "from 0 to 1",
    "compute_share": "fraction of a step's time that the worker spends computing",
    "sync_wait_share": "fraction of a step's time that the worker spends waiting for other workers",
    "bubble_share": "fraction of a step's time in which a stage of a pipeline has nothing to do",
    "transfer_share": "fraction of a step's time that the worker spends communicating",
    "other_share": "the remaining fraction of a step's time",
    "sent_bytes_per_step": "bytes that all workers together send in a step",
    "sent_bytes": "bytes that all workers have sent in the whole run",
    "memory_bytes_per_worker": "bytes of the model, the gradients and the optimizer state, on the "
    "worker that holds the most bytes",
    "staleness_mean": "mean number of updates by other workers between a worker's pull and its "
    "push, in asynchronous strategies",
    "loss": "the loss of the last step",
}
"""Figures of a run; those of its last evaluation are `eval_NAME`. A value that was not measured is
null."""

PROGRESS = {
    "event": "`progress`",
    "t": "the time at which the line was printed, in seconds since 1970",
    "state": "`pending`, `starting`, `running`, `paused`, `stopping`, ...",
    "step": "number of steps that every worker completed; under asynchronous strategies, the "
    "largest number of steps that one worker took",
    "total_steps": "the total number of steps; null while it is unknown",
    "loss": "the loss of the latest step",
    "samples_per_s": "samples per second of all workers together, over the last few seconds",
    "compute_share": "fraction of the workers' time that they spend computing, from 0 to 1",
    "sync_wait_share": "fraction of the workers' time that they spend waiting for each other, "
    "from 0 to 1",
    "slow_rank": "the rank of the worker for which the others wait; null if there is no straggler",
}

JOB = {
    "name": "the job's name in `wb.jobs` and in the commands",
    "platform": "`slurm`, `ray`, ...",
    "id": "the name or number that the platform gave to the job",
    "state": "`pending`, `running`, `finished`, `failed`, `cancelled`, or `unknown`",
    "reason": "the reason for the state, in the platform's words",
    "over": "whether the job is over",
    "folder": "the job's folder on this machine",
    "submitted_s": "the time at which the job was submitted, in seconds since 1970",
    "began_s": "the time at which the job began to run, in seconds since 1970; null if it has not "
    "begun, or if the time is not known",
}
"""A submitted job."""

END = {
    "event": "`end`",
    "t": "the time at which the line was printed, in seconds since 1970",
    "state": "`finished`, `stopped` or `failed`",
    "error": "the run's error; null if there is none",
    "folder": "the run's folder; null if nothing was recorded",
    "figures": "the run's description and measured values, with the keys of the table \"Keys of a "
    'run"; null if nothing was recorded',
    "exit_code": "the exit status of the command",
}


def error_wire(error: WorkbenchError) -> dict[str, Any]:
    """Return an error as JSON-ready data."""
    seen = error.seen
    if seen is not None and not isinstance(seen, int):  # a float can be one that JSON does not have
        seen = str(seen)
    return {"code": error.code, "what": error.what, "seen": seen,
            "allowed": error.allowed, "next": error.next_step}  # fmt: skip


def say(text: object, stream: TextIO | None = None) -> None:
    """Print a line at once, by default on standard output.

    Terminal control sequences are left out, because names, errors and logs can come from other
    users.
    """
    stream = stream or sys.stdout
    stream.write("".join(c if c.isprintable() or c in "\n\t" else " " for c in f"{text}\n"))
    stream.flush()


def print_json(data: Mapping[str, Any]) -> None:
    """Print an object as one line of JSON."""
    say(json.dumps(data, default=str, allow_nan=False))


def _number(value: float | None) -> float | int | None:
    """Return a number for JSON: null if it was not measured."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else float(f"{value:.9g}")


# -- places ----------------------------------------------------------------------------------------


def is_job(folder: Path) -> bool:
    """Whether a folder is a job folder, as `run.to_job(DIR)` writes it."""
    return description(folder).get("format") == FORMAT


def description(folder: Path) -> dict[str, Any]:
    """Return a folder's `run.json`; empty if it is missing or cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "run.json").read_text("utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders of a job, or of a recorded script, the newest last."""
    for root in (folder / "runs", folder):
        found = [one for one in root.glob("*") if one.name.isdecimal() and one.is_dir()]
        if found:
            return sorted(found, key=lambda one: int(one.name))
    return []


def run_folder(place: str | Path) -> Path:
    """Return the run folder for a place on this machine's disks.

    Args:
        place: A run folder, or a job folder, which means its newest run.

    Raises:
        PlanError: The place does not exist, or is a job that has not run yet.
    """
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise PlanError(
            "There is no such folder.",
            seen=str(place),
            allowed="a run folder, a job folder, or a folder that run.save(path) wrote",
            next_step="copy the folder to this machine: this command reads only local folders"
            if "://" in str(place)
            else f"check the path; the current folder is {Path.cwd()}",
            code="WB-PLAN-249",
        )
    if runs := runs_in(folder):
        return runs[-1]
    if is_job(folder):
        raise PlanError(
            "This job has not run yet.",
            seen=str(place),
            next_step=f"run the job first: workbench run {shlex.quote(str(place))}",
            code="WB-PLAN-250",
        )
    return folder


def load_place(place: str | Path) -> tuple[Run, Path]:
    """Return a run with its folder; damage is reported on standard error."""
    import warnings

    from ..execution.registry import load

    folder = run_folder(place)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = load(folder)
    for one in told:
        say(one.message, sys.stderr)
    return run, folder


def state_of(run: Run, folder: Path) -> str:
    """Return a run's state; a run without a recorded end can still be alive."""
    state = str(description(folder).get("state", run.state))
    if state in OVER:
        return run.state
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        alive = json.loads((folder / "alive").read_text("utf-8"))
        if abs(time.time() - float(alive["t"])) < _ALIVE_S:
            return state
    return run.state


# -- compare ---------------------------------------------------------------------------------------


def figures(run: Run, *, place: str = "", state: str = "") -> dict[str, Any]:
    """Return a run as JSON-ready data: keys of `ABOUT` and `METRICS`, and evaluation metrics."""
    return figures_of(run, run.summarise(), place=place, state=state)


def figures_of(run: Run, summary: RunSummary, *, place: str, state: str) -> dict[str, Any]:
    from ..history.analysis.comparison import records
    from ..history.analysis.rows import row_of

    row = row_of([summary], [summary], has_one_device=False)
    known = records([row], list(row.evals))[0]
    known |= {"loss": known["final_loss"], "step_median_s": _median_step_s(run, summary)}
    evals = [f"eval_{name}" for name in row.evals]
    about = {
        "run": run.name,
        "name": run.name,
        "place": place or str(run.folder),
        "folder": str(run.folder.absolute()),
        "strategy": summary.strategy,
        "framework": summary.framework,
        "state": state or run.state,
        "error": None if run.error is None else run.error.what,
        "seed": summary.seed,
        "diverged": summary.diverged,
    }
    return about | {name: _number(known[name]) for name in (*METRICS, *evals)}  # type: ignore[arg-type]


def _median_step_s(run: Run, summary: RunSummary) -> float:
    import numpy as np

    columns = run.history.together("step", "step_s")
    first = columns["step"].min() if len(columns["step"]) else 0
    late = columns["step_s"][columns["step"] >= first + summary.warm_up]
    known = late[np.isfinite(late)]
    return float(np.median(known)) if len(known) else math.nan


_COMPARED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*(\S.*?)\s*(<=|>=|<|>)\s*(\S+?)(\s+abs)?\s*")


@dataclass(frozen=True)
class Condition:
    """A condition that makes a comparison fail if it holds.

    Attributes:
        metric: A key of `METRICS`, or `eval_NAME`.
        than: `<`, `<=`, `>` or `>=`.
        absolute: Whether the limit is a value, and not a ratio to the first run.
    """

    text: str
    metric: str
    than: str
    limit: float
    absolute: bool

    def check(self, first: Mapping[str, Any], later: Mapping[str, Any]) -> Checked:
        """Compare a run with the first one."""
        who = _called(later)
        value, base = later.get(self.metric), first.get(self.metric)
        if later["state"] not in OVER:
            return self._told(later, None, None, f"{who} has not ended")
        if self.metric == "loss" and value is None and later["diverged"]:
            return self._told(later, None, True, f"the loss of {who} became NaN or infinite")
        if value is None:
            return self._told(later, None, None, f"{self.metric} of {who} was not measured")
        if not self.absolute:
            if first is not later and first["state"] not in ("finished", "stopped"):
                words = f"the state of the first run, {first['place']}, is {first['state']}"
                return self._told(later, None, None, words)
            if not base:
                words = "was not measured" if base is None else "is 0, so there is no ratio"
                return self._told(later, None, None, f"{self.metric} of {first['place']} {words}")
            value = value / base
        held = _COMPARED[self.than](value, self.limit)
        what = f"the value of {who}" if self.absolute else f"the ratio of {who} to the first run"
        return self._told(later, value, held, f"{what} is {value:.4g}")

    def _told(
        self, later: Mapping[str, Any], value: float | None, held: bool | None, why: str
    ) -> Checked:
        kind = "value" if self.absolute else "ratio"
        return Checked(self.text, later["run"], later["place"], kind, _number(value), held, why)


@dataclass(frozen=True)
class Checked:
    """The result of one condition for one run.

    Attributes:
        kind: `ratio` (to the first run) or `value`.
        value: The compared value; None if there was none.
        held: Whether the condition holds, so the comparison fails; None if it could not be checked.
        why: The reason in words.
    """

    condition: str
    run: str
    place: str
    kind: str
    value: float | int | None
    held: bool | None
    why: str

    @property
    def sentence(self) -> str:
        """The check in words."""
        if self.held is None:
            return f"{self.condition}: not checked: {self.why}"
        return f"{self.condition}: {'TRUE' if self.held else 'false'}: {self.why}"


def _called(one: Mapping[str, Any]) -> str:
    """Return the name for a run, with its place if the name alone does not say which run it is."""
    numbered = one["run"] != one.get("name", one["run"])
    return f"{one['run']} in {one['place']}" if numbered else str(one["run"])


def parse_condition(text: str) -> Condition:
    """Read `samples_per_s < 0.95` or `loss > 0.5 abs`.

    Raises:
        PlanError: The text is not a condition.
    """
    found = _CONDITION.fullmatch(text)
    limit = math.nan
    with contextlib.suppress(ValueError):
        limit = float(found[3]) if found else math.nan
    if found is None or not math.isfinite(limit):
        raise PlanError(
            "This is not a valid condition for --fail-if.",
            seen=text,
            allowed="METRIC < NUMBER, or another comparison: <=, > or >=. Workbench divides "
            "the run's value of METRIC by the first run's value, and compares the result with "
            """NUMBER. To compare the value itself, write "abs" after the number""",
            next_step='--fail-if "samples_per_s < 0.95"',
            code="WB-PLAN-251",
        )
    return Condition(" ".join(text.split()), found[1], found[2], limit, found[4] is not None)


def check_all(conditions: Sequence[Condition], runs: Sequence[Mapping[str, Any]]) -> list[Checked]:
    """Check all conditions on all runs except the first; a single run is compared with itself.

    The states are checked even without a condition: a failed run is not a success, however fast it
    was.
    """
    first, later = runs[0], runs[1:] or runs[:1]
    found = [one.check(first, run) for one in conditions for run in later]
    if first is not later[0] and first["state"] not in ("finished", "stopped"):
        is_over = "failed" if first["state"] == "failed" else "has not ended"
        found.append(_state(first, None, f"the first run, {first['place']}, {is_over}"))
    for run in later:
        if run["state"] not in OVER:
            found.append(_state(run, None, f"{_called(run)} has not ended"))
        elif run["state"] == "failed":
            why = run["error"] or "the run's end was not recorded"
            found.append(_state(run, True, f"{_called(run)}: {why}"))
    return found


def _state(run: Mapping[str, Any], held: bool | None, why: str) -> Checked:
    return Checked("state is failed", run["run"], run["place"], "value", None, held, why)


def status_of(checks: Sequence[Checked]) -> int:
    """Return the exit status of the checks."""
    if any(one.held is None for one in checks):
        return NOT_CHECKED
    return FAILED if any(one.held for one in checks) else WELL


def ratios_of(
    first: Mapping[str, Any], one: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, float | int | None]:
    """Return the ratios of a run's figures to the first run's; null if there is no ratio."""
    found = {}
    for key in known:
        base, value = first.get(key), one.get(key)
        found[key] = _number(value / base) if base and value is not None else None
    return found


_HEADS = ("samples_per_s", "step_median_s", "wall_s", "compute_share", "sync_wait_share", "loss")


def against(runs: Sequence[Mapping[str, Any]], known: Mapping[str, Any]) -> str:
    """Return a table of the main figures, as ratios to the first run."""
    keys = [*_HEADS, *(key for key in known if key.startswith("eval_"))]
    lines = [[f"ratio to {runs[0]['run']}", *keys]]
    for one in runs[1:]:
        ratios = ratios_of(runs[0], one, known)
        lines.append(
            [
                _called(one),
                *("–" if (r := ratios[k]) is None else f"{r:.3f}" for k in keys),
            ]
        )
    widths = [max(len(line[at]) for line in lines) for at in range(len(keys) + 1)]
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def progress_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the current data of a run: the keys of `PROGRESS`."""
    from ..shared.record import PARTS

    wait = "sync_wait_s"
    shares = [worker.share[PARTS.index(wait)] for worker in snapshot.workers]
    measured = snapshot.step > 0 and wait not in snapshot.unmeasured
    known = [share for share in shares if measured and math.isfinite(share)]
    return {
        "event": "progress",
        "t": round(time.time(), 3),
        "state": snapshot.state,
        "step": snapshot.step,
        "total_steps": snapshot.total_steps,
        "loss": _number(snapshot.loss),
        "samples_per_s": _number(snapshot.samples_per_s),
        "compute_share": _number(snapshot.compute_share),
        "sync_wait_share": _number(sum(known) / len(known)) if known else None,
        "slow_rank": snapshot.slow_rank,
    }


class Teller:
    """Prints the progress of a run: a line if something is new, and its end.

    Args:
        as_json: One JSON object per line on standard output; otherwise words.
        quiet: Print only the end.
        aside: Words go to standard error, because the user's script uses standard output.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False, aside: bool = False) -> None:
        self._as_json, self._quiet = as_json, quiet
        self._stream = sys.stderr if aside and not as_json else sys.stdout
        self._said: tuple[str, int] | None = None

    def tell(self, run: Run) -> None:
        """Print the progress of the run if it is new."""
        if self._quiet:
            return
        snapshot = run.snapshot()
        if self._said == (snapshot.state, snapshot.step):
            return
        self._said = snapshot.state, snapshot.step
        if self._as_json:
            print_json(progress_of(snapshot))
        else:
            from ..views.text import progress_line

            say(progress_line(snapshot), self._stream)

    def end(self, run: Run | None, state: str, exit_code: int, error: str | None = None) -> int:
        """Print how the run ended; return the exit status."""
        if self._as_json:
            print_json({
                "event": "end",
                "t": round(time.time(), 3),
                "state": state,
                "error": error if run is None or run.error is None else run.error.what,
                "folder": None if run is None else str(run.folder.absolute()),
                "figures": None if run is None else figures(run, state=state),
                "exit_code": exit_code,
            })  # fmt: skip
            return exit_code
        from ..views.text import report

        words = [state] if run is None else [report(run.snapshot()), f"records: {run.folder}"]
        words += [error or ""] if run is None or run.error is None else [str(run.error)]
        say("\n".join(filter(None, words)), self._stream)
        return exit_code


def follow_place(words: Sequence[str], wait_s: float | None = 60.0) -> Run:
    """Return the followed run at a place.

    Args:
        words: One word: a place or the name of a submitted job. Or the words of a command that
            prints the run's lines.
        wait_s: How long to wait for a run that has not begun; None: without a limit.
    """
    from .followed import follow
    from .places import nowhere

    place = words[0] if len(words) == 1 else list(words)
    gone: dict[str, Any] = {}
    if isinstance(place, str) and Path(place).is_dir() and not is_job(Path(place)):
        place = str(run_folder(place))  # a recorded script's newest
    elif isinstance(place, str) and re.fullmatch(r"[\w.@-]+", place) and not Path(place).exists():
        from .submitted import Jobs, MissingJobError

        jobs = Jobs()
        try:
            job = jobs[place]
        except MissingJobError:
            raise nowhere(place, list(jobs)) from None
        place, gone = job.place, {"gone": lambda: end_of(job)}
    followed: Run = follow(place, wait_s=wait_s, **gone)
    return followed


def end_of(job: Submitted) -> str:
    """Return why a submitted job has ended; empty while it runs."""
    now = job.look()
    return (now.reason or now.state) if now.is_over else ""


def watch(run: Run, teller: Teller) -> int:
    """Print a run's progress until it ends; return the exit status."""
    teller.tell(run)
    while not run.over.wait(LINE_S):
        teller.tell(run)
    teller.tell(run)
    return teller.end(run, run.state, FAILED if run.state == "failed" else WELL)


def let_go(run: Run) -> None:
    """Stop following a run; the run continues."""
    close = getattr(run, "close", None)
    if close is not None:
        close()
