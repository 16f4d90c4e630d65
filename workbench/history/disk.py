"""A run on disk: each engine appends its own rows and events, the kernel writes `run.json`.

    <run_dir>/
      run.json                 the request and the end of the run
      records-rank<r>.bin      rows of `RECORD`, one after the other
      events-rank<r>.jsonl     one event a line: name, t_s, fields
      events-rankkernel.jsonl  the same, for workers that left or joined
      weights.npz, weights.pt  written at the end of the run

The rows and events of engines on other machines are written by the kernel, as they arrive
(`FarWriter`). Every file is written by one process only and flushed at each append, so a run whose
kernel or engines were killed can be read up to the last whole row. If the files cannot be written
(a full disk), the run continues in memory, and `unwritten` makes the note about it. Engines import
this module, so it needs only NumPy and the protocol.

`Tail` reads a run's folder while its engines write it: each row and event once, in order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import re
import secrets
import shutil
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError, WorkbenchError
from ..shared import checkpoints, cluster_env
from ..shared.events import OVER, Event, Noted, Topic
from ..shared.messages import Happened, Position, Records
from ..shared.record import RECORD

META = "run.json"
ROW_BYTES = "record_bytes"  # in run.json: identifies rows of another version
FILES = "files"  # in run.json: state of the other files when the run ended or was saved
PROFILES = "profiles"
_FULL = (errno.ENOSPC, errno.EDQUOT)
IDLE_S = 5.0
MOST_WAITING_BYTES = 256 << 20
_EVENT_BYTES = 500  # about what one takes
_WEIGHTS = ("weights*.npz", "weights*.pt")
KERNELS_EVENTS = "events-rankkernel.jsonl"
_SAVED = (META, "records-rank*.bin", "events-rank*.jsonl", *_WEIGHTS)


class RunWriter:
    """Appends one rank's rows and events to a run's folder.

    If a killed process has written half a row or half a line, the file is cut to complete ones.
    """

    def __init__(self, run_dir: str | os.PathLike[str], rank: int) -> None:
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._records = _open_whole(records_path(folder, rank), RECORD.itemsize)
        try:
            self._events = _open_whole(events_path(folder, rank), None)
        except BaseException:
            self._records.close()
            raise

    def append_records(self, packed: bytes) -> None:
        """Append packed RECORD rows."""
        self._records.write(packed)
        self._records.flush()

    def append_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append one event; its time (`t_s`, perf_counter) is added if it has none."""
        line = {"name": name, "t_s": time.perf_counter(), **fields}
        self._events.write(json.dumps(line, default=_plain).encode() + b"\n")
        self._events.flush()

    def close(self) -> None:
        """Close both files; can be called twice."""
        try:
            self._records.close()
        finally:
            self._events.close()


