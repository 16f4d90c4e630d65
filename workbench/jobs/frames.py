"""A run folder in frames, sent over ssh or as printed lines, and its mirror.

A line is `#wb1 ` and a frame of JSON, which appends to a file, or replaces a file:

    {"f": name, "a": offset, "d": base64 of zlib of bytes}
    {"f": name, "a": -1, "v": version, "d": ...}   replaces the file; "m": 1 if more parts follow,
                                                   which have -2
    {"f": "", ...}                  data about the run or the other side; no file

        h  {"dir", "host"}: the run folder on the other side; `id` identifies the writer of the
           lines
        k  the run's key in hex, and n, the number of the newest order that it took
        o  an order was put into the inbox: what went wrong, or ""
        e  no more frames: the reason, or "" if the run is over

Because of the offsets, the same frame can safely arrive twice. A lost connection is opened again
and continues at its last offset. A command that prints all frames from the beginning changes
nothing. Frames are data: their names, sizes and forms are checked, and none is ever run or
unpickled.

The first part of this module also runs on the other side of ssh: `far_source` is sent there.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import fcntl
import inspect
import json
import os
import re
import secrets
import select
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..shared.record import RECORD

MARK = "#wb1 "
OVER = ["finished", "stopped", "failed"]
WHOLE = ["run.json", "alive"]  # written anew each time
WHOLE_BYTES = 4 << 20
WEIGHTS_BYTES = 8 << 20
NAMES = (
    r"run\.json|alive|records-rank[0-9]{1,6}\.bin|events-rank[0-9A-Za-z_-]{1,32}\.jsonl|"
    r"log-rank[0-9]{1,6}\.txt|weights[0-9A-Za-z_-]{0,32}\.npz"
)
WAITING_S = 0.2

# -- both sides: only the standard library of Python 3.6 ------------------------------------


def line_of(about: dict[str, Any]) -> str:
    """Return a frame as a marked line."""
    return MARK + json.dumps(about, separators=(",", ":")) + "\n"


def lines_of(name: str, at: int, data: bytes, line_bytes: int, row_bytes: int) -> list[str]:
    """Return marked lines for bytes of a file, each at most `line_bytes` long; rows are not split.

    Args:
        at: The offset of the bytes in the file; for a replaced file, minus its version.
    """
    lines: list[str] = []
    version, at = -at, max(at, -1)
    while data or not lines:
        size = min(len(data), 4 * line_bytes)
        while True:
            size -= size % row_bytes if size > row_bytes else 0
            text = base64.b64encode(zlib.compress(data[:size])).decode()
            if len(text) + 160 <= line_bytes or size < 256:
                break
            size //= 2
        data = data[size:]
        frame: dict[str, Any] = {"f": name, "a": at, "d": text}
        if at < 0:
            frame.update({"v": version, "m": 1} if data else {"v": version})
        lines.append(line_of(frame))
        at = at + size if at >= 0 else -2
    return lines


def is_job(folder: str) -> bool:
    """Whether a folder belongs to a job, with its runs in `runs/`."""
    try:
        with open(os.path.join(folder, "run.json"), "rb") as file:
            about = json.loads(file.read(WHOLE_BYTES).decode())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and str(about.get("format", "")).startswith("workbench-job/")


def found(top: str, run: str) -> tuple[str, str]:
    """Return the run folder ("": not yet created), and an error ("": none)."""
    try:
        names = os.listdir(top)
    except (OSError, ValueError) as error:
        return "", "closed" if isinstance(error, PermissionError) else "none"
    if is_job(top):
        runs = os.path.join(top, "runs")
        there = os.listdir(runs) if os.path.isdir(runs) else []
        numbers = [int(one) for one in there if re.match(r"[1-9][0-9]{0,8}\Z", one)]
        if run and run not in [str(one) for one in numbers]:
            return "", "absent"
        return (os.path.join(runs, run or str(max(numbers))) if numbers else ""), ""
    above, number = os.path.split(os.path.abspath(top))
    of_job = os.path.basename(above) == "runs" and is_job(os.path.dirname(above))
    begun = of_job and number.isdigit()
    shown = re.compile(r"(run\.json|records-rank.*\.bin|events-rank.*\.jsonl)\Z")
    if begun or any(map(shown.match, names)):
        return top, ""
    return "", "other" if names else "empty"


def status_of(path: str, ask: bool) -> os.stat_result:
    """Return a file's size and times. Opening it makes a network file system ask its server."""
    if not ask:
        return os.lstat(path)
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.fstat(handle)
    finally:
        os.close(handle)


