"""Engines of a kept cluster: what their next owner must know, and how it becomes that.

this kernel: keep ── about (into cluster.json) ── release, or its end
the next:    take_over ── invite (control.json) ── expect, for calls under way
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ClusterError
from . import kept, profile
from .calls import Call
from .deaths import Ending
from .engine_info import EngineInfo, described, recalled
from .ground import Ground
from .pending import Pending
from .router import ControlRouter

ORPHAN_S = 3.0
"""How long an engine that was not forked does without its kernel before it ends."""


class Handover:
    """Leaves engines to another kernel, or takes them from one; `engines.Engines` is the rest.

    Attributes:
        idle_timeout_s: After how long of doing nothing a kept cluster ends (0: never); None: it is
            not kept.
    """

    engines: dict[int, EngineInfo]
    launcher: str
    router: ControlRouter
    _ground: Ground
    _calls: Pending
    _next_id: int
    _stopping: bool

    def __init__(self) -> None:
        self.idle_timeout_s: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the engines outlive this kernel."""
        return self.idle_timeout_s is not None

    def keep(self, idle_timeout_s: float) -> None:
        """Let engines that are started from now on outlive this kernel; before the first one.

        Raises:
            ClusterError: They are not forked here, so nobody would look after them.
        """
        if not self._ground.forks:
            raise ClusterError(
                "This cluster cannot be kept.",
                seen=self._ground.why_not,
                allowed="engines forked on this machine (--launcher local, on Linux)",
            )
        self.idle_timeout_s = idle_timeout_s

    def about(self) -> dict[str, Any]:
        """Return what the cluster's folder says about its processes (`kept.py`)."""
        return {
            **self._ground.about(),
            "engines": {str(i): described(one) for i, one in self.engines.items()},
            "next_id": self._next_id,
            "key": self.router.key.hex() if self.kept else "",
            "framework": self._ground.framework,
            "launcher": self.launcher,
        }

    def take_over(self, about: Mapping[str, Any], *, take: bool) -> None:
        """Become the owner of the engines that another kernel left.

        Raises:
            ClusterError: They are gone, or have an owner.
        """
        ground = self._ground
        self.idle_timeout_s = float(about["idle_timeout_s"])
        self._next_id = int(about["next_id"])
        for number, one in about["engines"].items():
            info = recalled(int(number), one)
            if not kept.alive(one):
                info.state, info.exit = "dead", Ending(what="ended while no notebook was there")
            self.engines[info.id] = info
        ground.take_over(about, take=take)
        self.invite()

    def invite(self) -> None:
        """Say in the cluster's folder where engines reach this kernel."""
        profile.write_json(self._ground.folder / kept.CONTROL, {"url": self.router.url})

    def expect(self, engine: int) -> Call:
        """Return a call that stands for what another kernel began; somebody else finishes it."""
        call, info = Call(engine), self.engines.get(engine)
        if info is None or info.state == "dead":
            call.finish(ClusterError(f"Engine {engine} died: {info.exit if info else 'gone'}."))
            return call
        info.state = "busy"
        self._calls.add(call)
        return call

    def when_taken(self, callback: Callable[[int], None]) -> None:
        """Have the pid told of a kernel that takes the cluster over from us."""
        self._ground.parents.on_taken = callback

    def release(self, reason: str) -> None:
        """Let go of all processes, which go on without us; what waits for them here is told why."""
        self._stopping = True
        for call in self._calls.all():
            call.finish(ClusterError(reason))
        self._ground.release()
        self.engines.clear()
        with contextlib.suppress(Exception):
            self.router.close()

    def _home(self) -> dict[str, Any]:
        """Return what engines are told about their end, and where they write what they do."""
        if not self._ground.forks:
            return {"patience_s": ORPHAN_S}
        return {"folder": str(self._ground.folder), "kept": self.kept}
