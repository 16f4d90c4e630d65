"""Checks the arguments of a prediction and returns the seconds per step, with an interval.

The interval should contain nine of ten runs with the requested number of steps. It includes the
uncertainty from the choice of steps, the uncertainty of the fits, the variation of the run itself,
and the known error of the model (`model.UNEXPLAINED`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import catalog
from ..errors import PlanError, RunError
from ..history.analysis.steady import rate_of
from ..shared.plan import check_count
from .exchange import Cost, Exchange
from .fit import Fitted, fit
from .link import Link, parse_link
from .model import CAUSES, Case, Computed, compute
from .probe import Probe, Setting, check_predicted
from .work import Work

if TYPE_CHECKING:
    from ..history.run_data import RunData

Floats = NDArray[np.float64]
DRAWS, SEED = 240, 1907
MOST_WORKERS = 4096
FAR = 8
"""From this multiple of the measured workers on, a note says that it is far from the measurements.
"""
MOST_FIXED = 0.5
"""Largest assumed share of computation that does not depend on the samples, if not measured."""
Scaling = Literal["strong", "weak"]
_CHANCE_Z = 2.5


@dataclass(frozen=True)
class Point:
    """One number of workers.

    Attributes:
        step_s, samples_per_s: Median, and the ends of the 90 % interval.
        share: Share of each of `CAUSES` in a step.
        far: Whether it is too far from the measured runs.
        batch: Samples of a step, of all workers.
    """

    workers: int
    step_s: tuple[float, float, float]
    samples_per_s: tuple[float, float, float]
    share: tuple[float, ...]
    far: bool = False
    batch: float = float("nan")


@dataclass(frozen=True)
class Measured:
    """A measured run used for the prediction: samples per second, with its 95 % interval.

    Attributes:
        batch: Samples of a step, of all workers.
    """

    run: str
    workers: int
    step_s: float
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    batch: float = float("nan")


@dataclass(frozen=True)
class Prediction:
    """The prediction for a strategy with other numbers of workers.

    Attributes:
        runs: Names of the measured runs.
        scaling: `strong`: the batch stays; `weak`: the samples of each worker stay.
        link: The link in words.
        notes: The assumptions, and where the prediction goes beyond the measurements.
    """

    strategy: str
    options: Mapping[str, Any]
    runs: tuple[str, ...]
    scaling: Scaling
    link: str
    steps: int
    points: tuple[Point, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""
        return {
            "strategy": self.strategy, "options": dict(self.options), "runs": list(self.runs),
            "scaling": self.scaling, "link": self.link, "steps": self.steps,
            "causes": list(CAUSES), "notes": list(self.notes),
            "points": [
                {**vars(p), "step_s": list(p.step_s), "samples_per_s": list(p.samples_per_s),
                 "share": list(p.share)}
                for p in self.points
            ],
            "measured": [
                {k: None if v != v else v for k, v in vars(m).items()} for m in self.measured
            ],
        }  # fmt: skip

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per number of workers, predicted and measured; units in the headings.

        Args:
            path: A file to which the text is also written.
        """
        target = io.StringIO()
        keys = ["kind", "workers", "step_s", "step_low_s", "step_high_s", "samples_per_s",
                "low_per_s", "high_per_s", *(f"{c.replace(' ', '_')}_share" for c in CAUSES),
                "far"]  # fmt: skip
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(keys)
        for m in self.measured:
            rates = [_cell(v) for v in (m.samples_per_s, m.low_per_s, m.high_per_s)]
            writer.writerow(
                ["measured", m.workers, _cell(m.step_s), "", "", *rates, "", "", "", ""]
            )
        for p in self.points:
            writer.writerow(
                ["predicted", p.workers, *p.step_s, *p.samples_per_s, *p.share, int(p.far)]
            )
        if path is not None:
            Path(path).write_text(target.getvalue(), "utf-8")
        return target.getvalue()


