"""The cost of a step's messages: each message moves the clocks of its workers forward.

A message of m bytes takes `a + b m` seconds (Hockney, Parallel Computing 20(3), 1994); The number
and sizes of consecutive messages come from the catalog's description of a strategy. So the costs of
collectives are those that Thakur, Rabenseifner and Gropp (IJHPCA 19(1), 2005, section 4) and
Patarasuk and Yuan (JPDC 69(2), 2009) derive: a ring 2(n-1) rounds of m/n bytes, recursive doubling
log2 n rounds of m.

    clocks   w0 w1 w2 s0      computation is added, a message moves its receiver's clock forward
             |--|------>|     all workers of a ring wait for a late worker

Two kinds of links:

- `held`, as `--inject bandwidth=` simulates them: the sender delays its messages, one after the
  other. A message from a server is delayed by the worker that receives it.
- ports: a node sends everything through one port and receives everything through another. So
  workers queue at a server's port.

Asynchronous workers with servers are a closed queueing network: a worker computes, then the
servers' ports serve it. Its mean cycle is found by mean value analysis (Reiser and Lavenberg,
Journal of the ACM 27(2), 1980).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..catalog.diagrams import Arrow, Phase
    from .probe import Setting

Floats = NDArray[np.float64]
FORWARD = 1 / 3
"""Share of the forward pass in computation; assumed: backward has two products for each forward
product."""
MOST_BUCKETS = 256
SERVED_S = 0.0008
"""Fixed time of a server for each worker's push and pull, which it serves one after the
other. From training runs with 4 to 32 workers; a run of two replicas gives no information about it.
"""


@dataclass(frozen=True, eq=False)
class Cost:
    """Seconds per message and per byte; each is (draws,).

    Attributes:
        message_s, byte_s: Cost of the link.
        soft_message_s, soft_byte_s: Additional time of workers and servers for a message.
        near_message_s, near_byte_s: Between workers of one host.
        held: The kind of link, see the module.
    """

    message_s: Floats
    byte_s: Floats
    soft_message_s: Floats
    soft_byte_s: Floats
    near_message_s: Floats
    near_byte_s: Floats
    held: bool = False

    @staticmethod
    def plain(
        message_s: Floats, byte_s: Floats, soft: tuple[Floats, Floats] | None = None,
        *, held: bool = False,
    ) -> Cost:  # fmt: skip
        """Return a cost that is the same for all pairs of workers."""
        none = np.zeros_like(message_s)
        soft = soft or (none, none)
        return Cost(message_s, byte_s, *soft, message_s, byte_s, held)


@dataclass(frozen=True)
class _Message:
    source: int
    target: int
    size_bytes: float
    times: int
    near: bool


class Exchange:
    """The messages of one strategy with this many workers.

    Args:
        message_bytes: Size of a worker's gradients as sent.
    """

    def __init__(self, setting: Setting, message_bytes: float) -> None:
        self.setting, self.message_bytes = setting, message_bytes
        self.workers = setting.workers
        parts = setting.parts()
        names = [node.id for node in parts.nodes if node.rank is None]
        self._ids = {f"w{rank}": rank for rank in range(self.workers)}
        self._ids |= {name: self.workers + k for k, name in enumerate(names)}
        self.servers = len(names)
        self._phases = [self._compiled(phase) for phase in parts.phases]
        self._works = self._own_shares(parts.phases)
        name = setting.entry.name
        # Simulated links delay all messages of such a step at once.
        self._once = name in ("local_sgd", "gossip", "sharded") or self.servers > 0

    def _compiled(self, phase: Phase) -> tuple[Phase, list[_Message]]:
        return phase, [self._message(arrow) for arrow in phase.arrows]

    def _message(self, arrow: Arrow) -> _Message:
        size = arrow.size.factor * self.setting.share_of(arrow.size.unit) * self.message_bytes
        source, target = self._ids[arrow.source], self._ids[arrow.target]
        per_host = self.setting.per_host
        near = max(source, target) < self.workers and source // per_host == target // per_host
        return _Message(source, target, size, arrow.times, near and per_host > 1)

    def _own_shares(self, phases: tuple[Phase, ...]) -> list[float]:
        working = [
            k for k, phase in enumerate(phases) if "w0" in phase.busy and phase.title != "Optimizer"
        ]
        shares = [0.0] * len(phases)
        for k in working:
            shares[k] = 1.0 if len(working) == 1 else FORWARD if k == working[0] else 1 - FORWARD
        return shares

    # -- a run ---------------------------------------------------------------------------------

    def period(self, own: Floats, cost: Cost, first: int = 0) -> Floats:
        """Return the mean seconds of a step, over steps and workers, shape (draws,).

        Args:
            own: (steps, workers, draws) seconds of computation.
            first: Number of the first step: some messages are not part of every step.
        """
        if self.setting.alone:
            return np.asarray(self.paces(own, cost).mean(axis=0))
        clocks = np.zeros((self.workers + self.servers, own.shape[2]))
        for step in range(len(own)):
            self._step(clocks, own[step], cost, first + step)
        ends = clocks[: self.workers].mean(axis=0)
        return np.asarray(ends / len(own))

    def _step(self, clocks: Floats, own: Floats, cost: Cost, step: int) -> None:
        if self.setting.overlapped and self.workers > 1:
            self._buckets(clocks, own, cost)
            return
        for (phase, messages), share in zip(self._phases, self._works, strict=True):
            if share and phase.happens(step):
                clocks[: self.workers] += own * share
            if messages and phase.happens(step):
                self._send(clocks, messages, cost)

    def _send(self, clocks: Floats, messages: list[_Message], cost: Cost) -> None:
        if any(message.times > 1 for message in messages):
            self._ring(clocks, messages, cost)
        elif cost.held:
            self._held(clocks, messages, cost)
        else:
            self._ports(clocks, messages, cost)
        for message in messages:
            if message.target >= self.workers:
                clocks[message.target] += SERVED_S

    def _ring(self, clocks: Floats, messages: list[_Message], cost: Cost) -> None:
        """Let all workers of a ring meet: like all others, the last worker sends in all rounds."""
        members = sorted({message.source for message in messages})
        longest = np.zeros(clocks.shape[1])
        for message in {(m.size_bytes, m.times, m.near): m for m in messages}.values():
            message_s, byte_s = self._pair(message, cost)
            rounds = 1 if cost.held and self._once else message.times
            spent = rounds * message_s + message.times * (
                cost.soft_message_s + (byte_s + cost.soft_byte_s) * message.size_bytes
            )
            longest = np.maximum(longest, spent)
        clocks[members] = clocks[members].max(axis=0) + longest

    def _pair(self, message: _Message, cost: Cost) -> tuple[Floats, Floats]:
        if message.near:
            return cost.near_message_s, cost.near_byte_s
        return cost.message_s, cost.byte_s

    def _held(self, clocks: Floats, messages: list[_Message], cost: Cost) -> None:
        """Let senders delay their messages; each end has half of a message's other time."""
        begin, leaves = clocks.copy(), clocks.copy()
        paid: set[int] = set()
        count: dict[int, int] = {}
        for message in messages:
            source, target = message.source, message.target
            message_s, byte_s = self._pair(message, cost)
            half = (cost.soft_message_s + cost.soft_byte_s * message.size_bytes) / 2
            takes = byte_s * message.size_bytes
            payer = target if source >= self.workers else source
            if not (self._once and payer in paid):
                takes = takes + message_s
                paid.add(payer)
            if source >= self.workers:  # the worker delays the messages that it gets from a server
                came = np.maximum(clocks[target], begin[source]) + takes + 2 * half
                clocks[target] = came
                continue
            leaves[source] = leaves[source] + takes + half
            count[target] = count.get(target, 0) + 1
            if not self._once:
                clocks[target] = np.maximum(clocks[target], leaves[source] + half)
            if count[target] > 1:  # a receiver processes several messages one after the other
                clocks[target] = np.maximum(clocks[target], begin[target] + count[target] * half)
        for message in messages if self._once else ():  # all messages of a worker leave at once
            if message.source < self.workers:
                half = (cost.soft_message_s + cost.soft_byte_s * message.size_bytes) / 2
                came = leaves[message.source] + half
                clocks[message.target] = np.maximum(clocks[message.target], came)
        sources = sorted({m.source for m in messages if m.source < self.workers})
        if sources:
            clocks[sources] = np.maximum(clocks[sources], leaves[sources])

    def _ports(self, clocks: Floats, messages: list[_Message], cost: Cost) -> None:
        out, into = clocks.copy(), clocks.copy()
        ends = clocks.copy()
        pairs = {(message.source, message.target) for message in messages}
        for message in messages:
            source, target = message.source, message.target
            message_s, byte_s = self._pair(message, cost)
            soft = cost.soft_message_s + cost.soft_byte_s * message.size_bytes
            takes = byte_s * message.size_bytes + soft
            out[source] = out[source] + takes
            # The first byte can travel while the receiver's port is busy.
            into[target] = np.maximum(out[source] + message_s, into[target] + takes)
            if (target, source) in pairs:  # an exchange: each side waits for the other
                into[target] = np.maximum(into[target], clocks[target] + takes + message_s)
            ends[target] = np.maximum(ends[target], into[target])
            ends[source] = np.maximum(ends[source], out[source])
        clocks[:] = ends

    def _buckets(self, clocks: Floats, own: Floats, cost: Cost) -> None:
        """Reduce bucket after bucket, each when all workers have its gradients."""
        options, n = self.setting.options, self.workers
        size = max(float(options.get("bucket_mb", 25.0)), 1e-3) * 1e6
        buckets = int(min(max(np.ceil(self.message_bytes / size), 1), MOST_BUCKETS))
        part = self.message_bytes / buckets / n
        far = self.setting.per_host < n
        message_s = cost.message_s if far else cost.near_message_s
        byte_s = cost.byte_s if far else cost.near_byte_s
        each = 2 * (n - 1) * (
            message_s + cost.soft_message_s + (byte_s + cost.soft_byte_s) * part
        )  # fmt: skip
        end = clocks[:n].max(axis=0)
        for k in range(1, buckets + 1):
            ready = (clocks[:n] + own * (FORWARD + (1 - FORWARD) * k / buckets)).max(axis=0)
            end = np.maximum(end, ready) + each
        clocks[:n] = end

    # -- nobody waits for all -------------------------------------------------------------------

    def paces(self, own: Floats, cost: Cost) -> Floats:
        """Return the mean step of each asynchronous worker, shape (workers, draws)."""
        options = self.setting.options
        every = int(options.get("pull_every", 1))
        servers = max(self.servers, 1)
        size = self.message_bytes
        ways = 1 + 1 / every
        soft = servers * cost.soft_message_s + cost.soft_byte_s * size
        once = 1 if cost.held else servers
        away = ways * once * cost.message_s
        if cost.held:  # each worker has its own link, so no worker queues
            think = away + ways * cost.byte_s * size + (ways - 1) * soft
            stations = [soft / servers + SERVED_S] * servers
        else:
            # Messages that leave one port one after the other also arrive one after the other, so
            # they wait only at the first port.
            port = (cost.byte_s * size + soft) / servers
            think = away + port / every
            stations = [port + SERVED_S] * servers
        bound = options.get("max_staleness")
        if bound is not None and self.workers > 1:
            return self._bounded(own, think + sum(stations), int(bound))
        each = own.mean(axis=0)
        return np.asarray(each + think + self._served(each.mean(axis=0) + think, stations))

    def _served(self, think: Floats, stations: list[Floats]) -> Floats:
        """Return the seconds at the servers' ports in a cycle, by mean value analysis.

        All messages have one size, so on average half of the message in service remains (Reiser,
        IEEE Transactions on Communications 27(8), 1979).
        """
        queues = [np.zeros_like(think) for _ in stations]
        spent, rate = np.zeros_like(think), np.zeros_like(think)
        for n in range(1, self.workers + 1):
            each = [
                s * (1 + q - np.minimum(rate * s, 1.0) / 2)
                for s, q in zip(stations, queues, strict=True)
            ]
            spent = np.sum(each, axis=0)
            rate = n / (think + spent)
            queues = [rate * one for one in each]
        return spent

    def _bounded(self, own: Floats, exchange: Floats, bound: int) -> Floats:
        """Return each worker's mean step if none can be more than `bound` steps ahead."""
        steps, workers, draws = own.shape
        ends = np.zeros((steps + 1, workers, draws))
        for step in range(steps):
            ends[step + 1] = ends[step] + own[step] + exchange
            behind = step + 1 - bound
            if behind >= 1:
                ends[step + 1] = np.maximum(ends[step + 1], ends[behind].max(axis=0))
        return np.asarray(ends[-1] / steps)
