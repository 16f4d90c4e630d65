"""Limits of an administrator, and what listens beyond this machine.

Limits hold for everybody on a machine; users can only make them stricter.

Two places are read, and the stricter value of each limit holds:

    /etc/distributed-workbench.toml          the machine's; a file that only root can change
    WORKBENCH_MAX_ENGINES, _DEVICES, ...     the environment's: of a container, of JupyterHub's
                                             spawner, or a user's own

A file that cannot be read or understood is an error, not "no limits": a mistyped limit must not be
an open door. What this cannot do is said in `docs/shared-machines.md`: it guards against mistakes
and greed by accident, not against somebody who changes the code that reads it.

With `--hosts` something listens beyond loopback: what, and how the user is told.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PlanError, WorkbenchWarning

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its older name
    import tomli as tomllib

SYSTEM_FILE = Path("/etc/distributed-workbench.toml")
VARIABLES = {
    "max_engines": "WORKBENCH_MAX_ENGINES",
    "devices": "WORKBENCH_DEVICES",
    "idle_timeout": "WORKBENCH_IDLE_TIMEOUT",
    "hosts": "WORKBENCH_HOSTS",
}
_ALLOWED = {
    "max_engines": "a whole number, at least 1",
    "devices": '"all", "cpu", or GPUs as nvidia-smi lists them: "0,2", "GPU-5f3e"',
    "idle_timeout": 'a time: "45m", "2h", "90s", or "never"',
    "hosts": "true or false: whether --hosts may be used",
}
_ORDERED = {"max_engines": "max_engines", "idle_timeout": "idle_timeout_s", "hosts": "hosts"}
_PER_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a user may have here.

    Attributes:
        max_engines: Engines that one user may run at once, in all notebooks together.
        devices: Lists of GPUs, as NVML numbers or (prefixes of) UUIDs; a GPU may be used that is in
            every one of them. An empty list means CPU only; no list means all GPUs.
        idle_timeout_s: After how long a cluster in which nothing runs must end; infinite: never.
        hosts: Whether anything may listen beyond loopback.
        sources: Where each limit that is set comes from, by name.
    """

    max_engines: int | None = None
    devices: tuple[tuple[str, ...], ...] = ()
    idle_timeout_s: float = math.inf
    hosts: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def check_engines(self, wanted: int, elsewhere: int = 0) -> None:
        """Raise PlanError where `wanted` engines here would be too many.

        Args:
            elsewhere: Engines that the user has in other notebooks and kept clusters.
        """
        if self.max_engines is None or wanted + elsewhere <= self.max_engines:
            return
        others = f"; other clusters of yours have {elsewhere}" if elsewhere else ""
        raise PlanError(
            f"The administrator limits engines to {self.max_engines} per user{others}.",
            seen=wanted,
            allowed=f"up to {max(0, self.max_engines - elsewhere)} here"
            f" ({self.sources.get('max_engines')})",
            next_step="workbench ps lists the others; workbench stop ID ends one"
            if elsewhere
            else "ask for fewer with -n or %cluster start",
            code="WB-PLAN-055",
        )

    def check_hosts(self, hosts: str) -> None:
        """Raise PlanError where listening beyond loopback is asked for and not allowed."""
        if hosts and not self.hosts:
            raise PlanError(
                "The administrator allows no engines on other hosts.",
                seen=f"--hosts {hosts}",
                allowed=f"engines of this machine ({self.sources.get('hosts')})",
                next_step="leave --hosts out",
                code="WB-PLAN-056",
            )

    def permits(self, number: int, uuid: str) -> bool:
        """Whether a GPU may be used.

        Args:
            number: As NVML and nvidia-smi count, whatever CUDA_VISIBLE_DEVICES says.
        """
        return all(
            any(
                int(word) == number if word.isdecimal() else uuid.startswith(word)
                for word in listed
            )
            for listed in self.devices
        )

    def idle_timeout(self, asked_s: float) -> float:
        """Return the idle time in seconds that holds when the user asks for `asked_s`."""
        return min(asked_s, self.idle_timeout_s)

    def stricter(self, other: Limits) -> Limits:
        """Return what both allow."""
        sources = {**self.sources}
        picked: dict[str, Any] = {"devices": self.devices + other.devices}
        for name, key in _ORDERED.items():
            mine, theirs = getattr(self, key), getattr(other, key)
            tighter = theirs is not None and (mine is None or theirs < mine)
            picked[key] = theirs if tighter else mine
            if tighter and name in other.sources:
                sources[name] = other.sources[name]
        if "devices" in other.sources:
            both = (sources.get("devices"), other.sources["devices"])
            sources["devices"] = "; ".join(filter(None, both))
        return Limits(**picked, sources=sources)


