"""The request for a run: one field per flag; all code that handles flags is built from them.

A field's `Flag` describes its form on the line above a cell, in `cluster.run(...)`, in the plan,
on the wire, in a cell that is written back, and in docs/magics.md. The fields that a plan and the
engines use unchanged are in `flags/settings.py`; `RunRequest` has the other fields too.

To add a flag: a field there or here, and the place where it does something.

This module parses the line above a `%%distributed` cell into words and flags, without side effects.
In `--profile`, `10:15` means the five steps from step 10 on.

Several values of one flag give one run for each value: `flags/several.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import catalog
from ..errors import PlanError
from .flags import several
from .flags.flag import Flag
from .flags.flag import said as _said
from .flags.settings import ON_STRAGGLER, SETTINGS, RunSettings, number
from .flags.several import Axis
from .magic_args import (
    Parser,
    parse_ranks,
    tokens,
)

AUTO = "auto"
"""Used instead of a strategy's name: short runs choose the strategy."""
PLOTS = ("auto", "widget", "svg", "text", "off")


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunSettings):
    """The request of a `%%distributed` line, of `cluster.run(...)`, or of the panel.

    Attributes:
        strategies: Names in the catalog, several with commas; none: a plain cell.
        workers: Number of replicas; None: as many as there are engines.
        ranks: Engines that a plain cell runs on; None: all.
        framework: None: the recipe's, else the cluster's.
        options: Options of the strategy; as text if they came from a line.
        epochs, steps, batch_size, seed: Override the cell's arguments of `wb.fit`.
        batch_per_worker: The global batch is this number times the number of workers.
        price: The price of a worker per hour, in any currency; None: not known.
        memory_per_worker: With `auto`: memory limit of a worker in bytes; None: no limit.
        allow_stale: Whether `auto` also considers strategies whose weights differ from one
            device's.
        probe_seconds: The time limit for choosing; None: the default.
        several: The fields with several values; the fields themselves have their defaults.
        seeds: Number of runs of each strategy, with seeds from 0; None: one run with the cell's
            seed.
        recipe: The recipe that is trained instead of the cell below.
        parameters: Parameters of the recipe; as text if they came from a line.
        local: Whether the cell also runs in the kernel.
        background: Whether the cell returns at once.
        plot: How the live dashboard is shown.
        to_job: Folder that is written instead of training; empty: none.
        plain: Whether the job's script does not use Workbench.
    """

    strategies: tuple[str, ...] = _said(
        "strategy",
        (),
        help="one strategy, or several strategies separated by commas",
        without="no strategy: the cell simply runs on every engine",
        example="%%distributed one_device,mirrored",
    )
    workers: int | None = _said(
        "-n --workers",
        metavar="N",
        argument="workers",
        read=number("--workers"),
        several=True,
        help="number of workers",
        without="all engines",
        example="%%distributed one_device,mirrored -n 1,2,4",
    )
    ranks: tuple[int, ...] | None = _said(
        "-r --ranks",
        metavar="IDS",
        read=lambda text: parse_ranks(text) if text else None,
        help="run on some engines only: 0,2 or 0-2 or [0,2]",
        without="all engines",
        example="%%distributed --ranks 0,2",
    )
    framework: str | None = _said(
        "--framework",
        metavar="NAME",
        argument="framework",
        help="torch or tensorflow",
        without="the recipe's framework; if the recipe has none, the cluster's framework",
        example="%%distributed --framework tensorflow",
    )
    options: dict[str, Any] = _said(  # noqa: RUF009
        "-o --option",
        {},
        metavar="KEY=VALUE",
        repeated=True,
        trains=True,
        argument="options",
        read=several.pairs("An option", "-o bucket_mb=10"),
        help="option of the strategy",
        without="the default of each option",
        example="%%distributed parameter_server -o max_staleness=4",
    )
    epochs: int | None = _said(
        "--epochs",
        metavar="N",
        trains=True,
        overrides=True,
        argument="epochs",
        read=number("--epochs"),
        several=True,
        help="overrides the cell's number of epochs",
        without="the argument `epochs` of `wb.fit`; without this argument, 1",
        example="%%distributed mirrored --epochs 2",
    )
    steps: int | None = _said(
        "--steps",
        metavar="N",
        trains=True,
        overrides=True,
        argument="steps",
        read=number("--steps"),
        several=True,
        help="train for N steps; overrides the cell's number of steps or epochs",
        without="the argument `steps` of `wb.fit`",
        example="%%distributed mirrored --steps 200",
    )
    batch_size: int | None = _said(
        "--batch-size",
        metavar="N",
        trains=True,
        overrides=True,
        argument="batch_size",
        read=number("--batch-size"),
        several=True,
        help="overrides the cell's global batch size",
        without="the argument `batch_size` of `wb.fit`",
        example="%%distributed mirrored --batch-size 256",
    )
    batch_per_worker: int | None = _said(
        "--batch-per-worker",
        metavar="N",
        trains=True,
        argument="batch_per_worker",
        read=number("--batch-per-worker"),
        several=True,
        help="each worker's share of a batch: N samples (weak scaling). The cell's global batch "
        "size is then not used",
        without="the global batch stays the same for any number of workers (strong scaling)",
        example="%%distributed mirrored -n 1,2,4 --batch-per-worker 64",
    )
    seed: int | None = _said(
        "--seed",
        metavar="N",
        trains=True,
        overrides=True,
        argument="seed",
        read=number("--seed", least=0),
        several=True,
        help="overrides the cell's seed",
        without="the argument `seed` of `wb.fit`; without this argument, 0",
        example="%%distributed mirrored --seed 7",
    )
    seeds: int | None = _said(
        "--seeds",
        metavar="K",
        trains=True,
        read=number("--seeds"),
        help="run each strategy with seeds 0..K-1",
        without="one run, with one seed",
        example="%%distributed mirrored --seeds 3",
    )
    recipe: str | None = _said(
        "--recipe",
        metavar="NAME",
        help="what to train: the cell of an earlier run, a @wb.recipe, or a built-in recipe",
        without="the cell; with `%distributed`, the cell that was trained last",
        example="%distributed sharded --recipe base",
    )
    parameters: dict[str, Any] = _said(  # noqa: RUF009
        "-p --parameter",
        {},
        metavar="NAME=VALUE",
        repeated=True,
        trains=True,
        argument="parameters",
        read=several.pairs("A parameter", "-p layers=4"),
        help="value for a parameter of the recipe (a parameter is an argument of the recipe's "
        "function)",
        without="the default of each parameter",
        example="%distributed mirrored --recipe char_transformer -p layers=4 -p width=256",
    )
    local: bool = _said(
        "--local",
        False,
        help="run the cell on the engines and also in the notebook's kernel",
        without="off",
        example="%%distributed --local",
    )
    background: bool = _said(
        "--background",
        False,
        help="return immediately; the run continues in the background",
        without="off: the cell ends when the run ends",
        example="%%distributed mirrored --background",
    )
    plot: str = _said(
        "--plot",
        "auto",
        choices=PLOTS,
        help="how the live dashboard is shown. With `text` or `off`, a comparison of several runs "
        "is shown only as a table",
        without="`auto`: the widget in a notebook, otherwise text",
        example="%%distributed mirrored --plot off",
    )

    price: float | None = _said(
        "--price",
        metavar="PRICE",
        trains=True,
        read=several.price_of,
        help="price of one worker for one hour; tables then also show the cost of an epoch (or of "
        "1M samples, if the size of an epoch is not known)",
        without="no costs are shown",
        example="%%distributed one_device,mirrored -n 1,2,4 --price 2.5",
    )
    memory_per_worker: float | None = _said(
        "--memory-per-worker",
        metavar="SIZE",
        trains=True,
        read=several.memory_of,
        write=lambda size_bytes: f"{size_bytes:.0f}",
        help="with the strategy `auto`: memory limit of a worker for weights, gradients and "
        "optimizer state",
        without="no limit",
        example="%%distributed auto --memory-per-worker 4GiB",
    )
    allow_stale: bool = _said(
        "--allow-stale",
        False,
        trains=True,
        help="with the strategy `auto`: also allow strategies whose result differs from the "
        "result on one device",
        without="only strategies that give the same result as one device",
        example="%%distributed auto --allow-stale",
    )
    probe_seconds: int | None = _said(
        "--probe-seconds",
        metavar="S",
        trains=True,
        read=number("--probe-seconds", least=5),
        help="with the strategy `auto`: total time limit, in seconds, of all short runs that "
        "compare the strategies",
        without="60",
        example="%%distributed auto --probe-seconds 120",
    )
    several: tuple[Axis, ...] = ()

    to_job: str = _said(
        "--to-job",
        "",
        metavar="DIR",
        trains=True,
        help="write a job folder and do not train here; the job can be started on another machine",
        without="the cell is trained here",
        example="%%distributed mirrored -n 2 --to-job job",
    )
    plain: bool = _said(
        "--plain",
        False,
        trains=True,
        help="with --to-job: write a script that does not need Workbench",
        without="the script needs Workbench, which records the run",
        example="%%distributed mirrored -n 2 --to-job job --plain",
    )

    def each(self) -> Iterator[tuple[RunRequest, tuple[str, ...]]]:
        """Yield the request with each combination of its several values, and words for those."""
        for chosen in itertools.product(*(axis.values for axis in self.several)):
            one, words = dataclasses.replace(self, several=()), []
            for axis, value in zip(self.several, chosen, strict=True):
                put: Any = {**getattr(one, axis.field), axis.key: value} if axis.key else value
                changed: dict[str, Any] = {axis.field: put}
                one = dataclasses.replace(one, **changed)
                if word := several.WORDS[axis.field](axis.key, value):
                    words.append(word)
            yield one, tuple(words)

    @property
    def overrides(self) -> dict[str, int]:
        """The values that override the cell, by name."""
        given = {name: getattr(self, name) for name in OVERRIDES}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def training_flags(self) -> list[str]:
        """Long names of the flags given that belong to a training run."""
        given = [name for name, default in UNSAID.items() if getattr(self, name) != default]
        several = [axis.field for axis in self.several]
        trains = [name for name in given if FLAGS[name].trains]
        return [FLAGS[name].long for name in dict.fromkeys([*trains, *several])]


