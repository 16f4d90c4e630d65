"""`workbench run`, `compare`, `jobs`, `follow` and `control`: for shells, scripts, agents and CI.

Exit status of all commands: 0 success; 1 the run failed, or a condition of `--fail-if` held; 2 an
argument is wrong, or something could not be checked; 130 interrupted. With `--json`, standard
output contains only JSON, also for an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import PlanError, WorkbenchError, unknown
from .control import Does, Order, give, read_order
from .here import add_run_arguments, run_here
from .telling import (
    FAILED,
    INTERRUPTED,
    METRICS,
    NOT_CHECKED,
    WELL,
    Teller,
    against,
    check_all,
    error_wire,
    figures_of,
    follow_place,
    let_go,
    load_place,
    parse_condition,
    print_json,
    ratios_of,
    run_folder,
    say,
    state_of,
    status_of,
    watch,
)

if TYPE_CHECKING:
    from ..execution.run import Run
    from .submitted import Submitted

COMMANDS = ("run", "compare", "jobs", "follow", "control")
_STATUS = """
Exit status: 0 after success; 1 if the run failed or a --fail-if condition is true; 2 if an argument
is wrong or something could not be checked; 130 if the command was interrupted."""


def add_job_commands(commands: Any) -> None:
    """Add the commands to the parser of `workbench`."""
    run = _command(
        commands, "run", "run a job folder, a script or a cell on this machine, and record it"
    )
    add_run_arguments(run)
    compare = _command(
        commands, "compare", "compare each run with the first run, for example in CI"
    )
    compare.add_argument("places", nargs="+", metavar="PLACE",
        help="a run folder, a job folder (Workbench reads its newest run), or a folder that "
             "run.save wrote")  # fmt: skip
    compare.add_argument("--fail-if", action="append", default=[], metavar="CONDITION",
        help='condition under which the command fails. "samples_per_s < 0.95" is true if a '
             "run's value, divided by the first run's value, is below 0.95. "
             '"loss > 0.5 abs" is true if the value itself is above 0.5')  # fmt: skip
    jobs = _command(
        commands, "jobs", "list the jobs that you submitted; cancel a job, or show its output"
    )
    jobs.add_argument(
        "words", nargs="*", metavar="[cancel|logs] NAME", help="without arguments: list all jobs"
    )
    jobs.add_argument(
        "--last",
        type=int,
        default=200,
        metavar="N",
        help="logs: print the last N lines (default 200)",
    )
    follow = _command(commands, "follow",
        "show the progress of a run that another process or machine trains, until the run ends",
    )  # fmt: skip
    follow.add_argument("place", nargs="+", metavar="PLACE",
        help="a folder, the name of a submitted job, ssh://host/dir, or a command that prints "
             "the job's output")  # fmt: skip
    follow.add_argument("--until-end", action="store_true", help="print only how the run ended")
    follow.add_argument("--wait", type=float, default=60.0, metavar="SECONDS",
        help="seconds to wait until the run begins (default 60; inf: no limit)")  # fmt: skip
    control = _command(
        commands, "control", "stop, pause or slow down a run that another process or machine trains"
    )
    control.add_argument("--stdin", action="store_true",
        help='read orders from standard input, one per line: {"do": "stop"}')  # fmt: skip
    control.add_argument(
        "place", metavar="PLACE", help="the run's folder or address, as for `workbench follow`"
    )
    control.add_argument("order", nargs="*", metavar="ORDER",
        help="stop | preempt | interrupt | pause | resume | step [N] | inject [FAULT ...]. "
             "The order `interrupt` does not wait for the end of the step")  # fmt: skip


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + "." + _STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def run_job_command(given: argparse.Namespace) -> int:
    """Carry out the command line; return the exit status."""
    try:
        return _DO[given.command](given)
    except WorkbenchError as error:
        if given.json:
            print_json({"error": error_wire(error)})
        say(error, sys.stderr)
        return NOT_CHECKED
    except KeyboardInterrupt:
        say("Interrupted.", sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as in `workbench follow PLACE | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED


def _compare(given: argparse.Namespace) -> int:
    from ..history.analysis.comparison import compare

    conditions = [parse_condition(text) for text in given.fail_if]
    loaded = [(place, *load_place(place)) for place in given.places]
    # A loaded run without an end counts as failed; a live process says that it still trains.
    summaries = [replace(run.summarise(), state=state_of(run, at)) for _, run, at in loaded]
    compared = compare(summaries)
    runs = [
        {**figures_of(run, summary, place=str(place), state=summary.state), "run": label}
        for (place, run, _), summary, label in zip(loaded, summaries, compared.labels, strict=True)
    ]
    known = dict.fromkeys((*METRICS, *(key for one in runs for key in one if key[:5] == "eval_")))
    for condition in conditions:
        if condition.metric not in known:
            raise unknown("metric", condition.metric, known)
    checks = check_all(conditions, runs)
    status = status_of(checks)
    if given.json:
        print_json({
            "format": "workbench-compare/1",
            "baseline": runs[0]["run"],
            "runs": [{**one, "ratio": ratios_of(runs[0], one, known)} for one in runs],
            "verdict": compared.verdict,
            "notes": list(compared.notes),
            "checks": [asdict(one) for one in checks],
            "exit_code": status,
        })  # fmt: skip
        return status
    from ..views.tables import comparison_table

    say(comparison_table(compared).text())
    if len(runs) > 1:
        say("\n" + against(runs, known))
    if checks:
        say("\n" + "\n".join(one.sentence for one in checks))
    return status


# -- follow ----------------------------------------------------------------------------------------


def _follow(given: argparse.Namespace) -> int:
    wait_s = None if given.wait == math.inf else given.wait
    if given.wait != given.wait or given.wait < 0:
        raise PlanError(
            "--wait is out of range.",
            seen=given.wait,
            allowed="seconds, 0 or more; inf: no limit",
            code="WB-PLAN-259",
        )
    run = follow_place(given.place, wait_s)
    try:
        return watch(run, Teller(as_json=given.json, quiet=given.until_end))
    finally:
        let_go(run)


# -- control ---------------------------------------------------------------------------------------


def order_of(words: Sequence[str]) -> Order:
    """Return the order in these words: `stop`, `step 3`, `inject slow=1:50ms`.

    Raises:
        PlanError: The words are not an order.
    """
    do, rest = (words[0], tuple(words[1:])) if words else ("", ())
    if do == "inject":
        return Order("inject", faults=rest)
    if do == "step" and len(rest) == 1 and rest[0].isdecimal():
        return Order("step", steps=int(rest[0]))
    for known in get_args(Does):
        if do == known and not rest:
            return Order(known)
    raise PlanError(
        "This is not an order that a run accepts."
        if words
        else "The order is missing. An order tells the run what to do, for example `stop`.",
        seen=" ".join(words) or None,
        allowed="stop, preempt, interrupt, pause, resume, step [N], inject [FAULT ...]",
        next_step="write one of these orders, for example: workbench control PLACE pause",
        code="WB-PLAN-252",
    )


def carry_out(run: Run, order: Order) -> None:
    """Send an order to a followed run.

    Raises:
        PlanError: The run has ended.
    """
    if run.is_over:
        raise PlanError(
            f"Run {run.name} has ended and accepts no more orders.",
            seen=run.state,
            code="WB-PLAN-253",
        )
    if order.do == "inject":
        run.inject(*order.faults)
    elif order.do == "step":
        run.step(order.steps)
    else:
        getattr(run, order.do)()


def _control(given: argparse.Namespace) -> int:
    if given.stdin:
        return relay(run_folder(given.place), sys.stdin)
    order = order_of(given.order)
    run = follow_place([given.place])
    try:
        carry_out(run, order)
    finally:
        let_go(run)
    if given.json:
        print_json({"sent": asdict(order), "run": run.name})
    else:
        words = " ".join(given.order)
        when = "immediately" if order.do == "interrupt" else "between two steps"
        say(f"{run.name}: `{words}` was sent; the run carries it out {when}")
    return WELL


def relay(folder: Path, lines: Iterable[str]) -> int:
    """Sign orders that arrive as lines of JSON, and put them into a run's inbox.

    An answer is printed for each: {"sent": ...} or {"error": ...}. This is the remote end of
    `workbench.follow("ssh://...")`. So the key of the run stays on its host.

    Returns:
        The exit status: 0 if all lines were orders and could be put into the inbox.
    """
    status = WELL
    for line in lines:
        if not line.strip():
            continue
        try:
            order = read_order(_whole(line))
            give(folder, order)
            print_json({"sent": asdict(order)})
        except WorkbenchError as error:
            print_json({"error": error_wire(error)})
            status = NOT_CHECKED
    return status


def _whole(line: str) -> bytes:
    """Return an order's line with its optional fields filled in."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return json.dumps({"faults": [], **found}).encode()
    return line.encode()


