"""The settings of a run that a line, its plan and the engines share: a field with a flag each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..faults import Fault, parse_fault
from ..log_targets import parse_targets
from ..magic_args import Window, parse_window, whole_number
from . import several
from .flag import Read
from .flag import said as _said

TRACEBACKS = ("short", "full")
ON_STRAGGLER = ("wait", "shed", "replace")


def number(name: str, least: int = 1) -> Read:
    return lambda text: whole_number(name, text, least)


def read_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    return tuple(parse_fault(text) for text in texts)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that a line, its plan and the engines share, in the order of a written cell.

    Attributes:
        faults: Faults that the run begins with.
        init_from: Name of the run whose final weights the model starts from (on engines its
            folder); empty: none.
        checkpoint: Folder for checkpoints; empty: none are written.
        checkpoint_every: Steps between two checkpoints; 0 without checkpoints, or if not given.
        on_failure: The action when an engine dies: one of `checkpoints.ON_FAILURE`; empty if not
            given.
        on_straggler: The action when a worker stays slow: one of `ON_STRAGGLER`.
        spares: Number of engines that wait, so that they can join at once.
        profile: First step to profile, and the step before which it ends.
        traceback: How errors of the cell are shown: `short`, or `full` with every frame.
        values: What `--set` gives the cell, by name: numbers, truth values, texts.
        log: Where the run is also written in addition to its folder, as `log_targets.Target.text`.
        name: Name of the run; empty for one made from the strategy.
    """

    faults: tuple[Fault, ...] = _said(
        "--inject",
        (),
        metavar="FAULT",
        repeated=True,
        trains=True,
        argument="inject",
        is_text=True,
        read=read_faults,
        write=lambda fault: fault.text,
        help="inject a fault, for example slow=1:50ms, jitter=20ms or kill=2@100",
        without="no faults",
        example="%%distributed mirrored --inject slow=1:50ms --inject jitter=5ms",
    )
    init_from: str = _said(
        "--init-from",
        "",
        metavar="RUN",
        trains=True,
        argument="init_from",
        help="start from the final weights of the given run",
        without="the cell's own initial weights",
        example="%%distributed mirrored --init-from base",
    )
    checkpoint: str = _said(
        "--checkpoint",
        "",
        metavar="DIR",
        trains=True,
        argument="checkpoint",
        help="write checkpoints into this folder",
        without="no checkpoints",
        example="%%distributed mirrored --checkpoint kept",
    )
    checkpoint_every: int = _said(
        "--checkpoint-every",
        0,
        metavar="N",
        trains=True,
        argument="checkpoint_every",
        read=number("--checkpoint-every"),
        help="steps between two checkpoints (100)",
        without="100 if `--checkpoint` is given",
        example="%%distributed mirrored --checkpoint kept --checkpoint-every 50",
    )
    on_failure: str = _said(
        "--on-failure",
        "",
        metavar="WHAT",
        trains=True,
        argument="on_failure",
        help="when an engine dies: `stop`; `continue`: go on with fewer workers; `replace`: start "
        "a new engine (needs --checkpoint); `heal`: the other workers continue, and a new engine "
        "joins them",
        without="`stop`; with `--checkpoint`: `replace`; with `--spares` or `--on-straggler "
        "replace`: `heal`",
        example="%%distributed mirrored --on-failure continue",
    )
    on_straggler: str = _said(
        "--on-straggler",
        "wait",
        choices=ON_STRAGGLER,
        trains=True,
        argument="on_straggler",
        help="what to do when a worker stays slow. `wait`: wait for the worker. `shed`: give the "
        "worker a smaller share of each batch. `replace`: replace the worker with a new engine",
        without="`wait`: each step takes as long as the slowest worker needs",
        example="%%distributed mirrored --on-straggler shed",
    )
    spares: int = _said(
        "--spares",
        0,
        metavar="N",
        trains=True,
        argument="spares",
        read=number("--spares", 0),
        help="number of spare engines. A spare engine runs the cell up to wb.fit and waits there. "
        "If an engine dies, a spare engine replaces it immediately. With --spares, the default of "
        "--on-failure is `heal`",
        without="0: there is no spare engine. With `--on-failure heal`, Workbench starts a new "
        "engine after an engine has died",
        example="%%distributed mirrored --spares 1",
    )
    profile: Window | None = _said(  # noqa: RUF009 - it returns a field
        "--profile",
        metavar="A:B",
        trains=True,
        argument="profile",
        is_text=True,
        read=lambda text: parse_window(text) if text else None,
        write=lambda window: f"{window[0]}:{window[1]}",
        help="profile steps A to B-1 on every rank",
        without="nothing is profiled",
        example="%%distributed mirrored --profile 10:15",
    )
    traceback: str = _said(
        "--traceback",
        "short",
        choices=TRACEBACKS,
        argument="traceback",
        help="tracebacks show only your own lines (`short`), or every frame (`full`)",
        without="`short`",
        example="%%distributed --traceback full",
    )
    values: dict[str, Any] = _said(  # noqa: RUF009 - it returns a field
        "--set",
        {},
        metavar="NAME=VALUE",
        repeated=True,
        trains=True,
        argument="values",
        read=several.values,
        write=several.written,
        help="a value that the cell reads as wb.options.NAME",
        without="the cell's own default",
        example="%%distributed mirrored --set lr=0.1,0.01",
    )
    log: tuple[str, ...] = _said(
        "--log",
        (),
        metavar="KIND:PLACE",
        repeated=True,
        trains=True,
        argument="log",
        is_text=True,
        read=parse_targets,
        help="log the run to tensorboard:DIR, mlflow:URI, wandb:PROJECT, trackio:PROJECT",
        without="no log is written to these tools",
        example="%%distributed mirrored --log tensorboard:runs",
    )
    name: str = _said(
        "--name",
        "",
        metavar="NAME",
        argument="name",
        help="name of the run in wb.runs",
        without="the strategy's name",
        example="%%distributed mirrored --name base",
    )

    @property
    def needed_on_failure(self) -> str:
        """The action on an engine's death that other settings require.

        Empty: any action is allowed.
        """
        return "heal" if self.on_straggler == "replace" else ""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, as arguments for `RunSettings(**...)`."""
        return {name: getattr(self, name) for name in SETTINGS}

    def settings_to_wire(self) -> dict[str, Any]:
        """Return the settings as JSON-ready data."""
        return self.settings | {
            "faults": [fault.text for fault in self.faults],
            "values": dict(self.values),
        }


def settings_from_wire(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `settings_to_wire` gave, by name; older versions may have left some out."""
    found = {name: data[name] for name in SETTINGS if name in data}
    if "faults" in found:
        found["faults"] = read_faults(found["faults"])
    if "profile" in found:
        found["profile"] = tuple(found["profile"]) if found["profile"] else None
    if "log" in found:
        found["log"] = tuple(found["log"] or ())
    return found


SETTINGS = tuple(field.name for field in dataclasses.fields(RunSettings))
