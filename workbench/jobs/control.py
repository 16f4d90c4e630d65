"""Signed orders to a run in another process: files in an inbox in the run's folder.

    <run folder>/
      control.key              32 random bytes in hex, for this user alone (0600)
      control/                 the inbox, for this user alone (0700)
        <time>-<hex>.json      one order; a line of JSON and its HMAC-SHA256
        .newest                the number of the newest order that was taken

An order is written by a rename, so a reader never sees half of it. Each order has a greater number
than the one before. An order is refused if it was already taken, or if it is older than the last
taken order.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import math
import os
import secrets
import stat
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import PlanError, RunError, WorkbenchError
from ..shared.faults import parse_fault

KEY = "control.key"
INBOX = "control"
NEWEST = ".newest"
KEY_BYTES = 32
ORDER_BYTES = 4096
FILES_AT_ONCE = 100
MOST_STEPS = 1_000_000
MOST_FAULTS = 32
Does = Literal["stop", "preempt", "pause", "resume", "step", "inject", "interrupt"]
"""`preempt` stops like `stop`, and the next start of the job continues from there."""


@dataclass(frozen=True)
class Order:
    """An order to a run for its next step boundary.

    Attributes:
        do: The action.
        steps: For `step`: the number of steps that a paused run takes.
        faults: For `inject`: as `--inject` takes them; none ends the faults.
        number: Grows from order to order.

    Raises:
        PlanError: There is no such order.
    """

    do: Does
    steps: int = 1
    faults: tuple[str, ...] = ()
    number: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        if wrong := _wrong(self):
            raise PlanError(
                f"A run cannot obey this order: {wrong}.",
                seen=f"{self.do} (steps={self.steps!r}, faults={self.faults!r})"[:200],
                allowed=f"one of {', '.join(get_args(Does))}; `steps` from 1 to {MOST_STEPS}; "
                "`faults` only with `inject`",
                code="WB-PLAN-237",
            )


def _wrong(order: Order) -> str:
    """Return the error in an order; a wrong fault raises a more detailed error."""
    if order.do not in get_args(Does):
        return "there is no order with this name"
    if type(order.steps) is not int or not 1 <= order.steps <= MOST_STEPS:
        return "`steps` is not a valid number of steps"
    if type(order.number) is not int or not 0 <= order.number < 1 << 63:
        return "`number` is invalid"
    if not isinstance(order.faults, tuple) or len(order.faults) > MOST_FAULTS:
        return f"`faults` is not a tuple with at most {MOST_FAULTS} faults"
    if order.faults and order.do != "inject":
        return "only `inject` takes faults"
    if not all(isinstance(text, str) for text in order.faults):
        return "a fault is not a string"
    if sum(map(len, order.faults)) > ORDER_BYTES // 2:
        return "`faults` is too long"
    for text in order.faults:
        fault = parse_fault(text)
        if not all(map(math.isfinite, (fault.delay_s, fault.factor, fault.bytes_per_s))):
            return "a value of a fault is infinite or NaN"
    return ""


def order_text(order: Order) -> bytes:
    """Return an order as a line of JSON, unsigned: what `workbench control --stdin` reads."""
    return json.dumps(asdict(order), separators=(",", ":")).encode()


def read_order(text: bytes) -> Order:
    """Read a line that `order_text` made.

    Raises:
        PlanError: The text is not an order.
    """
    try:
        if len(text) > ORDER_BYTES:
            raise ValueError("too long")
        about: dict[str, Any] = json.loads(text)
        return Order(**{**about, "faults": tuple(about["faults"])})
    except PlanError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PlanError(
            "The message to the run is not a valid order. An order tells the run what to do, for "
            "example `stop`.",
            seen=text[:80],
            allowed="a line of JSON with `do`, `steps`, `faults` and `number`",
            code="WB-PLAN-238",
        ) from error


def packed(order: Order, key: bytes) -> bytes:
    """Return an order as JSON with its signature."""
    text = order_text(order)
    return text + b"\n" + hmac.digest(key, text, "sha256").hex().encode()


def unpacked(signed: bytes, key: bytes) -> Order:
    """Return the order that was signed with a key.

    Raises:
        PlanError: The text is not an order.
        ValueError: The order was not signed with this key.
    """
    text, _, mac = signed.partition(b"\n")
    if not hmac.compare_digest(hmac.digest(key, text, "sha256").hex().encode(), mac.strip()):
        raise ValueError("the signature is wrong")
    return read_order(text)


def make_key(run_dir: str | os.PathLike[str]) -> bytes:
    """Create a run's key and its inbox, readable only for this user; return the key.

    Raises:
        OSError: They cannot be written; the run can continue, but takes no orders.
    """
    folder, key = Path(run_dir), secrets.token_bytes(KEY_BYTES)
    with contextlib.suppress(FileExistsError):
        (folder / INBOX).mkdir(mode=0o700)
    _write_new(folder / KEY, key.hex().encode())
    return key


def read_key(run_dir: str | os.PathLike[str]) -> bytes:
    """Return a run's key.

    Raises:
        RunError: There is no key, or other users could have read or written it.
    """
    path = Path(run_dir) / KEY
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _unsafe(path, "its file is a symbolic link") from None
        missing = isinstance(error, FileNotFoundError)
        raise RunError(
            "You cannot control this run, because the run's secret key "
            + ("does not exist." if missing else f"cannot be read ({error.strerror})."),
            seen=str(path),
            next_step="wait until the job has begun; if a notebook trains the run, control the run "
            "in that notebook"
            if missing
            else _AS_OWNER,
            code="WB-RUN-108",
        ) from error
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise _unsafe(path, "its file is not a regular file")
        if about.st_uid != os.getuid():
            raise _unsafe(path, "its file belongs to another user", _AS_OWNER)
        if about.st_mode & 0o077:
            raise _unsafe(path, "other users can read or write its file")
        text = os.read(handle, 4 * KEY_BYTES)
    finally:
        os.close(handle)
    try:
        key = bytes.fromhex(text.decode("ascii"))
        if len(key) != KEY_BYTES:
            raise ValueError("too short, or too long")
    except ValueError as error:
        raise RunError(
            "You cannot control this run, because the run's secret key is damaged.",
            seen=str(path),
            next_step="to end the run, cancel the job with its platform's own command",
            code="WB-RUN-110",
        ) from error
    return key


_AS_OWNER = "repeat the command as the user who started the job"
_MODES = "keep job folders on a file system that stores the owner and permissions of each file"


def _unsafe(path: Path, why: str, next_step: str = _MODES) -> RunError:
    return RunError(
        f"The run's secret key is not safe, so Workbench does not use it: {why}.",
        seen=str(path),
        allowed="a file of this user that no other user can read or write (mode 0600)",
        next_step=next_step,
        code="WB-RUN-109",
    )


def put(run_dir: str | os.PathLike[str], signed: bytes) -> None:
    """Put a signed order into a run's inbox, completely or not at all.

    Raises:
        RunError: The order cannot be written.
    """
    name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
    try:
        _write_new(Path(run_dir) / INBOX / name, signed)
    except OSError as error:
        raise RunError(
            f"The order cannot be written into the run's folder: {error.strerror}.",
            seen=str(Path(run_dir) / INBOX),
            next_step=_AS_OWNER
            if isinstance(error, PermissionError)
            else "if the disk is full, delete some files; make sure that the folder still exists",
            code="WB-RUN-111",
        ) from error


def give(run_dir: str | os.PathLike[str], order: Order) -> None:
    """Sign an order with the key in a run's folder and put it into the inbox there.

    Raises:
        RunError: The key is missing or not safe, or the order cannot be written.
    """
    key = read_key(run_dir)
    put(run_dir, packed(later(order, newest(run_dir)), key))


def newest(run_dir: str | os.PathLike[str]) -> int:
    """Return the number of the newest order that a run has taken, 0 for none."""
    try:
        with (Path(run_dir) / INBOX / NEWEST).open("rb") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return 0


def later(order: Order, than: int) -> Order:
    """Return an order with a greater number than another: clocks of two hosts can differ."""
    return replace(order, number=max(order.number, than + 1))


def _write_new(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 by a rename."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(fresh, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


class Inbox:
    """The orders to a run, read by the process that writes its folder.

    Args:
        run_dir: The run's folder.
        key: The key from `make_key`.

    Attributes:
        refused: The number of files that were not an order of this user, or were an old order.
    """

    def __init__(self, run_dir: str | os.PathLike[str], key: bytes) -> None:
        self._run_dir, self._key = Path(run_dir), key
        self._newest = newest(run_dir)
        self._stuck: set[str] = set()  # looked at, and cannot be deleted
        self.refused = 0

    def take(self) -> list[Order]:
        """Return new orders sorted by number, and delete their files; never waits."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            inbox = os.open(self._run_dir / INBOX, flags)
        except OSError:
            return []
        try:
            found = [order for name in self._names(inbox) if (order := self._read(inbox, name))]
        finally:
            os.close(inbox)
        return self._fresh(found) if found else []

    def _names(self, inbox: int) -> list[str]:
        with os.scandir(inbox) as entries:
            some = itertools.islice(entries, 10 * FILES_AT_ONCE)
            names = [one.name for one in some if not one.name.startswith(".")]
        return sorted(name for name in names if name not in self._stuck)[:FILES_AT_ONCE]

    def _read(self, inbox: int, name: str) -> Order | None:
        try:
            return unpacked(_content(inbox, name), self._key)
        except (OSError, ValueError, WorkbenchError):
            self.refused += 1
            return None
        finally:
            try:
                os.unlink(name, dir_fd=inbox)
            except FileNotFoundError:
                pass
            except OSError:
                if len(self._stuck) < 10 * FILES_AT_ONCE:
                    self._stuck.add(name)

    def _fresh(self, found: list[Order]) -> list[Order]:
        orders = []
        for order in sorted(found, key=lambda one: one.number):
            if order.number > self._newest:
                self._newest = order.number
                orders.append(order)
            else:
                self.refused += 1
        if orders:
            with contextlib.suppress(OSError):  # only later readers need it
                _write_new(self._run_dir / INBOX / NEWEST, str(self._newest).encode())
        return orders


def _content(inbox: int, name: str) -> bytes:
    """Return a file's content; OSError or ValueError if the file does not belong to this user."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(name, flags, dir_fd=inbox)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            raise ValueError("not a file of this user")
        if about.st_size > ORDER_BYTES:
            raise ValueError("too long")
        return os.read(handle, ORDER_BYTES)
    finally:
        os.close(handle)
