"""Requests to a launcher (by a line, an argument or a file), checked before anything starts.

Two files have settings that do not have to be typed each time, with a table per launcher and the
names of the flags (`partition = "gpu"`). The line overrides the user's file, and the user's file
overrides the site's file:

    /etc/workbench/launchers.toml            the site's
    ~/.config/workbench/launchers.toml       the user's; WORKBENCH_LAUNCHERS names another one
"""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ...devices import limits
from ...errors import PlanError, unknown
from .settings import (
    LOCAL,
    MPI,
    OURS,
    QUEUE_TIMEOUT_S,
    SLURM,
    SSH,
    START_TIMEOUT_S,
    HostSlots,
    LaunchSettings,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

SITE_FILE = Path("/etc/workbench/launchers.toml")
VARIABLE = "WORKBENCH_LAUNCHERS"
LEAST_PORTS = 16
"""The ports of a notebook: 13 for ipyparallel's controller, one for control messages, one for
agents and, if workers are on its own machine, one for the store."""
ALLOCATION = "SLURM_JOB_ID"
PROGRAMS = {
    SSH: (("ssh",), "openssh-client"),
    SLURM: (("sbatch", "srun"), "slurm-client"),
    MPI: (("mpiexec",), "openmpi-bin"),
}
"""For each launcher: the programs that it calls, and their Debian package."""
_ANYWHERE = ("listen", "ports", "start_timeout")
TAKES: Mapping[str, tuple[str, ...]] = {
    LOCAL: _ANYWHERE,
    SSH: ("on", "setup", "options", *_ANYWHERE),
    SLURM: (
        "nodes", "gpus_per_node", "time", "partition", "account", "setup", "options", *_ANYWHERE
    ),
    MPI: ("setup", "options", *_ANYWHERE),
}  # fmt: skip
"""The settings of each launcher; for ipyparallel's launchers: `_THEIRS`."""
_THEIRS = ("options", *_ANYWHERE)
_HOST = re.compile(r"((?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,5}))?")
_TIME = re.compile(
    r"[0-9]+(?::[0-5]?[0-9])?|[0-9]+:[0-5]?[0-9]:[0-5]?[0-9]"
    r"|[0-9]+-[0-9]+(?::[0-5]?[0-9]){0,2}"
)
_WORD = re.compile(r"[A-Za-z0-9_][\w.,+@:/=-]*")
_OPTION = re.compile(r"[A-Za-z][\w.-]*(?: [\w.-]+)?")


class LaunchArguments(TypedDict, total=False):
    """The arguments of `wb.Cluster` for engines on other machines.

    None or empty means not given.
    """

    launcher: str | None
    on: str | Sequence[str]
    nodes: int | None
    gpus_per_node: int | None
    time: str
    partition: str
    account: str
    setup: str | Sequence[str]
    launcher_options: Mapping[str, object] | Sequence[str]
    listen: str
    hosts: str
    ports: str | tuple[int, int]
    start_timeout: str | float | None


_NAMES = {"launcher_options": "options", "hosts": "listen"}
"""Arguments whose field has a different name."""


@dataclass(frozen=True)
class Given:
    """A value, and how a message shows where it was given."""

    value: Any
    shown: str


def launch_settings(engines: int, **asked: Unpack[LaunchArguments]) -> LaunchSettings:
    """Return the checked settings; missing ones come from the files.

    Args:
        engines: How many will be started; there must be room for them.

    Raises:
        PlanError: A setting is not valid, or a program is missing.
    """
    settings = _settings(asked)
    _check_hosts(settings, engines)
    _check_programs(settings.launcher)
    return settings


def engines_meant(**asked: Unpack[LaunchArguments]) -> int:
    """Return how many engines to start if no number is given: as many as there is room for.

    Raises:
        PlanError: A setting is not valid.
    """
    settings = _settings(asked)
    return sum(one.slots or 1 for one in settings.on) or (
        settings.nodes * max(1, settings.gpus_per_node) or 2
    )


def _settings(asked: LaunchArguments) -> LaunchSettings:
    if strange := sorted(set(asked) - set(LaunchArguments.__annotations__)):
        raise TypeError(f"Cluster() got an unexpected keyword argument {strange[0]!r}")
    given = _typed(asked)
    launcher = _launcher(given.pop("launcher", None))
    _refuse_stray(given, launcher)
    if launcher in OURS:
        given = _merged(_of_files(launcher), given)
    waits = QUEUE_TIMEOUT_S if launcher == SLURM else START_TIMEOUT_S
    found = {"start_timeout_s": waits, **dict(_read(*one, launcher) for one in given.items())}
    return LaunchSettings(launcher=launcher, **found)


def differences(
    launch: LaunchSettings, **asked: Unpack[LaunchArguments]
) -> dict[str, tuple[str, str]]:
    """Return the settings that differ from those of a started cluster: by name, given and actual.

    Raises:
        PlanError: It is not valid.
    """
    given, found = _typed(asked), {}
    said = given.pop("launcher", None)
    launcher = launch.launcher if said is None else _launcher(said)
    if said is not None and launcher != launch.launcher:
        return {"launcher": (said.shown, launch.launcher)}
    _refuse_stray(given, launcher)
    for name, one in given.items():
        field, wanted = _read(name, one, launcher)
        now = getattr(launch, field)
        if name == "options":
            now = {key: now.get(key) for key in wanted}
        if wanted != now:
            found[name] = (one.shown, _told(getattr(launch, field)))
    return found


def _told(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, tuple):
        return ", ".join(getattr(one, "name", str(one)) for one in value)
    return str(value) if value else ""


def _typed(asked: Mapping[str, Any]) -> dict[str, Given]:
    """Return the given settings by field, each as a line would show it."""
    found = {}
    for name, value in asked.items():
        if value is None or (isinstance(value, (str, Sequence, Mapping)) and not value):
            continue
        field = _NAMES.get(name, name)
        flag = "--launcher-option" if field == "options" else f"--{field.replace('_', '-')}"
        words = value
        if isinstance(value, Mapping):
            words = " ".join(f"{key}={each}" for key, each in value.items())
        elif not isinstance(value, str) and isinstance(value, Sequence):
            words = ("-" if field == "ports" else " ").join(map(str, value))
        found[field] = Given(value, f"{flag} {words}")
    return found


def check_keep(launcher: str) -> None:
    """Raise PlanError if engines of this launcher should outlive the notebook."""
    if launcher != LOCAL:
        raise PlanError(
            f"Engines of --launcher {launcher} end together with the notebook's kernel, so they "
            "cannot be kept.",
            seen=f"--keep --launcher {launcher}",
            allowed="--keep without --launcher",
            next_step="remove --keep, and save the training with --checkpoint",
            code="WB-PLAN-176",
        )


# -- launchers -----------------------------------------------------------------------------------


def known_launchers() -> list[str]:
    """Return the names of Workbench's and of ipyparallel's launchers."""
    theirs = metadata.entry_points(group="ipyparallel.engine_launchers")
    return sorted({LOCAL, *OURS, *(one.name for one in theirs if one.name != "workbench")})


def installed() -> list[str]:
    """Return Workbench's launchers whose programs are installed here; `local` always is."""
    return [LOCAL, *(name for name in OURS if not _missing(name))]


def _missing(launcher: str) -> list[str]:
    programs, _ = PROGRAMS.get(launcher, ((), ""))
    if launcher == SLURM and os.environ.get(ALLOCATION):
        programs = ("srun",)  # engines are started in the current job
    return [name for name in programs if shutil.which(name) is None]


def _launcher(given: Given | None) -> str:
    if given is None:
        return LOCAL
    name = str(given.value)
    if name in known_launchers():
        return name
    module, _, kind = name.rpartition(".")
    if not module:
        step = "use one of these names, or give a class: package.module.Class"
        raise unknown("launcher", name, known_launchers(), step)
    try:
        found = getattr(importlib.import_module(module), kind, None)
    except ImportError as error:
        raise _no_class(name, str(error)) from error
    if not isinstance(found, type):
        raise _no_class(name, f"{module} has no class {kind}")
    return name


def _no_class(name: str, why: str) -> PlanError:
    return PlanError(
        "The launcher's class cannot be imported.",
        seen=f"{name}: {why}",
        allowed=f"package.module.Class, or one of {', '.join(known_launchers())}",
        next_step="import the class in a cell; when the import works, start the cluster again",
        code="WB-PLAN-184",
    )


def _refuse_stray(given: Mapping[str, Given], launcher: str) -> None:
    takes = TAKES.get(launcher, _THEIRS)
    for name, one in given.items():
        if name in takes:
            continue
        owners = [other for other in TAKES if name in TAKES[other]]
        flags = ", ".join(f"--{each.replace('_', '-')}" for each in takes)
        raise PlanError(
            f"The launcher {launcher!r} does not accept {one.shown.split()[0]}.",
            seen=one.shown,
            allowed=flags.replace("--options", "--launcher-option"),
            next_step=f"remove this flag, or use --launcher {' or '.join(owners)}",
            code="WB-PLAN-165",
        )


def _check_programs(launcher: str) -> None:
    if missing := _missing(launcher):
        raise PlanError(
            f"The launcher {launcher!r} needs programs that are not in PATH: {', '.join(missing)}.",
            seen=f"PATH={os.environ.get('PATH', '')}",
            allowed=f"launchers that can be used here: {', '.join(installed())}",
            next_step=f"install Debian's package {PROGRAMS[launcher][1]}, or start Jupyter on "
            f"a machine with {missing[0]}",
            code="WB-PLAN-175",
        )


def _check_hosts(settings: LaunchSettings, engines: int) -> None:
    if settings.launcher == SSH and not settings.on:
        raise PlanError(
            "--launcher ssh needs the names of the hosts.",
            seen="--launcher ssh",
            allowed="--on node1:4,user@node2:4 (after the colon: the largest "
            "number of engines on that host)",
            next_step=f"%cluster start {engines} --launcher ssh --on node1,node2",
            code="WB-PLAN-166",
        )
    slots = [host.slots for host in settings.on]
    if slots and all(slots) and sum(slots) < engines:
        total, plural = sum(slots), "" if sum(slots) == 1 else "s"
        more = [slots[0] + engines - total, *slots[1:]]
        hosts = ",".join(f"{one.name}:{n}" for one, n in zip(settings.on, more, strict=True))
        raise PlanError(
            "The hosts have too few slots. Each engine needs one slot.",
            seen=f"{total} slot{plural} for {engines} engines",
            allowed=f"at least {engines} slots on all hosts together; a host without `:SLOTS` has "
            "no limit",
            next_step=f"start at most {total} engine{plural}, or give more slots: --on {hosts}",
            code="WB-PLAN-169",
        )
    if settings.nodes > engines:
        raise PlanError(
            "There are more nodes than engines, so some nodes would have no engine.",
            seen=f"--nodes {settings.nodes} for {engines} engine{'' if engines == 1 else 's'}",
            allowed=f"--nodes 1 to {engines}",
            next_step=f"start {settings.nodes} engines, or use --nodes {engines}",
            code="WB-PLAN-177",
        )


# -- files ---------------------------------------------------------------------------------------


def files() -> list[Path]:
    """Return the files that are read; later files override earlier ones."""
    if named := os.environ.get(VARIABLE, "").strip():
        return [SITE_FILE, Path(named).expanduser()]
    home = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    return [SITE_FILE, Path(home).expanduser() / "workbench" / "launchers.toml"]


def _of_files(launcher: str) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for path in files():
        found = _merged(found, _of_file(path, launcher))
    return found


def _merged(under: Mapping[str, Given], over: Mapping[str, Given]) -> dict[str, Given]:
    """Return both combined; options are merged, and otherwise `over` wins."""
    found = {**under, **over}
    if "options" in under and "options" in over:
        mine, theirs = _options(under["options"]), _options(over["options"])
        found["options"] = Given({**mine, **theirs}, over["options"].shown)
    return found


def _of_file(path: Path, launcher: str) -> dict[str, Given]:
    try:
        named = os.environ.get(VARIABLE, "").strip()
        if named and path != SITE_FILE and not path.exists():
            raise FileNotFoundError(
                f"this file does not exist; the environment variable {VARIABLE} names this file"
            )
        tables = limits.read_toml(path)
    except (OSError, ValueError) as error:
        raise PlanError(
            "The file with settings for launchers cannot be read, so no engine is started.",
            seen=f"{path}: {error}",
            allowed="a TOML file; its tables can be [ssh], [slurm] and [mpi]",
            next_step="correct or remove the file"
            if path == SITE_FILE
            else f"correct the file, or set {VARIABLE} to another file",
            code="WB-PLAN-178",
        ) from error
    for name, table in tables.items():
        if name not in OURS or not isinstance(table, dict):
            is_table = isinstance(table, dict)
            raise PlanError(
                f"{path}: this table's name is not valid."
                if is_table
                else f"{path}: this setting is not in a table.",
                seen=f"[{name}]" if is_table else f"{name} = {table!r}",
                allowed="the tables [ssh], [slurm] and [mpi]; the keys in a table are names of "
                "flags, without --",
                next_step="correct this table's name in the file"
                if is_table
                else "write settings below the line [ssh], [slurm] or [mpi]",
                code="WB-PLAN-179",
            )
    return _of_table(tables.get(launcher, {}), launcher, str(path))


def _of_table(table: Mapping[str, Any], launcher: str, path: str) -> dict[str, Given]:
    found: dict[str, Given] = {}
    where = f"{path}, [{launcher}]"
    for key, value in table.items():
        name = key.replace("-", "_")
        if name == "python":
            value, name = {"python": value, **table.get("options", {})}, "options"
        elif name == "options" and "python" in table:
            continue  # taken with it
        if name not in TAKES[launcher]:
            raise PlanError(
                f"{where}: there is no setting with this name.",
                seen=key,
                allowed=", ".join((*TAKES[launcher], "python")),
                next_step="correct the setting's name in the file, or remove the setting",
                code="WB-PLAN-180",
            )
        found[name] = Given(value, f"{key} = {value!r} ({where})")
    return found


# -- values --------------------------------------------------------------------------------------


def _read(name: str, one: Given, launcher: str) -> tuple[str, Any]:
    """Return the settings field for a given name, and the value for it."""
    readers: dict[str, tuple[str, Callable[[Given], Any]]] = {
        "on": ("on", _hosts),
        "nodes": ("nodes", partial(_count, least=1)),
        "gpus_per_node": ("gpus_per_node", partial(_count, least=0)),
        "time": ("time", _time),
        "partition": ("partition", _word),
        "account": ("account", _word),
        "setup": ("setup", _lines),
        "options": ("options", lambda one: _checked_options(one, launcher)),
        "listen": ("listen", lambda one: limits.listening(_text(one))),
        "ports": ("ports", _ports),
        "start_timeout": ("start_timeout_s", _timeout),
    }
    field, reader = readers[name]
    return field, reader(one)


def _text(one: Given) -> str:
    if isinstance(one.value, bool) or not isinstance(one.value, (str, int)):
        raise PlanError(
            "The value must be a string.",
            seen=one.shown,
            allowed="a string in quotation marks",
            next_step="put the value in quotation marks",
            code="WB-PLAN-185",
        )
    return str(one.value).strip()


def _texts(one: Given) -> list[str]:
    """Return a text's lines, or those of a list of texts."""
    several = not isinstance(one.value, str) and isinstance(one.value, Sequence)
    parts = one.value if several else [one.value]
    return [line for part in parts for line in _text(Given(part, one.shown)).splitlines()]


def _lines(one: Given) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in _texts(one) if line.strip())


