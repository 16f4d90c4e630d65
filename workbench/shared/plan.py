"""A plan: a recipe, a strategy and its options, validated before any engine is touched.

`cell_of` turns a plan into a notebook cell: the magic's line, and below it the source.

The line holds only what differs from the defaults, always in the same order, so equal plans give
equal text:

    strategy  -n  --framework  -o ..  --epochs --steps --batch-size --seed
    and then the settings, in the order of `RunSettings`: --inject .. to --name

Each line is parsed again before it is returned. If it does not give the same plan, an error is
raised.
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import catalog
from ..cookbook import builtin
from ..cookbook.recipe import Recipe
from ..errors import PlanError
from . import checkpoints, log_targets
from .faults import ON_LINKS
from .flags.settings import RunSettings, settings_from_wire
from .flags.several import Axis, check_runs
from .flags.several import values as check_values
from .magic_args import check_window
from .run_request import (
    FLAGS,
    OVERRIDES,
    UNSAID,
    RunRequest,
    check_straggler,
    parse_cell_line,
)

MOST_NAME = 100
"""Maximum length of a run's name, because it appears in tables, figures and folder names."""


@dataclass(frozen=True)
class Plan(RunSettings):
    """Everything that is decided before a run begins: its settings, and these attributes.

    Attributes:
        recipe: The recipe that is trained.
        strategy: Name in the catalog.
        workers: Number of replicas.
        options: Value of every option of the strategy.
        overrides: `epochs`, `steps`, `batch_size`, `seed` from the line; they override the cell's
            arguments of `wb.fit`.
    """

    recipe: Recipe
    strategy: str
    framework: str = "torch"
    workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, int] = field(default_factory=dict)

    @property
    def entry(self) -> catalog.Strategy:
        """The strategy's entry in the catalog."""
        return catalog.lookup(self.strategy, self.framework)

    @property
    def servers(self) -> int:
        """Number of server engines that the run needs in addition to its workers."""
        return self.entry.server_count(self.options)

    @property
    def helpers(self) -> tuple[str, ...]:
        """Names of the engines that the run needs in addition to those that run the cell."""
        return self.entry.helpers(self.options, self.workers)

    @property
    def engines(self) -> int:
        """Number of engines that run the cell; one engine may hold several replicas."""
        return 1 if self.entry.one_engine else self.workers

    @property
    def sync(self) -> bool:
        """Whether the workers take each step together."""
        return self.entry.is_sync(self.options)

    def check_scales(self, workers: int | None = None, batch: int | None = None) -> None:
        """Raise PlanError if a run cannot continue with this number of workers, or with any other.

        Args:
            batch: Samples of its global batch; None if not known.
        """
        if not (self.entry.heals and self.entry.replicated):
            able = ", ".join(e.name for e in catalog.CATALOG if e.heals and e.replicated)
            raise PlanError(
                f"Strategy {self.entry.name} cannot change its number of workers during a run.",
                seen=self.entry.name,
                allowed=f"strategy {able} in PyTorch",
                next_step="call run.stop(), then run the cell again with another -n",
                code="WB-PLAN-322",
            )
        if self.on_failure != "heal":
            raise PlanError(
                "Only a run with --on-failure heal can change its number of workers.",
                seen=f"--on-failure {self.on_failure}",
                allowed="--on-failure heal",
                next_step=f"start the run with %%distributed {self.entry.name} --on-failure heal",
                code="WB-PLAN-323",
            )
        if workers is None:
            return
        count = check_count("The number of workers", workers)
        if batch is not None and count > batch:
            raise PlanError(
                "There are more workers than samples in a batch.",
                seen=f"{count} workers, a global batch of {batch}",
                allowed=f"at most {batch} workers",
                next_step=f"run.scale({batch})",
                code="WB-PLAN-321",
            )
        check_fewer(self, count)

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise PlanError if the strategy or an option needs devices that are not available.

        Args:
            devices: One per replica: `cpu`, `cuda:0`; replicas on one GPU have the same device.
        """
        on_gpus = [device for device in devices if device != "cpu"]
        alone = len(set(on_gpus)) == len(on_gpus)
        if not alone and not self.entry.shares_gpu:
            gpus, s = len(set(on_gpus)), "s" * (len(set(on_gpus)) > 1)
            one, n = "replica" if self.entry.one_engine else "worker", len(devices)
            raise PlanError(
                f"Strategy {self.strategy} needs a separate GPU for each {one}.",
                seen=f"{n} {one}s, {gpus} GPU{s}",
                allowed=f"up to {gpus} {one}{s}, or a strategy in which workers can share a GPU: "
                + ", ".join(one.name for one in catalog.strategies(self.framework)
                            if one.shares_gpu and one.max_workers is None),
                next_step=f"use -n {gpus}; or %cluster stop, then %cluster start {n} --devices cpu",
                code="WB-PLAN-162",
            )  # fmt: skip
        if alone and len(on_gpus) == len(devices):
            return
        for name, value in self.entry.needs_gpus:
            if self.options.get(name) == value:
                default = self.entry.option(name).default
                raise PlanError(
                    f"-o {name}={value} needs a GPU for each replica.",
                    seen=", ".join(devices),
                    allowed=f"a GPU for each replica, or -o {name}={default}",
                    next_step=f"remove -o {name}, or use -o {name}={default}",
                    code="WB-PLAN-084",
                )

    def with_seed(self, seed: int) -> Plan:
        """Return the same plan with another seed and another name."""
        return replace(
            self,
            overrides={**self.overrides, "seed": seed},
            name=f"{self.name or self.strategy}-seed{seed}",
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the plan as JSON-ready data, without function arguments."""
        data = asdict(self) | self.settings_to_wire()
        data["recipe"].pop("args")
        return data

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> Plan:
        """Rebuild what `to_wire` gave."""
        known = dict(data) | settings_from_wire(data)
        known["recipe"] = Recipe(**known["recipe"])
        return Plan(**known)


