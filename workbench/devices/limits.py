"""An administrator's limits, and what other machines can connect to.

Limits apply to every user of a machine; users can only make them stricter.

Two places are read, and the stricter value of each limit applies:

    /etc/distributed-workbench.toml          the machine's; a file that only root can change
    WORKBENCH_MAX_ENGINES, _DEVICES, ...     the environment's: of a container, of JupyterHub's
                                             spawner, or a user's own

A file that cannot be read or understood is an error, not "no limits", because a typing mistake must
not remove a limit. Limits protect against mistakes and accidental overuse, but not against users
who change this code (`docs/shared-machines.md`).

With engines on other machines, or `--listen`, something listens beyond loopback. This module
chooses the address and warns the user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PlanError, WorkbenchWarning

SYSTEM_FILE = Path("/etc/distributed-workbench.toml")
VARIABLES = {
    "max_engines": "WORKBENCH_MAX_ENGINES",
    "devices": "WORKBENCH_DEVICES",
    "idle_timeout": "WORKBENCH_IDLE_TIMEOUT",
    "hosts": "WORKBENCH_HOSTS",
}
_ALLOWED = {
    "max_engines": "a whole number, at least 1",
    "devices": '"all", "cpu" or a list of GPUs. In the list, each GPU is a number or a UUID from '
    'nvidia-smi, for example "0,2" or "GPU-5f3e"',
    "idle_timeout": 'a time such as "45m", "2h" or "90s", or "never"',
    "hosts": "true if engines may run on other machines, otherwise false",
}
_ORDERED = {"max_engines": "max_engines", "idle_timeout": "idle_timeout_s", "hosts": "hosts"}
_PER_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """The limits for a user on this machine.

    Attributes:
        max_engines: How many engines one user can run at once, in all notebooks together.
        devices: Lists of GPUs, as NVML numbers or (prefixes of) UUIDs; a GPU is allowed only if it
            is in every list. An empty list means CPU only; no list means all GPUs.
        idle_timeout_s: After this time without a running cell, a cluster must end; infinite: never.
        hosts: Whether engines can run on other machines, and anything can listen beyond loopback.
        sources: The place where each limit is set, by the limit's name.
    """

    max_engines: int | None = None
    devices: tuple[tuple[str, ...], ...] = ()
    idle_timeout_s: float = math.inf
    hosts: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def check_engines(self, wanted: int, elsewhere: int = 0) -> None:
        """Raise PlanError if `wanted` engines here would be too many.

        Args:
            elsewhere: Engines that the user has in other notebooks and kept clusters.
        """
        if self.max_engines is None or wanted + elsewhere <= self.max_engines:
            return
        engines = f"{elsewhere} engine{'s' if elsewhere > 1 else ''}"
        others = f". Your other clusters have {engines}" if elsewhere else ""
        left = max(0, self.max_engines - elsewhere)
        most = f"{self.max_engines} engine{'s' if self.max_engines > 1 else ''}"
        raise PlanError(
            f"The administrator allows each user at most {most}{others}.",
            seen=f"{wanted} engine{'s' if wanted != 1 else ''} in this cluster",
            allowed=f"at most {left} engine{'s' if left != 1 else ''} in this cluster "
            f"({self.sources.get('max_engines')})",
            next_step=(
                "run workbench ps to see your other clusters, and workbench stop ID to end "
                "one of them"
            )
            if elsewhere
            else "use a smaller number in -n or %cluster start",
            code="WB-PLAN-055",
        )

    def check_hosts(self, listen: str, launcher: str = "local") -> None:
        """Raise PlanError if other machines are asked for and not allowed."""
        elsewhere = launcher != "local"
        if (listen or elsewhere) and not self.hosts:
            flag = f"--launcher {launcher}" if elsewhere else f"--listen {listen}"
            raise PlanError(
                "The administrator does not allow engines on other hosts"
                + ("." if elsewhere else ", so --listen cannot be used."),
                seen=flag,
                allowed=f"engines on this machine ({self.sources.get('hosts')})",
                next_step=f"remove {flag.split()[0]}",
                code="WB-PLAN-056",
            )

    def permits(self, number: int, uuid: str) -> bool:
        """Whether a GPU may be used.

        Args:
            number: Its number in NVML and nvidia-smi, which ignore CUDA_VISIBLE_DEVICES.
        """
        return all(
            any(
                int(word) == number if word.isdecimal() else uuid.startswith(word)
                for word in listed
            )
            for listed in self.devices
        )

    def idle_timeout(self, asked_s: float) -> float:
        """Return the idle time in seconds that applies when the user asks for `asked_s`."""
        return min(asked_s, self.idle_timeout_s)

    def stricter(self, other: Limits) -> Limits:
        """Return the limits that allow only what both allow."""
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
    """Return the limits that apply to this user now.

    Args:
        environment: By default the environment of this process.
        path: The machine's file; by default `SYSTEM_FILE`.

    Raises:
        PlanError: A limit is not valid; the error names its place.
    """
    return _of_file(path or SYSTEM_FILE).stricter(
        _of_environment(os.environ if environment is None else environment)
    )


def _of_file(path: Path) -> Limits:
    try:
        given = read_toml(path)
    except (OSError, ValueError) as error:
        raise PlanError(
            "The file with this machine's limits cannot be read, so no engine is started.",
            seen=f"{path}: {error}",
            allowed="a TOML file that every user can read",
            next_step="inform the administrator of this machine",
            code="WB-PLAN-057",
        ) from error
    unknown = sorted(set(given) - set(VARIABLES))
    if unknown:
        names = f"these names of limits: {', '.join(VARIABLES)}"
        raise _misunderstood(str(path), unknown[0], unknown[0], names)
    return _limits({name: (value, f"set in {path}") for name, value in given.items()})


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a small TOML file; empty if there is no file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not TOML.
    """
    try:
        with path.open("rb") as file:
            return _toml(file.read(_MAX_FILE_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _toml(text: str) -> dict[str, Any]:
    """Return the data of a TOML text.

    On Python 3.10 the parser is a package that can be missing.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _of_environment(environment: Mapping[str, str]) -> Limits:
    return _limits(
        {
            name: (environment[variable], f"set by {variable}")
            for name, variable in VARIABLES.items()
            if environment.get(variable, "").strip()
        }
    )


def _limits(given: Mapping[str, tuple[object, str]]) -> Limits:
    """Return the raw values of the limits, each with its source."""
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
        f"The limit {name} in {where} is invalid, so no engine is started.",
        seen=value,
        allowed=allowed,
        next_step="correct the limit, or inform the administrator of this machine",
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
        raise ValueError(f"{value!r} is not a time")
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
EVERY = ("*", "0.0.0.0", "::", "0", "[::]")
OUTSIDE = ("192.0.2.1", 9)
"""An address that no host has (RFC 5737): its route is the route to other networks."""


class ExposureWarning(WorkbenchWarning):
    """Something will listen where other hosts can connect."""


def interfaces() -> dict[str, list[str]]:
    """Return this machine's IPv4 addresses by interface."""
    import psutil  # the doctor reads limits even if no package is installed

    found = {
        name: [one.address for one in addresses if one.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def listening(listen: str) -> str:
    """Return the one address of this machine on which to listen.

    Args:
        listen: An address, the name of an interface (`eth0`), a network (`10.0.0.0/8`): this
            machine's address in it; or a host name of this machine. Empty stays empty.

    Raises:
        PlanError: It is not an address of this machine, or means all addresses.
    """
    listen, here = listen.strip(), interfaces()
    if not listen:
        return ""
    if listen in EVERY:
        raise PlanError(
            "--listen must select one address of this machine, but this value means all addresses.",
            seen=listen,
            allowed=_choices(here),
            next_step="give the network that connects the machines, for example "
            "--listen 10.0.0.0/8. Workbench then uses this machine's address in that network",
            code="WB-PLAN-163",
        )
    found = here.get(listen) or _of_network(listen, here) or _of_name(listen, here)
    if not found:
        raise PlanError(
            "--listen needs an address of this machine.",
            seen=listen,
            allowed=_choices(here),
            next_step="use an allowed value; if you mean another machine, remove --listen, and "
            "name the machine with --launcher ssh --on HOSTS",
            code="WB-PLAN-164",
        )
    return found[0]


def _choices(here: Mapping[str, list[str]]) -> str:
    own = ", ".join(f"{name} ({', '.join(each)})" for name, each in here.items())
    return (
        "a network (10.0.0.0/8), this machine's name, or one of these interfaces or addresses: "
        f"{own}"
    )


def _of_network(listen: str, here: Mapping[str, list[str]]) -> list[str]:
    """Return the addresses of this machine that match an address or a network."""
    try:
        network = ipaddress.ip_network(listen, strict=False)
    except ValueError:
        return []
    if network.version == 4 and network.is_loopback and network.num_addresses == 1:
        return [listen]  # all of 127.0.0.0/8 is this machine's
    own = [address for each in here.values() for address in each]
    return [one for one in own if ipaddress.ip_address(one) in network]


def _of_name(listen: str, here: Mapping[str, list[str]]) -> list[str]:
    """Return the addresses of this machine that belong to a host name."""
    try:
        resolved = {str(one[4][0]) for one in socket.getaddrinfo(listen, None, socket.AF_INET)}
    except (OSError, UnicodeError):
        return []
    own = [address for each in here.values() for address in each]
    if listen.split(".")[0] == "localhost":
        return sorted(resolved)
    if all(ipaddress.ip_address(one).is_loopback for one in resolved):
        # Debian gives a machine's own name 127.0.1.1, which no other machine reaches.
        first = [address for address in (_outward(),) if address]
        return first or [one for one in own if not ipaddress.ip_address(one).is_loopback]
    return [one for one in own if one in resolved]


def _outward() -> str:
    """Return the address from which other networks are reached; empty if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(OUTSIDE)  # sends nothing: it only finds the route
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def beyond_loopback(address: str) -> bool:
    """Whether other machines can reach this address; a host name counts as reachable."""
    if not address or address == "localhost":
        return False
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def exposure_words(listen: str, launcher: str = "local", *, encrypted: bool = False) -> str:
    """Return the warning about the address that will listen.

    Args:
        listen: The address; empty: the one from which the other machines are reached.
        encrypted: Whether the traffic between the notebook and its engines is encrypted.
    """
    if launcher == "local":
        return (
            f"--listen {listen}: the traffic on this address is not encrypted, and only a part of "
            "it is signed. All engines of this cluster are on this machine, so they do not need "
            f"--listen. Remove --listen (see {PAGE})"
        )
    whose = "between workers" if encrypted else "of engines"
    return f"--launcher {launcher}: traffic {whose} is unencrypted. Use a private network ({PAGE})"


_tell: ContextVar[Callable[[str], object] | None] = ContextVar("workbench_exposure", default=None)


@contextlib.contextmanager
def telling(tell: Callable[[str], object]) -> Iterator[None]:
    """Call `tell(words)` in this block instead of a warning: a notebook shows notes."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def warn(listen: str, launcher: str = "local", *, encrypted: bool = False) -> None:
    """Tell the user where other machines can connect, by a warning unless `telling` is active."""
    if not (beyond_loopback(listen) or (launcher != "local" and not listen)):
        return
    words, tell = exposure_words(listen, launcher, encrypted=encrypted), _tell.get()
    if tell is not None:
        tell(words)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always", ExposureWarning)
        warnings.warn(ExposureWarning(words, code="WB-WARN-001"), stacklevel=_asker())


def _asker() -> int:
    """Return how many frames the user's line is above the caller's frame."""
    package, level = __name__.split(".")[0], 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def reachable(host: str) -> str:
    """Return the address at which other hosts reach a socket that is bound to `host`."""
    return _outward() or "127.0.0.1" if host in EVERY else host
