"""Writes runs to Trackio's store on this machine, in the way of Trackio's importers.

https://huggingface.co/docs/trackio. This module does not call `trackio.init`: that function prints,
shows its dashboard in the cell, measures this machine, and asks Hugging Face for the user's name.
The store is a folder, `TRACKIO_DIR`; `trackio sync` copies a project to a Space.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trackio import Image, Markdown, fragments, utils
from trackio.media import get_project_media_path
from trackio.sqlite_storage import SQLiteStorage

from ...errors import PlanError
from . import About, Ending, try_folder

if TYPE_CHECKING:
    from ...history.analysis.series import Scalar


def check(where: str) -> None:
    """Raise PlanError if Trackio refuses the project's name, or its folder is not writable."""
    try:
        SQLiteStorage.validate_project_name(where)
    except ValueError as error:
        raise PlanError(
            "Trackio reserves this project name for itself.",
            seen=where,
            next_step=f"use another name: --log trackio:{where}-runs",
            code="WB-PLAN-248",
        ) from error
    try_folder(str(utils.TRACKIO_DIR), "Trackio's store", make=True)


class StoredRun:
    """One run in the store."""

    def __init__(self, where: str, about: About) -> None:
        self._project, self._name, self._id = where, about.name, uuid.uuid4().hex
        created = _moment(about.began)
        tags = {key: value for key, value in about.tags.items() if key != "folder"}
        self._config: dict[str, Any] = {**tags, "_Created": created, "_Group": None}
        self._stale = True  # the config is not written yet
        # In a folder on the network, write files for the dashboard: SQLite is not safe there.
        self._fragments = (
            fragments.FragmentWriter() if utils.get_storage_mode() == "jsonl" else None
        )

    @property
    def place(self) -> str:
        """The run's project and its folder."""
        return f"run {self._name} of {self._project} in {utils.TRACKIO_DIR}"

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Keep the run's settings; Trackio receives them with the first values."""
        self._config |= values
        self._stale = True

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values, all values of a step in one row."""
        rows = []
        ordered = sorted(scalars, key=lambda one: one.step)
        for step, of_step in groupby(ordered, key=lambda one: one.step):
            values = list(of_step)
            when = epoch_s + max(one.t_s for one in values)
            rows.append((step, when, {one.tag: one.value for one in values}))
        self._add(rows)

    def rewind(self, step: int) -> None:
        """Remove values of `step` and later, except values in files that wait for their import."""
        self._config["rewound_to_step"] = step
        self._stale = True
        path = SQLiteStorage.get_project_db_path(self._project)
        if self._fragments is None and path.exists():
            with contextlib.closing(sqlite3.connect(path, timeout=30)) as store, store:
                store.execute(
                    "DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._id, step)
                )

    def end(self, ending: Ending) -> None:
        """Write the picture, the report, the key figures and the state."""
        last = int(ending.figures.get("steps", 0))
        values: dict[str, Any] = {f"final/{k}": value for k, value in ending.figures.items()}
        notes = "\n".join(f"- {note}" for note in (f"state: {ending.state}", *ending.notes))
        report = f"```\n{ending.report}\n```\n\n{notes}"
        values["report"] = {"_type": Markdown.TYPE, "_value": report}
        if ending.picture:
            name = re.sub(r"[^\w@+-]+", "-", self._name)  # the name of a folder, which "a/b" is not
            folder = get_project_media_path(project=self._project, run=name, step=last)
            path = folder / f"{self._id}.png"
            path.write_bytes(ending.picture)
            place = str(path.relative_to(utils.MEDIA_DIR))
            values["run"] = {"_type": Image.TYPE, "file_path": place, "caption": None}
        self._config["state"] = ending.state
        self._stale = True
        self._add([(last, ending.ended, values)])

    def _add(self, rows: Sequence[tuple[int, float, dict[str, Any]]]) -> None:
        config = self._config if self._stale else None
        if self._fragments is None:
            SQLiteStorage.bulk_log(
                self._project,
                self._name,
                [values for _, _, values in rows],
                steps=[step for step, _, _ in rows],
                timestamps=[_moment(when) for _, when, _ in rows],
                config=config,
                log_ids=[uuid.uuid4().hex for _ in rows],
                run_id=self._id,
            )
        else:
            entries = [
                {
                    "project": self._project, "run": self._name, "run_id": self._id,
                    "metrics": values, "step": step, "timestamp": _moment(when),
                    "config": config, "log_id": uuid.uuid4().hex,
                }
                for step, when, values in rows
            ]  # fmt: skip
            self._fragments.write_local([fragments.metric_record(entry) for entry in entries])
        self._stale = False


def open(where: str, about: About) -> StoredRun:
    """Return a sink that writes a new run to a project."""
    return StoredRun(where, about)


def _moment(when_s: float) -> str:
    return datetime.fromtimestamp(when_s, timezone.utc).isoformat()
