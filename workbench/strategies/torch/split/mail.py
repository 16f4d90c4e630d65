"""A stage's messages: they travel while it computes, and carry the sender's clock.

    the schedule asks for a message            here, with gloo

    receiver  |work|ask.......|work            ask|work     |work
    sender    |work|offer.....|work            |work|send|work

gloo moves a message only once its receiver has asked for it, and the schedules of torch ask when
they need it: then receiver and sender both stand still while it travels. Here a step's receives are
posted before it begins, and nobody waits for what he sent until the step ends; a tag says which
message is which. Messages of NCCL are ordered by its streams: there torch's way is kept.

Where the device is CUDA and the group is not NCCL, messages go through the host's memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ....engine.marks import RECEIVE, waits_in
from .timeline import Timeline

MOST_CHUNKS = 1 << 14
Way = Literal["F", "B"]
"""Forward: activations for the next stage. Backward: gradients for the one before."""

Ops = list[dist.P2POp]
clock = time.perf_counter


@dataclass
class Sent:
    """A message under way, and its memory."""

    work: Any
    tensor: torch.Tensor

    @waits_in(RECEIVE)
    def wait(self) -> None:
        """Block until it has come or left."""
        self.work.wait()


class Mail:
    """One stage's messages.

    Args:
        asks: By way, what receives a microbatch's message as torch would.
        stage: Number of the stage, of `count`.

    Attributes:
        sent_bytes: What was sent; stamps are not counted.
    """

    def __init__(
        self,
        asks: Mapping[str, Callable[[int], Ops]],
        timeline: Timeline,
        stage: int,
        count: int,
        device: torch.device,
        group: Any,
    ) -> None:
        self.sent_bytes = 0
        self._asks, self._timeline, self._stage = asks, timeline, stage
        backend = dist.get_backend(group)
        self._ahead = backend == "gloo"
        self._through_host = device.type == "cuda" and backend != "nccl"
        self._stamps: dict[tuple[str, int], torch.Tensor] = {}
        self._landed: dict[tuple[Way, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._asked: list[tuple[Way, int]] = []
        self._coming: dict[tuple[Way, int], list[Sent]] = {}
        self._leaving: deque[Sent] = deque()
        self._most_leaving = 4 * (count + 1)

    def expect(self) -> None:
        """Post all receives of a step, known from the first one, before it begins."""
        for way, chunk in self._asked:
            self._post(way, chunk)

    @waits_in(RECEIVE)
    def settle(self) -> None:
        """Wait until everything that was sent has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    @waits_in(RECEIVE)
    def receive(self, way: Way, chunk: int) -> Ops:
        """See to it that a message comes; return what is left for the schedule to do."""
        if not self._ahead:
            return self._receive_ops(way, chunk)
        if (way, chunk) not in self._coming:  # the first step
            self._asked.append((way, chunk))
            self._post(way, chunk)
        return []

    @waits_in(RECEIVE)
    def send(self, way: Way, chunk: int, ops: Ops) -> Ops:
        """See to it that a message leaves; return what is left for the schedule to do."""
        self.sent_bytes += sum(op.tensor.nbytes for op in ops)
        ops = [
            op if op.tensor.is_contiguous() else _moved(op, op.tensor.contiguous()) for op in ops
        ]
        if self._through_host:
            ops = [_moved(op, op.tensor.cpu()) for op in ops]
        if ops and self._timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(f"{way} sent", chunk).fill_(clock())))
        if ops:
            self._timeline.travel(sum(op.tensor.nbytes for op in ops))
        if not self._ahead:
            return ops
        receiver = self._stage + (1 if way == "F" else -1)
        self._leaving += [_begin(op, _tag(receiver, way, chunk)) for op in ops]
        while len(self._leaving) > self._most_leaving:  # what is under way holds memory
            self._leaving.popleft().wait()
        return []

    @waits_in(RECEIVE)
    def arrived(self, way: Way, chunk: int) -> float | None:
        """Wait for a message, bring it to the device; return when it was sent."""
        for message in self._coming.pop((way, chunk), ()):
            message.wait()
        for host, buffer in self._landed.pop((way, chunk), ()):
            with torch.no_grad():
                buffer.copy_(host)
        stamp = self._stamps.get((way, chunk))
        return None if stamp is None else float(stamp)

    def _post(self, way: Way, chunk: int) -> None:
        tag = _tag(self._stage, way, chunk)
        self._coming[way, chunk] = [_begin(op, tag) for op in self._receive_ops(way, chunk)]

    def _receive_ops(self, way: Way, chunk: int) -> Ops:
        ops = self._asks[way](chunk)
        if self._through_host and ops:
            landed = [(torch.empty_like(op.tensor, device="cpu"), op.tensor) for op in ops]
            self._landed[way, chunk] = landed
            ops = [_moved(op, host) for op, (host, _) in zip(ops, landed, strict=True)]
        if ops and self._timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(way, chunk)))
        return ops

    def _stamp(self, kind: str, chunk: int) -> torch.Tensor:
        if (kind, chunk) not in self._stamps:
            self._stamps[kind, chunk] = torch.zeros(1, dtype=torch.float64)
        return self._stamps[kind, chunk]


def _tag(receiver: int, way: Way, chunk: int) -> int:
    """Return the number by which a receive finds its message, in whatever order they are posted."""
    return 1 + (2 * receiver + (way == "B")) * MOST_CHUNKS + chunk


def _begin(op: dist.P2POp, tag: int) -> Sent:
    """Send or receive, without waiting."""
    return Sent(op.op(op.tensor, op.peer, op.group, tag), op.tensor)


def _moved(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    """Return the same operation for another tensor."""
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)
