"""Writes runs as TensorBoard's event files, with the parts of its package that load no framework.

If TensorFlow is installed, `tensorboard.summary.Writer` uses its file system, which would load
TensorFlow into the notebook. The record format and the messages do not need it. Format:
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto and
`tensorboard/summary/writer/record_writer.py`.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2, summary_v2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from ...errors import PlanError
from . import About, Ending, try_folder

if TYPE_CHECKING:
    from ...history.analysis.series import Scalar

_STATUS = {"finished": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE}
_FIGURES = ("loss", "samples_per_s", "compute_share", "wall_s")
_RGBA = 4


def check(where: str) -> None:
    """Make the folder; raise PlanError if no file can be made in it."""
    if Path(where).exists() and not Path(where).is_dir():
        raise PlanError(
            "TensorBoard's files need a folder, but the target is a file.",
            seen=where,
            code="WB-PLAN-126",
        )
    try_folder(where, "TensorBoard's files", make=True)


class EventFile:
    """One run's event file, in a separate folder."""

    def __init__(self, where: str, about: About) -> None:
        self._about = about
        self._folder = _own_folder(Path(where), about.name)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (self._folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._add(about.began, file_version="brain.Event:2")
        lines = "\n".join(f"- {name}: {value}" for name, value in about.tags.items())
        self._summary(about.began, 0, text_pb("run", lines).value)
        self._file.flush()

    @property
    def place(self) -> str:
        """The run's folder."""
        return str(self._folder)

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Write the run's settings, as hyper-parameters and as text."""
        began = self._about.began
        start = summary_v2.hparams_pb(
            dict(values), trial_id=self._about.run_id, start_time_secs=began
        )
        columns = summary_v2.hparams_config_pb(
            hparams=[summary_v2.HParam(name) for name in values],
            metrics=[summary_v2.Metric(f"final/{name}") for name in _FIGURES],
            time_created_secs=began,
        )
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        lines = "\n".join(["| setting | value |", "|---|---|", *rows])
        self._summary(began, 0, [*columns.value, *start.value, *text_pb("settings", lines).value])
        self._file.flush()

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values, all values of a step in one event, and flush them."""
        ordered = sorted(scalars, key=lambda one: one.step)
        for step, of_step in groupby(ordered, key=lambda one: one.step):
            values = list(of_step)
            self._summary(
                epoch_s + max(one.t_s for one in values),
                step,
                [Summary.Value(tag=one.tag, simple_value=one.value) for one in values],
            )
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Tell readers to drop values of `step` and later."""
        self._add(time.time(), step=step, session_log=SessionLog(status=SessionLog.START))

    def end(self, ending: Ending) -> None:
        """Write the picture, the report, the key figures and the state, and close the file."""
        last = int(ending.figures.get("steps", 0))
        values = [
            Summary.Value(tag=f"final/{name}", simple_value=value)
            for name, value in ending.figures.items()
        ]
        values.extend(text_pb("report", f"```\n{ending.report}\n```").value)
        notes = [f"state: {ending.state}", *ending.notes]
        values.extend(text_pb("notes", "\n".join(f"- {note}" for note in notes)).value)
        if ending.picture:
            width, height = struct.unpack(">II", ending.picture[16:24])  # the PNG's header
            image = Summary.Image(width=width, height=height, colorspace=_RGBA)
            image.encoded_image_string = ending.picture
            values.append(Summary.Value(tag="run", image=image))
        status = _STATUS.get(ending.state, api_pb2.STATUS_UNKNOWN)
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ending.ended)
        about = hparams.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_end_info=info)
        )
        values.append(
            Summary.Value(
                tag=hparams.SESSION_END_INFO_TAG, metadata=about, tensor=hparams.NULL_TENSOR
            )
        )
        self._summary(ending.ended, last, values)
        self._file.close()

    def _summary(self, wall_s: float, step: int, values: Iterable[Any]) -> None:
        self._add(wall_s, step=step, summary=Summary(value=values))

    def _add(self, wall_s: float, **fields: Any) -> None:
        self._records.write(Event(wall_time=wall_s, **fields).SerializeToString())


def open(where: str, about: About) -> EventFile:
    """Return a sink that writes a new run below a folder."""
    return EventFile(where, about)


def _own_folder(parent: Path, name: str) -> Path:
    """Make a new folder that no other run uses: `base`, `base-2`, ..."""
    safe = re.sub(r"[^\w.@+-]+", "-", name).strip(".") or "run"
    for number in count(1):
        folder = parent / (safe if number == 1 else f"{safe}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError  # count does not end
