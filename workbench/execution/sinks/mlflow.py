"""Writes runs to MLflow's tracking store through `MlflowClient`, which loads no framework.

https://mlflow.org/docs/latest/ml/tracking/. Databases and servers work; folders (`file:`) are in
maintenance mode upstream, which refuses them unless MLFLOW_ALLOW_FILE_STORE is set.
"""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ...errors import PlanError
from . import About, Ending, try_folder

if TYPE_CHECKING:
    from ...history.analysis.series import Scalar

EXPERIMENT = "workbench"
"""The experiment for the runs if MLFLOW_EXPERIMENT_NAME is not set."""
CONNECT_S = 5.0
_BATCH = 1000  # MLflow's limit of the values in one request
_PARAMS = 100
_LETTERS = 5000  # MLflow's limit of the letters of a tag
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


def check(where: str) -> None:
    """Raise PlanError if the store cannot be used; the check makes a new database if needed."""
    uri = _uri(where)
    _check_reachable(uri)
    try:
        _experiment(MlflowClient(tracking_uri=uri), uri)
    except PlanError:
        raise
    except Exception as error:  # each kind of store raises errors of different classes
        raise PlanError(
            f"MLflow cannot use this store: {_first_line(error)}",
            seen=where or uri,
            allowed="sqlite:///mlflow.db, http://HOST:5000, or a database's URI",
            code="WB-PLAN-121",
        ) from error


class TrackedRun:
    """One run in a tracking store."""

    def __init__(self, where: str, about: About) -> None:
        self._uri = _uri(where)
        self._client = MlflowClient(tracking_uri=self._uri)
        self._id = self._client.create_run(
            _experiment(self._client, self._uri),
            start_time=int(about.began * 1000),
            run_name=about.name,
            tags={f"workbench.{key}": value[:_LETTERS] for key, value in about.tags.items()},
        ).info.run_id

    @property
    def place(self) -> str:
        """The run's id and its store."""
        return f"run {self._id} in {self._uri}"

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Write the run's settings as parameters."""
        params = [Param(name, str(value)) for name, value in values.items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values as metrics."""
        metrics = [
            Metric(_key(one.tag), one.value, int((epoch_s + one.t_s) * 1000), one.step)
            for one in scalars
        ]
        for at in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[at : at + _BATCH])

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow cannot remove values. The steps appear a second time."""
        self._client.set_tag(self._id, "workbench.rewound_to_step", str(step))

    def end(self, ending: Ending) -> None:
        """Write the picture, the report, the key figures and the state, and end the run."""
        when = int(ending.ended * 1000)
        last = int(ending.figures.get("steps", 0))
        metrics = [
            Metric(_key(f"final/{name}"), value, when, last)
            for name, value in ending.figures.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._id, metrics=metrics)
        notes = "\n".join(f"- {note}" for note in ending.notes)
        self._client.set_tag(self._id, "workbench.state", ending.state)
        self._client.set_tag(self._id, "mlflow.note.content", notes[:_LETTERS])
        with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
            for name, content in _files(ending).items():
                path = Path(folder, name)
                path.write_bytes(content)
                self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, _STATUS.get(ending.state, "KILLED"), when)


def open(where: str, about: About) -> TrackedRun:
    """Return a sink that writes a new run to a store."""
    return TrackedRun(where, about)


def _files(ending: Ending) -> dict[str, bytes]:
    files = {
        "report.txt": ending.report.encode(),
        "run.json": json.dumps(ending.meta, indent=1, default=str).encode(),
    }
    if ending.picture:
        files["run.png"] = ending.picture
    return files


def _uri(where: str) -> str:
    uri = where or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise PlanError(
            "No MLflow store is given.",
            seen="`mlflow:` without a URI; MLFLOW_TRACKING_URI is not set",
            allowed="mlflow:sqlite:///mlflow.db, mlflow:http://HOST:5000",
            code="WB-PLAN-122",
        )
    return uri


def _check_reachable(uri: str) -> None:
    """Raise PlanError at once in cases in which MLflow would retry for minutes."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        path = Path(parts.path[1:])
        try_folder(str(path.parent), "MLflow's database")
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise PlanError(
                "MLflow's database file is not writable.", seen=str(path), code="WB-PLAN-123"
            )
    elif parts.scheme in ("http", "https"):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
        except OSError as error:
            raise PlanError(
                f"MLflow's server does not answer: {error}.",
                seen=f"{parts.scheme}://{parts.hostname}:{port}",
                next_step="start `mlflow server`, or give the address of another MLflow server",
                code="WB-PLAN-124",
            ) from error


def _experiment(client: MlflowClient, uri: str) -> str:
    """Return the id of the runs' experiment; it is made if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    if found is None:
        place = None
        if uri.startswith("sqlite"):  # otherwise pictures go to the notebook's folder
            place = Path(urlsplit(uri).path[1:]).parent.joinpath("mlruns", name).as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # another process made it at this moment
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise PlanError(
            "MLflow's experiment was deleted.",
            seen=name,
            next_step="restore the experiment, or set MLFLOW_EXPERIMENT_NAME to another name",
            code="WB-PLAN-125",
        )
    return str(found.experiment_id)


def _key(tag: str) -> str:
    """Return a name that MLflow accepts: letters, digits and `_-. /`, at most 250."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in tag)[:250]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
