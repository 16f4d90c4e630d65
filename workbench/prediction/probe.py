"""The data that a prediction takes from a short run: computation, step times, bytes of messages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..catalog import diagrams, schedules
from ..catalog.diagrams import Arrow, Layout, Parts, Phase
from ..errors import PlanError, RunError
from ..history.analysis.counterfactual import TRANSFER, WAIT, Table
from ..history.analysis.steady import warm_up_of
from ..shared.events import Topic
from ..shared.faults import lasting
from .link import Link, simulated
from .work import Work

if TYPE_CHECKING:
    from ..catalog.spec import Strategy
    from ..history.run_data import RunData

Floats = NDArray[np.float64]
LEAST_STEPS = 20
"""With fewer steps after warm-up, the tail and so a straggler cannot be estimated."""
NOT_PREDICTED = {
    "hybrid": "Workbench does not know how one more worker changes the pipelines' stages",
    "tensor_parallel": "Workbench does not know how the computation of a layer would be "
    "divided among more workers",
    "tpu": "Workbench does not know how the compiler would change a step if there were more TPU "
    "cores",
}


@dataclass(frozen=True, eq=False)
class Setting:
    """A strategy with all its settings.

    Attributes:
        entry: The catalog's entry.
        options: All options.
        per_host: Number of workers per host; messages between them do not use the link.
    """

    entry: Strategy
    options: Mapping[str, Any]
    workers: int
    per_host: int = 1

    @property
    def overlapped(self) -> bool:
        """Whether buckets are sent while backward still runs (DistributedDataParallel)."""
        options = self.options
        return (
            self.entry.name == "mirrored"
            and options.get("allreduce", "backend") == "backend"
            and options.get("compress", "none") == "none"
            and options.get("overlap", True) is not False
        )

    @property
    def alone(self) -> bool:
        """Whether no worker waits for all others in a step."""
        return not self.entry.is_sync(dict(self.options))

    @property
    def piped(self) -> bool:
        """Whether workers have stages of one model."""
        return self.entry.name == "model_split"

    def parts(self) -> Parts:
        """Return the messages of a step from the catalog."""
        module, _, name = self.entry.messages.partition(":")
        options = {k: v for k, v in self.options.items() if k != "overlap"}
        layout = Layout(self.workers, self.entry.server_count(options), options)
        parts: Parts = getattr(importlib.import_module(module), name)(layout)
        if self.per_host > 1 and options.get("allreduce") == "hierarchical":
            return _by_host(parts, layout.ids, self.per_host)
        return parts

    def share_of(self, unit: str) -> float:
        """Return the share of the gradients' bytes for a variable of the messages."""
        servers = self.entry.part_count(dict(self.options))
        return 1.0 if not unit[1:].isdigit() or not servers else 1.0 / servers


def _by_host(parts: Parts, ids: Sequence[str], per_host: int) -> Parts:
    """Return the hierarchical all-reduce with one group per host."""
    first, *_, last = parts.phases
    unit = "C" if "C" in parts.units else "M"
    groups = [ids[k : k + per_host] for k in range(0, len(ids), per_host)]
    pairs = [(one, group[0]) for group in groups for one in group[1:]]
    size = diagrams.whole(unit)
    up = tuple(Arrow(one, leader, "gradients", size) for one, leader in pairs)
    down = tuple(Arrow(leader, one, "gradients", size) for one, leader in pairs)
    leaders = [group[0] for group in groups]
    between = diagrams.ring_at_once(leaders, "gradients", unit, "Between leaders", "", by="L")
    phases = (
        first, Phase("Reduce in groups", "", arrows=up), *between,
        Phase("Broadcast in groups", "", arrows=down), last,
    )  # fmt: skip
    return replace(parts, phases=phases)


