"""Reads back, with the tools' own readers, what `--log` has written."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# TensorBoard's own switch: its reader then does not load TensorFlow, which takes 10 s.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

Series = dict[str, list[tuple[int, float]]]


@dataclass
class Board:
    """One run's folder as TensorBoard sees it."""

    scalars: Series
    walls: dict[str, list[float]]
    images: dict[str, tuple[int, int, bytes]]
    texts: dict[str, str]
    hparams: dict[str, Any]
    status: int | None


def read_board(folder: Path) -> Board:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    everything = {"scalars": 0, "images": 0, "tensors": 0}
    board = EventAccumulator(str(folder), size_guidance=everything).Reload()
    tags = board.Tags()
    texts = {
        tag: board.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in board.PluginTagToContent("text")
    }
    found = board.PluginTagToContent(metadata.PLUGIN_NAME)
    hparams, status = {}, None
    if content := found.get(metadata.SESSION_START_INFO_TAG):
        for name, value in metadata.parse_session_start_info_plugin_data(content).hparams.items():
            hparams[name] = getattr(value, value.WhichOneof("kind"))
    if content := found.get(metadata.SESSION_END_INFO_TAG):
        status = metadata.parse_session_end_info_plugin_data(content).status
    return Board(
        {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in tags["scalars"]},
        {tag: [e.wall_time for e in board.Scalars(tag)] for tag in tags["scalars"]},
        {
            tag: (e.width, e.height, e.encoded_image_string)
            for tag in tags["images"]
            for e in board.Images(tag)
        },
        texts,
        hparams,
        status,
    )


@dataclass
class Tracked:
    """One run as MLflow's client sees it."""

    metrics: Series
    params: dict[str, str]
    tags: dict[str, str]
    status: str
    name: str
    files: dict[str, bytes]


def read_tracked(uri: str, experiment: str = "workbench") -> list[Tracked]:
    """Return the runs of an experiment, oldest first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = []
    for run in client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"]):
        key = run.info.run_id
        metrics = {
            name: sorted((m.step, m.value) for m in client.get_metric_history(key, name))
            for name in run.data.metrics
        }
        files = {
            item.path: Path(client.download_artifacts(key, item.path)).read_bytes()
            for item in client.list_artifacts(key)
        }
        runs.append(
            Tracked(
                metrics, run.data.params, run.data.tags, run.info.status, run.info.run_name, files
            )
        )
    return runs


@dataclass
class Synced:
    """One offline run as W&B's own reader (`wandb leet inspect`) sees it.

    Attributes:
        walls: When each value of a series was measured.
        axes: The column that a series is drawn over.
        text: Everything.
    """

    text: str
    series: Series = field(default_factory=dict)
    walls: dict[str, list[float]] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    exit_code: int | None = None


def read_wandb(folder: Path) -> Synced:
    """Return the only run below a folder of W&B's."""
    (found,) = folder.glob("*run-*/*.wandb")
    spec = find_spec("wandb")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    core = Path(spec.submodule_search_locations[0], "bin", "wandb-core")
    done = subprocess.run(
        [core, "leet", "inspect", "--no-observability", "--json", "--run-file", found, folder],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    kept = Synced(done.stdout)
    for one in map(json.loads, done.stdout.splitlines()):
        told = one.get(one["type"], {})
        match one["type"]:
            case "history":
                item = told["item"]
                for tag in item.keys() - {"step"}:
                    if not tag.startswith("_"):
                        kept.series.setdefault(tag, []).append((item["step"], item[tag]))
                        kept.walls.setdefault(tag, []).append(item.get("_timestamp"))
            case "run":
                kept.run |= told
                kept.config |= told.get("config", {}).get("update", {})
            case "config":
                kept.config |= told["update"]
            case "summary":
                kept.summary |= told.get("update", {})
            case "metric":
                kept.axes[told["name"]] = told.get("step_metric")
            case "files":
                kept.files += [file["path"] for file in told["files"]]
            case "exit":
                kept.exit_code = told.get("exit_code", 0)
    return kept


def read_trackio(project: str) -> tuple[dict[str, list[tuple[int, Any]]], dict[str, Any], str]:
    """Return series, config and name of the only run of a project, by Trackio's own reader."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs(project)
    series: dict[str, list[tuple[int, Any]]] = {}
    for row in SQLiteStorage.get_logs(project, found.name, run_id=found.id):
        for tag in row.keys() - {"step", "timestamp"}:
            series.setdefault(tag, []).append((row["step"], row[tag]))
    return series, found.config or {}, found.name
