"""A plan as a folder that trains it elsewhere: the cell, the packages to install, the pinned
values.

    train.py           the cell as a file
    run.json           the plan, and the values that make the run equal to the notebook's: seed,
                       pins
    requirements.txt   exact versions, and Workbench as a wheel in the folder
    README.md          how to start, watch, stop and continue
    runs/<n>/          made when it runs

A folder contains no data about the machine and the user that wrote it. Paths in it are relative,
addresses contain no passwords, and no environment variables are stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from ..cookbook.recipe import Recipe
from ..devices.leases import threads_per_worker
from ..errors import PlanError
from ..history.disk import META
from ..shared.events import OVER, Topic
from ..shared.log_targets import PACKAGES, parse_target
from ..shared.plan import Plan
from . import script
from .cell import check_cell, imported
from .packages import packages_of, requirements, workbench_wheel
from .published import ENVELOPES

FORMAT = "workbench-job/1"
RUNS = "runs"
CHECKPOINTS = "checkpoints"
INITIAL = "initial"
_OURS = ("train.py", META, "requirements.txt", "README.md", RUNS, CHECKPOINTS, INITIAL)
_HOLDING = {
    file
    for one in ENVELOPES.values() if one.schema.startswith("kubernetes:")
    for file in one.files if file.endswith(".yaml")
}  # fmt: skip
"""Envelopes that contain the cell; an old one would train an outdated cell."""
_ALIVE_S = 10.0
"""Largest age of the last sign of life of a running run."""


@dataclass(frozen=True)
class Pins:
    """Values that affect the last bits of a run's result.

    Attributes:
        threads: CPU threads of each worker; None: all.
        allreduce: The all-reduce that the notebook's run had chosen; None: the plan sets it, or has
            none.
        dtype: Data type of the parameters.
    """

    threads: int | None = None
    allreduce: str | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class JobFolder:
    """The job that a folder describes.

    Attributes:
        path: The folder.
        name: Of the job.
        plan: The plan; its paths are relative to the folder.
        launch: `workers`, `servers`, `processes` (both together) and `framework`.
        pins: The fields of `Pins`, and the versions `python` and `packages`.
        plain: Whether train.py does not use Workbench.
    """

    path: Path
    name: str
    plan: Plan
    launch: dict[str, Any]
    pins: dict[str, Any]
    plain: bool = False

    @property
    def runs(self) -> list[Path]:
        """The folders of its runs, the oldest first."""
        found = [path for path in (self.path / RUNS).glob("*") if path.name.isdecimal()]
        return sorted(found, key=lambda path: int(path.name))


class Told(Protocol):
    """A history's data about its run's beginning; `history.events.Story` is one."""

    started: dict[str, Any]
    facts: dict[Topic, Any]


class Remembered(Protocol):
    """The history of a run; `history.store.RunHistory` is one."""

    @property
    def story(self) -> Told:
        """The events of the run."""


class Trained(Protocol):
    """A run from which a job is made; `execution.run.Run` is one."""

    @property
    def plan(self) -> Plan:
        """Its plan."""

    @property
    def folder(self) -> Path:
        """Its folder."""

    @property
    def init_from(self) -> str:
        """The folder of its initial weights; empty: none."""

    @property
    def history(self) -> Remembered:
        """Its history."""


def job_of(what: Plan | Trained, folder: str | os.PathLike[str], **about: Any) -> Path:
    """Write a plan, or a run to repeat, as a job folder; return its path.

    For a run, its choices are pinned, so that the job's result is the same to the last bit on as
    many workers of the same kind. For a plan, the threads that it would have here are pinned, and
    the backend's all-reduce if the plan does not set one.

    Args:
        about: Further arguments of `write_job`.

    Raises:
        PlanError: As `write_job`.
    """
    if isinstance(what, Plan):
        pins = Pins(threads_per_worker(what.workers), "backend")
        return write_job(what, Path(folder), **({"pins": pins} | about))
    told: dict[str, Any] = {"pins": pins_of(what)}
    if what.init_from:
        told["initial"] = Path(what.init_from)
    return write_job(what.plan, Path(folder), **(told | about))


def pins_of(run: Trained) -> Pins:
    """Return the choices of a run, as far as it began."""
    story, options = run.history.story, run.plan.options
    threads = story.started.get("threads")
    chosen: str | None = None
    if options.get("allreduce") == "auto" and story.started:
        # The backend's all-reduce is the default, so there is no event about it.
        chosen = str(story.facts.get(Topic.ALLREDUCE_CHOSEN) or "backend")
    return Pins(int(threads) if threads else None, chosen, _dtype(run.folder / "weights.npz"))


def _dtype(weights: Path) -> str:
    """Return the type of the first parameter; float32 if there are no weights."""
    failures = (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
    with contextlib.suppress(*failures), np.load(weights, allow_pickle=False) as arrays:
        kinds = (arrays[name].dtype for name in arrays.files)
        return next((kind.name for kind in kinds if kind.kind == "f"), "float32")
    return "float32"


def write_job(
    plan: Plan,
    folder: Path,
    *,
    plain: bool = False,
    pins: Pins | None = None,
    files: Sequence[Path] = (),
    initial: Path | None = None,
    names: Mapping[str, object] | None = None,
    replace: bool = False,
) -> Path:
    """Write a complete job folder or nothing; return its path.

    An existing job folder is written again. Other files stay: its runs, its checkpoints, files that
    were added, and envelopes that do not contain the cell.

    Args:
        plain: Write a script that does not use Workbench; it is not recorded.
        files: Files that the cell reads, by paths from the current folder. They are put next to
            train.py under the same relative paths, other files under their names only.
        initial: The folder of the run with the initial weights.
        names: The notebook's variables, for error messages.
        replace: Whether to overwrite a train.py that was changed by hand.

    Raises:
        PlanError: The cell cannot run elsewhere, or the folder cannot be written.
    """
    goal, here = folder.expanduser().absolute(), Path.cwd()
    source = plan.recipe.cell
    notes = check_cell(source, names=names, folder=here, files=files)
    text = script.plain_py(plan) if plain else script.train_py(plan)
    travelling = _portable(plan, initial)
    kept = _check_goal(goal, force=replace)
    chosen = _placed(files, here)
    fresh = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}")
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        for place, path in chosen.items():
            _copy(path, fresh / place)
        if plan.init_from and initial is not None:
            _copy_weights(initial, fresh / INITIAL)
        trackers = [name for one in plan.log for name in PACKAGES[parse_target(one).kind]]
        also = {*_imported_by(chosen.values()), *(() if plain else trackers)}
        packages = packages_of(source, plan.framework, also - {Path(p).stem for p in chosen})
        pinned = {"python": platform.python_version(), "packages": packages}
        about = _describe(travelling, {**pinned, **asdict(pins or Pins())}, plain=plain)
        wheel = "" if plain else workbench_wheel(fresh)
        (fresh / "train.py").write_text(text, "utf-8")
        (fresh / "requirements.txt").write_text(requirements(packages, wheel), "utf-8")
        (fresh / "README.md").write_text(_readme(travelling, about, wheel, notes), "utf-8")
        about["files"] = {
            path.name: _digest(path.read_bytes()) for path in sorted(fresh.iterdir())
            if path.is_file()
        } | {PurePosixPath(place).parts[0]: "" for place in chosen if "/" in place}  # fmt: skip
        about["files"] |= {INITIAL: ""} if (fresh / INITIAL).exists() else {}
        (fresh / META).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        _swap(fresh, goal, [name for name in kept if not (fresh / name).exists()])
    except OSError as error:
        raise PlanError(
            f"The job folder cannot be written: {error.strerror or error}.",
            seen=str(goal),
            allowed="a folder in which this user can write, on a disk with free space",
            next_step="free some disk space, or use another folder",
            code="WB-PLAN-208",
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return goal


def _describe(plan: Plan, pins: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return the content of run.json."""
    launch = {
        "workers": plan.workers,
        "servers": plan.servers,
        "processes": script.process_count(plan),
        "framework": plan.framework,
    }
    return {
        "format": FORMAT,
        "name": plan.name or plan.recipe.name or plan.strategy,
        "framework": plan.framework,
        "plan": plan.to_wire(),
        "seed": int(plan.overrides.get("seed", 0)),
        "pins": pins,
        "launch": launch,
        **({"plain": True} if plain else {}),
    }