def predict(
    runs: Sequence[RunData], workers: int | Sequence[int], *, link: str | None = None,
    latency: str | None = None, strategy: str | None = None,
    options: Mapping[str, Any] | None = None, scaling: str = "strong",
    batch_size: int | None = None, steps: int | None = None, per_host: int = 1,
    gradient_bytes: float | None = None,
) -> Prediction:  # fmt: skip
    """Return the predicted step times with other numbers of workers; see `Run.predict`.

    Args:
        runs: The run to predict from, and further runs that reduce the uncertainty.

    Raises:
        PlanError: The setting is not possible, or cannot be predicted.
        RunError: The runs have too little data.
    """
    counts = _counts(workers)
    for name, value in (("batch_size", batch_size), ("steps", steps), ("per_host", per_host)):
        if value is not None:
            check_count(name, value)
    if gradient_bytes is not None and not gradient_bytes > 0:
        raise PlanError(
            "`gradient_bytes` must be above 0.", seen=f"gradient_bytes={gradient_bytes}",
            allowed="a number above 0", code="WB-PLAN-310",
        )  # fmt: skip
    base, probes = read(runs)
    target = parse_link(link, latency) if link is not None else None
    if latency is not None and link is None:
        raise PlanError(
            "`latency` can only be given together with `link`.", seen=f"latency={latency}",
            next_step="add link, for example link='1Gbit'", code="WB-PLAN-289",
        )  # fmt: skip
    if scaling not in ("strong", "weak"):
        raise PlanError(
            "The value of `scaling` is not valid.", seen=scaling,
            allowed="'strong' (the global batch keeps its size) or 'weak' (each worker's share "
            "keeps its size)",
            code="WB-PLAN-290",
        )  # fmt: skip
    settings = [target_setting(base, n, strategy, options, per_host) for n in counts]
    samples = [_samples(base, n, scaling, batch_size) for n in counts]
    knows = Knows.of(base, probes, gradient_bytes, target, needed=max(counts) > 1)
    points, notes = [], knows.notes(settings, samples, target)
    for setting, each in zip(settings, samples, strict=True):
        case = knows.case(setting, each, target, steps or base.total_steps)
        points.append(_point(compute(case), case, each, base))
    return Prediction(
        settings[0].entry.name, dict(settings[-1].options), tuple(p.name for p in probes),
        "weak" if scaling == "weak" else "strong", knows.link_text(target),
        steps or base.total_steps, tuple(points), tuple(_measured(runs, probes)),
        tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def read(runs: Sequence[RunData]) -> tuple[Probe, list[Probe]]:
    """Return the first measured run, and all measured runs.

    Raises:
        PlanError: There is no run, or their simulated links differ.
    """
    if not runs:
        raise PlanError(
            "There is no run from which a prediction can be made.",
            allowed="one or more finished runs",
            next_step="train with %%distributed mirrored -n 2 --steps 100, then use run.predict(8)",
            code="WB-PLAN-291",
        )  # fmt: skip
    probes = [Probe.of(run) for run in runs]
    links = {probe.link for probe in probes if probe.workers > 1}
    if len(links) > 1:
        raise PlanError(
            "One prediction cannot use runs that had different simulated links.",
            seen=", ".join("no simulated link" if one is None else one.text for one in links),
            next_step="predict from runs with the same values of `--inject bandwidth=` and "
            "`--inject latency=`, or from runs without a simulated link",
            code="WB-PLAN-292",
        )
    return probes[0], probes


def _counts(workers: int | Sequence[int]) -> list[int]:
    given = [workers] if isinstance(workers, int) else list(workers)
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= MOST_WORKERS:
            raise PlanError(
                "`workers` must be a number of workers, or a list of such numbers.", seen=workers,
                allowed=f"numbers from 1 to {MOST_WORKERS}: predict([8, 64])", code="WB-PLAN-293",
            )  # fmt: skip
    if not given:
        raise PlanError(
            "The list `workers` is empty.", seen=workers,
            next_step="for example run.predict([8, 64])", code="WB-PLAN-294",
        )  # fmt: skip
    return sorted(set(given))


def target_setting(
    base: Probe, workers: int, strategy: str | None, options: Mapping[str, Any] | None,
    per_host: int = 1,
) -> Setting:  # fmt: skip
    """Return the setting of the predicted run.

    Raises:
        PlanError: The strategy or an option is unknown, does not fit, or cannot be predicted.
    """
    entry = catalog.lookup(strategy or base.setting.entry.name, base.setting.entry.framework)
    check_predicted(entry)
    if entry.max_workers is not None and workers > entry.max_workers:
        raise PlanError(
            f"Strategy {entry.name} has at most {entry.max_workers} worker.",
            seen=f"workers={workers}", next_step="strategy='mirrored'", code="WB-PLAN-295",
        )  # fmt: skip
    same = entry.name == base.setting.entry.name
    if entry.name == "model_split" and not same:
        raise PlanError(
            "Workbench can predict model_split only from a run of model_split. Only such a run "
            "shows how the model is divided into stages.",
            seen=f"run {base.name}: {base.setting.entry.name}", next_step="run %%distributed "
            "model_split -n 2 --steps 100, and predict from the new run",
            code="WB-PLAN-296",
        )  # fmt: skip
    if base.setting.piped and not same:
        raise PlanError(
            "A run of a pipeline does not show the size of the gradients, so Workbench cannot "
            "predict another strategy from this run.",
            seen=f"this run: {base.setting.entry.name}; to predict: {entry.name}",
            next_step="predict from a run of strategy `mirrored`", code="WB-PLAN-297",
        )  # fmt: skip
    given = {k: v for k, v in (options or {}).items() if k != "overlap"}
    whole = entry.settings({**(_known(base.setting.options, entry) if same else {}), **given})
    if "overlap" in (options or {}):
        whole["overlap"] = bool((options or {})["overlap"])
    if compresses(base) and whole.get("compress", "none") != base.setting.options["compress"]:
        raise PlanError(
            "In this run, message times include the time to compress the gradients. So Workbench "
            "cannot use this run to predict a run with another compression.",
            seen=f"this run: compress={base.setting.options['compress']}; to predict: "
            f"{entry.name} with compress={whole.get('compress', 'none')}",
            next_step="predict from a run with -o compress=none",
            code="WB-PLAN-343",
        )
    return Setting(entry, whole, workers, max(int(per_host), 1))


def _known(options: Mapping[str, Any], entry: catalog.Strategy) -> dict[str, Any]:
    names = {option.name for option in entry.options}
    return {k: v for k, v in options.items() if k in names}


def _samples(base: Probe, workers: int, scaling: str, batch_size: int | None) -> float:
    """Return the samples of a worker in a step.

    Raises:
        PlanError: There are more workers than samples.
    """
    shares = base.setting.entry.data_parallel
    total = float(batch_size or base.samples * (base.workers if shares else 1))
    if not shares:
        return total
    if scaling == "weak":
        return total / base.workers
    most = batch_size or base.batch
    if workers > most:
        raise PlanError(
            "There are more workers than samples in a batch, so some workers would have no sample.",
            seen=f"{workers} workers, {most:g} samples in a batch",
            allowed=f"workers={most:g} or less",
            next_step="give a larger batch_size, or scaling='weak'",
            code="WB-PLAN-298",
        )
    return total / workers


@dataclass(frozen=True, eq=False)
class Knows:
    """The data from the runs, and the other arguments.

    Attributes:
        fitted: None if no run had messages.
        gradient_bytes: Bytes of the model's gradients, not compressed; NaN if unknown.
    """

    base: Probe
    probes: Sequence[Probe]
    fitted: Fitted | None
    gradient_bytes: float
    sizes: tuple[tuple[float, float, float], ...]
    draws: int = DRAWS

    @staticmethod
    def of(
        base: Probe, probes: Sequence[Probe], gradient_bytes: float | None, link: Link | None,
        *, needed: bool = True,
    ) -> Knows:  # fmt: skip
        """Fit the costs from the runs.

        Raises:
            RunError: The cost or the size of messages is unknown.
        """
        rng = np.random.default_rng(SEED)
        fitted = fit(probes, rng, DRAWS)
        size = float(gradient_bytes or np.nan)
        if gradient_bytes is None:
            size = base.message_bytes / packed_share(str(base.setting.options.get("compress")))
        if needed and not size > 0 and not base.setting.piped:
            raise RunError(
                "The run sent no messages, so the size of messages between workers is not known.",
                seen=f"{base.workers} worker" + ("s" if base.workers > 1 else ""),
                allowed="a run with 2 or more workers, or the arguments gradient_bytes and link",
                next_step="run %%distributed mirrored -n 2 --steps 100, and predict from the new "
                "run",
                code="WB-RUN-134",
            )
        if needed and fitted is None and link is None:
            raise RunError(
                "The cost of messages is not known: no run sent messages, and no `link` was given.",
                seen=", ".join(p.name for p in probes),
                allowed="a run with 2 or more workers, or the argument link",
                next_step="for example run.predict(8, link='10Gbit')",
                code="WB-RUN-135",
            )
        works = [(p.samples, p.work(straggler=False)) for p in probes]
        sizes = tuple(
            (samples, work.computed_s, float(work.own_s.std()) / np.sqrt(work.own_s.size))
            for samples, work in works
        )
        return Knows(base, probes, fitted, size, sizes)

    def case(
        self, setting: Setting, samples: float, link: Link | None, steps: int, *,
        straggler: bool = True,
    ) -> Case:  # fmt: skip
        """Return the case to compute for a number of workers."""
        if self.fitted is not None:
            cost = self.fitted.cost(link)
        elif link is None:
            cost = Cost.plain(np.zeros(self.draws), np.zeros(self.draws))
        else:
            none = np.zeros(self.draws)
            cost = Cost.plain(none + (link.latency_s or 0.0), none + 1 / link.bytes_per_s)
        size = self.gradient_bytes * packed_share(str(setting.options.get("compress", "none")))
        if setting.piped:
            size = self._handed_on(setting, samples)
        if setting.options.get("allreduce") == "auto":
            setting = _fastest(setting, size, cost)
        scale = self.scale(samples)
        return Case(
            setting, self.work(straggler=straggler), size, scale, cost, steps,
            max(p.workers for p in self.probes),
        )  # fmt: skip

    def work(self, *, straggler: bool = True) -> Work:
        """Return the measured computation of the first run and of similar runs.

        Similar runs have as many workers with as many samples, and their computation differs only
        by chance.
        """
        base = self.base
        if base.setting.piped or base.slow:
            return base.work(straggler=straggler)
        alike, jitter_s = [base.own_s], base.jitter_s
        for other in self.probes[1:]:
            same = other.workers == base.workers and abs(other.samples - base.samples) < 1e-9
            if not same or other.slow or other.setting.piped or other.jitter_s != jitter_s:
                continue
            error = np.hypot(*(float(p.own_s.std()) / np.sqrt(p.own_s.size) for p in (base, other)))
            gap = abs(float(other.own_s.mean() - base.own_s.mean()))
            if gap <= max(_CHANCE_Z * error, 0.005 * float(base.own_s.mean())):
                alike.append(other.own_s)
        return Work.of(np.concatenate(alike), jitter_s=jitter_s)

    def _handed_on(self, setting: Setting, samples: float) -> float:
        from .pipeline import shape_of

        before, after = shape_of(self.base.setting)[1], shape_of(setting)[1]
        return self.base.message_bytes * before / after * samples / self.base.samples

    def scale(self, samples: float) -> Floats:
        """Return the factor by which computation changes with a worker's samples, (draws,)."""
        base = self.base
        if abs(samples - base.samples) < 1e-9:
            return np.ones(self.draws)
        rng = np.random.default_rng(SEED + 1)
        if not self.two_sizes:
            fixed = rng.uniform(0.0, MOST_FIXED, self.draws)
            return np.asarray(fixed + (1 - fixed) * samples / base.samples)
        x = np.array([s for s, _, _ in self.sizes])
        y = np.array([mean for _, mean, _ in self.sizes])
        error = np.array([max(e, 1e-9) for _, _, e in self.sizes])
        drawn = y[:, None] + error[:, None] * rng.normal(size=(len(y), self.draws))
        middle = x - x.mean()
        slope = np.maximum((middle[:, None] * drawn).sum(axis=0) / (middle**2).sum(), 0.0)
        at = drawn.mean(axis=0) + slope * (np.array([samples, base.samples])[:, None] - x.mean())
        at = np.maximum(at, 1e-9)
        # The time for a part of the samples is at least this part of the whole time.
        return np.asarray(at[0] / at[1])

    @property
    def two_sizes(self) -> bool:
        """Whether runs had different numbers of samples per worker."""
        return len({round(s, 6) for s, _, _ in self.sizes}) > 1

    def link_text(self, link: Link | None) -> str:
        """Return the link of a prediction in words."""
        if link is not None:
            return f"{link.text}, {self._kept_text()}" if link.latency_s is None else link.text
        if self.fitted is None:
            return "none"
        return "as measured" if self.fitted.link is None else f"simulated: {self.fitted.link.text}"

    def _kept_text(self) -> str:
        """Return the cost of a message in words, for a link that is given without a latency."""
        if self.fitted is None:
            return "0 ms per message (assumed, because no run sent messages)"
        if self.fitted.link is not None:
            return f"{1e3 * (self.fitted.link.latency_s or 0.0):g} ms per message (as simulated)"
        low, middle, high = (1e3 * v for v in np.percentile(self.fitted.message_s, (5, 50, 95)))
        cost = f"{middle:.2g}" if self.fitted.settled else f"{low:.2g} to {high:.2g}"
        return f"{cost} ms per message (as measured)"

    def notes(
        self, settings: Sequence[Setting], samples: Sequence[float], link: Link | None
    ) -> list[str]:
        """Return the assumptions, and where the prediction goes beyond the measurements."""
        base, most = self.base, max(s.workers for s in settings)
        seen = max(p.workers for p in self.probes)
        found = []
        if most > FAR * seen:
            found.append(
                f"No run with {most} workers was measured. The largest measured run had {seen} "
                f"worker{'s' * (seen > 1)}. The effect of more hosts, switches and shared links "
                "was not measured. So the predicted interval is right only if all links are like "
                f"the {'measured' if link is None else 'given'} link."
            )
        values = self.work().seen
        if most > values / 10 and not base.setting.piped:
            found.append(
                f"The runs have {values} measured compute times: one for each worker in each "
                f"step. These times are too few to show how long the slowest of {most} workers "
                "computes in a step. So the time of the slowest worker is extrapolated. More "
                "steps improve the estimate."
            )
        if any(abs(s - base.samples) > 1e-9 for s in samples) and not self.two_sizes:
            found.append(
                f"All runs had {base.samples:g} samples per worker and step. The prediction "
                "assumes that a part of the compute time does not depend on the number of samples. "
                "The size of this part is not known. The predicted interval covers all sizes from "
                f"0 to {MOST_FIXED:.0%} of the compute time. To measure this part, "
                "train a second run with another --batch-size, and predict from both runs: "
                "wb.predict([run, other], ...)."
            )
        if base.workers == 1:
            found.append(
                f"Run {base.name} had only one worker, so differences between workers are not "
                "known."
            )
        if self.fitted is not None and not self.fitted.settled and most > 1:
            known = self.fitted.link is not None or (
                link is not None and link.latency_s is not None
            )
            if not known:
                found.append(
                    "All measured messages had the same size. So Workbench cannot separate the "
                    "fixed cost of a message from the cost that depends on its size. The predicted "
                    "interval covers all possible values of the two costs. Give link= "
                    "and latency=, or a second run with messages of another size "
                    "(-o compress=fp16)."
                )
        if self.fitted is None and link is not None and most > 1:
            found.append(
                "The runs sent no messages, so Workbench does not know how long a worker needs "
                "to prepare and read a message. For messages, the prediction counts only their "
                "time on the link."
            )
        if any(s.overlapped for s in settings) and most > 1:
            found.append(
                "The workers send the gradients in buckets while the backward pass still runs. The "
                "prediction assumes that the backward pass takes two thirds of the computation "
                "time."
            )
        if any(s.piped and s.workers != base.workers for s in settings):
            found.append(
                "The prediction assumes that the stages share the model's computation equally."
            )
        if any(s.options.get("allreduce") == "auto" for s in settings):
            held = self.fitted is not None and self.fitted.link is not None
            found.append(
                "For allreduce=auto the prediction uses the fastest algorithm."
                if held
                else "The prediction can compare the all-reduce algorithms only if the messages "
                "were measured on a simulated link. In these runs they were not. So for "
                "allreduce=auto the prediction assumes allreduce=backend."
            )
        return found


def _fastest(setting: Setting, size_bytes: float, cost: Cost) -> Setting:
    """Return the setting with the fastest all-reduce."""
    names = ["ring", "hierarchical", "reduce_to_one", "recursive_doubling"]
    if not cost.held:
        return Setting(setting.entry, {**setting.options, "allreduce": "backend"},
                       setting.workers, setting.per_host)  # fmt: skip
    taken: list[tuple[float, Setting]] = []
    own = np.zeros((2, setting.workers, len(cost.message_s)))
    for name in names:
        one = Setting(
            setting.entry, {**setting.options, "allreduce": name}, setting.workers, setting.per_host
        )
        taken.append((float(np.median(Exchange(one, size_bytes).period(own, cost))), one))
    return min(taken, key=lambda pair: pair[0])[1]


def compresses(probe: Probe) -> bool:
    """Whether a run computed long to compress its gradients; a cast to 16 bits takes no time."""
    return str(probe.setting.options.get("compress", "none")).startswith(("topk", "powersgd"))


def packed_share(compress: str) -> float:
    """Return the bytes sent per byte of the gradients (float32).

    Raises:
        PlanError: The value depends on the shapes of the model's matrices.
    """
    kind, _, amount = compress.partition(":")
    if kind in ("fp16", "bf16"):
        return 0.5
    if kind == "topk":
        return 2 * float(amount)
    if kind == "powersgd":
        raise PlanError(
            "The bytes that PowerSGD sends depend on the shapes of the model's matrices, but the "
            "run has not recorded these shapes.",
            seen=f"compress={compress}",
            allowed="compress=none, fp16, bf16 or topk:FRACTION",
            next_step=f"measure instead: %%distributed mirrored -n 8 -o compress={compress}",
            code="WB-PLAN-299",
        )
    return 1.0


def _point(found: Computed, case: Case, samples: float, base: Probe) -> Point:
    n = case.setting.workers
    low, middle, high = (float(q) for q in np.quantile(found.step_s, (0.05, 0.5, 0.95)))
    total = samples * (n if base.setting.entry.data_parallel else 1)
    values = case.work.seen
    far = n > FAR * case.seen_workers or (n > values / 10 and not case.setting.piped)
    first, half, last = (float(q) for q in np.quantile(found.end_s, (0.05, 0.5, 0.95)))
    rates = (total / half, total / last, total / first)
    return Point(n, (middle, low, high), rates, found.share, far, total)


def _measured(runs: Sequence[RunData], probes: Sequence[Probe]) -> list[Measured]:
    found = []
    for run, probe in zip(runs, probes, strict=True):
        rate = rate_of(run.history)
        if rate is not None:
            batch = probe.samples * (probe.workers if probe.setting.entry.data_parallel else 1)
            found.append(Measured(run.name, probe.workers, float(probe.step_s.mean()), rate.mean,
                                  rate.low, rate.high, batch))  # fmt: skip
    return found


def beside(found: Prediction, runs: Sequence[RunData]) -> Prediction:
    """Return a prediction with more measured runs, to be shown next to it.

    Raises:
        PlanError: A run is of another strategy, so it says nothing about the prediction.
        RunError: A run has too few steps.
    """
    for run in runs:
        if run.plan.strategy != found.strategy:
            raise PlanError(
                "The measured run and the prediction have different strategies, so they cannot be "
                "compared.",
                seen=f"{run.name}: {run.plan.strategy}", allowed=found.strategy,
                code="WB-PLAN-311",
            )  # fmt: skip
    more = _measured(runs, [Probe.of(run) for run in runs])
    return replace(found, measured=(*found.measured, *more))


def _cell(value: float) -> float | str:
    return "" if value != value else value
