"""Writes runs to Weights & Biases from a separate process, which ends with the run's log.

https://docs.wandb.ai/ref/python. In a notebook W&B replaces IPython's display, sends the notebook
and the output of its cells, and allows one run per process. A separate process avoids all this. It
reads lines of JSON, answers each with one line, and stops W&B's service at the end. It exits by
itself when the notebook's process exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...errors import PlanError, RunError
from . import About, Ending, try_folder

if TYPE_CHECKING:
    from ...history.analysis.series import Scalar

MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
"""Values of WANDB_MODE."""
CONNECT_S = 20.0
"""How long W&B may take to answer before the run becomes an offline run."""
OPEN_S = 90.0
ANSWER_S = 60.0
END_S = 600.0
"""How long the last values may take to be sent; the notebook waits shorter (`await_all`)."""
LEAVE_S = 10.0
_SILENT = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
}
_OF_ONE_RUN = ("WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID")
"""Variables that would join all runs into one, or send it to a W&B service of the notebook."""
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from workbench.execution.sinks.wandb import serve; serve()"
)
_EXIT = {"finished": 0, "failed": 1}
_STOPPED = 255  # the exit code that W&B uses for a run that was interrupted


def check(where: str) -> None:
    """Raise PlanError if no run can be written, or WANDB_MODE has another value."""
    mode = os.environ.get("WANDB_MODE") or MODES[0]
    if mode not in MODES:
        raise PlanError(
            "The environment variable WANDB_MODE has an invalid value.",
            seen=mode,
            allowed=", ".join(MODES[:4]),
            code="WB-PLAN-247",
        )
    if mode != "disabled":
        folder = os.environ.get("WANDB_DIR") or "."
        try_folder(str(Path(folder).absolute()), "W&B's files", make=True)


class ChildRun:
    """One run, written by a separate process."""

    def __init__(self, where: str, about: About) -> None:
        entity, _, project = where.rpartition("/")
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - its last words
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={k: v for k, v in os.environ.items() if k not in _OF_ONE_RUN} | _SILENT,
            start_new_session=True,  # a Ctrl-C at the notebook must not reach this process
        )
        tags = {key: value for key, value in about.tags.items() if key != "folder"}
        asked = {"project": project, "entity": entity or None, "name": about.name}
        said = self._ask("open", OPEN_S, **asked, began=about.began, tags=tags)
        self._place = str(said["place"])
        self.remark = str(said["remark"])

    @property
    def place(self) -> str:
        """The run's page, or its folder while it is offline."""
        return self._place

    def settings(self, values: Mapping[str, str | int | float | bool]) -> None:
        """Write the run's settings as W&B's config."""
        self._ask("settings", ANSWER_S, values=dict(values))

    def write(self, scalars: Sequence[Scalar], epoch_s: float) -> None:
        """Write values, all values of a step in one row."""
        rows = []
        ordered = sorted(scalars, key=lambda one: one.step)
        for step, of_step in groupby(ordered, key=lambda one: one.step):
            values = list(of_step)
            when = epoch_s + max(one.t_s for one in values)
            rows.append([step, when, {one.tag: one.value for one in values}])
        self._ask("write", ANSWER_S, rows=rows)

    def rewind(self, step: int) -> None:
        """Do nothing: W&B cannot remove values. The steps appear a second time."""
        self._ask("settings", ANSWER_S, values={"rewound_to_step": step})

    def end(self, ending: Ending) -> None:
        """Write the picture, the report, the key figures and the state; end run and process."""
        with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
            picture = Path(folder, "run.png")
            picture.write_bytes(ending.picture)
            self._ask(
                "end",
                END_S,
                state=ending.state,
                exit_code=_EXIT.get(ending.state, _STOPPED),
                figures=dict(ending.figures),
                report=ending.report,
                notes="\n".join(f"- {note}" for note in ending.notes),
                picture=str(picture) if ending.picture else "",
            )
        self._close(LEAVE_S)

    def _ask(self, what: str, timeout_s: float, **values: Any) -> dict[str, Any]:
        """Return the answer; any failure ends the process, because no later request follows."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + timeout_s
        alarm = threading.Timer(timeout_s, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            process.stdin.write(json.dumps({"do": what, **values}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            alarm.cancel()
            alarm.join()
        if not line:
            late = time.monotonic() >= end
            said = self._last_words()
            self._close(0.0)
            raise RunError(
                f"W&B did not answer the request `{what}` within {timeout_s:g} s. {said}"
                if late
                else f"W&B's process ended during the request `{what}`. {said}",
                code="WB-RUN-121",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._close(LEAVE_S)
            raise RunError(f"W&B says: {answer['error']}", code="WB-RUN-122")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def _close(self, timeout_s: float) -> None:
        process = self._process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # the pipe was full, and no process reads it
                pipe.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._errors.close()


def open(where: str, about: About) -> ChildRun:
    """Return a sink that writes a new run to a project."""
    return ChildRun(where, about)


class _Writer:
    """The work of the separate process; only this process imports `wandb`."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None
        self._known: set[str] = set()

    def open(
        self, project: str, entity: str | None, name: str, began: float, tags: dict[str, str]
    ) -> dict[str, str]:
        """Begin a run; begin an offline run if W&B cannot be reached or does not know the user."""
        settings = self._wandb.Settings(
            console="off", disable_git=True, disable_code=True, save_code=False,
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True,
            x_disable_machine_info=True, x_save_requirements=False, silent=True, quiet=True,
            host="", program="", symlink=False, init_timeout=CONNECT_S, x_start_time=began,
        )  # fmt: skip
        asked: dict[str, Any] = {
            "project": project, "entity": entity, "name": name, "settings": settings,
            "config": tags, "reinit": "create_new",
            "tags": [tags[key] for key in ("strategy", "framework") if tags.get(key)],
        }  # fmt: skip
        remark = ""
        try:
            self._run = self._wandb.init(**asked)
        except (self._wandb.errors.Error, TimeoutError) as error:
            # No key, a wrong key, or no network: the user can send the files later.
            self._run = self._wandb.init(**asked, mode="offline")
            remark = f"W&B cannot be used now ({_first_line(error)}), so the run is saved offline."
        self._run.define_metric("step", hidden=True)
        found = self._run.settings
        if self._run.disabled:
            return {"place": "nowhere", "remark": "With WANDB_MODE=disabled, nothing is written."}
        if self._run.offline:
            place = str(found.sync_dir)
            later = (
                "To send the run to W&B later, use this command in a terminal: "
                f'wandb sync "{place}"'
            )
            return {"place": place, "remark": f"{remark} {later}" if remark else ""}
        return {"place": str(self._run.url), "remark": ""}

    def settings(self, values: dict[str, Any]) -> dict[str, str]:
        self._run.config.update(values, allow_val_change=True)
        return {}

    def write(self, rows: list[tuple[int, float, dict[str, float]]]) -> dict[str, str]:
        """Log rows; the step is a column, because W&B's step must not go back."""
        for step, when, values in rows:
            self._log(step, when, values)
        return {}

    def end(
        self, state: str, exit_code: int, figures: dict[str, float], report: str, notes: str,
        picture: str,
    ) -> dict[str, str]:  # fmt: skip
        last = int(figures.get("steps", 0))
        if picture:
            self._log(last, None, {"run": self._wandb.Image(picture)})
        self._run.summary.update({f"final/{name}": value for name, value in figures.items()})
        self._run.config.update({"state": state}, allow_val_change=True)
        self._run.notes = notes
        if not self._run.disabled:
            path = Path(self._run.dir, "report.txt")
            path.write_text(report)
            self._run.save(str(path), base_path=self._run.dir, policy="now")
        self.leave(exit_code)
        return {}

    def leave(self, exit_code: int = _STOPPED) -> None:
        """End the run and W&B's service; does nothing the second time."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None
        self._wandb.teardown()

    def _log(self, step: int, when: float | None, values: dict[str, Any]) -> None:
        for tag in values.keys() - self._known:
            self._run.define_metric(tag, step_metric="step")
            self._known.add(tag)
        row = {"step": step, **values}
        self._run.log(row if when is None else {**row, "_timestamp": when})


def serve() -> None:
    """Obey the commands on standard input until it ends; the output of libraries is dropped."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    writer = _Writer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(writer, request.pop("do"))(**request)
        except Exception as error:  # W&B's errors, of any class: the notebook receives them
            answer = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except OSError:  # the notebook's process has ended meanwhile
            break
    writer.leave()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