def fresh_lines(
    folder: str, have: dict[str, int], seen: dict[str, Any], how: dict[str, Any]
) -> list[str]:
    """Return marked lines for new data in a run's folder.

    Args:
        have: The sent bytes of each file, and the sent version of replaced files; is updated.
        seen: The last seen state of replaced files; is updated. `done`: the run is over and
            completely sent.
        how: `names`, `most` (bytes at once, about), `line` and `row` (bytes), `own`: this process
            writes the folder, so a network file system's cached data is correct.
    """
    whole: dict[str, tuple[tuple[int, int, int], bytes]] = {}
    left: dict[str, int] = {}
    lines: list[str] = []
    sent = 0
    meant = re.compile("(?:" + how["names"] + r")\Z")
    ask = not how["own"] and not time.time() - 1 < seen.get("asked_s", 0) <= time.time()
    if ask:
        seen["asked_s"] = time.time()
    for name in filter(meant.match, WHOLE):  # first: the others then match run.json
        with contextlib.suppress(OSError):
            path = os.path.join(folder, name)
            about = status_of(path, ask)
            mark = (about.st_mtime_ns, about.st_size, about.st_ino)
            if seen.get(name) == mark:
                continue
            if stat.S_ISREG(about.st_mode) and about.st_size <= WHOLE_BYTES:
                with open(path, "rb") as file:
                    whole[name] = (mark, file.read(WHOLE_BYTES))
    if "run.json" in whole:
        try:
            seen["over"] = json.loads(whole["run.json"][1].decode()).get("state") in OVER
        except (ValueError, AttributeError, RecursionError):
            seen["over"] = False
    with os.scandir(folder) as entries:
        for one in entries:
            name = one.name
            if name in WHOLE or not meant.match(name) or not one.is_file(follow_symlinks=False):
                continue
            size = status_of(os.path.join(folder, name), ask).st_size
            if name.startswith("weights") and (not seen.get("over") or size > WEIGHTS_BYTES):
                continue
            if size < have.get(name, 0) and not name.startswith("log"):
                raise ValueError(name)
            if size > have.get(name, 0):
                left[name] = size
    while left and sent < how["most"]:
        for name in sorted(left):  # in turns, so that steps complete
            at = have.get(name, 0)
            with open(os.path.join(folder, name), "rb") as file:
                file.seek(at)
                data = file.read(min(left[name] - at, 4 * how["line"]))
            row = how["row"] if name.endswith(".bin") else 1
            data = data[: len(data) - len(data) % row]
            if how["row"] > 1 and name.endswith(".jsonl"):
                data = data[: data.rfind(b"\n") + 1] or data
            more = lines_of(name, at, data, how["line"], row) if data else []
            lines += more
            sent += sum(map(len, more))
            have[name] = at + len(data)
            if have[name] >= left[name] or not data:
                del left[name]
    if left and seen.get("over") and "run.json" in whole and not seen.get("told"):
        early = dict(json.loads(whole["run.json"][1].decode()), state="running")
        have["run.json"] = have.get("run.json", 0) + 1
        packed = json.dumps(early).encode()
        lines[:0] = lines_of("run.json", -have["run.json"], packed, how["line"], 1)
        seen["told"] = True  # the run's description is sent before a long history
    for name, (mark, data) in sorted(whole.items()):
        if name != "run.json" or not left or not seen.get("over"):
            have[name] = have.get(name, 0) + 1
            lines += lines_of(name, -have[name], data, how["line"], 1)
            seen[name] = mark
            seen["told"] = seen.get("told") or name == "run.json"
    seen["done"] = bool(seen.get("over")) and not left and bool(seen.get("run.json"))
    return lines