def _word(one: Given) -> str:
    text = _text(one)
    if not _WORD.fullmatch(text):
        raise PlanError(
            "The name of the partition or account is not valid.",
            seen=one.shown,
            allowed="letters, digits and `_`; from the second character on, also these characters: "
            "`- . , + @ : / =`",
            next_step="`sinfo` lists partitions; `sacctmgr show assoc user=$USER` lists accounts",
            code="WB-PLAN-181",
        )
    return text


def _count(one: Given, least: int) -> int:
    text = _text(one)
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        equals = "" if one.shown.startswith("--") else " ="  # of a file
        raise PlanError(
            f"The value must be a whole number, at least {least}.",
            seen=one.shown,
            allowed=f"{least} to 999999",
            next_step=f"{one.shown.split()[0]}{equals} {max(1, least)}",
            code="WB-PLAN-171",
        )
    return int(text)


def _hosts(one: Given) -> tuple[HostSlots, ...]:
    found: dict[str, HostSlots] = {}
    for text in (part.strip() for line in _texts(one) for part in line.split(",")):
        match = _HOST.fullmatch(text)
        if not match or match[2] == "0":
            raise PlanError(
                "The list of hosts is invalid.",
                seen=f"{text or 'an empty name'} in {one.shown}",
                allowed="host, host:4 (at most four engines) or user@host:4, with commas between "
                "hosts. A host is a name or an address. Ports and keys of ssh do not belong here: "
                "set them in ~/.ssh/config or with --launcher-option",
                next_step="--on node1:4,user@node2:4",
                code="WB-PLAN-167",
            )
        name = match[1].rpartition("@")[2].lower()
        if name in found:
            raise PlanError(
                "A host is named twice.",
                seen=f"{found[name].name} and {match[1]}",
                allowed="each host once, with the total number of its engines",
                next_step="give this host only once: "
                f"{match[1]}:{found[name].slots + int(match[2] or 0) or 2}",
                code="WB-PLAN-168",
            )
        found[name] = HostSlots(match[1], int(match[2] or 0))
    return tuple(found.values())


