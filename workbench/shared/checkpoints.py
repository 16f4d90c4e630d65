"""Checkpoints on disk and weights of models, as both sides see them.

The files of checkpoints; the last good one is also found here:

    DIR/
      run.json            the run's plan, which `wb.resume(DIR)` starts again
      step-120/           written as `step-120.tmp`, flushed to disk, then renamed
        checkpoint.json   step, world size, strategy, and a checksum of every other file
        state/            model, optimizer, scheduler, in the framework's own format
        rank-0/ ...       one worker's own state: random states, its own replica
      step-240/

A folder with the name `step-N` is complete. A crash during writing leaves a `.tmp` folder, which is
never read and which the next checkpoint removes. The checksums find later damage (by a disk, a copy
or a person) before anything is loaded. Checkpoints of versions that wrote no checksums are loaded
unchecked.

If the data on disk differs from what was written, it is refused, and the error names it. CRC-32
finds every flipped bit and every burst of up to 32; it costs about 0.3 ms per MB. It does not
protect against an attacker: read only folders that you trust (`docs/security.md`).

This module also copies weights into another model of the same form, also between frameworks, and a
run's final weights into a model of the notebook. It imports no framework, because the model brings
its own. Within a framework, weights are matched by name. If Keras' names differ (a model built
twice can have the name `sequential_1`), they are matched by order. Between frameworks they are
matched by order: layer after layer, and within a layer in the order of both frameworks (matrix,
bias; scale, shift, mean, variance). Only the memory layout of a layer's matrix differs:

| | PyTorch | Keras |
|---|---|---|
| dense | (out, in) | (in, out) |
| convolution | (out, in, height, width) | (height, width, in, out) |
| dense behind flattened maps | rows by (channel, place) | rows by (place, channel) |
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError, RunError

EVERY = 100
"""Default number of steps between checkpoints."""
KEEP = 2
"""How many complete checkpoints are kept in a folder."""
MANIFEST, RUN = "checkpoint.json", "run.json"
VERSION = 1
ON_FAILURE = ("stop", "continue", "replace", "heal")
_NEEDED = ("version", "step", "training", "base", "world_size", "strategy")
_SHARED = "state/"
_MOST_FAULTS = 3  # named in an error
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)(?:\.(.+))?\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint.

    Attributes:
        path: Its folder, `DIR/step-N`.
        step: Steps done when it was taken: the next step is number `step`.
        about: The content of its manifest.
    """

    path: str
    step: int
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)


