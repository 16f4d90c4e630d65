"""The tools that runs are also written to: one module per tool, loaded only when needed.

In reading order:

    tensorboard  writes TensorBoard's event files without TensorFlow
    mlflow       writes to MLflow's store without a framework
    wandb        sends a run to Weights & Biases without an effect on the notebook
    trackio      writes to Trackio's store
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import PlanError
from ...shared.log_targets import PACKAGES

if TYPE_CHECKING:
    from ...history.analysis.series import Scalar
    from ...shared.log_targets import Target


@dataclass(frozen=True)
class About:
    """The facts about a run that are known when it begins.

    Attributes:
        run_id: The name of the run's folder, which is unique.
        began: Seconds since 1970.
        tags: Facts that distinguish the run from other runs, as text.
    """

    name: str
    run_id: str
    began: float
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """The facts about a run that are known when it is over.

    Attributes:
        state: `finished`, `stopped` or `failed`; another state if the notebook ended first.
        ended: Seconds since 1970.
        report: The run in words: figures, workers, evaluations, notes.
        notes: Notes for the user, and the error if the run failed.
        picture: The run's final figure as PNG; empty if it could not be drawn.
        figures: Key figures of the whole run by name; none is NaN.
        meta: The contents of `run.json`.
    """

    state: str
    ended: float
    report: str
    notes: Sequence[str] = ()
    picture: bytes = b""
    figures: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """One place that a run is written to; used by one thread at a time."""

    @property
    def place(self) -> str:
        """The place of the run in words: a folder, or a store and the run's id in this store."""

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Write the run's settings; called once."""

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values and flush them; `epoch_s` is when the first step began, since 1970."""

    def rewind(self, step: int) -> None:
        """Remove values of `step` and later, if the place can: the run went back to `step`."""

    def end(self, ending: Ending) -> None:
        """Write how the run ended, and close."""


class Kind(Protocol):
    """The functions that each module of this package has."""

    def check(self, where: str) -> None:
        """Raise PlanError if nothing can be written to that place."""

    def open(self, where: str, about: About) -> Sink:
        """Return a sink for a new run."""


def try_folder(folder: str, what: str, *, make: bool = False) -> None:
    """Write a file into a folder and remove it: a disk may be read-only whatever the rights say.

    Args:
        make: Make the folder if it does not exist.

    Raises:
        PlanError: `what` cannot be written there.
    """
    try:
        if make:
            Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlanError(
            f"{what} cannot be written to this folder: {error.strerror}.",
            seen=folder,
            allowed="a folder that this user may write to",
            code="WB-PLAN-119",
        ) from error


def kind_of(target: Target) -> Kind:
    """Return the module that writes to a target.

    Raises:
        PlanError: A package is missing; the error names the extra to install.
    """
    for package in PACKAGES[target.kind]:
        if importlib.util.find_spec(package) is None:
            raise PlanError(
                f"--log {target.kind} needs a package that is not installed.",
                seen=package,
                next_step=f'pip install "distributed-workbench[{target.kind}]", '
                "in the notebook's environment",
                code="WB-PLAN-120",
            )
    module: Any = importlib.import_module(f".{target.kind}", __package__)
    return module  # type: ignore[no-any-return]
