"""Finds the fastest all-reduce for a message size, on this machine, with these workers.

The fastest algorithm depends on the size (rounds cost time, bytes cost time), on the number of
workers and on the machine. So all workers measure it together, once per cluster for each number of
workers and each power of two of bytes. Rank 0 remembers the result. The candidates run one after
another, for several rounds, with a little computation in between. In each round the time of the
last worker counts, because this worker did not wait. Over the rounds the lower quartile counts,
because other programs on the machine can only add time.

Between hosts one message can take as long as a step, and trying all algorithms can take longer than
the run. So the first message of each algorithm is compared: an algorithm that is several times
slower than the best is not tried again. If the first messages have used up the time for trying, the
remaining algorithms are not tried at all. Over a slow network the number of bytes decides. The
backend sends the fewest bytes possible. Between hosts the hierarchical algorithm sends fewer; it is
tried second there.

The backend's own all-reduce runs while backward is still computing, and needs no copy of the
gradients; the measurement shows neither advantage. So another algorithm must be twice as fast to be
chosen.

A separate thread exchanges the messages, while the training thread waits for it. The training
thread uses its core all the time. So on a busy machine, when a message arrives, the training thread
waits milliseconds until it runs again, in every round of every all-reduce. A thread that sleeps
most of the time runs at once. With more workers than cores, which is common on a laptop, this
decides how long a small all-reduce takes.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ....engine.debugging.marks import ALL_REDUCE, waits_in
from ....engine.torch.group import shutdown_group_sockets
from . import ALGORITHMS, BACKEND, AllReduce

if TYPE_CHECKING:
    from .links import Links

LARGEST_BYTES = 8 << 20  # beyond this only bandwidth counts, and the order stays the same
LEAST_GAIN = 0.5  # fraction of the backend's time that another algorithm can take at most
ROUNDS = 9
COMPUTE_S = 0.5e-3
BUDGET_S = 2.0
"""Time limit for trying all messages; the message that is running at this time is the last."""
HOPELESS = 4.0
"""Slower algorithms are not tried again; the limit is this multiple of the best first message."""
NOISE_S = 0.05
"""Shorter first messages are not compared, because connections and memory are new."""


@dataclass(frozen=True)
class Choice:
    """The choice for a size.

    Attributes:
        seconds: Time of one all-reduce by algorithm; empty if nothing was measured.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)

    def explain(self, size_bytes: int) -> str:
        """Return one sentence for the user."""
        kib = size_bytes / 1024
        size = f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"
        times = ", ".join(f"{name} {1e3 * took_s:.2f}" for name, took_s in self.seconds.items())
        return (
            f"Gradients ({size}) are averaged by `{self.name}`, the fastest algorithm here. "
            f"Measured times in ms: {times}."
        )


class Message(NamedTuple):
    """A message: this many numbers of a type, from a device; nothing is allocated for it."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        """Bytes of it."""
        return self.numel * self.dtype.itemsize


_known: dict[tuple[object, ...], Choice] = {}


@waits_in(ALL_REDUCE)
def choose(message: Message, links: Links, aside: Aside, *, simulated: bool = False) -> Choice:
    """Return the fastest algorithm for a message; all workers call it together.

    Only gloo on CPUs is compared: NCCL chooses its algorithm itself, and CUDA tensors would need
    copies on the host for the others.

    Args:
        aside: The thread on which all algorithms except the backend's will run.
        simulated: Whether faults delay messages: then the backend, whose messages cannot be
            delayed, does not take part, and the result is not remembered.
    """
    if links.size == 1 or (message.device.type != "cpu" and not simulated):
        return Choice(BACKEND)
    size_bytes = min(message.size_bytes, LARGEST_BYTES)
    probe = torch.zeros(size_bytes // message.dtype.itemsize, dtype=message.dtype)
    if simulated:
        names = [name for name in ALGORITHMS if name != BACKEND]
        return fastest(race(probe, links, aside, names, rounds=1))
    near = links.peers is not None
    key = (links.size, tuple(links.hosts), near, message.dtype, size_bytes.bit_length())
    choice = _recall(key, links)
    if choice is None:
        names = list(ALGORITHMS)
        # perhaps there is time for only two: the most promising come first
        if len(set(links.hosts)) > 1:
            names.sort(key=lambda name: name not in (BACKEND, "hierarchical"))
        measured = race(probe, links, aside, names, rounds=ROUNDS, budget_s=BUDGET_S)
        choice = _known[key] = fastest(measured)
    return choice


def _recall(key: tuple[object, ...], links: Links) -> Choice | None:
    """Return rank 0's stored choice, because a replaced engine has none."""
    names = list(ALGORITHMS)
    own = _known.get(key)
    index = torch.tensor([-1 if own is None else names.index(own.name)])
    dist.broadcast(index, 0, group=links.group)
    if int(index) < 0:
        return None
    name = names[int(index)]
    return own if own is not None and own.name == name else Choice(name)