def far_put(folder: str, line: bytes) -> str:
    """Put a signed order into a run's inbox; return an error text, or ""."""
    inbox = os.path.join(folder, "control")
    name = f"{int(time.time() * 1e9)}-{secrets.token_hex(4)}.json"
    try:
        signed = base64.b64decode(line, validate=True)
        if not folder:
            return "the run's folder does not exist yet"
        if os.path.islink(inbox):
            return "the folder `control` in the run's folder is a link"
        if len(signed) > 4096:
            return "the order is too long"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(os.path.join(inbox, "." + name), flags, 0o600)
        with open(handle, "wb") as file:
            file.write(signed)
        os.rename(os.path.join(inbox, "." + name), os.path.join(inbox, name))
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def far_key(folder: str) -> dict[str, Any]:
    """Return a run's key, and the number of the newest order that it took."""
    key, newest = "", 0
    with contextlib.suppress(OSError, ValueError):
        path = os.path.join(folder, "control.key")
        about = os.lstat(path)
        if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o77:
            with open(path, "rb") as file:
                key = file.read(128).decode("ascii")
        with open(os.path.join(folder, "control", ".newest"), "rb") as file:
            newest = int(file.read(32))
    return {"f": "", "k": key, "n": newest}


def far_main() -> None:
    """Send the content of a run's folder until stdin ends; orders arrive as lines of base64."""
    given = b""
    while b"\n" not in given:
        more = os.read(0, 1 << 16)
        if not more:
            return
        given += more
    first, _, given = given.partition(b"\n")
    ask = json.loads(first.decode())
    folder, have, beat_s = "", ask["have"], 0.0
    told: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    while True:
        lines, wrong = [], ""
        try:
            if not folder:
                folder, wrong = found(ask["dir"], ask["run"])
                if folder:
                    about = {"dir": os.path.abspath(folder), "host": socket.gethostname()}
                    lines.append(line_of({"f": "", "h": about}))
            if folder:
                key = far_key(folder)
                if key != told:
                    lines.append(line_of(key))
                    told = key
                lines += fresh_lines(folder, have, seen, ask["how"])
        except ValueError:
            wrong = "shrank"
        except OSError:
            wrong = "gone"
        *asked, given = given.split(b"\n")
        lines += [line_of({"f": "", "o": far_put(folder, one)}) for one in asked]
        ends = wrong or (seen.get("done") and not lines)
        if ends:
            lines.append(line_of({"f": "", "e": wrong}))
        if lines or time.time() - beat_s > 5:
            beat_s = time.time()
            sys.stdout.write("".join(lines) or line_of({"f": ""}))
            sys.stdout.flush()
        if ends:
            return
        if select.select([0], [], [], 0 if len(lines) > 9 else WAITING_S)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                return
            given += more


FAR: list[Callable[..., Any]] = [
    line_of, lines_of, is_job, found, status_of, fresh_lines, far_put, far_key, far_main,
]  # fmt: skip


def far_source() -> bytes:
    """Return the source for the other side of ssh: the functions above without type annotations."""
    modules = "base64, contextlib, json, os, re, secrets, select, socket, stat, sys, time, zlib"
    values = {"MARK": MARK, "OVER": OVER, "WHOLE": WHOLE, "WHOLE_BYTES": WHOLE_BYTES}
    values |= {"WEIGHTS_BYTES": WEIGHTS_BYTES, "WAITING_S": WAITING_S}
    lines = [f"import {modules}", *(f"{name} = {value!r}" for name, value in values.items())]
    tree = ast.parse("\n\n".join(["\n".join(lines), *map(inspect.getsource, FAR), "far_main()"]))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree).encode()


# -- this side -------------------------------------------------------------------------------------