def found(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, oldest first; none if there is no folder."""
    whole = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        match = _STEP.fullmatch(name)
        path = Path(folder) / name
        if match is None or not (path / MANIFEST).is_file():
            continue
        whole.append(int(match[1]))
    return [_read(Path(folder) / f"step-{step}", step) for step in sorted(whole)]


def token(prefix: str, run_id: str = "run") -> str:
    """Return the token that marks one launch's unfinished folders: `step-N.<token>.tmp`."""
    return (prefix or run_id or "run").strip("/").replace("/", "-")


def sweep(folder: str | os.PathLike[str], doomed: Callable[[int, str], bool]) -> None:
    """Remove unfinished folders for which `doomed(step, token)` is true."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        match = _UNFINISHED.fullmatch(name)
        if match is not None and doomed(int(match[1]), match[2] or ""):
            shutil.rmtree(Path(folder) / name, ignore_errors=True)


def latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the last good checkpoint in a folder, None if there is none."""
    whole = found(folder)
    return whole[-1] if whole else None


def at(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at a path: `DIR/step-N`, or the last checkpoint in `DIR`.

    Raises:
        RunError: There is none, another version wrote it, or its manifest is damaged.
    """
    whole = Path(path).expanduser().absolute()
    match = _STEP.fullmatch(whole.name)
    if match is not None and (whole / MANIFEST).is_file():
        return checked(_read(whole, int(match[1])))
    last = latest(whole)
    if last is not None:
        return checked(last)
    if match is not None and whole.is_dir():
        raise refusal(Checkpoint(str(whole), int(match[1])), [f"{MANIFEST} is missing"])
    below = sorted(one.name for one in whole.glob("*/") if one.is_dir() and latest(one) is not None)
    raise RunError(
        "The folder contains no checkpoint."
        if whole.is_dir()
        else "There is no checkpoint folder at this path.",
        seen=f"{path}; these subfolders contain checkpoints: {', '.join(below[:20])}"
        if below
        else str(whole),
        allowed="a folder that was given to --checkpoint, or one of its subfolders step-N",
        next_step=f"continue one of the runs: wb.resume({os.path.join(path, below[0])!r})"
        if below
        else None,
        code="WB-RUN-001",
    )


def checked(one: Checkpoint) -> Checkpoint:
    """Return a checkpoint of this version with an unchanged manifest.

    Raises:
        RunError: Another version wrote it, or its manifest is damaged.
    """
    if fault := _manifest_fault(one):
        raise refusal(one, [fault])
    if one.about["version"] != VERSION:
        raise RunError(
            "This version of Workbench cannot read the checkpoint.",
            seen=f"version {one.about['version']} at {one.path}",
            allowed=f"version {VERSION}",
            next_step="use the version of Workbench that wrote the checkpoint",
            code="WB-RUN-002",
        )
    return one


def faults(one: Checkpoint, *, own: bool = True) -> list[str]:
    """Return the damage in a checkpoint, file by file; empty if it is undamaged.

    Reads every file, which takes about as long as loading.

    Args:
        own: Whether the files of each rank are needed too, because the same ranks continue.
    """
    if fault := _manifest_fault(one):
        return [fault]
    files = one.about.get("files") or {}
    needed = {name: sums for name, sums in files.items() if own or name.startswith(_SHARED)}
    return checksum_faults(Path(one.path), needed)


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether `DIR/step-N` is an unchanged checkpoint."""
    match = _STEP.fullmatch(Path(path).name)
    return match is not None and not faults(_read(Path(path), int(match[1])))


def refusal(one: Checkpoint, found: Sequence[str]) -> RunError:
    """Return the error that names the damaged files, and the last undamaged checkpoint."""
    more = f", and {len(found) - _MOST_FAULTS} more" if len(found) > _MOST_FAULTS else ""
    return RunError(
        f"The checkpoint of step {one.step} is damaged.",
        seen=f"{one.path}: {', '.join(found[:_MOST_FAULTS])}{more}",
        allowed="a checkpoint with unchanged files",
        next_step=_instead(one, found),
        code="WB-RUN-003",
    )


def last_whole(folder: str | os.PathLike[str], but: str = "") -> Checkpoint | None:
    """Return the last unchanged checkpoint of a folder; None if there is none.

    Args:
        but: Path of a checkpoint that must not be used.
    """
    others = (one for one in reversed(found(folder)) if one.path != but)
    return next((one for one in others if not faults(one)), None)


def _instead(one: Checkpoint, found: Sequence[str]) -> str:
    """Return the next step for the user if a checkpoint is damaged."""
    ways = []
    if other := last_whole(Path(one.path).parent, but=one.path):
        ways.append(f"wb.resume({other.path!r}) continues from the last intact checkpoint")
    # the common part for all ranks is undamaged
    if all(name.startswith("rank-") for name in found):
        workers = 1 if one.about["world_size"] > 1 else 2
        ways.append(
            f"wb.resume({one.path!r}, workers={workers}) continues from the damaged checkpoint, "
            "but the own state of every rank is lost (for example, its random state)"
        )
    return "; ".join(ways) or (
        "the folder has no intact checkpoint: start again with another --checkpoint DIR"
    )


def _manifest_fault(one: Checkpoint) -> str:
    """Return the damage of a manifest; empty if it is unchanged."""
    if not one.about:
        return f"{MANIFEST} cannot be read"
    if not is_as_sealed(one.about):
        return f"{MANIFEST} was changed or damaged (its checksum differs)"
    if isinstance(version := one.about.get("version"), int) and version != VERSION:
        return ""  # the fields of another version are not known
    if missing := [key for key in _NEEDED if key not in one.about]:
        return f"{MANIFEST} lacks: {', '.join(missing)}"
    if one.about["step"] != one.step:
        return f"{MANIFEST} belongs to step {one.about['step']}"
    return ""


def settings(folder: str, every: object, on_failure: str) -> tuple[str, int, str]:
    """Check the checkpoint and failure settings of a line; return them complete.

    Args:
        folder: Where checkpoints go; empty for none.
        every: Steps between two of them; 0 or None for the default.
        on_failure: One of `ON_FAILURE`; empty for the default.

    Returns:
        The folder as an absolute path, the steps (0 without checkpoints), the action on a failure.

    Raises:
        PlanError: Naming the value seen and what is allowed.
    """
    if on_failure and on_failure not in ON_FAILURE:
        raise PlanError(
            "The value of on_failure is not valid.",
            seen=on_failure,
            allowed=", ".join(ON_FAILURE),
            code="WB-PLAN-012",
        )
    if every and not folder:
        raise PlanError(
            "checkpoint_every was given without a checkpoint folder.",
            seen=f"checkpoint_every={every}",
            next_step="add --checkpoint DIR",
            code="WB-PLAN-013",
        )
    if on_failure == "replace" and not folder:
        raise PlanError(
            "on_failure='replace' works only if the run writes checkpoints.",
            seen="on_failure='replace' without a checkpoint folder",
            next_step="add --checkpoint DIR",
            code="WB-PLAN-014",
        )
    if not folder:
        return "", 0, on_failure or "stop"
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
        raise PlanError(
            "checkpoint_every must be a whole number of at least 1.",
            seen=every,
            allowed="a whole number, at least 1",
            code="WB-PLAN-015",
        )
    return _writable(folder), int(every or EVERY), on_failure or "replace"


def _writable(folder: str) -> str:
    """Return the folder's absolute path; the folder is created only when the run begins."""
    path = Path(os.path.expanduser(folder)).absolute()
    if path.exists() and not path.is_dir():
        raise PlanError(
            "The checkpoint path must be a folder, but it is a file.",
            seen=str(path),
            next_step="use --checkpoint with another folder",
            code="WB-PLAN-016",
        )
    there = path
    while not there.exists():
        there = there.parent
    if reason := _why_not(there):
        raise PlanError(
            "Checkpoints cannot be written to this folder.",
            seen=f"{there} ({reason})",
            allowed="a folder in which this user can create files",
            code="WB-PLAN-017",
        )
    return str(path)


def _why_not(folder: Path) -> str:
    """Return why no file can be created in a folder; empty if it can.

    It tries to write. `os.access` is wrong for root, who cannot write in `/proc`, and for disks of
    other hosts.
    """
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".workbench-", dir=folder))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _read(path: Path, step: int) -> Checkpoint:
    try:
        about = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        about = {}
    return Checkpoint(str(path), step, about if isinstance(about, dict) else {})


