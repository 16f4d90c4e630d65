"""What-if: changes to a run, each computed by the same model, and the best of several.

The measured run and the changed run are computed with the same draws, so errors that both share
cancel: the measured step is multiplied by the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PlanError
from ..history.analysis.counterfactual import straggler_of
from .link import Link, parse_link
from .model import Computed, compute
from .predict import Knows, packed_share, read, target_setting
from .probe import Probe

if TYPE_CHECKING:
    from ..history.run_data import RunData

CHANGES = ("link", "latency", "straggler", "batch_size", "overlap", "workers", "strategy")
"""Possible changes in addition to the strategy's options."""


@dataclass(frozen=True)
class Variant:
    """A change, and its predicted effect.

    Attributes:
        text: The requested change.
        step_s: Median, and the ends of the interval with 90 % of such runs.
        samples_per_s: Value at the median.
        speedup: Samples per second relative to the unchanged run: median and interval.
        share: Share of each of `case.CAUSES` in a step.
    """

    text: str
    step_s: tuple[float, float, float]
    samples_per_s: float
    speedup: tuple[float, float, float]
    share: tuple[float, ...]


@dataclass(frozen=True)
class Ranking:
    """Changes to a run, best first.

    Attributes:
        step_s, samples_per_s: Values of the unchanged run.
        share: Shares of its computed step.
    """

    run: str
    step_s: float
    samples_per_s: float
    share: tuple[float, ...]
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "run": self.run, "step_s": self.step_s, "samples_per_s": self.samples_per_s,
            "share": list(self.share), "notes": list(self.notes),
            "variants": [
                {**vars(v), "step_s": list(v.step_s), "speedup": list(v.speedup),
                 "share": list(v.share)}
                for v in self.variants
            ],
        }  # fmt: skip


def rank(
    run: RunData, every: Sequence[Mapping[str, Any]], beside: Sequence[RunData] = ()
) -> Ranking:
    """Compute changes to a run; return them, best first.

    Args:
        beside: Other runs that reduce the uncertainty (another batch).
        every: Changes, each a mapping of one or more of `CHANGES` and the strategy's options.

    Raises:
        PlanError: A change is unknown, or does not fit the run.
        RunError: The run has too little data.
    """
    if not every or not all(every):
        raise PlanError(
            "No change was given to `what_if`.", seen=list(every), allowed=_allowed(None),
            next_step="run.what_if(link='1GB/s')", code="WB-PLAN-300",
        )  # fmt: skip
    base, probes = read([run, *beside])
    knows = Knows.of(base, probes, None, None, needed=base.workers > 1)
    before = compute(knows.case(base.setting, base.samples, None, base.total_steps), noisy=False)
    was_s = float(base.step_s.mean())
    total = base.samples * (base.workers if base.setting.entry.data_parallel else 1)
    found, notes = [], []
    was_end_s = was_s * float(np.median(before.behind))
    for change in every:
        new, samples, more = _computed(run, base, knows, change)
        ratio, rate = new.step_s / before.step_s, samples / total * before.end_s / new.end_s
        low, middle, high = (float(q) for q in np.quantile(was_s * ratio, (0.05, 0.5, 0.95)))
        worse, speedup, better = (float(q) for q in np.quantile(rate, (0.05, 0.5, 0.95)))
        text = ", ".join(f"{key}={value}" for key, value in change.items())
        found.append(
            Variant(
                text, (middle, low, high), speedup * total / was_end_s, (speedup, worse, better),
                new.share,
            )
        )  # fmt: skip
        notes += more
    found.sort(key=lambda one: -one.speedup[0])
    return Ranking(
        run.name, was_s, total / was_end_s, before.share, tuple(found), tuple(dict.fromkeys(notes))
    )


