"""Where a TPU may be: signs that can be read without asking anybody; pure but for that look.

Source: tf.distribute.cluster_resolver.TPUClusterResolver; https://cloud.google.com/tpu/docs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PlanError

NAMES = ("TPU_NAME", "COLAB_TPU_ADDR")
DEVICES = ("accel*", "vfio/[0-9]*")
"""Device files under /dev: up to TPU v4, and since v5."""


@dataclass(frozen=True)
class Signs:
    """What was found.

    Attributes:
        name: Value of the variable in `variable`; empty where none is set.
        devices: Device files.
    """

    name: str = ""
    variable: str = ""
    devices: tuple[str, ...] = ()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that the name gives; None where it is the name of a machine."""
        text = self.name.rpartition("://")[2]
        host, _, port = text.rpartition(":")
        return (host, int(port)) if host and port.isdigit() else None


def look(environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> Signs:
    """Return the signs of a TPU on this machine."""
    variable = next((name for name in NAMES if environ.get(name)), "")
    files = sorted(str(path) for form in DEVICES for path in folder.glob(form))
    return Signs(environ.get(variable, "") if variable else "", variable, tuple(files))


def missing(signs: Signs, more: str = "") -> PlanError:
    """Return the error that says what was looked for."""
    if signs.name:
        looked = [f"{signs.variable}={signs.name}"]
    else:
        looked = [f"{name} is not set" for name in NAMES]
    looked += signs.devices or [f"no /dev/{form}" for form in DEVICES]
    return PlanError(
        "No TPU was found.",
        seen="; ".join([*looked, *([more] if more else [])]),
        allowed="a machine with a TPU, or TPU_NAME set to the name or grpc:// address of one",
        next_step="use mirrored, or set os.environ['TPU_NAME'] before %cluster start",
        code="WB-PLAN-148",
    )


def check(options: Mapping[str, Any], workers: int, batch_size: int | None) -> None:
    """Raise PlanError where there is no sign of a TPU."""
    signs = look()
    if not signs.name and not signs.devices:
        raise missing(signs)