def _time(one: Given) -> str:
    # A bare number is minutes; TOML reads 1:00:00 without quotation marks as no string.
    text = _text(one)
    if not _TIME.fullmatch(text):
        guess = "--time 1:00:00"
        try:
            seconds = limits.duration_s(text)
        except ValueError:
            seconds = math.inf
        if math.isfinite(seconds):
            minutes = max(1, math.ceil(seconds / 60))
            guess = f"--time {minutes // 60}:{minutes % 60:02d}:00"
        raise PlanError(
            "Slurm does not accept this time limit.",
            seen=one.shown,
            allowed="minutes, minutes:seconds, hours:minutes:seconds, days-hours,"
            " days-hours:minutes, days-hours:minutes:seconds",
            next_step=guess,
            code="WB-PLAN-170",
        )
    return text


def _ports(one: Given) -> tuple[int, int]:
    value = one.value
    pair = not isinstance(value, str) and isinstance(value, Sequence)
    text = "-".join(map(str, value)) if pair else _text(one)
    match = re.fullmatch(r"([0-9]{1,5})\s*-\s*([0-9]{1,5})", text)
    if not match or not 1024 <= int(match[1]) <= int(match[2]) < 1 << 16:
        raise PlanError(
            "The value must be a range of ports.",
            seen=one.shown,
            allowed="FIRST-LAST: two port numbers from 1024 to 65535",
            next_step="--ports 20000-20100",
            code="WB-PLAN-172",
        )
    first, last = int(match[1]), int(match[2])
    if (count := last - first + 1) < LEAST_PORTS:
        low = min(first, (1 << 16) - 100)
        raise PlanError(
            "The range has too few ports for one notebook.",
            seen=f"{count} port{'' if count == 1 else 's'} in {one.shown}",
            allowed=f"at least {LEAST_PORTS} ports; more if several notebooks share the range",
            next_step=f"--ports {low}-{low + 99}",
            code="WB-PLAN-173",
        )
    return first, last