Sums = dict[str, list[int]]
"""Bytes and CRC-32 of each file, by its path below a folder. The CRC can be missing."""

_CHUNK_BYTES = 1 << 20
_SEAL = "checksum"


def of_file(path: Path) -> list[int]:
    """Return a file's bytes and CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def of_folder(folder: Path, prefix: str = "") -> Sums:
    """Return the bytes and CRC-32 of all files below a folder; names begin with `prefix`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {prefix + path.relative_to(folder).as_posix(): of_file(path) for path in files}


def fault(path: Path, written: Sequence[int]) -> str:
    """Return the damage of a file, such as `is missing`; empty if the file is unchanged.

    Args:
        written: Its size in bytes and, if known, its CRC-32.
    """
    try:
        size = path.stat().st_size
        # Without a checksum it may have grown, because rows and events are appended.
        if size < written[0] or (len(written) > 1 and size != written[0]):
            return f"has {size} bytes instead of {written[0]}"
        if len(written) > 1 and of_file(path) != list(written):
            return "was changed or damaged (its checksum differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or type(error).__name__})"
    return ""


def checksum_faults(folder: Path, written: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the damage of a folder's files: `state/arrays.index is missing`."""
    found = ((name, fault(folder / name, sums)) for name, sums in written.items())
    return [f"{name} {what}" for name, what in found if what]


def sealed(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content for a JSON file, with its checksum."""
    plain = {key: value for key, value in about.items() if key != _SEAL}
    return {**plain, _SEAL: _crc(plain)}


def is_as_sealed(about: Mapping[str, Any]) -> bool:
    """Whether a JSON file is unchanged; without a checksum it counts as unchanged."""
    plain = {key: value for key, value in about.items() if key != _SEAL}
    return _SEAL not in about or about[_SEAL] == _crc(plain)


def _crc(about: Mapping[str, Any]) -> int:
    # Through JSON, so that keys become texts and tuples become lists, as when it is read.
    plain = json.loads(json.dumps(about))
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


Arrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]

KERNEL = "kernel"
COUNTERS = ("num_batches_tracked",)
"""A buffer of PyTorch's BatchNorm that Keras does not have."""


def fit_weights(
    arrays: Arrays, source: str, shapes: Shapes, target: str
) -> dict[str, NDArray[Any]]:
    """Return the arrays by the model's names, in the model's shapes.

    Args:
        arrays: A run's weights by name, in the order of its model.
        source: The framework they come from.
        shapes: Shape of each weight of the model, in its order.
        target: The model's framework.

    Raises:
        PlanError: The models are not of the same form.
    """
    if source == target:
        found = _same_framework(arrays, shapes, numbered=target == "tensorflow")
    else:
        found = _across(arrays, source, shapes, target)
    for name, array in found.items():
        if tuple(array.shape) != tuple(shapes[name]):
            raise _unlike(f"{name} of shape {tuple(shapes[name])}", f"{tuple(array.shape)}")
    return found


def _same_framework(arrays: Arrays, shapes: Shapes, *, numbered: bool) -> dict[str, NDArray[Any]]:
    if set(arrays) == set(shapes):
        return {name: arrays[name] for name in shapes}
    if not numbered or len(arrays) != len(shapes):
        new, old = sorted(set(shapes) - set(arrays)), sorted(set(arrays) - set(shapes))
        seen = f"only in the model: {', '.join(new[:6]) or 'none'}"
        raise _unlike(
            f"{seen}; only in the run: {', '.join(old[:6]) or 'none'}", "the same parameter names"
        )
    return dict(zip(shapes, arrays.values(), strict=True))


def _across(arrays: Arrays, source: str, shapes: Shapes, target: str) -> dict[str, NDArray[Any]]:
    given = [(name, array) for name, array in arrays.items() if not name.endswith(COUNTERS)]
    wanted = [name for name in shapes if not name.endswith(COUNTERS)]
    if len(given) != len(wanted):
        raise _unlike(
            f"{len(wanted)} parameter tensors in the model",
            f"{len(given)} parameter tensors, as many as in the run",
        )
    channels = 0  # of the latest convolution without a dense layer after it
    found = {}
    for (name, array), own in zip(given, wanted, strict=True):
        keras_name = own if target == "tensorflow" else name
        if keras_name.rpartition("/")[2] != KERNEL:
            found[own] = array
            continue
        to_keras = target == "tensorflow"
        found[own] = _kernel(array, to_keras, channels)
        channels = _channels(array, to_keras) if array.ndim > 2 else 0
    return found


def _channels(kernel: NDArray[Any], from_torch: bool) -> int:
    """Return how many maps a convolution gives."""
    return int(kernel.shape[0] if from_torch else kernel.shape[-1])


def _kernel(array: NDArray[Any], to_keras: bool, channels: int) -> NDArray[Any]:
    """Return a layer's matrix in the other framework's layout."""
    if array.ndim != 2:
        places = range(2, array.ndim) if to_keras else range(array.ndim - 2)
        axes: Sequence[int] = (
            (*places, 1, 0) if to_keras else (array.ndim - 1, array.ndim - 2, *places)
        )
        return array.transpose(axes)
    rows = array.T if to_keras else array  # (in, out)
    if channels and rows.shape[0] % channels == 0 and rows.shape[0] > channels:
        places = rows.shape[0] // channels
        shape = (channels, places) if to_keras else (places, channels)
        rows = rows.reshape(*shape, -1).swapaxes(0, 1).reshape(rows.shape)
    return rows if to_keras else rows.T


def _unlike(seen: str, allowed: str) -> PlanError:
    return PlanError(
        "The model's parameters do not match the parameters of the run.",
        seen=seen,
        allowed=allowed,
        next_step="build the model in the same way as the run's cell does",
        code="WB-PLAN-151",
    )


def load_into(model: Any, arrays: Mapping[str, NDArray[Any]], framework: str) -> Any:
    """Copy weights into a PyTorch or Keras model, whichever framework they come from.

    Args:
        arrays: Weights by name, in the order of the run's model.
        framework: The run's framework.

    Raises:
        PlanError: The model has other parameters, or none yet.
    """
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        return _into_keras(model, arrays, framework)
    if torch is None or not hasattr(model, "load_state_dict"):
        raise PlanError(
            "load_into needs a torch module or a Keras model as its argument.",
            seen=type(model).__name__,
            code="WB-PLAN-106",
        )
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = fit_weights(arrays, framework, shapes, "torch")
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in found.items()}
    model.load_state_dict({**state, **tensors})
    return model


def _into_keras(model: Any, arrays: Mapping[str, NDArray[Any]], framework: str) -> Any:
    if not model.weights:
        raise PlanError(
            "The Keras model has no weights yet because the shape of its input is unknown.",
            seen=model.name,
            next_step="call the model on a batch, or make keras.layers.Input its first layer; then "
            "load again",
            code="WB-PLAN-107",
        )
    variables: dict[str, Any] = {}
    for variable in model.weights:
        name, count = variable.path, 1
        while name in variables:  # as the engines name them
            name, count = f"{variable.path}_{count}", count + 1
        variables[name] = variable
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    for name, array in fit_weights(arrays, framework, shapes, "tensorflow").items():
        variables[name].assign(array)
    return model
