"""Whose the warm parent is: the kernel that started it, another one that took it over, nobody's."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import kept, profile
from .door import Door
from .nanny import Nanny

LOOK_EVERY_S = 1.0
MAX_EXITS = 1000


class Owner:
    """Knows who owns this warm parent, and whether it is needed while nobody does.

    Attributes:
        alone: Whether the owner is gone.
        kept: Whether the engines are to outlive it.
        door: Where the next owner knocks; None where the cluster is not kept.
        exits: How engines ended that nobody was told of.
    """

    def __init__(self, nanny: Nanny, framework: str) -> None:
        self._nanny, self._framework = nanny, framework
        self._parent = os.getppid()
        self._who: Mapping[str, Any] | None = None  # a kernel that is not our parent
        self._folder: Path | None = None
        self._idle_timeout_s = 0.0
        self._alone_since = self._looked = 0.0
        self._idle = False
        self.alone = self.kept = False
        self.door: Door | None = None
        self.exits: list[dict[str, Any]] = []

    def look(self) -> None:
        """Notice a death that closed no socket: a copy of it may live on in a forked child."""
        if self.alone:
            return
        if self._who is None:
            gone = os.getppid() != self._parent
        elif time.monotonic() - self._looked > LOOK_EVERY_S:
            self._looked = time.monotonic()
            gone = not kept.alive(self._who)
        else:
            gone = False
        if gone:
            self.lost()

    def lost(self) -> None:
        """The owner is gone."""
        if not self.alone:
            self.alone, self._alone_since = True, time.monotonic()

    def keep(self, folder: Path, idle_timeout_s: float) -> None:
        """Outlive the owner from now on, until nothing has run for so long (0: for ever)."""
        self._folder, self._idle_timeout_s = folder, idle_timeout_s
        self.kept = True
        if self.door is None:
            self.door = Door(folder, f"warm-{self._framework}")
        # Whose death makes the folder stale: ours, once the kernel's no longer does.
        self._nanny.own_folders(os.getpid())

    def let_go(self) -> None:
        """End with the owner again."""
        self.kept = False
        self._nanny.own_folders(self._parent if self._who is None else int(self._who["pid"]))

    def needed(self) -> bool:
        """Whether the engines of a kept cluster are there still, and were not forgotten."""
        if not self.kept:
            return False
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return True
        self._looked = time.monotonic()
        found = kept.look(self._folder) if self._folder is not None else None
        alone_s = time.monotonic() - self._alone_since
        if found is None:  # its description was lost: stay for our own engines
            self._idle = 0 < self._idle_timeout_s < alone_s
            return "engine" in self._nanny.children.values() and not self._idle
        self._idle = 0 < self._idle_timeout_s < min(found.idle_s, alone_s)
        if self._idle:
            return False
        return "engine" in self._nanny.children.values() or bool(found.engines)

    def successor(self) -> int:
        """Return the cluster's other warm parent, if it goes on with engines; else 0.

        It then has the folder and all that was guarded.
        """
        found = kept.look(self._folder) if self.kept and self._folder is not None else None
        if found is None or self._idle or not found.engines:
            return 0
        others = found.about["parents"].values()
        living = [int(one["pid"]) for one in others if kept.alive(one)]
        return next((pid for pid in living if pid != os.getpid()), 0)

    def admit(self) -> tuple[socket.socket, dict[str, Any], str] | None:
        """Let somebody in who knocks: their connection, what they said, why they are refused."""
        knocked = self.door.answer() if self.door is not None else None
        if knocked is None:
            return None
        sock, message = knocked
        refused = ""
        if not kept.alive(message):
            refused = "the one who asks is not there"
        elif not self.alone and not message.get("take"):
            refused = "it has an owner"
        if not refused:
            self._who = {"pid": message["pid"], "create_time": message["create_time"]}
            self.alone = False
        return sock, message, refused

    @property
    def who(self) -> dict[str, Any]:
        """Pid and start time of the owner."""
        return dict(self._who) if self._who is not None else profile.identity(self._parent)

    def tell_later(self, message: dict[str, Any]) -> None:
        """Keep what the next owner must know."""
        if self.alone and message.get("event") == "exit":
            self.exits = [*self.exits, message][-MAX_EXITS:]

    def leave(self) -> None:
        """Let go of the door in a forked child."""
        if self.door is not None:
            self.door.leave()