class FarWriter:
    """Writes the data that engines on other machines have sent, on a separate thread.

    The thread ends and the files are closed after `IDLE_S` without data, or with the run. If the
    files cannot be written, or only more slowly than rows arrive, the run continues without them.

    Args:
        folder: The run's folder.
        tell: Called once if not all data could be written.

    Attributes:
        ranks: The rank for each engine's rows, by engine. Other engines write their own files, so
            their data is ignored.
    """

    def __init__(self, folder: Path, tell: Callable[[Noted], None]) -> None:
        self._folder, self._tell = folder, tell
        self.ranks: Mapping[int, int] = {}
        self._queue: queue.SimpleQueue[tuple[int, Records | Happened] | threading.Event]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._files: dict[int, RunWriter] = {}
        self._waiting_bytes = 0
        self._failed = False

    def take(self, engine: int, message: Records | Happened | Position) -> None:
        """Process an engine's message about the run; never waits."""
        rank = self.ranks.get(engine)
        if rank is None or self._failed or isinstance(message, Position):
            return
        with self._lock:
            self._waiting_bytes += _size(message)
            behind = self._waiting_bytes > MOST_WAITING_BYTES
        if behind:
            self._give_up(TimeoutError(errno.ETIMEDOUT, "the disk is too slow for the run's data"))
        else:
            self._put((rank, message))

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until all data is written; the files are then closed."""
        written = threading.Event()
        if self.ranks:
            self._put(written)
            written.wait(timeout_s)

    def _put(self, item: tuple[int, Records | Happened] | threading.Event) -> None:
        with self._lock:
            self._queue.put(item)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._main, name="workbench-run-files", daemon=True
                )
                self._thread.start()

    def _main(self) -> None:
        while True:
            item = None
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=IDLE_S)
            if isinstance(item, tuple):
                self._write(*item)
                continue
            self._close()
            with self._lock:
                over = self._queue.empty()
                self._thread = None if over else self._thread
            if item is not None:
                item.set()
            if over:
                return

    def _write(self, rank: int, message: Records | Happened) -> None:
        with self._lock:
            self._waiting_bytes -= _size(message)
        if self._failed:
            return
        try:
            file = self._files.get(rank)
            if file is None:
                file = self._files[rank] = RunWriter(self._folder, rank)
            if isinstance(message, Records):
                file.append_records(bytes(message.rows))
            else:
                file.append_event(message.event.name, message.event.to_wire())
        except Exception as error:  # a full disk: the files are lost, the run continues
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._tell(unwritten(self._folder, error))

    def _close(self) -> None:
        for file in self._files.values():
            try:
                file.close()
            except Exception as error:  # noqa: PERF203 - network disks report the error only now
                self._give_up(error)
        self._files.clear()


def _size(message: Records | Happened) -> int:
    return len(message.rows) if isinstance(message, Records) else _EVENT_BYTES


def unwritten(
    run_dir: str | os.PathLike[str], error: BaseException, rank: int | None = None
) -> Noted:
    """Return the note about a run that cannot be written; it is the same for all writers and
    errors.
    """
    reason = reason_of(error)
    free = "free some disk space, or " * (getattr(error, "errno", 0) in _FULL)
    to = "use a job folder" if Path(run_dir).name.isdecimal() else "set WORKBENCH_HOME to a folder"
    text = (
        f"Part of this run could not be written to disk: {reason} ({run_dir}). The run continues, "
        "and its history is kept in memory, but its final weights may be missing. For later runs, "
        f"{free}{to} on another disk."
    )
    return Noted(rank=rank, text=text, topic=Topic.NOT_ON_DISK.value, value=reason)


def reason_of(error: BaseException) -> str:
    """Return why something could not be written, in a line: `No space left on device`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, WorkbenchError):
        return error.what
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def write_meta(run_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
    """Replace `run.json` atomically: readers see the old or the new file, never half of it.

    `store.read_run` uses these keys: `ranks` (engine ids by rank), `joined` and `data_parallel` (as
    in `store.RunHistory`); other keys are returned unchanged.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    whole = {**meta, ROW_BYTES: RECORD.itemsize}
    cluster_env.replace(folder / META, json.dumps(whole, indent=1, default=_plain))


def read_meta(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of `run.json`; empty if the run was interrupted before it was written.

    Raises:
        RunError: There is no run in this folder, or its `run.json` is damaged.
    """
    folder = Path(run_dir)
    try:
        meta = json.loads((folder / META).read_text())
    except FileNotFoundError:
        if any(folder.glob("records-rank*.bin")) or any(folder.glob("events-rank*.jsonl")):
            return {}
        raise RunError(
            "The folder contains no saved run." if folder.is_dir() else "There is no such folder.",
            seen=str(folder),
            allowed=f"a folder with {META}, for example a folder that run.save(path) wrote",
            code="WB-RUN-036",
        ) from None
    except (OSError, ValueError) as error:
        what = f"{META} cannot be read: {reason_of(error)}."
        raise RunError(what, seen=str(folder), code="WB-RUN-037") from error
    if not isinstance(meta, dict):
        raise RunError(f"{META} does not describe a run.", seen=str(folder), code="WB-RUN-038")
    return meta


def sizes(run_dir: str | os.PathLike[str]) -> checkpoints.Sums:
    """Return the size of a run's files; after its end this needs no reading of them."""
    return {path.name: [path.stat().st_size] for path in _files(Path(run_dir))}


def faults(run_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> list[str]:
    """Return the damage in a run's rows, events and weights, file by file.

    For runs of older versions and for interrupted runs, damage cannot be detected.

    Args:
        meta: The result of `read_meta`.
    """
    return checkpoints.checksum_faults(Path(run_dir), meta.get(FILES) or {})


def weights_files(folder: Path, known: Iterable[str], rank: int | None = None) -> list[Path]:
    """Return the files of a run's final weights, of all ranks or of one.

    Args:
        known: Names of the run's files at its end; some can have been deleted since.
    """
    names = {name for name in known if name.endswith(".npz")}
    names |= {path.name for path in folder.glob("weights*.npz")}
    files = [folder / name for name in sorted(names)]
    return [file for file in files if rank is None or file.stem == weights_stem(rank)]


def read_weights(path: Path, written: Sequence[int] = ()) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of one `weights*.npz`.

    Args:
        written: Its size and CRC-32, if they were recorded.

    Raises:
        RunError: The file is missing or damaged.
    """
    what = checkpoints.fault(path, written) if written else ""
    try:
        if not what:
            with np.load(path, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        what = f"{type(error).__name__}: {error}"
    plain = path.with_suffix(".pt")
    raise RunError(
        "The file with the run's weights is missing or damaged.",
        seen=f"{path}: {what}",
        allowed="the unchanged file that the run wrote",
        next_step=f"load the same weights: torch.load({str(plain)!r}, weights_only=True)"
        if plain.is_file() and plain.stat().st_size
        else "if you have a copy of the folder, use it; if not, train again with the cell "
        "that run.to_cell() returns",
        code="WB-RUN-040",
    )


def add_event(folder: Path, event: Event, name: str = KERNELS_EVENTS) -> None:
    """Add an event of the kernel to a run's folder, if the folder can be written to."""
    line = {"name": event.name, "t_s": time.perf_counter(), **event.to_wire()}
    with contextlib.suppress(OSError), (folder / name).open("a") as file:
        file.write(json.dumps(line, default=_plain) + "\n")


def read_events(run_dir: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of all ranks, sorted by time; damaged lines are left out."""
    found = []
    for path in sorted(Path(run_dir).glob("events-rank*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                fields = json.loads(line)
                name, t_s = str(fields.pop("name")), float(fields.get("t_s", 0.0))
            except (ValueError, KeyError, AttributeError, TypeError):
                continue  # the line a killed engine was writing
            found.append((t_s, name, fields))
    return [(name, fields) for _, name, fields in sorted(found, key=lambda one: one[0])]


class Memory(Protocol):
    """Rows and events that are not on disk; `store.RunHistory` is one."""

    def write(self, folder: Path) -> None:
        """Write all rows and events to a folder."""


def save(
    run_dir: str | os.PathLike[str],
    target: str | os.PathLike[str],
    meta: Mapping[str, Any] | None = None,
    memory: Memory | None = None,
) -> Path:
    """Copy a run (rows, events, `run.json`, weights) to `target`; completely or not at all.

    An existing run is replaced; any other folder is not changed.

    Args:
        meta: The content of the copy's `run.json`; by default that of the run.
        memory: The source of rows and events if `run_dir` does not have all of them.

    Returns:
        The target's path.

    Raises:
        RunError: `run_dir` has no run, or `target` has other content or cannot be written.
    """
    source, goal = Path(run_dir), Path(target).expanduser()
    if meta is None:
        read_meta(source)
    if goal.exists() and not (goal / META).is_file() and not _is_empty_folder(goal):
        raise RunError(
            "The target contains something that is not a run, so Workbench saved nothing.",
            seen=str(goal),
            allowed="a new path, an empty folder, or the folder of a saved run",
            code="WB-RUN-041",
        )
    if memory is None and goal.exists() and goal.samefile(source):
        return goal
    try:
        _copy(source, goal, meta, memory)
    except OSError as error:
        raise RunError(
            f"The run cannot be saved to this path: {reason_of(error)}.",
            seen=str(goal),
            allowed="a folder that this user may write to, on a disk with free space",
            next_step=f"{'free some disk space, or ' * (error.errno in _FULL)}use another folder",
            code="WB-RUN-042",
        ) from error
    return goal


def _copy(source: Path, goal: Path, meta: Mapping[str, Any] | None, memory: Memory | None) -> None:
    goal.parent.mkdir(parents=True, exist_ok=True)
    fresh = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}")
    try:
        fresh.mkdir()
        if memory is not None:
            memory.write(fresh)
            sums = dict((meta or {}).get(FILES) or {})
            left = {name: sums[name] for name in sums if name.startswith("weights")}
            meta = {
                **(meta or {}),
                FILES: left,
            }  # checksums of rows do not match after rows were cut off
        for pattern in _SAVED if memory is None else _WEIGHTS:
            for path in source.glob(pattern):
                shutil.copy2(path, fresh / path.name)
        if (source / PROFILES).is_dir():
            shutil.copytree(source / PROFILES, fresh / PROFILES)
        if meta is not None or not (fresh / META).exists():
            write_meta(fresh, meta or {})
        _sum_up(fresh)
        _swap(fresh, goal)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def holds(run_dir: str | os.PathLike[str], ranks: int, rows: int) -> bool:
    """Whether a run's folder has at least so many rows of its ranks."""
    paths = (records_path(Path(run_dir), rank) for rank in range(ranks))
    sizes = [path.stat().st_size for path in paths if path.exists()]
    return bool(sizes) and sum(size // RECORD.itemsize for size in sizes) >= rows


def profiles(run_dir: Path) -> list[Path]:
    """Return a run's Chrome traces, in the order of their first ranks."""
    traces = (run_dir / PROFILES).glob("rank*.json")
    return sorted(traces, key=lambda path: int("".join(re.findall(r"\d+", path.stem)[:1])))


def weights_stem(rank: int) -> str:
    """Return the file name of a rank's final weights, without its suffix."""
    return "weights" if rank == 0 else f"weights-rank{rank}"


def remove_weights(run_dir: Path, rank: int) -> None:
    """Remove a rank's final weights: half of them is worse than none."""
    for path in run_dir.glob(f"{weights_stem(rank)}.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def records_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's rows."""
    return run_dir / f"records-rank{rank}.bin"


def events_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's events."""
    return run_dir / f"events-rank{rank}.jsonl"


def ranks_on_disk(folder: Path) -> list[int]:
    found = set()
    for pattern in ("records-rank*.bin", "events-rank*.jsonl"):
        for path in folder.glob(pattern):
            digits = path.stem.rpartition("rank")[2]
            if digits.isdecimal():
                found.add(int(digits))
    return sorted(found)


def _open_whole(path: Path, item_bytes: int | None) -> IO[bytes]:
    """Open for appending, after cutting off an incomplete row (or line)."""
    file = path.open("ab+")
    size = file.seek(0, os.SEEK_END)
    if item_bytes:
        keep = size - size % item_bytes
    else:
        file.seek(0)
        keep = file.read().rfind(b"\n") + 1
    if keep != size:
        file.truncate(keep)
    file.seek(0, os.SEEK_END)
    return file


def _files(run_dir: Path) -> list[Path]:
    """Return a run's files except `run.json`."""
    return sorted(path for pattern in _SAVED[1:] for path in run_dir.glob(pattern))


def _sum_up(copy: Path) -> None:
    """Write the checksums of a copy's files into its `run.json`.

    Files that were damaged before the copy keep their old checksums, because the copy is damaged
    too.
    """
    meta = read_meta(copy) if (copy / META).exists() else {}
    before = meta.get(FILES) or {}
    damaged = {name for name, sums in before.items() if checkpoints.fault(copy / name, sums)}
    files = {path.name: checkpoints.of_file(path) for path in _files(copy)}
    write_meta(copy, {**meta, FILES: {**files, **{name: before[name] for name in damaged}}})


def _swap(fresh: Path, goal: Path) -> None:
    """Replace `goal` by `fresh`; an older run is deleted only after the new one is in place."""
    old = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}.old")
    if goal.exists():
        goal.rename(old)
    try:
        fresh.rename(goal)
    except OSError:
        if old.exists():
            old.rename(goal)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _plain(value: object) -> Any:
    """Convert NumPy's numbers and arrays, and paths, to JSON types."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


ROWS_AT_ONCE = 4096


class Tail:
    """Reads data that was added to a run's folder since the last call.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes taken so far

    def rows(self) -> Iterator[NDArray[Any]]:
        """Yield new RECORD rows of shape (rows,), alternating between ranks, so that steps
        complete.
        """
        sources = sorted(self._folder.glob("records-rank*.bin"))
        while sources:
            still = []
            for path in sources:
                size = RECORD.itemsize
                packed = self._fresh(path, ROWS_AT_ONCE * size)
                whole = len(packed) // size * size
                if whole:
                    self._read[path] += whole
                    yield np.frombuffer(packed[:whole], RECORD)
                    still.append(path)
            sources = still

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return new events of all ranks, sorted by time."""
        found = []
        for path in sorted(self._folder.glob("events-rank*.jsonl")):
            packed = self._fresh(path, -1)
            whole = packed.rfind(b"\n") + 1
            self._read[path] += whole
            for line in packed[:whole].splitlines():
                # A killed engine can have written only a part of the line.
                with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
                    fields = json.loads(line)
                    found.append((float(fields.get("t_s", 0.0)), str(fields.pop("name")), fields))
        return [(name, fields) for _, name, fields in sorted(found, key=lambda one: one[0])]

    def _fresh(self, path: Path, limit: int) -> bytes:
        at = self._read.setdefault(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                return file.read(limit)
        except OSError:
            return b""


def final_weights(
    folder: Path, files_of: checkpoints.Sums, rank: int | None, *, name: str, state: str, why: Any
) -> dict[str, NDArray[np.generic]]:
    """Return the final weights of a run, by parameter name.

    Args:
        files_of: Sizes and checksums of its files.
        rank: The rank; None: rank 0, or all ranks if the model is split.
        name, state: Name and state of the run.
        why: Why the weights were not written; None if unknown.

    Raises:
        RunError: The run has not ended, has no weights, or the weights are damaged.
    """
    files = weights_files(folder, files_of, rank)
    if not files and why is not None:
        raise RunError(
            f"Run {name} has no weights, because they could not be written to disk.",
            seen=why,
            next_step="free some disk space if the disk is full, or use another folder for the "
            "runs (WORKBENCH_HOME, or another job folder); then train again",
            code="WB-RUN-086",
        )
    if not files:
        whose = "" if rank is None else f" of rank {rank}"
        step = "wait until the run has ended"
        if state in OVER:
            others = rank is not None and weights_files(folder, files_of)
            step = (
                "call run.weights() without a rank"
                if others
                else "train again with the cell that run.to_cell() returns"
            )
        raise RunError(
            f"Run {name} has no weights{whose}.",
            seen=state,
            allowed="a run that used wb.fit or wb.prepare, and that finished or was stopped",
            next_step=step,
            code="WB-RUN-087",
        )
    found: dict[str, NDArray[np.generic]] = {}
    for file in files:
        found.update(read_weights(file, files_of.get(file.name, ())))
    return found
