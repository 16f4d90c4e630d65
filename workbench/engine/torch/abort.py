"""The way out of a collective that hangs on a device, and what must not be used after it.

A collective of gloo ends with an error as soon as its connections are shut. NCCL's is a kernel that
waits on the device for its peers: no signal and no closed socket reaches it, the host stands in C,
and `destroy_process_group` waits for the same peers. What ends it is to abort the communicators,
which any thread may do (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html).
The kernel then leaves with a part of the sum in its tensors, and nothing raises. Hence:

    a mark is set before the abort; an optimizer that begins an update finds it and raises
    each update notes how far the device was: those that were issued behind a collective which did
    not end are known, and the weights are then said to be spoiled instead of saved
    where a run is to go on from this worker's weights, an update waits for its gradients first

Updates are those of every `torch.optim.Optimizer`, also in loops of the user's own.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ClusterError
from . import accelerator

POLL_S = 0.02
KEPT = 64
"""Updates whose end on the device is not known yet; more are not issued ahead in practice."""


class Updates:
    """Watches the updates of a process whose groups have collectives on a device.

    Attributes:
        spoiled: Whether an update was issued behind a collective that was then aborted.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = accelerator.of(device)
        self._issued: deque[accelerator.Event] = deque(maxlen=KEPT)
        self._aborted = threading.Event()
        self.spoiled = False
        self._hook = register_optimizer_step_pre_hook(self._update_begins)

    def close(self) -> None:
        """Watch no longer; the group is gone."""
        self._hook.remove()

    def mark(self) -> None:
        """Note, before communicators are aborted, which updates were behind what did not end."""
        if not self._aborted.is_set():
            with contextlib.suppress(Exception):  # a device that failed: whatever it holds is lost
                self.spoiled = any(not event.query() for event in self._issued)
            self._aborted.set()

    def check(self) -> None:
        """Raise if collectives were aborted: what they left is no result.

        Raises:
            ClusterError: They were.
        """
        if self._aborted.is_set():
            raise ClusterError(
                "This step's collectives were ended before they were done.",
                seen="half-summed gradients",
                next_step="nothing of them was used; run the cell again",
                code="WB-CLUSTER-280",
            )

    def _update_begins(self, *unused: Any) -> None:
        self.check()
        while self._issued and self._issued[0].query():
            self._issued.popleft()
        self._issued.append(self._accelerator.event(timed=False))

    def verify(self) -> None:
        """Wait until the device has done all it was given: its gradients are whole then.

        Raises:
            ClusterError: They are not: collectives were aborted meanwhile.
        """
        event = self._accelerator.event(timed=False)
        while not event.wait(POLL_S):
            self.check()
        self.check()


_updates: Updates | None = None
_spoiled = False  # what the group of before left behind


def watch(device: torch.device) -> None:
    """Begin to watch the updates behind a new group that has collectives on a device."""
    global _updates, _spoiled
    forget()
    _updates, _spoiled = Updates(device), False


def forget() -> None:
    """Let go of a group that is gone; what it spoiled stays known until there is another one."""
    global _updates, _spoiled
    if _updates is not None:
        _updates.close()
        _spoiled = _updates.spoiled
    _updates = None


def are_spoiled() -> bool:
    """Whether the weights of this process may hold half-summed gradients."""
    return _spoiled if _updates is None else _updates.spoiled


def check() -> None:
    """Raise if the group's collectives were aborted.

    Raises:
        ClusterError: They were.
    """
    if _updates is not None:
        _updates.check()


def verify() -> None:
    """Before an update from which others are to go on: wait for the gradients.

    Raises:
        ClusterError: Their collectives were aborted.
    """
    if _updates is not None:
        _updates.verify()


def is_needed() -> bool:
    """Whether shutting sockets would not end a collective that hangs."""
    return _updates is not None and dist.is_initialized()


def abort_groups() -> None:
    """End every collective of this process at once, and all its groups; callable from any thread.

    `_abort_process_group` is torch's only way that takes all communicators together, without which
    their aborts can wait for each other (pytorch#119797); it is experimental, so older and newer
    versions fall back to one after the other.
    """
    if _updates is not None:
        _updates.mark()
    c10d: Any = dist.distributed_c10d
    with contextlib.suppress(Exception):
        if hasattr(c10d, "_abort_process_group"):
            c10d._abort_process_group()
            return
        for group in list(c10d._world.pg_map):
            group.abort()
        dist.destroy_process_group()


def is_idle(within_s: float) -> bool:
    """Whether the device has done all that it was given, or does so in time."""
    if _updates is None:
        return True
    try:
        return _updates._accelerator.event(timed=False).wait(within_s)
    except Exception:
        return False