def _timeout(one: Given) -> float:
    try:
        seconds = limits.duration_s(one.value)
    except ValueError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise PlanError(
            "The start timeout is invalid.",
            seen=one.shown,
            allowed="90s, 10m, 2h, 1d, or a number of seconds",
            next_step="--start-timeout 10m",
            code="WB-PLAN-174",
        )
    return seconds


def _options(one: Given) -> dict[str, str]:
    """Return options by name; an option without a value is a flag."""
    if isinstance(one.value, Mapping):
        pairs = [(str(key), value) for key, value in one.value.items()]
    else:
        split = (line.partition("=") for line in _texts(one))
        pairs = [(key.strip(), value.strip()) for key, _, value in split]
    found = {}
    for key, value in pairs:
        text = "" if value is True else _text(Given(value, one.shown))
        key = key.removeprefix("--")
        if not _OPTION.fullmatch(key) or "\n" in text:
            raise PlanError(
                "An option of the launcher is invalid.",
                seen=one.shown,
                allowed="for slurm and mpi: NAME=VALUE or NAME, where NAME is a long option of "
                "the launcher, without its two hyphens; for ssh: NAME=VALUE, where NAME is an "
                "option of `ssh -o`",
                next_step="for example, for slurm: --launcher-option qos=high; for ssh: "
                "--launcher-option Port=2222",
                code="WB-PLAN-183",
            )
        found[key] = text
    return found


def _checked_options(one: Given, launcher: str) -> dict[str, str]:
    found = _options(one)
    for key, value in found.items():
        name = key.replace("-", "_")
        if name in TAKES.get(launcher, ()) or (launcher == SSH and not value):
            own = launcher != SSH or name in TAKES[SSH]
            raise PlanError(
                f"Workbench has its own flag for {key}, so {key} must not be an option of the "
                "launcher."
                if own
                else f"The launcher's option {key} needs a value.",
                seen=one.shown,
                allowed=f"--{key} {value}".strip() if own else f"{key}=value, as for ssh -o",
                next_step=f"remove {key} from the launcher's options, and use Workbench's flag"
                if own
                else f"`man ssh_config` explains the option {key}",
                code="WB-PLAN-182",
            )
    return found