LINE_BYTES = 1 << 16
PRINTED_BYTES = 4096
"""Length of a line that a job prints. A pipe that ranks share passes it in one piece (PIPE_BUF)."""
PUMP_BYTES = 2 << 20
AGAIN_S = 60.0
ALIVE_S = 2.0
RAW_BYTES = 1 << 20
REFRESH_BYTES = 8 << 20
LOOK_S = 0.2
END_S = 1.0
MIRROR_BYTES = 4 << 30
MIRROR_FILES = 10_000
_NAME = re.compile(NAMES, re.ASCII)


def is_over(meta: bytes) -> bool:
    """Whether a `run.json` belongs to a run that has ended."""
    try:
        about = json.loads(meta)
    except (ValueError, RecursionError):
        return False
    return isinstance(about, dict) and about.get("state") in OVER


class Mirror:
    """A run folder to which frames are applied.

    Args:
        folder: The folder of this mirror only.
        skips: Whether a gap in a file is skipped; `missing` then reports it.

    Attributes:
        have: The received bytes of each file, as the other side counts; for replaced files, the
            version.
        over: The run has ended, as its `run.json` says.
        full: The mirror takes no more data.
        size_bytes: Size of all appended data.
    """

    def __init__(self, folder: Path, *, skips: bool = False) -> None:
        self.folder, self._skips = folder, skips
        self.have: dict[str, int] = {}
        self.over = self.missing = self.full = False
        self.size_bytes = 0
        self._parts: dict[str, tuple[int, bytes]] = {}

    def apply(self, frame: dict[str, Any]) -> bool:
        """Append to a file, or replace it; return whether the frame had new data.

        Raises:
            ValueError: The data is not a frame, or would change earlier data.
            OSError: The mirror cannot be written.
        """
        name, at, text = frame.get("f"), frame.get("a"), frame.get("d")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(text, str):
            raise ValueError(
                "the job's records are damaged: in a line, the file name or the data is invalid"
            )
        if type(at) is not int or not -2 <= at < 1 << 48 or (at < 0) != (name in WHOLE):
            raise ValueError(
                "the job's records are damaged: in a line, the position in the file is invalid"
            )
        data = _inflated(text)
        if at >= 0:
            return self._append(name, at, data)
        version = frame.get("v")
        if type(version) is not int or not 0 < version < 1 << 48:
            raise ValueError("a line of the job's records has an invalid version number")
        if version <= self.have.get(name, 0):
            return False
        of, before = self._parts.pop(name, (0, b"")) if at == -2 else (version, b"")
        if of != version or len(before) + len(data) > WHOLE_BYTES:
            raise ValueError("the first records of this file are missing, or the file is too large")
        if frame.get("m"):
            self._parts[name] = version, before + data
            return False
        return self._replace(name, version, before + data)

    def _replace(self, name: str, version: int, data: bytes) -> bool:
        fresh = self.folder / f".{name}"
        fresh.write_bytes(data)
        fresh.replace(self.folder / name)
        self.have[name] = version
        self.over = self.over or (name == "run.json" and is_over(data))
        return True

    def _append(self, name: str, at: int, data: bytes) -> bool:
        have = self.have.get(name, 0)
        if at > have and not self._skips:
            raise ValueError("earlier records of this file are missing")
        self.missing = self.missing or at > have
        fresh = data[max(0, have - at) :]
        if not fresh:
            return False
        many = name not in self.have and len(self.have) >= MIRROR_FILES
        self.full = self.full or many or self.size_bytes + len(fresh) > MIRROR_BYTES
        if self.full:
            raise ValueError("the mirror is full")
        with (self.folder / name).open("ab") as file:
            file.write(fresh)
        self.have[name], self.size_bytes = at + len(data), self.size_bytes + len(fresh)
        return True


def _inflated(text: str) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), RAW_BYTES)
    except zlib.error as error:
        raise ValueError("damaged") from error
    if not stream.eof or stream.unused_data:
        raise ValueError("cut, or too large")
    return data