def make_plan(
    recipe: Recipe,
    strategy: str,
    *,
    framework: str = "torch",
    workers: int,
    options: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """Validate the request and return it as a plan.

    Args:
        workers: The number of available or requested engines; a strategy with a lower limit uses
            fewer.
        settings: Fields of `RunSettings`. Paths are relative to the notebook's folder; by default
            `on_failure` is `replace` with checkpoints, `stop` without.

    Raises:
        PlanError: With the value seen, what is allowed and the next step.
    """
    entry = catalog.lookup(strategy, framework)
    asked = RunSettings(**settings)
    check_name(asked.name)
    count = check_count("The number of workers", workers)
    if entry.max_workers is not None:
        count = min(count, entry.max_workers)
    chosen = entry.settings(options or {}, catalog.CATALOG)
    given = _check_overrides(overrides or {})
    _check_layout(entry, chosen, count, given.get("batch_size"))
    for fault in asked.faults:
        fault.check(count, links=entry.links)
    if not recipe.source.strip():
        raise PlanError(
            "The cell is empty, so there is nothing to train.",
            next_step="write the training code below the line %%distributed ...",
            code="WB-PLAN-085",
        )
    builtin.check(recipe)
    check_window(asked.profile, given.get("steps"))
    folder, every, on_failure = checkpoints.settings(
        asked.checkpoint, asked.checkpoint_every, asked.on_failure or asked.needed_on_failure
    )
    check_straggler(entry, asked, chosen)
    if asked.spares and not asked.on_failure:
        on_failure = "heal"
    if asked.spares and not (entry.replicated and on_failure == "heal"):
        raise PlanError(
            "--spares works only with --on-failure heal, and not with every strategy.",
            seen=f"{entry.name} --spares {asked.spares} --on-failure {on_failure}",
            allowed="--on-failure heal (the default with --spares), in PyTorch, with one of these "
            "strategies: " + ", ".join(e.name for e in catalog.CATALOG if e.heals and e.replicated),
            next_step="remove --spares, or use --on-failure heal with an allowed strategy",
            code="WB-PLAN-331",
        )
    _check_on_failure(entry, on_failure, count, chosen)
    decided = {
        **asked.settings,
        "checkpoint": folder,
        "checkpoint_every": every,
        "on_failure": on_failure,
        "log": log_targets.parse_targets(asked.log),
        "values": _check_values(asked.values, chosen),
    }
    return Plan(recipe, entry.name, framework, count, chosen, given, **decided)


def plan_of(
    request: RunRequest, recipe: Recipe, *, strategy: str = "", framework: str, workers: int
) -> Plan:
    """Return the plan of a request.

    Args:
        strategy: One of the request's strategies, if it names several.
        framework: Used if neither the request nor the recipe names one.
        workers: Used if the request gives no number.

    Raises:
        PlanError: With the value seen, what is allowed and the next step.
    """
    chosen = strategy or request.strategies[0]
    framework = request.framework or recipe.framework or framework
    workers = workers if request.workers is None else request.workers
    overrides = request.overrides
    if request.several:
        raise PlanError(
            "A run can have only one value for each flag.",
            seen=", ".join(
                f"{len(axis.values)} values of {_axis(axis)}" for axis in request.several
            ),
            allowed="one value for each flag. To try several values, use wb.sweep(...) or "
            "wb.queue().sweep(...). Without --to-job, %%distributed also accepts several values",
            code="WB-PLAN-274",
        )
    if request.batch_per_worker is not None:
        if request.batch_size is not None:
            raise PlanError(
                "The batch size is given twice: for all workers together, and per worker.",
                seen=f"--batch-size {request.batch_size}, "
                f"--batch-per-worker {request.batch_per_worker}",
                next_step="use --batch-size for strong scaling (the global batch stays the same), "
                "or --batch-per-worker for weak scaling (each worker's share stays the same)",
                code="WB-PLAN-275",
            )
        most = catalog.lookup(chosen, framework).max_workers
        count = check_count("The number of workers", workers)
        each = check_count("batch_per_worker", request.batch_per_worker)
        overrides["batch_size"] = each * (count if most is None else min(count, most))
    return make_plan(
        recipe.with_given(request.parameters),
        chosen,
        framework=framework,
        workers=workers,
        options=request.options,
        overrides=overrides,
        **request.settings,
    )


def _axis(axis: Axis) -> str:
    return f"{FLAGS[axis.field].long} {axis.key}".rstrip()


def plans_of(request: RunRequest, recipe: Recipe, *, framework: str, workers: int) -> list[Plan]:
    """Return the plans of a request: every strategy with every combination of its several values.

    A strategy with a limit of workers (`one_device`) runs once if only the number of workers
    varies. Options and link faults of other strategies do not apply to it, because it is the
    baseline.

    Args:
        framework, workers: As in `plan_of`.

    Raises:
        PlanError: A plan cannot be run, or there are too many.
    """
    sizes = [len(axis.values) for axis in request.several]
    check_runs(len(request.strategies), *sizes, request.seeds or 1)
    if request.seeds and any(axis.field == "seed" for axis in request.several):
        raise PlanError(
            "The seeds are given twice.",
            seen=f"--seeds {request.seeds}, together with several values of --seed",
            next_step="use --seeds K for seeds 0 to K-1, or --seed 3,5,8 for these seeds only",
            code="WB-PLAN-276",
        )
    found: list[Plan] = []
    for strategy in request.strategies:
        one_name = request.name if len(request.strategies) == 1 else ""
        stem = one_name or (f"{request.name}-{strategy}" if request.name else "")
        yardstick = _is_yardstick(strategy, request, recipe, framework)
        sized = any(axis.field == "workers" for axis in request.several)
        made: list[Plan] = []
        for one, words in request.each():
            if yardstick:
                unlinked = tuple(f for f in one.faults if f.kind not in ON_LINKS)
                one = replace(one, options={}, faults=unlinked)
                words = tuple(w for w in words if "=" not in w or _of_cell(w, request))
            plan = plan_of(
                replace(one, name=stem), recipe, strategy=strategy, framework=framework,
                workers=workers,
            )  # fmt: skip
            if sized and plan.entry.max_workers != 1:
                words = (f"n{plan.workers}", *words)
            if plan not in made:
                made.append(plan)
                name = "-".join([stem or strategy, *words]) if words else stem
                check_name(name)
                plan = replace(plan, name=name)
                seeds = range(request.seeds or 0)
                found += [plan.with_seed(k) for k in seeds] or [plan]
    return found


def _is_yardstick(strategy: str, request: RunRequest, recipe: Recipe, framework: str) -> bool:
    """Whether a strategy has one worker and no options, next to strategies that have options."""
    entry = catalog.lookup(strategy, request.framework or recipe.framework or framework)
    return entry.max_workers == 1 and not entry.options and len(request.strategies) > 1


def _of_cell(word: str, request: RunRequest) -> bool:
    """Whether a word of a run's name describes a value that the cell reads."""
    key = word.partition("=")[0]
    read = ("values", "parameters")
    return any(axis.field in read and axis.key == key for axis in request.several)


def _check_values(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `--set`, if their names have no other meaning in `wb.options`."""
    found = check_values(values)
    for name in found:
        if name in OVERRIDES or name in options:
            flag = f"-o {name}=..." if name in options else FLAGS[name].long
            raise PlanError(
                f"--set cannot set `{name}`, because {flag.split()[0]} sets it.",
                seen=f"--set {name}={found[name]}",
                next_step=f"use {flag}",
                code="WB-PLAN-278",
            )
    return found


def _check_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given overrides, as numbers."""
    given = {key: value for key, value in overrides.items() if value is not None}
    for key, value in given.items():
        if key not in OVERRIDES:
            raise PlanError(
                "A run has no argument with this name.",
                seen=key,
                allowed=", ".join(OVERRIDES),
                code="WB-PLAN-086",
            )
        given[key] = check_seed(value) if key == "seed" else check_count(f"`{key}`", value)
    return given


def _check_layout(
    entry: catalog.Strategy, settings: dict[str, Any], count: int, batch: int | None
) -> None:
    """Raise PlanError if the number of workers, the options and the batch do not fit each other."""
    if batch is not None and entry.data_parallel and batch < count:
        raise PlanError(
            "The global batch is smaller than the number of workers.",
            seen=f"batch_size={batch} on {count} workers",
            allowed=f"batch_size of at least {count}",
            next_step=f"increase --batch-size, or use fewer workers: -n {batch}",
            code="WB-PLAN-087",
        )
    if entry.rules:
        module, _, rule = entry.rules.partition(":")
        getattr(importlib.import_module(module), rule)(settings, count, batch)


def check_fewer(plan: Plan, workers: int) -> None:
    """Raise PlanError if a plan cannot continue with fewer workers."""
    _check_layout(plan.entry, plan.options, workers, plan.overrides.get("batch_size"))


def _check_on_failure(
    entry: catalog.Strategy, on_failure: str, count: int, settings: dict[str, Any]
) -> None:
    if on_failure == "heal" and not entry.heals:
        able = ", ".join(e.name for e in catalog.CATALOG if e.heals and e.framework == "torch")
        why = entry.unhealed or (
            "in TensorFlow, no new worker can join a training that has begun"
            if entry.framework == "tensorflow" else "no new worker can join it")  # fmt: skip
        raise PlanError(
            f"A run of strategy {entry.name} cannot heal after a worker's death: {why}.",
            seen="--on-failure heal",
            allowed=f"`stop`, {'`continue`, ' * (count > 1 and not entry.one_engine)}or `replace` "
            f"with --checkpoint DIR. `heal` works only in PyTorch, with these strategies: {able}",
            next_step="use --checkpoint DIR --on-failure replace",
            code="WB-PLAN-320",
        )
    together = entry.copy_workers(settings, count) if on_failure == "heal" else 1
    if together == count > 1:
        raise PlanError(
            f"This run of strategy {entry.name} cannot heal after a worker's death. All workers "
            "form one pipeline, so no other worker has the stage of the dead worker.",
            seen=f"--on-failure heal, {count} workers in one pipeline",
            allowed="`heal` with two pipelines or more; `stop`; `replace` with --checkpoint DIR",
            next_step=f"use -n {2 * count} -o stages={count}; or `replace` with --checkpoint DIR",
            code="WB-PLAN-332",
        )
    for name, value in entry.unhealed_with if on_failure == "heal" else ():
        if settings[name] == value:
            raise PlanError(
                f"With {name}={value}, a run of strategy {entry.name} cannot heal after a "
                "worker's death. All servers must apply the same pushes, but a worker's last push "
                "before its death may have reached only some of the servers.",
                seen=f"--on-failure heal, {name}={value}",
                allowed=f"`heal` without {name}={value}; `stop`; `replace` with --checkpoint DIR",
                next_step=f"remove -o {name}={value}",
                code="WB-PLAN-330",
            )
    if on_failure != "continue":
        return
    one = "only one engine runs the cell" if entry.one_engine else ""
    one = one or ("the run has only one worker" if count == 1 else "")
    if one:
        raise PlanError(
            f"Strategy {entry.name} cannot continue with fewer workers: {one}.",
            seen="--on-failure continue",
            allowed="`stop`; `replace` with --checkpoint DIR",
            next_step="use --checkpoint DIR --on-failure replace",
            code="WB-PLAN-088",
        )


def check_name(name: object) -> None:
    """Raise PlanError if a run cannot have this name."""
    if not isinstance(name, str):
        raise PlanError(
            "The run's name must be text.",
            seen=name,
            allowed=f"text of at most {MOST_NAME} characters",
            code="WB-PLAN-089",
        )
    if len(name) > MOST_NAME:
        raise PlanError(
            f"The run's name is too long: {len(name)} characters.",
            seen=f"{name[:40]}...",
            allowed=f"at most {MOST_NAME} characters",
            next_step="use --name with a shorter name",
            code="WB-PLAN-090",
        )


def check_count(what: str, value: object) -> int:
    """Return `value` as a whole number of at least 1, or raise PlanError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(
            f"{what} must be a whole number of at least 1.",
            seen=value,
            allowed="a whole number, at least 1",
            code="WB-PLAN-091",
        )
    return value


def check_seed(value: object) -> int:
    """Return `value` as a seed (0 or more), or raise PlanError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(
            "`seed` must be a whole number of at least 0.",
            seen=value,
            allowed="0 or more",
            code="WB-PLAN-092",
        )
    return value


MAGIC = "%%distributed"
Part = tuple[str, object]
"""A flag and its value."""


def cell_of(plan: Plan, *, framework: str = "torch") -> str:
    """Return a notebook cell that requests this plan.

    Args:
        plan: The plan that the cell must train. A recipe that is a function is defined and then
            called.
        framework: The notebook's default framework; only another framework is written into the
            cell.

    Returns:
        The text of the cell, `%%distributed ...` first.

    Raises:
        PlanError: It cannot be written as a cell: a name has a line break, or an argument of the
            function cannot be written as source code.
    """
    return f"{MAGIC} {line_of(plan, framework=framework)}\n{plan.recipe.cell}"


def line_of(plan: Plan, *, framework: str = "torch") -> str:
    """Return the text after `%%distributed` in this cell.

    Raises:
        PlanError: A value does not fit on one line.
    """
    words = [plan.strategy]
    for flag, value in _parts(plan, framework):
        words += _words(flag, str(value))
    line = " ".join(words)
    if line.splitlines() != [line]:
        raise PlanError(
            "This run cannot be written as a cell, because a value contains a line break.",
            seen=next((word for word in words if word.splitlines() != [word]), line),
            next_step="remove the line break from this value",
            code="WB-PLAN-010",
        )
    _check_said(plan, parse_cell_line(line), framework)
    return line


def _parts(plan: Plan, framework: str) -> Iterator[Part]:
    """Yield the settings that differ from the defaults, in order."""
    entry = plan.entry
    if entry.max_workers is None or plan.workers < entry.max_workers:
        yield "-n", plan.workers
    if plan.framework != framework:
        yield "--framework", plan.framework
    for option in entry.options:
        value = plan.options.get(option.name, option.default)
        if value != option.default or type(value) is not type(option.default):
            yield "-o", f"{option.name}={_option(value)}"
    for name in OVERRIDES:
        if name in plan.overrides:
            yield from FLAGS[name].words(plan.overrides[name])
    for name, value in plan.settings.items():
        if value != _implied(name, plan):
            yield from FLAGS[name].words(value)


def _implied(name: str, settings: RunSettings) -> object:
    """Return a plan's values for flags that its line does not have."""
    if name == "checkpoint_every":
        return checkpoints.EVERY if settings.checkpoint else 0
    if name == "on_failure":
        return settings.needed_on_failure or ("replace" if settings.checkpoint else "stop")
    return UNSAID[name]


def _option(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(flag: str, value: str) -> list[str]:
    """Return a flag and its value as text for the line."""
    if value.startswith("-") or not value:  # otherwise it would look like a flag
        return [_quoted(f"{flag}={value}")]
    return [flag, _quoted(value)]


def _quoted(text: str) -> str:
    plain = "'" in text and not {'"', "\\"} & set(text)
    return f'"{text}"' if plain else shlex.quote(text)


def _check_said(plan: Plan, said: RunRequest, framework: str) -> None:
    """Raise PlanError if the line, when parsed again, gives another plan."""
    entry = plan.entry
    read: dict[str, object] = {
        "strategy": said.strategies[0] if len(said.strategies) == 1 else said.strategies,
        "framework": said.framework or framework,
        "workers": said.workers or entry.max_workers,
        "options": entry.settings(dict(said.options)),
    }
    every = said.checkpoint_every if said.checkpoint else 0
    read["checkpoint_every"] = every or _implied("checkpoint_every", said)
    read["on_failure"] = said.on_failure or _implied("on_failure", said)
    for one in dataclasses.fields(plan):
        if one.name == "recipe":
            continue
        value = getattr(plan, one.name)
        got = read.get(one.name, getattr(said, one.name, None))
        if got != value:
            raise PlanError(
                f"This run cannot be written as a cell: no flag can set this value of {one.name}.",
                seen=value,
                allowed=f"the nearest possible value is {got!r}",
                next_step="start the run with cluster.run(...)",
                code="WB-PLAN-011",
            )