def _computed(
    run: RunData, base: Probe, knows: Knows, change: Mapping[str, Any]
) -> tuple[Computed, float, list[str]]:
    """Return the steps with a change, the samples of all workers, and notes."""
    workers = change.get("workers", base.workers)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise PlanError(
            "`workers` must be a whole number of at least 1.",
            seen=workers,
            allowed="1 or more",
            code="WB-PLAN-301",
        )
    options = {k: v for k, v in change.items() if k not in CHANGES or k == "overlap"}
    link = _link(change)
    known = {option.name for option in base.setting.entry.options} | set(CHANGES)
    strange = [key for key in change if key not in known and "strategy" not in change]
    if strange:
        raise PlanError(
            "`what_if` does not know this change.", seen=strange[0], allowed=_allowed(base),
            next_step="run.what_if(link='1GB/s')", code="WB-PLAN-302",
        )  # fmt: skip
    if "overlap" in change and base.setting.entry.name != "mirrored":
        raise PlanError(
            "Workbench can predict the change `overlap` only for a run of `mirrored`.",
            seen=f"run {base.name}: {base.setting.entry.name}", allowed="a run of mirrored",
            code="WB-PLAN-303",
        )  # fmt: skip
    setting = target_setting(base, workers, change.get("strategy"), options)
    packed_share(str(setting.options.get("compress", "none")))
    if change.get("overlap") is True and not setting.overlapped:
        setting = target_setting(
            base, workers, None, {**options, "allreduce": "backend", "compress": "none"}
        )
    batch = change.get("batch_size")
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise PlanError(
            "`batch_size` must be a whole number of at least 1.",
            seen=batch,
            allowed="1 or more",
            code="WB-PLAN-304",
        )
    shares = setting.entry.data_parallel
    total = float(batch or base.samples * (base.workers if shares else 1))
    samples = total / workers if shares else total
    if samples < 1:
        raise PlanError(
            "There are more workers than samples in a batch, so some workers would have no "
            "sample.",
            seen=f"batch_size={total:g}, {workers} workers", allowed=f"batch_size={workers} or "
            "more",
            code="WB-PLAN-305",
        )  # fmt: skip
    straggler = "straggler" not in change
    if not straggler:
        base, knows = _without(run, base, knows, change["straggler"])
    case = knows.case(setting, samples, link, base.total_steps, straggler=straggler)
    found = compute(case)
    return found, total, knows.notes([setting], [samples], link)


def _link(change: Mapping[str, Any]) -> Link | None:
    link, latency = change.get("link"), change.get("latency")
    if link is None and latency is not None:
        raise PlanError(
            "`latency` can only be given together with `link`.", seen=f"latency={latency}",
            next_step="what_if(link='1Gbit', latency='1ms')", code="WB-PLAN-306",
        )  # fmt: skip
    return None if link is None else parse_link(link, latency)


def _without(
    run: RunData, base: Probe, knows: Knows, straggler: object
) -> tuple[Probe, Knows]:  # fmt: skip
    """Return the run with its slow worker as fast as the others."""
    if straggler is not None:
        raise PlanError(
            "`straggler` can only be None. With straggler=None, the run is computed as if no "
            "worker were slow.",
            seen=straggler, code="WB-PLAN-307",
            next_step="to see the run without the delay of one worker, for example worker 1: "
            "run.what_if(1)",
        )  # fmt: skip
    if base.setting.piped:
        raise PlanError(
            "The stages of a pipeline do different work, so the workers' times do not show which "
            "worker is slow.",
            seen="straggler=None", next_step="run.what_if() without changes", code="WB-PLAN-308",
        )  # fmt: skip
    if base.slow:
        return base, knows
    worst = straggler_of(run.history)
    if worst is None:
        raise PlanError(
            "No worker is clearly slower than the others, so there is no straggler to remove.",
            seen=f"run {run.name}", next_step="give the rank of a worker: run.what_if(0)",
            code="WB-PLAN-309",
        )  # fmt: skip
    marked = Probe(**{**vars(base), "slow": (worst,)})
    return marked, Knows(**{**vars(knows), "base": marked})


def _allowed(base: Probe | None) -> str:
    names = [*CHANGES]
    if base is not None:
        names += [option.name for option in base.setting.entry.options]
    return ", ".join(names)