def load(environment: Mapping[str, str] | None = None, path: Path | None = None) -> Limits:
    """Return the limits that hold for this user now.

    Args:
        environment: By default the process's.
        path: The machine's file; by default `SYSTEM_FILE`.

    Raises:
        PlanError: A limit was not understood; says where it stands.
    """
    return _of_file(path or SYSTEM_FILE).stricter(
        _of_environment(os.environ if environment is None else environment)
    )


def _of_file(path: Path) -> Limits:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode()
        given = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return Limits()
    except (OSError, ValueError) as error:
        raise PlanError(
            "The machine's limits cannot be read, so nothing is started.",
            seen=f"{path}: {error}",
            allowed="a TOML file that everybody can read",
            next_step="tell the administrator of this machine",
            code="WB-PLAN-057",
        ) from error
    unknown = sorted(set(given) - set(VARIABLES))
    if unknown:
        raise _misunderstood(str(path), unknown[0], given[unknown[0]], ", ".join(VARIABLES))
    return _limits({name: (value, f"set in {path}") for name, value in given.items()})


def _of_environment(environment: Mapping[str, str]) -> Limits:
    return _limits(
        {
            name: (environment[variable], f"set by {variable}")
            for name, variable in VARIABLES.items()
            if environment.get(variable, "").strip()
        }
    )


def _limits(given: Mapping[str, tuple[object, str]]) -> Limits:
    """Return the limits in raw values, each with where it was found."""
    readers: dict[str, tuple[str, Callable[[object], Any]]] = {
        "max_engines": ("max_engines", _count),
        "devices": ("devices", _devices),
        "idle_timeout": ("idle_timeout_s", duration_s),
        "hosts": ("hosts", _yes_or_no),
    }
    found: dict[str, Any] = {}
    for name, (value, where) in given.items():
        key, read = readers[name]
        try:
            found[key] = read(value)
        except (ValueError, TypeError) as error:
            raise _misunderstood(where.split(" ")[-1], name, value, _ALLOWED[name]) from error
    return Limits(**found, sources={name: where for name, (_, where) in given.items()})


def _misunderstood(where: str, name: str, value: object, allowed: str) -> PlanError:
    return PlanError(
        f"The limit {name} in {where} was not understood, so nothing is started.",
        seen=value,
        allowed=allowed,
        next_step="correct it there, or tell the administrator of this machine",
        code="WB-PLAN-058",
    )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    count = int(value)
    if count < 1:
        raise ValueError
    return count


def _devices(value: object) -> tuple[tuple[str, ...], ...]:
    words = value if isinstance(value, list) else str(value).split(",")
    names = [str(word).strip() for word in words]
    if names == ["all"]:
        return ()
    if names in (["cpu"], []):
        return ((),)
    for name in names:
        if not (re.fullmatch(r"[0-9]+", name) or re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", name)):
            raise ValueError
    return (tuple(names),)


def duration_s(value: object) -> float:
    """Return the seconds in `90s`, `45m`, `2h`, `1d`, `90`; infinite for `never`.

    Raises:
        ValueError: It has none of these forms, or is not above 0.
    """
    text = str(value).strip().lower()
    if text == "never":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd]?)", text, re.ASCII)
    if not match:
        raise ValueError(f"{value!r} is no time")
    seconds = float(match[1]) * _PER_UNIT_S[match[2] or "s"]
    if seconds <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return seconds


def _yes_or_no(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).strip().lower()]
    except KeyError:
        raise ValueError(f"{value!r} is neither true nor false") from None


PAGE = "docs/security.md"
EVERY = ("*", "0.0.0.0", "::")


class ExposureWarning(WorkbenchWarning):
    """Something is about to listen where other hosts can connect."""


def beyond_loopback(hosts: str) -> bool:
    """Whether listening on `hosts` can be reached from other machines; a name counts as such."""
    if not hosts or hosts == "localhost":
        return False
    try:
        return not ipaddress.ip_address(hosts).is_loopback
    except ValueError:
        return True


def exposure_words(hosts: str) -> str:
    """Return what the user should know before listening on `hosts`."""
    where = "on every interface" if hosts in EVERY else f"on {hosts}"
    return (
        f"--hosts {hosts}: ipyparallel's controller and our control socket listen {where}; both "
        "take nothing that is not signed with the cluster's key, but nothing is encrypted. "
        "Training over several machines does not work yet; what it uses has no authentication at "
        "all: gloo, NCCL, the TCPStore, TensorFlow's gRPC. Whoever can connect to these can read "
        "and change what is trained. Use it on a private network or behind a firewall only "
        f"({PAGE})."
    )


def warn(hosts: str) -> None:
    """Tell the user, each time, where listening on `hosts` can be reached from other machines."""
    if beyond_loopback(hosts):
        with warnings.catch_warnings():
            warnings.simplefilter("always", ExposureWarning)
            warnings.warn(ExposureWarning(exposure_words(hosts), code="WB-WARN-001"), stacklevel=3)


def reachable(host: str) -> str:
    """Return the address under which other hosts reach what is bound to `host`."""
    if host not in EVERY:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
