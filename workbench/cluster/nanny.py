"""The warm parent's care for processes: reaping, stopping, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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

    def reap(self) -> Iterator[tuple[int, int | None, int | None]]:
        """Yield pid, exit code and signal of each child that has ended."""
        for pid in list(self.children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.children[pid]
                self._doomed.pop(pid, None)
                code = os.waitstatus_to_exitcode(status)
                yield (pid, code, None) if code >= 0 else (pid, None, -code)

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

    def end(self) -> None:
        """Kill children and guarded processes, remove guarded folders."""
        for pid in self.children:
            kill_group(pid)
        for pid, create_time in self.guarded.items():
            if profile.same_process(pid, create_time):
                kill_group(pid)
        self._end_unnamed()
        for folder in self._folders:
            profile.remove(folder)

    def _end_unnamed(self) -> None:
        """Kill controllers whose kernel died before it could name them.

        They are known by the guarded folder in their environment. The kernel may have died while
        one was being started, before it was a program of its own: hence a second look.
        """
        if len(self.guarded) >= len(self._folders):
            return
        for wait_s in (0.0, SECOND_LOOK_S):
            time.sleep(wait_s)
            for folder in self._folders:
                for pid in profile.controllers(folder):
                    kill_group(pid)


def kill_group(pid: int) -> None:
    """SIGKILL a process and, where it leads a group (all of ours do), what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