FLAGS: dict[str, Flag] = {
    field.name: field.metadata["flag"]
    for field in sorted(dataclasses.fields(RunRequest), key=lambda one: one.name in SETTINGS)
    if "flag" in field.metadata
}
"""The flag of every field of a request: first those that a plan decides, then the settings."""

UNSAID: dict[str, Any] = {name: getattr(RunRequest(), name) for name in FLAGS}
"""The default of every field."""
OVERRIDES = tuple(name for name, flag in FLAGS.items() if flag.overrides)
ARGUMENTS = {flag.argument: name for name, flag in FLAGS.items() if flag.argument}


def from_line(given: Mapping[str, Any]) -> RunRequest:
    """Return the request of a line, from its parsed values by long name.

    Raises:
        PlanError: The line is not valid; the error says what is allowed.
    """
    found: dict[str, Any] = {}
    axes: list[Axis] = []
    for name, flag in FLAGS.items():
        value = given[flag.long.lstrip("-").replace("-", "_")]
        if flag.several and value is not None and "," in value:
            read = tuple(map(flag.read, several.each_of(value, flag.long)))
            if len(read) == 1:
                found[name] = read[0]
            else:
                axes.append(Axis(name, read))
        elif value is not None and value != []:
            found[name] = flag.read(value)
    names = filter(None, map(str.strip, found["strategies"].split(",")))
    framework = found.get("framework")
    found["strategies"] = tuple(
        name if name == AUTO else catalog.canonical(name, framework) for name in names
    )
    axes += _of_options(found) + several.of_values(found) + several.of_parameters(found)
    return RunRequest(**found, several=tuple(axes))


