"""The warm parent's care for processes: reaping, stopping, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from . import profile

SECOND_LOOK_S = 0.3


class Nanny:
    """Knows the children and what else is to be gone when the kernel is."""

    def __init__(self) -> None:
        self.children: dict[int, str] = {}
        """pid -> what it is: "engine" or "keeper"."""
        self.guarded: dict[int, float] = {}
        """pid -> start time of processes that somebody else started."""
        self._folders: list[str] = []
        self._doomed: dict[int, float] = {}  # pid -> when SIGTERM gives way to SIGKILL

    @property
    def busy(self) -> bool:
        """Whether `escalate` will have something to do soon."""
        return bool(self._doomed)

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
        """Signal a child; False for anything else (a pid may belong to another by now)."""
        if pid not in self.children:
            return False
        os.kill(pid, sig)
        return True

    def stop(self, pids: Sequence[int], grace_s: float) -> None:
        """SIGTERM children, and SIGKILL what is left after `grace_s` (TensorFlow swallows TERM)."""
        due = time.monotonic() + grace_s
        for pid in pids:
            if self.signal(pid, signal.SIGTERM):
                self._doomed[pid] = due
        self.escalate()

    def escalate(self) -> None:
        """SIGKILL those whose time is up."""
        now = time.monotonic()
        for pid in [pid for pid, due in self._doomed.items() if due <= now]:
            del self._doomed[pid]
            kill_group(pid)

    def guard_dir(self, path: str) -> None:
        """Remove this folder at the end.

        Raises:
            ValueError: It is not a cluster's own temporary folder.
        """
        if not profile.is_ours(path):
            raise ValueError(f"{path} is not a cluster's folder")
        if path not in self._folders:
            self._folders.append(path)

    def own_folders(self, pid: int) -> None:
        """Say which process keeps the guarded folders in use."""
        for folder in self._folders:
            profile.own(Path(folder), pid)

    def hand_over(self, pid: int) -> None:
        """Kill children only: another process has the folders and all that is guarded."""
        self.own_folders(pid)
        for child in self.children:
            kill_group(child)

    def end(self) -> None:
        """Kill children, guarded processes and all that belongs to guarded folders; remove these.

        The second look is for a controller that the kernel was starting when it died, before it was
        a program of its own and carried the folder in its environment.
        """
        for pid in self.children:
            kill_group(pid)
        for pid, create_time in self.guarded.items():
            if profile.same_process(pid, create_time):
                kill_group(pid)
        for wait_s in (0.0, SECOND_LOOK_S if len(self.guarded) < len(self._folders) else 0.0):
            time.sleep(wait_s)
            for folder in self._folders:
                profile.end_family(folder)
        for folder in self._folders:
            profile.remove(folder)


def kill_group(pid: int) -> None:
    """SIGKILL a process and, where it leads a group (all of ours do), what it started.

    Not multiprocessing's resource trackers: they unlink shared memory and semaphores of whoever
    started them, and end by themselves.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        leads = os.getpgid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        for member in profile.group(pid) if leads else ():
            if not profile.is_tracker(member):
                with contextlib.suppress(psutil.Error):
                    member.kill()
