"""The tools that runs are also written to: one module per tool, loaded only when needed.

In reading order:

    tensorboard  how are TensorBoard's event files written, without TensorFlow
    mlflow       how is MLflow's store written, without a framework
    wandb        how does Weights & Biases get a run, without a hand on the notebook
    trackio      how is Trackio's store written
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
    """What is known of a run when it begins.

    Attributes:
        run_id: Unique: the name of its folder.
        began: Seconds since 1970.
        tags: What tells it apart from others, as text.
    """

    name: str
    run_id: str
    began: float
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Ending:
    """What is known of a run when it is over.

    Attributes:
        state: `finished`, `stopped`, `failed`; another one where the notebook ended before it did.
        ended: Seconds since 1970.
        report: The run in words: figures, workers, evaluations, notes.
        notes: What the user should know, and the error of a run that failed.
        picture: Its final figure, PNG; empty where it could not be drawn.
        figures: Key figures of the whole run by name; none is NaN.
        meta: What `run.json` says.
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
        """Where the run is, in words: a folder, or a store and the run's id in it."""

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Write what the run was asked to do; called once."""

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values and flush them; `epoch_s` is when the first step began, since 1970."""

    def rewind(self, step: int) -> None:
        """Take back values of `step` and later, where the place can: the run went back."""

    def end(self, ending: Ending) -> None:
        """Write how the run ended, and close."""


class Kind(Protocol):
    """What a module of this package offers."""

    def check(self, where: str) -> None:
        """Raise PlanError where nothing can be written to that place."""

    def open(self, where: str, about: About) -> Sink:
        """Return a sink for a new run."""


def try_folder(folder: str, what: str, *, make: bool = False) -> None:
    """Write a file into a folder and remove it; rights alone do not tell (a disk may be read-only).

    Args:
        make: Make the folder where it is not there.

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
            f"{what} cannot be written there: {error.strerror}.",
            seen=folder,
            allowed="a folder that this user may write to",
            code="WB-PLAN-119",
        ) from error


def kind_of(target: Target) -> Kind:
    """Return the module that writes to a target.

    Raises:
        PlanError: A package is missing; names the extra to install.
    """
    for package in PACKAGES[target.kind]:
        if importlib.util.find_spec(package) is None:
            raise PlanError(
                f"--log {target.kind} needs a package that is not installed here.",
                seen=package,
                next_step=f'pip install "distributed-workbench[{target.kind}]", '
                "in the notebook's environment",
                code="WB-PLAN-120",
            )
    module: Any = importlib.import_module(f".{target.kind}", __package__)
    return module  # type: ignore[no-any-return]
