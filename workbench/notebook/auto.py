"""`%%distributed auto` and `wb.choose`: short runs, a ranking, the best strategy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError, WorkbenchError
from ..execution.outcome import is_refusal, outcome_behind
from ..execution.paused import attend, attending
from ..execution.stop import ending
from ..prediction.choose import Candidate, Race, Row, candidates
from ..prediction.probe import LEAST_STEPS
from ..shared.faults import ON_LINKS, lasting
from ..shared.flags.several import memory_of
from ..shared.plan import Plan, plan_of
from ..shared.run_request import AUTO, FLAGS, UNSAID, RunRequest, from_arguments
from ..views.blocks import ProgressLine, show
from ..views.explain.prediction import ChoicePicture
from .session import check_ahead, cluster_here, session
from .sweep import recipe_of

if TYPE_CHECKING:
    from ..cookbook.recipe import Recipe
    from ..execution.run import Run
    from ..session.cluster import Cluster

PROBE_S = 60.0
MOST_PROBES = 3
ENOUGH_S, ENOUGH_STEPS = 4.0, 60
"""A short run ends after this time and this number of steps; earlier if its time limit is reached.
"""
TELLS_STEPS = LEAST_STEPS + 6
"""Number of steps, with warm-up, from which other strategies can be predicted."""
MOST_STEPS = 2000
_NO_ROOM = frozenset({"OutOfMemoryError", "MemoryError", "ResourceExhaustedError"})
_OWN = ("memory_per_worker", "allow_stale", "probe_seconds")
_NOT_BESIDE = ("to_job", "background", "seeds", "profile", "price", "ranks")


def chooses(request: RunRequest) -> bool:
    """Whether a line asks for short runs to choose the strategy.

    Raises:
        PlanError: The line also names other strategies, or has flags of auto without auto.
    """
    chosen = AUTO in request.strategies
    mine = [FLAGS[name].long for name in _OWN if getattr(request, name) != UNSAID[name]]
    if mine and not chosen:
        raise PlanError(
            "These flags work only with the strategy `auto`.",
            seen=", ".join(mine),
            next_step="%%distributed auto ...",
            code="WB-PLAN-314",
        )
    besides = [FLAGS[name].long for name in _NOT_BESIDE if getattr(request, name) != UNSAID[name]]
    besides += [f"several values of {FLAGS[axis.field].long}" for axis in request.several]
    if chosen and (len(request.strategies) > 1 or besides):
        raise PlanError(
            "The strategy `auto` chooses one strategy and starts one run, so it does not work with "
            "these flags."
            if besides
            else "The strategy `auto` chooses a strategy for you, so you cannot name another "
            "strategy.",
            seen=", ".join([*request.strategies, *besides]),
            next_step="first run `%%distributed auto` without these flags, then run the chosen "
            "strategy with them"
            if besides
            else "name only `auto`, or only the other strategies",
            code="WB-PLAN-315",
        )
    return chosen


def choose(
    source: str | Callable[..., Any] | Recipe,
    *,
    memory_per_worker: float | str | None = None,
    allow_stale: bool = False,
    most_s: float = PROBE_S,
    cluster: Cluster | None = None,
    **settings: Any,
) -> ChoicePicture:
    """Measure up to three strategies, predict others, and return a ranking of all strategies.

        found = wb.choose("digits_mlp", workers=2)
        found.winner.candidate.name, found.reason

    Workbench makes at most three short runs. Each short run trains the cell from its beginning. The
    cell is not trained to its end.

    Args:
        source: Source of a cell, a function, a recipe, or the name of a run or recipe.
        memory_per_worker: Memory limit of a worker for weights, gradients and optimizer state: a
            number of bytes, or a text such as `"4GiB"`.
        allow_stale: Whether to include strategies whose weights differ from those of one device.
        most_s: Time limit of all short runs together, in seconds.
        cluster: The cluster for the runs; by default the notebook's cluster, or the only cluster.
        settings: Settings of the runs, as for `Cluster.run`: `workers`, `options`, `batch_size`,
            `values`, ...

    Raises:
        PlanError: The settings are not possible, or no strategy remains.
        RunError: The cell failed.
    """
    where = cluster or cluster_here()
    request = replace(
        from_arguments(AUTO, settings),
        memory_per_worker=None if memory_per_worker is None else memory_of(memory_per_worker),
        allow_stale=allow_stale,
    )
    chooses(request)
    return Chooser(where, request, recipe_of(source, request.framework), most_s).choose()


class Chooser:
    """Makes the short runs and the choice.

    Args:
        request: The request for a run, without a strategy.
        most_s: Time limit of all short runs together.
        number, autoreload: As `Cluster.start` takes them.
    """

    def __init__(
        self, cluster: Cluster, request: RunRequest, recipe: Recipe, most_s: float = PROBE_S,
        *, number: int = 1, autoreload: str = "",
    ) -> None:  # fmt: skip
        self._cluster, self._recipe = cluster, recipe
        self._most_s = float(request.probe_seconds or most_s)
        self._number, self._autoreload = number, autoreload
        framework = request.framework or recipe.framework or cluster.framework
        workers = request.workers or max(1, len(cluster.worker_ids))
        if request.batch_per_worker is not None:  # the same global batch for all of them
            batch = workers * request.batch_per_worker
            request = replace(request, batch_size=batch, batch_per_worker=None)
        self._request = request
        entrants, out = candidates(
            framework, workers, request.options, allow_stale=request.allow_stale
        )
        self._race = Race(entrants, out, request.memory_per_worker)
        self._framework, self._workers = framework, workers
        self._check()

    def choose(self) -> ChoicePicture:
        """Measure, predict, rank.

        Raises:
            PlanError: No strategy remains.
            RunError: The cell failed or was interrupted.
        """
        began, race, progress = time.monotonic(), self._race, ProgressLine()
        ends = began + self._most_s
        left = [one for one in race.first() if one.name not in race.refused]
        made = 0
        self._cluster.queue().check_free()
        try:
            while made < MOST_PROBES and (spare_s := ends - time.monotonic()) > 1.0:
                one = left.pop(0) if left else race.next()
                if one is None:
                    break
                progress(f"short run {made + 1} of at most {MOST_PROBES}: {one.name}")
                made += self._measure(one, spare_s / (MOST_PROBES - made), spare_s)
        finally:
            progress.done()
        found = race.choose()
        if found.winner is None:
            raise PlanError(
                "No strategy can be used for this training.",
                seen=reasons(found.rows),
                next_step=_way_out(self._request),
                code="WB-PLAN-316",
            )
        late = (
            "The short runs reached their time limit. With a longer limit, the short runs measure "
            "more steps or more strategies. To set the limit, use `--probe-seconds`, or `most_s` "
            "in wb.choose.",
        )
        notes = found.notes if time.monotonic() < ends else (*found.notes, *late)
        found = replace(found, seconds=time.monotonic() - began, workers=self._workers, notes=notes)
        return ChoicePicture(**vars(found))

    def line_of(self, one: Candidate) -> RunRequest:
        """Return the request that trains under a candidate."""
        alone = one.entry.max_workers == 1
        faults = tuple(
            f for f in self._request.faults if not (alone and f.kind in ON_LINKS)
        )  # fmt: skip
        return replace(
            self._request, strategies=(one.entry.name,), options=dict(one.options),
            workers=one.workers, faults=faults, memory_per_worker=None, allow_stale=False,
            probe_seconds=None,
        )  # fmt: skip

    def _plan(self, one: Candidate, *, short: bool) -> Plan:
        line = self.line_of(one)
        if short:
            kept = lasting(line.faults)
            line = replace(
                line, steps=MOST_STEPS, epochs=None, checkpoint="", checkpoint_every=0, log=(),
                on_failure="", on_straggler="wait", name=f"auto-{one.entry.name}",
                faults=tuple(f for f in line.faults if f.text in kept),
            )  # fmt: skip
        return plan_of(line, self._recipe, framework=self._framework, workers=one.workers)

    def _check(self) -> None:
        """Refuse the candidates that cannot be run with these settings.

        Raises:
            PlanError: No candidate can be run.
        """
        errors = {one.name: self._error(one) for one in self._race.entrants}
        found = {name: error for name, error in errors.items() if error is not None}
        if found and len(found) == len(errors):
            raise next(iter(found.values()))
        self._race.refused |= {name: _brief(error) for name, error in found.items()}

    def _error(self, one: Candidate) -> WorkbenchError | None:
        try:
            check_ahead(self._cluster, [self._plan(one, short=short) for short in (True, False)])
        except WorkbenchError as error:
            return error
        return None

    def _measure(self, one: Candidate, share_s: float, most_s: float) -> int:
        """Make a short run; return the number of runs made: 0 if the strategy refuses.

        Args:
            share_s: Its share of the time.
            most_s: Its time limit if other strategies will be predicted from it.

        Raises:
            RunError: The cell fails under every strategy.
        """
        with attending(True), ending(self._cluster):
            run = self._cluster.start(
                self._plan(one, short=True), number=self._number, autoreload=self._autoreload
            )
            self._watch(run, share_s, most_s if one.entry.replicated else share_s)
        error = run.error
        if error is None:
            self._race.measured[one.name] = run
            return 1
        outcome = outcome_behind(error)
        if outcome is None or not (outcome.ename in _NO_ROOM or is_refusal(error)):
            raise error
        self._race.refused[one.name] = (
            "ran out of memory" if outcome.ename in _NO_ROOM else f"refused: {_brief(error)}"
        )
        return 0

    def _watch(self, run: Run, share_s: float, most_s: float) -> None:
        """Wait for a short run's end; stop it when it has enough steps."""
        began, first, asked = time.monotonic(), 0.0, False
        while not run.over.wait(0.05):
            attend()
            now = time.monotonic()
            step = run.snapshot().step
            if step and not first:
                first = now
            enough = first and now - first > ENOUGH_S and step >= ENOUGH_STEPS
            late = now - began > (share_s if step >= TELLS_STEPS else most_s)
            if not asked and (enough or late):
                asked = True
                run.stop()