def _portable(plan: Plan, initial: Path | None) -> Plan:
    """Return the plan without data about this machine; its paths are inside the folder."""
    if plan.init_from and initial is None:
        raise PlanError(
            "The job needs the weights of the run in --init-from, but Workbench does not know the "
            "folder of this run.",
            seen=f"--init-from {plan.init_from}",
            allowed="the folder of this run, as the argument `initial`",
            next_step="use write_job(..., initial=run.folder), or remove --init-from",
            code="WB-PLAN-209",
        )
    recipe = plan.recipe
    if recipe.args:  # arguments are not sent: they are written into the cell
        recipe = Recipe(
            source=recipe.cell, origin=recipe.origin, name=recipe.name, framework=recipe.framework
        )
    return replace(
        plan,
        recipe=recipe,
        checkpoint=CHECKPOINTS if plan.checkpoint else "",
        init_from=INITIAL if plan.init_from else "",
        log=tuple(dict.fromkeys(map(_portable_target, plan.log))),
    )


def _portable_target(target: str) -> str:
    """Return the log targets of a job; a place on this machine moves into the job folder."""
    kind, _, where = target.partition(":")
    if kind == "tensorboard":
        return f"{kind}:{Path(where).name or kind}"
    scheme = where.partition(":")[0]
    if kind == "mlflow" and scheme in ("sqlite", "file"):
        name = Path(where).name
        return f"{kind}:sqlite:///{name}" if scheme == "sqlite" else f"{kind}:file:{name}"
    try:
        parts = urlsplit(where)
        bad = parts.username is not None or parts.password is not None or parts.query
    except ValueError:
        bad = True
    if bad or (where.startswith("/") and kind == "mlflow"):
        shown = where.partition("://")[0] + "://***" if "://" in where else "***"
        raise PlanError(
            "Workbench does not write this address of --log into the job folder. The address may "
            "contain a secret or a path of this machine.",
            seen=f"--log {kind}:{shown}",
            allowed="an address without user name, password or query (`?...`), not a local path",
            next_step="give only `--log mlflow:` (no address), and set the environment variable "
            "MLFLOW_TRACKING_URI where the job runs",
            code="WB-PLAN-213",
        )
    return target


