"""The platforms that job folders are submitted to, each through its own client.

In reading order:

    client      the interface of a platform, the call of a client, and the ticket
    machines    this machine, Slurm, ssh
    clouds      Ray, Kubernetes, SkyPilot
"""

from __future__ import annotations

from typing import Any

from ...errors import PlanError, unknown
from .client import JobState, Platform, Ticket
from .clouds import Kubernetes, Ray, SkyPilot
from .machines import Local, Slurm, Ssh

__all__ = ["PLATFORMS", "JobState", "Platform", "Ticket", "platform"]

PLATFORMS: dict[str, type[Any]] = {
    one.name: one for one in (Local, Slurm, Ssh, Ray, Kubernetes, SkyPilot)
}


def platform(on: str, **options: str) -> Platform:
    """Return a platform by its name.

    Args:
        options: `venv` of slurm and ssh, `address` of ray, `context` of kubernetes.

    Raises:
        PlanError: There is no such platform, or it has no such option.
    """
    if on not in PLATFORMS:
        raise unknown("platform", on, PLATFORMS)
    known = getattr(PLATFORMS[on], "__dataclass_fields__", {})
    if strange := sorted(set(options) - set(known)):
        raise PlanError(
            f"The platform {on} has no such option.",
            seen=", ".join(strange),
            allowed=", ".join(known) or "none",
            code="WB-PLAN-243",
        )
    made: Platform = PLATFORMS[on](**options)
    return made