class LineWriter:
    """Prints marked lines of a run's folder for followers that read the job's output.

    The ranks' printed text is already in this output. Small weights follow at the end. The data
    that every reader needs is printed again each `AGAIN_S`, because platforms keep only the end of
    a long output.

    Args:
        run_dir: The run's folder, written by this process.
        write: A function that takes one complete line and should write it in one piece.
    """

    def __init__(self, run_dir: str | os.PathLike[str], write: Callable[[str], object]) -> None:
        self._folder, self._write = os.path.abspath(run_dir), write
        self._have: dict[str, int] = {}
        self._seen: dict[str, Any] = {}
        self._said_s = self._alive_s = -AGAIN_S
        about = {"dir": self._folder, "host": socket.gethostname(), "id": secrets.token_hex(4)}
        self._header = line_of({"f": "", "h": about})

    def pump(self) -> None:
        """Write new data of the folder, at most about `PUMP_BYTES`.

        Raises:
            OSError: The folder cannot be read, or the lines cannot be written.
        """
        now = time.monotonic()
        if now - self._said_s >= AGAIN_S:
            self._said_s = now
            self._seen.pop("run.json", None)
            self._write(self._header)
        alive = now - self._alive_s >= ALIVE_S
        names = NAMES if alive else NAMES.replace("|alive|", "|")
        how: dict[str, Any] = {"most": PUMP_BYTES, "line": PRINTED_BYTES, "own": True}
        how["row"] = RECORD.itemsize
        before = self._seen.get("alive")
        how["names"] = names.replace(r"log-rank[0-9]{1,6}\.txt|", "")
        for line in fresh_lines(self._folder, self._have, self._seen, how):
            self._write(line)
        if self._seen.get("alive") != before:
            self._alive_s = now


class Process:
    """A program whose lines are read without waiting."""

    def __init__(self, command: Sequence[str], *, talks: bool) -> None:
        self._popen = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the kernel must not end it
        )  # fmt: skip
        ends = (self._popen.stdout, self._popen.stderr, self._popen.stdin)
        self._pipes = [one for one in ends if one is not None]
        self._out, self._err, *self._in = (one.fileno() for one in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(AttributeError, OSError):  # Linux alone
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._rest, self._said, self.ended, self.code = b"", b"", False, 0

    def write(self, data: bytes) -> None:
        """Write all data, or raise OSError."""
        if os.write(self._in[0], data) < len(data):
            raise BlockingIOError("the connection accepts no more data")

    def wait(self, wait_s: float) -> None:
        """Wait until there is something to read."""
        select.select([self._out, self._err], [], [], wait_s)

    def lines(self) -> list[bytes]:
        """Return the printed text in complete lines; lines that are too long come in pieces."""
        pieces, size, until = [self._rest], 0, time.monotonic() + LOOK_S
        while not self.ended and size < REFRESH_BYTES:
            try:
                piece = os.read(self._out, 1 << 18)
            except BlockingIOError:
                if size < 1 << 16 or time.monotonic() > until:  # no history to catch up with
                    break
                select.select([self._out], [], [], 0.01)
                size += 1 << 12
                continue
            self.ended = not piece
            pieces.append(piece)
            size += len(piece)
        lines = b"".join(pieces).split(b"\n")
        self._rest = b"" if self.ended or len(lines[-1]) > LINE_BYTES else lines.pop()
        return [line for line in lines if line]

    def words(self) -> str:
        """Return the beginning of its stderr text."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._err, 1 << 16):
                self._said = (self._said + piece)[: 1 << 12]
        return plain(self._said)

    def close(self) -> str:
        """End the program; return its exit code and its error text."""
        for pipe in self._pipes[2:]:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._popen.wait(END_S if self.ended else 0.0)
        except subprocess.TimeoutExpired:
            self._popen.terminate()
            try:
                self._popen.wait(END_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        words, self.code = self.words(), self._popen.returncode
        for pipe in self._pipes[:2]:
            pipe.close()
        return words or f"exit code {self.code}"


def plain(words: str | bytes, most: int = 600) -> str:
    """Return the beginning and end of a program's text, without terminal control sequences."""
    text = words.decode(errors="replace") if isinstance(words, bytes) else words
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in text.split("\n"))
    text = "\n".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[-most * 2 // 3 :]}"