# -- files ---------------------------------------------------------------------------------------


def _placed(files: Sequence[Path], here: Path) -> dict[str, Path]:
    """Return the files to send, by their places in the folder."""
    found: dict[str, Path] = {}
    for file in files:
        path = (here / Path(file).expanduser()).absolute()
        inside = path.is_relative_to(here) and ".." not in path.parts and path != here
        place = path.relative_to(here).as_posix() if inside else path.name
        if not path.exists() or not place:
            raise PlanError(
                "A file that should be sent with the job does not exist.",
                seen=str(file),
                allowed="paths of files and folders, relative to the notebook's folder",
                code="WB-PLAN-210",
            )
        if place.split("/")[0] in _OURS or place in found or place.endswith(".whl"):
            raise PlanError(
                f"{'Another file' if place in found else 'The job folder'} already uses this name.",
                seen=place,
                allowed="a different name for each file. These names are not allowed: "
                f"*.whl, {', '.join(_OURS)}",
                next_step="rename the file, and change its name in the cell",
                code="WB-PLAN-211",
            )
        found[place] = path
    return found


def _imported_by(files: Iterable[Path]) -> set[str]:
    """Return the modules that the sent scripts and packages import."""
    found: set[str] = set()
    for file in files:
        for path in file.rglob("*.py") if file.is_dir() else [file]:
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                found |= {*imported(path.read_text("utf-8"))} if path.suffix == ".py" else set()
    return found


_LEFT_HERE = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def _copy(path: Path, goal: Path) -> None:
    goal.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, goal, ignore=_LEFT_HERE)
    else:
        shutil.copyfile(path, goal)


