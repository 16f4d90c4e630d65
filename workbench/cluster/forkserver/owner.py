"""The owner of the warm parent, how the next owner connects, and what happens to its processes.

It belongs to the kernel that started it, to another kernel that took it over, or to no kernel. It
reaps and stops the processes that it forked, and leaves nothing behind. Its door is a Unix socket
in a kept cluster's folder:

    next owner -> warm   {"cmd": "own", "pid", "create_time", "take"}
    warm -> next owner   {"children", "exits", "report"} | {"error", "owner"}

Only this user can reach it (the folder is 0700), and the system's user id of a connection is
checked again. It runs in the warm parent's only thread, so it waits only for short times.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .. import folders

LOOK_EVERY_S = 1.0
MAX_EXITS = 1000


class Owner:
    """Knows who owns this warm parent, and whether it is needed without an owner.

    Attributes:
        alone: Whether the owner has ended.
        kept: Whether the engines outlive it.
        door: The socket for the next owner; None if the cluster is not kept.
        exits: The unreported ends of engines.
    """

    def __init__(self, nanny: Nanny, framework: str) -> None:
        self._nanny, self._framework = nanny, framework
        self._parent = os.getppid()
        self._who: Mapping[str, Any] | None = None  # a kernel that is not the parent process
        self._folder: Path | None = None
        self._idle_timeout_s = 0.0
        self._alone_since = self._looked = 0.0
        self._idle = False
        self.alone = self.kept = False
        self.door: Door | None = None
        self.exits: list[dict[str, Any]] = []

    def look(self) -> None:
        """Notice a death that closed no socket, because a forked child can hold a copy of it."""
        if self.alone:
            return
        if self._who is None:
            gone = os.getppid() != self._parent
        elif time.monotonic() - self._looked > LOOK_EVERY_S:
            self._looked = time.monotonic()
            gone = not folders.alive(self._who)
        else:
            gone = False
        if gone:
            self.lost()

    def lost(self) -> None:
        """Note that the owner has ended."""
        if not self.alone:
            self.alone, self._alone_since = True, time.monotonic()

    def keep(self, folder: Path, idle_timeout_s: float) -> None:
        """Outlive the owner from now on, until nothing has run for this long (0: forever)."""
        self._folder, self._idle_timeout_s = folder, idle_timeout_s
        self.kept = True
        if self.door is None:
            self.door = Door(folder, f"warm-{self._framework}")
        # From now on the folder is unused when this process dies, not when the kernel dies.
        self._nanny.own_folders(os.getpid())

    def let_go(self) -> None:
        """End with the owner again."""
        self.kept = False
        self._nanny.own_folders(self._parent if self._who is None else int(self._who["pid"]))

    def needed(self) -> bool:
        """Whether the engines of a kept cluster still exist and are still needed."""
        if not self.kept:
            return False
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return True
        self._looked = time.monotonic()
        found = folders.look(self._folder) if self._folder is not None else None
        alone_s = time.monotonic() - self._alone_since
        if found is None:  # its description was lost: stay for our own engines
            self._idle = 0 < self._idle_timeout_s < alone_s
            return "engine" in self._nanny.children.values() and not self._idle
        self._idle = 0 < self._idle_timeout_s < min(found.idle_s, alone_s)
        if self._idle:
            return False
        return "engine" in self._nanny.children.values() or bool(found.engines)

    def successor(self) -> int:
        """Return the pid of the cluster's other warm parent if it continues with engines; else 0.

        It then takes over the folder and the guarded processes.
        """
        found = folders.look(self._folder) if self.kept and self._folder is not None else None
        if found is None or self._idle or not found.engines:
            return 0
        others = found.about["parents"].values()
        living = [int(one["pid"]) for one in others if folders.alive(one)]
        return next((pid for pid in living if pid != os.getpid()), 0)

    def admit(self) -> tuple[socket.socket, dict[str, Any], str] | None:
        """Accept a connection: return it, its message, and the reason if it is refused."""
        knocked = self.door.answer() if self.door is not None else None
        if knocked is None:
            return None
        sock, message = knocked
        refused = ""
        if not folders.alive(message):
            refused = "the process that asked for the cluster does not run any more"
        elif not self.alone and not message.get("take"):
            refused = "another process owns the cluster"
        if not refused:
            self._who = {"pid": message["pid"], "create_time": message["create_time"]}
            self.alone = False
        return sock, message, refused

    @property
    def who(self) -> dict[str, Any]:
        """Pid and start time of the owner."""
        return dict(self._who) if self._who is not None else folders.identity(self._parent)

    def tell_later(self, message: dict[str, Any]) -> None:
        """Store what the next owner must know."""
        if self.alone and message.get("event") == "exit":
            self.exits = [*self.exits, message][-MAX_EXITS:]

    def leave(self) -> None:
        """Close the door in a forked child."""
        if self.door is not None:
            self.door.leave()


SECOND_LOOK_S = 0.3


class Nanny:
    """Knows the children and everything else that must end with the kernel."""

    def __init__(self) -> None:
        self.children: dict[int, str] = {}
        """pid -> what it is: "engine" or "keeper"."""
        self.guarded: dict[int, float] = {}
        """pid -> start time of processes that somebody else started."""
        self._folders: list[str] = []
        self._doomed: dict[int, float] = {}  # pid -> when SIGKILL follows SIGTERM

    @property
    def busy(self) -> bool:
        """Whether `escalate` will soon have a process to kill."""
        return bool(self._doomed)

    @property
    def engines(self) -> list[int]:
        """Pids of the engines among the children."""
        return [pid for pid, what in self.children.items() if what == "engine"]

    def reap(self) -> Iterator[tuple[int, int | None, int | None, int]]:
        """Yield pid, exit code, signal and the most memory (bytes) of each child that ended."""
        for pid in list(self.children):
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                del self.children[pid]
                self._doomed.pop(pid, None)
                code = os.waitstatus_to_exitcode(status)
                held_bytes = used.ru_maxrss * 1024
                yield (
                    (pid, code, None, held_bytes) if code >= 0 else (pid, None, -code, held_bytes)
                )

    def signal(self, pid: int, sig: int) -> bool:
        """Signal a child.

        False for other processes, because a pid may belong to another process now.
        """
        if pid not in self.children:
            return False
        os.kill(pid, sig)
        return True

    def stop(self, pids: Sequence[int], grace_s: float) -> None:
        """SIGTERM children, and SIGKILL the rest after `grace_s` (TensorFlow ignores TERM)."""
        due = time.monotonic() + grace_s
        for pid in pids:
            if self.signal(pid, signal.SIGTERM):
                self._doomed[pid] = due
        self.escalate()

    def escalate(self) -> None:
        """SIGKILL the children whose grace period is over."""
        now = time.monotonic()
        for pid in [pid for pid, due in self._doomed.items() if due <= now]:
            del self._doomed[pid]
            kill_group(pid)

    def guard_dir(self, path: str) -> None:
        """Remove this folder at the end.

        Raises:
            ValueError: It is not a cluster's own temporary folder.
        """
        if not folders.is_ours(path):
            raise ValueError(f"{path} is not a cluster's folder")
        if path not in self._folders:
            self._folders.append(path)

    def own_folders(self, pid: int) -> None:
        """Write which process keeps the guarded folders in use."""
        for folder in self._folders:
            folders.own(Path(folder), pid)

    def hand_over(self, pid: int) -> None:
        """Kill only children: another process now guards the folders and processes."""
        self.own_folders(pid)
        for child in self.children:
            kill_group(child)

    def end(self) -> None:
        """Kill children, guarded processes and those of guarded folders; remove the folders.

        The second check is for a controller that the kernel was starting when it died, before its
        environment contained the folder.
        """
        for pid in self.children:
            kill_group(pid)
        for pid, create_time in self.guarded.items():
            if folders.same_process(pid, create_time):
                kill_group(pid)
        for wait_s in (0.0, SECOND_LOOK_S if len(self.guarded) < len(self._folders) else 0.0):
            time.sleep(wait_s)
            for folder in self._folders:
                folders.end_family(folder)
        for folder in self._folders:
            folders.remove(folder)


def kill_group(pid: int) -> None:
    """SIGKILL a process and, if it leads a group (Workbench's do), the processes that it started.

    multiprocessing's resource trackers are not killed: they remove the shared memory and semaphores
    of their starter, and end by themselves.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        leads = os.getpgid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        for member in folders.group(pid) if leads else ():
            if not folders.is_tracker(member):
                with contextlib.suppress(psutil.Error):
                    member.kill()


KNOCK_S = 2.0
MAX_LINE_BYTES = 1 << 16


class Door:
    """Listens in a cluster's folder.

    Args:
        folder: The cluster's folder.
        name: The socket's name; one for each warm parent.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with _short(self.path) as path:
            self._socket.bind(path)
        self.path.chmod(0o600)
        self._socket.listen(8)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def answer(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Return a connection and its message; None for other users and silent connections."""
        try:
            caller, _ = self._socket.accept()
        except OSError:
            return None
        try:
            caller.settimeout(KNOCK_S)
            if _uid(caller) == os.getuid():
                message = json.loads(_line(caller, MAX_LINE_BYTES))
                if message.get("cmd") == "own":
                    caller.settimeout(None)
                    return caller, message
        except (OSError, ValueError, AttributeError):
            pass
        caller.close()
        return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def leave(self) -> None:
        """Close it in a forked child."""
        self._socket.close()


def knock(path: Path, message: Mapping[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Ask to own the cluster; return the connection and the answer.

    Raises:
        OSError: No process listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(10 * KNOCK_S)
        with _short(path) as short:
            sock.connect(short)
        sock.sendall(json.dumps({"cmd": "own", **message}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(_line(sock))
    except ValueError as error:
        sock.close()
        raise OSError("the answer was incomplete") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, answer


def _line(sock: socket.socket, most_bytes: int = -1) -> bytes:
    """Read one line and no byte more, because the next bytes are for another reader."""
    with sock.makefile("rb", buffering=0) as unbuffered:
        return unbuffered.readline(most_bytes)


def _uid(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", raw)[1])


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """Yield a name that fits a socket's address (107 bytes), even for a deep folder."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