@waits_in(ALL_REDUCE)
def race(
    probe: torch.Tensor,
    links: Links,
    aside: Aside,
    names: Sequence[str],
    *,
    rounds: int,
    budget_s: float = math.inf,
) -> dict[str, float]:
    """Return the seconds one all-reduce of `probe` takes by algorithm, equal on all workers.

    Args:
        budget_s: The time for all messages; algorithms after that are left out.
    """
    entrants: dict[str, Callable[[torch.Tensor], None]] = {}
    seconds: dict[str, float] = {}
    for name in names:
        entrants[name] = _entrant(AllReduce(name, links), aside)
        took = torch.tensor([_timed(entrants[name], probe)])  # connections are opened at first use
        dist.all_reduce(took, dist.ReduceOp.MIN, group=links.group)
        seconds[name] = float(took)
        if sum(seconds.values()) > budget_s:
            return seconds
    hopeless_s = max(NOISE_S, HOPELESS * min(seconds.values()))
    left = [name for name in seconds if seconds[name] <= hopeless_s]
    budget_s -= sum(seconds.values())
    each_s = sum(seconds[name] for name in left)
    rounds = rounds if rounds * each_s <= budget_s else int(budget_s / each_s)
    if rounds == 0:
        return seconds
    taken = torch.zeros(rounds, len(left))
    for row in taken:
        for column, name in enumerate(left):
            _compute()
            row[column] = _timed(entrants[name], probe)
    dist.all_reduce(taken, dist.ReduceOp.MIN, group=links.group)
    typical = taken.sort(dim=0).values[rounds // 4]
    return seconds | dict(zip(left, typical.tolist(), strict=True))


def _timed(entrant: Callable[[torch.Tensor], None], probe: torch.Tensor) -> float:
    began = time.perf_counter()
    entrant(probe)
    return time.perf_counter() - began


def _compute() -> None:
    """Keep the training thread busy for a moment, as in a step: a thread that slept runs sooner."""
    matrix, until = torch.ones(32, 32), time.perf_counter() + COMPUTE_S
    while time.perf_counter() < until:
        matrix @ matrix


def _entrant(all_reduce: AllReduce, aside: Aside) -> Callable[[torch.Tensor], None]:
    if all_reduce.name == BACKEND:
        return all_reduce
    return lambda probe: aside.run(lambda: all_reduce(probe))


def fastest(seconds: dict[str, float]) -> Choice:
    """Return the fastest, or the backend's own if nothing is clearly faster."""
    name = min(seconds, key=seconds.__getitem__)
    if seconds[name] > LEAST_GAIN * seconds.get(BACKEND, math.inf):
        name = BACKEND
    return Choice(name, seconds)


PATIENCE_S = 1.0


class Aside:
    """Runs tasks one after another on its own thread, which starts with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @waits_in(ALL_REDUCE)
    def run(self, task: Callable[[], None]) -> None:
        """Run a task there; return when it is done, or raise its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="workbench-links", daemon=True)
            self._thread.start()
        self._tasks.put(task)
        error = self._done.get()
        if error is not None:
            raise error

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            error: BaseException | None = None
            try:
                task()
            except BaseException as caught:
                error = caught
            self._done.put(error)
            del task, error

    @waits_in(ALL_REDUCE)
    def close(self) -> None:
        """End the thread; cancel a message that an interrupt left unfinished."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._tasks.put(None)
        thread.join(PATIENCE_S)
        if thread.is_alive():
            shutdown_group_sockets()
            thread.join(PATIENCE_S)