def _copy_weights(run: Path, goal: Path) -> None:
    """Copy a run's final weights, and the part of its description that is needed to read them."""
    files = sorted(run.glob("weights*.npz"))
    try:
        meta = json.loads((run / META).read_text("utf-8"))
        about = {"framework": str(meta["framework"])}
        known = {file.name: meta.get("files", {}).get(file.name) for file in files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        files = []
    if not files:
        raise PlanError(
            "The run in --init-from has no weights that can be sent with the job.",
            seen=run.name,
            allowed="a finished run's folder that contains weights.npz",
            next_step="start from another run, or remove --init-from",
            code="WB-PLAN-212",
        )
    goal.mkdir()
    for file in files:
        shutil.copyfile(file, goal / file.name)
    sums = {name: value for name, value in known.items() if value}
    (goal / META).write_text(json.dumps({**about, "files": sums}, indent=1) + "\n", "utf-8")


def _check_goal(goal: Path, *, force: bool) -> list[str]:
    """Return the files in the folder that stay: those not written by Workbench."""
    if not goal.exists() and not goal.is_symlink():
        return []
    if goal.is_dir() and not any(goal.iterdir()):
        return []
    about = _about(goal) if goal.is_dir() else None
    if about is None:
        raise PlanError(
            "The folder is not empty, and it is not a job folder, so nothing was written.",
            seen=str(goal),
            allowed="a new path, an empty folder, or a job folder that Workbench wrote",
            next_step="use another folder",
            code="WB-PLAN-214",
        )
    for alive in (goal / RUNS).glob("*/alive"):
        with contextlib.suppress(OSError):
            if time.time() - alive.stat().st_mtime < _ALIVE_S and not _is_over(alive.parent):
                raise PlanError(
                    "A run of this job folder is still active, so the folder's script cannot be "
                    "replaced.",
                    seen=str(alive.parent),
                    allowed="a job folder without an active run",
                    next_step="stop the run or wait for its end, or use another folder",
                    code="WB-PLAN-215",
                )
    written: dict[str, str] = about.get("files") or {}
    wanted, path = written.get("train.py"), goal / "train.py"
    if wanted and not force and path.is_file() and _digest(path.read_bytes()) != wanted:
        raise PlanError(
            "Somebody has changed the script in this job folder since Workbench wrote it.",
            seen=str(path),
            allowed="a new folder, or replace=True, which overwrites the changes",
            next_step="copy the changes into the cell and use replace=True, for example "
            "wb.job(run, DIR, replace=True); or use another folder",
            code="WB-PLAN-216",
        )
    gone = {META, *written, *_HOLDING}
    return [one.name for one in goal.iterdir() if one.name not in gone]


def _is_over(run: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((run / META).read_text("utf-8")).get("state") in OVER
    return False


def _about(folder: Path) -> dict[str, Any] | None:
    """Return the content of a job folder's run.json; None if there is no job folder."""
    try:
        about = json.loads((folder / META).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_job = isinstance(about, dict) and str(about.get("format", "")).startswith("workbench-job/")
    return about if is_job else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _swap(fresh: Path, goal: Path, keep: Iterable[str]) -> None:
    """Replace `goal` by `fresh`, with the files that stay; after an error nothing is changed."""
    old = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.old")
    moved: list[str] = []
    try:
        for name in keep:
            (goal / name).rename(fresh / name)
            moved.append(name)
        if goal.exists():
            goal.rename(old)
        fresh.rename(goal)
    except BaseException:
        if old.exists():
            old.rename(goal)
        for name in moved:
            if (fresh / name).exists():
                (fresh / name).rename(goal / name)
        raise
    shutil.rmtree(old, ignore_errors=True)


# -- the page ------------------------------------------------------------------------------------


def _readme(plan: Plan, about: Mapping[str, Any], wheel: str, notes: Sequence[str]) -> str:
    launch = about["launch"]
    processes, torch = launch["processes"], plan.framework == "torch"
    title = "".join(c if c.isprintable() else " " for c in about["name"])
    lines = [f"# {title}", "", "Workbench made this training job from a cell of a notebook.", ""]
    lines += [f"- strategy: {plan.strategy} ({plan.entry.term}), {plan.framework}"]
    shares = f"workers: {launch['workers']}, servers: {launch['servers']}"
    lines += [f"- {shares}; processes: {processes}"]
    lines += [f"- seed {about['seed']}, Python {about['pins']['python']}", ""]
    lines += ["## Install", "", "    pip install -r requirements.txt", ""]
    if wheel:
        lines += [f"The folder contains Workbench itself: {wheel}.", ""]
    lines += ["## Start", ""]
    if torch and processes > 1:
        alone = f"    torchrun --standalone --nproc-per-node {processes} train.py"
        lines += ["On one host:", "", alone, ""]
        lines += [
            f"On N hosts with P processes each (N x P = {processes}), run this command on each "
            "host. HOST is the name of one of the hosts. Use the same HOST in all commands:",
            "",
        ]
        lines += ["    torchrun --nnodes N --nproc-per-node P --rdzv-backend c10d "
                  "--rdzv-endpoint HOST:29500 train.py", ""]  # fmt: skip
    else:
        lines += ["    python train.py", ""]
    if not torch and processes > 1:
        lines += [f"Run this command once for each of the {processes} processes. Each process "
        "reads its rank and the other processes' addresses from `TF_CONFIG`.", ""]  # fmt: skip
    if wheel:
        lines += [
            "You can also start all processes on this host with one command of Workbench:",
            "",
            "    workbench run .",
            "",
        ]
        lines += _recorded(plan)
    else:
        lines += ["The script does not use Workbench, so no history is recorded."]
        if torch:
            lines += [
                "At the end it writes `weights.pt`: the weights of the model that the cell gave to "
                "`wb.fit` or `wb.prepare`."
            ]
        lines += [""]
    if notes:
        lines += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def _recorded(plan: Plan) -> list[str]:
    lines = [
        "## Watch",
        "",
        "Each start makes a folder: `runs/1`, `runs/2`, ... The new folder has the same kinds of",
        "data as a run in a notebook: steps, events, logs, final weights. In a notebook, run:",
        "",
    ]
    lines += ["    import workbench as wb", '    wb.follow("PATH/OF/THIS/FOLDER")', ""]
    lines += ["This code shows the dashboard during the run and after it. If the notebook runs on "
    'another machine, use `"ssh://host/path"` as the path.', ""]  # fmt: skip
    lines += ["## Stop and continue", "", "    workbench control . stop", ""]
    lines += ["This command stops the run at the end of a step, like Stop in the dashboard.", ""]
    if plan.checkpoint:
        lines += [
            (
                f"Checkpoints are in `{CHECKPOINTS}/`, one after every {plan.checkpoint_every} "
                "steps. "
            )
        ]
        lines += [
            "If a run was interrupted, the next start continues from the last checkpoint. If "
            "a run was stopped with `workbench control`, the next start begins a new run.",
            "",
        ]
    else:
        lines += [
            "The job writes no checkpoints. So each time it starts, it trains from the first step."
        ]
        lines += ["If you use `--checkpoint DIR` in the notebook, the job writes checkpoints.", ""]
    return lines


# -- reading -------------------------------------------------------------------------------------


def read_job(folder: Path) -> JobFolder:
    """Read the job of a folder; no code in it is run.

    Raises:
        PlanError: It is not a job folder, its run.json is damaged, or of a newer version.
    """
    path = folder.expanduser().absolute()
    try:
        about = json.loads((path / META).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        about = None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"The file {META} of the job folder is damaged or incomplete.",
            seen=f"{path}: {str(error)[:200]}",
            allowed="the unchanged file that Workbench wrote",
            next_step="write the folder again from the notebook: run.to_job(...)",
            code="WB-PLAN-217",
        ) from error
    kind = str(about.get("format", "")) if isinstance(about, dict) else ""
    if not kind.startswith("workbench-job/"):
        raise PlanError(
            "This folder is not a job folder.",
            seen=str(path),
            allowed="a folder that was written by run.to_job(...), with train.py and run.json",
            next_step="use the job folder: the folder that contains `runs/`"
            if kind or about
            else None,
            code="WB-PLAN-218",
        )
    if kind != FORMAT:
        raise PlanError(
            "A newer version of Workbench wrote this job folder. The installed version cannot "
            "read it.",
            seen=kind[:60],
            allowed=FORMAT,
            next_step="run pip install -U distributed-workbench, or install the wheel file "
            "that is in the folder",
            code="WB-PLAN-219",
        )
    try:
        plan = Plan.from_wire(about["plan"])
        plan.entry.settings(plan.options)
        launch, pins = dict(about["launch"]), dict(about["pins"])
        whole = {"workers", "servers", "processes", "framework"} <= set(launch)
        if not whole or not (path / "train.py").is_file():
            raise KeyError("launch, train.py")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"The file {META} of the job folder does not describe a job.",
            seen=f"{path}: {type(error).__name__} {str(error).splitlines()[:1]}",
            allowed="the unchanged folder that Workbench wrote",
            next_step="write the folder again from the notebook: run.to_job(...)",
            code="WB-PLAN-220",
        ) from error
    name = str(about.get("name") or plan.strategy)
    return JobFolder(path, name, plan, launch, pins, plain=bool(about.get("plain")))
