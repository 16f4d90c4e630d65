"""What listens beyond loopback when `--hosts` is given, and how the user is told."""

from __future__ import annotations

import ipaddress
import socket
import warnings

from ..errors import WorkbenchWarning

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


def words(hosts: str) -> str:
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
            warnings.warn(ExposureWarning(words(hosts), code="WB-WARN-001"), stacklevel=3)


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