@dataclass(frozen=True, eq=False)
class Probe:
    """A measured run.

    Attributes:
        setting: The setting of the run.
        own_s: (steps, workers) seconds in which a worker neither waited nor sent.
        step_s: (steps,) mean seconds of a step over the workers.
        bubble_s: (steps, workers) NaN except for pipelines.
        first: Number of the first of these steps.
        slow: Ranks slowed by a fault.
        message_bytes: Size of a worker's gradients as sent; NaN if not counted.
        samples: Samples of a worker in a step, as a mean: the last batch of an epoch may be small.
        batch: Samples of all workers in the largest step.
        link: The simulated link of its faults.
        total_steps: Number of steps, including the warm-up.
        delays_s: Seconds by rank that faults add to each step, whatever the size of the share.
        jitter_s: The longest random delay that faults add to each step of each worker.
    """

    name: str
    setting: Setting
    own_s: Floats
    step_s: Floats
    bubble_s: Floats
    first: int
    slow: tuple[int, ...]
    message_bytes: float
    samples: float
    batch: float
    link: Link | None
    total_steps: int
    delays_s: dict[int, float]
    jitter_s: float

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.setting.workers

    def work(self, *, straggler: bool = True) -> Work:
        """Return the measured computation.

        Args:
            straggler: Whether a worker that a fault slows stays slow.
        """
        if self.setting.piped:  # stages differ, so each keeps its value
            return Work.of(self.own_s)
        calm = [r for r in range(self.workers) if r not in self.slow]
        if not calm or len(calm) == self.workers:
            return Work.of(self.own_s, jitter_s=self.jitter_s)
        own = self.own_s[:, calm]
        mean = float(own.mean())
        extra = {r: float(self.own_s[:, r].mean()) - mean for r in self.slow} if straggler else {}
        fixed = {r: min(self.delays_s.get(r, 0.0), max(s, 0.0)) for r, s in extra.items()}
        return Work.of(own, extra, fixed, self.jitter_s)

    @staticmethod
    def of(run: RunData) -> Probe:
        """Read the data of a run.

        Raises:
            PlanError: Its strategy cannot be predicted.
            RunError: The run has too few steps, or a needed value was not measured.
        """
        history, plan = run.history, run.plan
        entry = plan.entry
        check_predicted(entry)
        _check_whole(run)
        table = Table.of(history, None, None)
        table = table.only(table.complete)
        cut = warm_up_of(table.step_s.mean(axis=1)) if len(table.step) else 0
        # The first step also opens connections and agrees on sizes.
        cut = max(cut, 1 if len(table.step) > LEAST_STEPS else 0)
        late = np.arange(len(table.step)) >= cut
        table = table.only(late)
        if len(table.step) < LEAST_STEPS:
            raise RunError(
                "The run has too few steps for a prediction.",
                seen=f"steps after the warm-up: {len(table.step)}, in run {run.name}",
                allowed=f"{LEAST_STEPS} steps or more; 100 or more to predict stragglers too",
                next_step="train again with --steps 100",
                code="WB-RUN-131",
            )
        options = {**entry.settings({}), **plan.options}  # a saved run may know fewer
        if options.get("allreduce") == "auto":
            options["allreduce"] = history.story.facts.get(Topic.ALLREDUCE_CHOSEN) or "backend"
        setting = Setting(entry, options, len(history.engines))
        parts = table.parts_s
        if len(history.engines) > 1 and np.isnan(parts[:, :, [WAIT, TRANSFER]]).any():
            raise RunError(
                "The workers' waits or transfers were not measured, so computation and waiting "
                "cannot be separated.",
                seen=f"{run.name}: {', '.join(sorted(history.unmeasured)) or 'in some steps'}",
                next_step="run.history.unmeasured shows the reason"
                if history.unmeasured
                else "predict from another run",
                code="WB-RUN-132",
            )
        own = table.step_s - np.nan_to_num(parts[:, :, WAIT]) - np.nan_to_num(parts[:, :, TRANSFER])
        if setting.piped and len(history.engines) > 1:
            own = table.step_s - table.bubble_s
        slow = tuple(
            sorted({f.rank for f in plan.faults if f.kind == "slow" and f.rank is not None})
        )
        return Probe(
            run.name, setting, np.maximum(own, 0.0), table.step_s.mean(axis=1), table.bubble_s,
            int(table.step[0]), slow, _message_bytes(history, setting),
            float(table.samples.mean()), float(table.samples.sum(axis=1).max()),
            simulated(plan.faults), len(late),
            {r: sum(f.delay_s for f in plan.faults if f.kind == "slow" and f.rank == r)
             for r in slow},
            sum(f.delay_s for f in plan.faults if f.kind == "jitter"),
        )  # fmt: skip


def check_predicted(entry: Strategy) -> None:
    """Raise PlanError if a strategy cannot be simulated."""
    why = NOT_PREDICTED.get(entry.name)
    if entry.framework != "torch":
        why = why or "TensorFlow does not report how many bytes it sends"
    if why:
        raise PlanError(
            f"Strategy {entry.name} cannot be predicted: {why}.",
            seen=f"{entry.name} ({entry.framework})",
            allowed="these strategies in PyTorch: mirrored, central_storage, parameter_server, "
            "local_sgd, gossip, sharded, model_split",
            next_step=f"measure the strategy instead: %%distributed {entry.name} -n 4",
            code="WB-PLAN-288",
        )


def _check_whole(run: RunData) -> None:
    """Raise RunError if a run changed between its begin and its end."""
    texts = getattr(run, "faults", None)
    changed = texts is not None and tuple(texts) != lasting(run.plan.faults)
    if changed or run.history.phases:
        raise RunError(
            "Workbench cannot predict from this run, because the injected faults or the number of "
            "workers changed during the run.",
            seen=f"run {run.name}: "
            + ("the injected faults changed" if changed else "workers left or joined"),
            next_step="predict from a run without such changes",
            code="WB-RUN-133",
        )


def _message_bytes(history: Any, setting: Setting) -> float:
    """Return the bytes of a worker's gradients, from the sent bytes and the catalog."""
    columns = history.together("step", "rank", "sent_bytes")
    sent = float(np.nansum(columns["sent_bytes"]))
    if setting.workers < 2 or not sent > 0:
        return float("nan")
    if setting.piped:
        return sent / len(np.unique(columns["step"])) / _handed_on(setting)
    factors = 0.0
    steps = columns["step"].astype(int)
    ranks = columns["rank"].astype(int)
    parts = setting.parts()
    ids = {f"w{rank}": rank for rank in range(setting.workers)}
    for phase in parts.phases:
        happens = steps % phase.every == phase.offset
        counts = np.bincount(ranks[happens], minlength=setting.workers)
        for arrow in phase.arrows:
            if arrow.payer in ids:
                each = arrow.factor * setting.share_of(arrow.size.unit)
                factors += each * counts[ids[arrow.payer]]
    return sent / factors if factors else float("nan")


def _handed_on(setting: Setting) -> int:
    """Return the number of messages of all pipeline stages in a step."""
    options = dict(setting.options)
    batches = schedules.microbatches(options, setting.workers)
    stages = schedules.stages_per_worker(options) * setting.workers
    return 2 * batches * (stages - 1)
