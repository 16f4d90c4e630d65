"""TPU: a replica on each core, gradients added up over the TPU's own interconnect.

    core 0:  forward, backward --+                      +-> update
    core 1:  forward, backward --+-- all-reduce (ICI) --+-> update
    ...                          |                      |
    core 7:  forward, backward --+                      +-> update

XLA, TensorFlow's compiler, compiles the whole step for the TPU, and a TPU runs no Python. So
Workbench cannot measure times or inject delays inside a step. The waits and compute times of a core
are therefore unknown. Workbench still records steps, samples and losses.

Before TensorFlow connects to the address of a TPU, Workbench checks that a server answers at this
address. Without this check, TensorFlow would wait for minutes if there is no server.

Sources: tf.distribute.TPUStrategy, https://www.tensorflow.org/guide/tpu; Jouppi et al.,
In-Datacenter Performance Analysis of a Tensor Processing Unit, ISCA 2017.

To find out whether the machine has a TPU, Workbench reads environment variables and the names of
device files. It opens no connection for this.

Source: tf.distribute.cluster_resolver.TPUClusterResolver; https://cloud.google.com/tpu/docs.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from ...engine.tensorflow import accelerator
from ...engine.tensorflow.support import reset
from ...errors import ClusterError, FitError, PlanError
from .keras.replicated import Replicated

ANSWER_S = 1.5
METADATA = ("169.254.169.254", 80)
"""Google Cloud's metadata service, which knows TPUs by their names."""
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a gRPC client: the preface and empty SETTINGS (RFC 9113, section 3.4)."""
SETTINGS = 4


class Tpu(Replicated):
    """Synchronous training on the cores of a TPU."""

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy over all cores.

        Raises:
            PlanError: There is no TPU.
            ClusterError: No server answers at the address given.
            FitError: The number of cores is not the number of replicas.
        """
        if self.context.faults.active:
            raise FitError(
                "--inject cannot be used on a TPU, because no Python code runs there during a "
                "step.",
                seen=", ".join(fault.text for fault in self.context.spec.faults),
                next_step="remove --inject, or use the strategy `mirrored`",
                code="WB-FIT-098",
            )
        resolver = connect(look())
        cores = accelerator.count("TPU")
        if cores != len(self.devices):
            raise FitError(
                "The number of workers must equal the number of the TPU's cores.",
                seen=f"{len(self.devices)} workers, {cores} cores",
                next_step=f"use -n {cores}",
                code="WB-FIT-099",
            )
        return tf.distribute.TPUStrategy(resolver)


def connect(signs: Signs) -> Any:
    """Initialise the TPU that the signs point to; return its resolver.

    Raises:
        PlanError: There is no sign of a TPU, or TensorFlow finds no TPU there.
        ClusterError: No server answers at the address given.
    """
    if not signs.name and not signs.devices:
        raise missing(signs)
    if signs.address is not None:
        check_answers(*signs.address)
    elif signs.name not in ("", "local"):
        check_named(signs.name)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(signs.name or "local")
        if signs.address is not None or signs.name not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        reset()  # an unfinished connection would disturb the next run
        raise missing(signs, f"TensorFlow: {first[:200]}") from error
    return resolver


def check_answers(host: str, port: int) -> None:
    """Raise ClusterError unless a gRPC server answers there, within seconds."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as line:
            line.settimeout(ANSWER_S)
            line.sendall(HTTP2_HELLO)
            head = line.recv(9)
    except OSError as error:
        raise _silent(f"{host}:{port}", f"{type(error).__name__}: {error}") from None
    if len(head) < 4 or head[3] != SETTINGS:
        raise _silent(f"{host}:{port}", "the server at this address does not use gRPC")


def check_named(name: str) -> None:
    """Raise ClusterError unless the service that knows TPUs by name can be reached."""
    try:
        socket.create_connection(METADATA, ANSWER_S).close()
    except OSError as error:
        why = (
            "Google Cloud's metadata service, which finds a TPU by its name, does not answer "
            f"({type(error).__name__})"
        )
        raise _silent(name, why) from None


def _silent(where: str, why: str) -> ClusterError:
    variable = look().variable or NAMES[0]
    return ClusterError(
        "No TPU answers at the given address.",
        seen=f"{where}: {why}",
        allowed="the gRPC address of a running TPU, its name in Google Cloud, or `local`",
        next_step=f"correct the environment variable {variable}, or remove it and use the "
        "strategy `mirrored`",
        code="WB-CLUSTER-048",
    )


NAMES = ("TPU_NAME", "COLAB_TPU_ADDR")
DEVICES = ("accel*", "vfio/[0-9]*")
"""Device files under /dev: up to TPU v4, and since v5."""


@dataclass(frozen=True)
class Signs:
    """The signs that were found.

    Attributes:
        name: Value of the variable in `variable`; empty if none is set.
        devices: Device files.
    """

    name: str = ""
    variable: str = ""
    devices: tuple[str, ...] = ()

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port that the name gives; None if it is a machine's name."""
        text = self.name.rpartition("://")[2]
        host, _, port = text.rpartition(":")
        return (host, int(port)) if host and port.isdigit() else None


def look(environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> Signs:
    """Return the signs of a TPU on this machine."""
    variable = next((name for name in NAMES if environ.get(name)), "")
    files = sorted(str(path) for form in DEVICES for path in folder.glob(form))
    return Signs(environ.get(variable, "") if variable else "", variable, tuple(files))


def missing(signs: Signs, more: str = "") -> PlanError:
    """Return the error that lists the signs that were checked."""
    if signs.name:
        looked = [f"{signs.variable}={signs.name}"]
    else:
        looked = [f"{name} is not set" for name in NAMES]
    looked += signs.devices or [f"no file /dev/{form}" for form in DEVICES]
    return PlanError(
        "No TPU was found.",
        seen="; ".join([*looked, *([more] if more else [])]),
        allowed="a machine with a TPU, or TPU_NAME set to the name or the grpc:// address of a TPU",
        next_step="use the strategy `mirrored`, or set os.environ['TPU_NAME'] before %cluster "
        "start",
        code="WB-PLAN-148",
    )


def check(options: Mapping[str, Any], workers: int, batch_size: int | None) -> None:
    """Raise PlanError if there is no sign of a TPU."""
    signs = look()
    if not signs.name and not signs.devices:
        raise missing(signs)