# -- jobs ------------------------------------------------------------------------------------------


def _jobs(given: argparse.Namespace) -> int:
    from .submitted import Jobs

    jobs, words = Jobs(), list(given.words)
    verb = words.pop(0) if words[:1] in (["cancel"], ["logs"]) else "list"
    if verb != "list" and not words:
        raise PlanError(
            f"`workbench jobs {verb}` needs the name of a job.",
            allowed=", ".join(jobs) or "none: there is no job",
            next_step=f"workbench jobs {verb} NAME" if jobs else None,
            code="WB-PLAN-260",
        )
    chosen = [jobs[name] for name in words]
    if verb == "logs":
        for job in chosen:
            text = str(job.logs(given.last))
            if given.json:
                print_json({"name": job.name, "log": text})
            else:
                say(text)
        return WELL
    if verb == "cancel":
        for job in chosen:
            job.cancel()
    told = [job_wire(job) for job in chosen or jobs.values()]
    if given.json:
        print_json({"jobs": told, "notes": jobs.notes})
    elif chosen:
        say("\n".join(f"{one['name']}: {one['state']} {one['reason']}".rstrip() for one in told))
    else:
        say(jobs)
    return _status_of(told) if words and verb == "list" else WELL


def job_wire(job: Submitted) -> dict[str, Any]:
    """Return the current state of a submitted job from its platform: the keys of `telling.JOB`."""
    now = job.look()
    return {
        "name": job.name,
        "platform": job.platform,
        "id": job.id,
        "state": now.state,
        "reason": now.reason,
        "over": now.is_over,
        "folder": str(job.folder),
        "submitted_s": job.ticket.submitted_s,
        "began_s": now.began_s,
    }


def _status_of(told: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit status for jobs that the user named."""
    states = {one["state"] for one in told}
    return NOT_CHECKED if "unknown" in states else FAILED if "failed" in states else WELL


_DO: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run_here,
    "compare": _compare,
    "jobs": _jobs,
    "follow": _follow,
    "control": _control,
}