def _of_options(found: dict[str, Any]) -> list[Axis]:
    """Remove the options with several values from the parsed line, and return them."""
    frameworks = [found["framework"]] if found.get("framework") else catalog.FRAMEWORKS
    text = {
        option.name
        for framework in frameworks
        for entry in catalog.strategies(framework)
        if entry.name in found["strategies"]
        for option in entry.options
        if option.holds_commas
    }
    axes = []
    for name, given in list(found.get("options", {}).items()):
        parts = (
            several.each_of(given, f"Option {name}", commas=name not in text) if given else [given]
        )
        if len(parts) > 1:
            axes.append(Axis("options", tuple(parts), name))
            del found["options"][name]
    return axes


def from_arguments(strategy: str, asked: Mapping[str, Any]) -> RunRequest:
    """Return the request that arguments of `cluster.run(...)` make.

    Raises:
        PlanError: There is no argument with this name, or its text is not valid.
    """
    found = {}
    for argument, value in asked.items():
        if argument not in ARGUMENTS:
            raise PlanError(
                "A run has no argument with this name.",
                seen=argument,
                allowed=", ".join(ARGUMENTS),
                code="WB-PLAN-095",
            )
        if value is not None:
            found[ARGUMENTS[argument]] = FLAGS[ARGUMENTS[argument]].given(value)
    return RunRequest(strategies=(strategy,), **found)


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_flags(function: Function) -> Function:
    """Show the arguments behind `**asked` in a function's signature and docstring.

    They replace the line `asked: ..` of the docstring.
    """
    before = inspect.signature(function)
    mine = [p for p in before.parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = [
        inspect.Parameter(
            argument,
            inspect.Parameter.KEYWORD_ONLY,
            default=() if UNSAID[name] == () else UNSAID[name] or None,
        )
        for argument, name in ARGUMENTS.items()
        if argument not in before.parameters
    ]
    function.__signature__ = before.replace(parameters=[*mine, *made])  # type: ignore[attr-defined]
    lines = [
        f"    {argument}: As `{FLAGS[name].long}`: {FLAGS[name].help}."
        for argument, name in ARGUMENTS.items()
    ]
    head, mark, rest = inspect.cleandoc(function.__doc__ or "").partition("    asked: ")
    if mark:
        function.__doc__ = head + "\n".join([*lines, rest.partition("\n")[2]])
    return function


@functools.cache
def cell_parser(prog: str = "%%distributed") -> argparse.ArgumentParser:
    """Return the parser of `%%distributed`, whose help is made from the catalog."""
    parser = Parser(
        prog=prog,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the cell on the engines. If the line names a strategy, the cell trains "
        "under this strategy.",
        epilog=_strategies_and_options(),
    )
    for flag in FLAGS.values():
        parser.add_argument(*flag.names, **flag.option)
    return parser


def _strategies_and_options() -> str:
    return "\n\n".join(
        f"strategies ({framework}):\n"
        + "\n".join(f"  {e.name:<14} {e.summary}" for e in catalog.strategies(framework))
        + "\n\noptions (-o):\n"
        + "\n".join(
            f"  {e.name}: {o.name}={o.default}  {o.help} ({o.allowed})"
            for e in catalog.strategies(framework)
            for o in e.options
        )
        for framework in catalog.FRAMEWORKS
    )


def parse_cell_line(line: str, prog: str = "%%distributed") -> RunRequest:
    """Read the line above a cell.

    Raises:
        PlanError: The line is not valid; the error says what is allowed.
    """
    return from_line(vars(cell_parser(prog).parse_args(tokens(line))))


def check_straggler(entry: catalog.Strategy, asked: RunSettings, chosen: dict[str, Any]) -> None:
    """Raise PlanError if a strategy does not support the requested action for slow workers."""
    what = asked.on_straggler
    if what not in ON_STRAGGLER:
        raise PlanError(
            "The value of on_straggler is not valid.",
            seen=what,
            allowed=", ".join(ON_STRAGGLER),
            code="WB-PLAN-324",
        )
    if what == "replace":
        _check_replacing(entry, asked)
    if what != "shed" or (entry.sheds and entry.is_sync(chosen)):
        return
    able = [one for one in catalog.CATALOG if one.sheds]
    names = [one.name if one.sync else f"{one.name} -o {one.sync_option}=true" for one in able]
    if entry.max_workers == 1:
        why = "it has only one worker"
    elif not entry.data_parallel:
        why = "each of its workers computes all samples of a batch"
    elif entry.is_sync(chosen):
        why = "the shares of its workers must be equal"
    else:
        why = "its workers do not take each step together"
    raise PlanError(
        f"Strategy {entry.name} cannot give a slow worker a smaller share: {why}.",
        seen=f"--on-straggler {what}",
        allowed=f"`wait`; `{what}` is allowed only in PyTorch, with one of these strategies: "
        f"{', '.join(names)}",
        next_step="remove --on-straggler, or use an allowed value",
        code="WB-PLAN-325",
    )


def _check_replacing(entry: catalog.Strategy, asked: RunSettings) -> None:
    """Raise PlanError if a worker cannot be replaced while the others train."""
    if not (entry.heals and entry.replicated):
        able = ", ".join(e.name for e in catalog.CATALOG if e.heals and e.replicated)
        shed = "; `shed`" if entry.sheds else ""
        if shed and not entry.sync:
            shed += f" with -o {entry.sync_option}=true"
        raise PlanError(
            f"Strategy {entry.name} cannot replace a slow worker during a run.",
            seen="--on-straggler replace",
            allowed=f"`wait`{shed}; `replace` is allowed only in PyTorch, with strategy {able}",
            next_step="remove --on-straggler, or use an allowed value",
            code="WB-PLAN-326",
        )
    if asked.on_failure not in ("", "heal"):
        raise PlanError(
            "--on-straggler replace works only with --on-failure heal.",
            seen=f"--on-straggler replace --on-failure {asked.on_failure}",
            allowed="--on-failure heal (the default with --on-straggler replace)",
            next_step="remove --on-failure",
            code="WB-PLAN-327",
        )