def train_chosen(
    request: RunRequest, recipe: Recipe, *, number: int, autoreload: str
) -> list[Run]:  # fmt: skip
    """Choose, show the ranking, train under the winner (`%%distributed auto`).

    A prediction cannot know whether the winner refuses the cell. If it does, the next strategy is
    used.

    Raises:
        PlanError: The settings are not possible, or no strategy remains.
        RunError: The run failed.
    """
    chooser = Chooser(
        session.need_cluster(), request, recipe, number=number, autoreload=autoreload
    )  # fmt: skip
    found = chooser.choose()
    show(found)
    assert found.winner is not None, "internal error: no strategy remains"
    rest = [row for row in found.rows if row.known != "out" and row is not found.winner]
    for row in (found.winner, *rest):
        with contextlib.suppress(_RefusedError):
            return _trained(chooser.line_of(row.candidate), recipe, number, autoreload)
    raise PlanError(
        "No strategy accepted the cell.",
        seen="tried: " + ", ".join(row.candidate.name for row in (found.winner, *rest)),
        next_step="to see why, run a strategy that was tried: "
        f"%%distributed {found.winner.candidate.entry.name}",
        code="WB-PLAN-317",
    )  # fmt: skip


class _RefusedError(Exception):
    """A strategy refused the cell before anything was trained."""


def _trained(line: RunRequest, recipe: Recipe, number: int, autoreload: str) -> list[Run]:
    try:
        return session.train(line, recipe, number=number, autoreload=autoreload)
    except RunError as error:
        if is_refusal(error):
            raise _RefusedError from error
        raise


def _brief(error: WorkbenchError) -> str:
    """Return an error's first sentence."""
    outcome = outcome_behind(error)
    text = outcome.evalue if outcome is not None else str(getattr(error, "what", error))
    return text.strip().partition("\n")[0].rstrip(".")


def reasons(rows: Sequence[Row]) -> str:
    """Return why each candidate is left out; candidates with one reason stand together."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.why, []).append(row.candidate.name)
    return "; ".join(f"{', '.join(held)}: {why}" for why, held in names.items())


def _way_out(request: RunRequest) -> str:
    if request.memory_per_worker is not None:
        return "allow more memory (--memory-per-worker), or use more workers"
    return (
        "to see the complete error of a strategy, run this strategy without `auto`: "
        "%%distributed mirrored"
    )
