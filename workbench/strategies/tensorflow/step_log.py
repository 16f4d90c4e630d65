"""What the marks of each step saw, kept beside the replicas until the loop asks for it.

A call into Python from within a graph costs 0.15 to 0.3 ms: TensorFlow hands it to a thread of its
own, which has to be woken and to get Python's lock. So nothing is told to Python while a step is
under way. Each device that holds replicas has a variable, a list of numbers to which every step
appends a row; the loop reads it when its call has ended, for 15 us a device. Between two calls
there may be any number of steps (`steps_per_execution`).

    row of a device:  for each of its replicas
                          began, samples, delay of data, delay of work, loss, 1 if it was seen,
                          ready x reductions
                      reduced x reductions      on the device of the first replica only
                      reductions                how many all-reduces the step had

A row ends with what tells its length, so a list is read from its end: where nobody has read it for
long, it has lost its oldest numbers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops.gen_resource_variable_ops import read_variable_op

from ..base import NAN

FIRST_READY = 6
"""Numbers of a replica before its first ready time."""

MOST = 1 << 15
"""Numbers that a device keeps at most: thousands of steps in one call."""

_CLEARED = 512  # a list that was read and is longer is emptied: each step copies it
_CLOSE_S = 20e-6


@dataclass
class Stamps:
    """What was seen of one replica in one step.

    Attributes:
        ready_s: On the clock of the replica's own work, which stands still while it is blocked.
        exposed_s: How long it was blocked in all-reduces.
        injected_s: Delays it spent after it had begun.
        has_loss: Whether the model's loss was seen; then NaN means that it is no number.
        eager: Whether it was computed without a graph.
    """

    began_s: float
    ready_s: float
    exposed_s: float
    loss: float
    samples: int
    injected_s: float
    has_loss: bool = False
    eager: bool = False


class StepLog:
    """The rows of all replicas of an engine.

    Args:
        hosts: By replica, the device that keeps its numbers. A word from one device to another
            costs as much as all marks together, so each keeps its own.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._lists = [
            _List(host, [i for i, other in enumerate(hosts) if other == host])
            for host in dict.fromkeys(hosts)
        ]
        self._eager: list[list[Stamps]] = []
        self._offset_s = NAN

    def append(self, parts: Sequence[Sequence[Any]], reduced: Sequence[Any]) -> None:
        """Have the graph that is being traced append a row.

        Args:
            parts: By replica, vectors that hold its numbers.
            reduced: When each all-reduce was done.
        """
        for one in self._lists:
            one.append([part for index in one.replicas for part in parts[index]], reduced)

    def keep(self, replicas: Sequence[Sequence[float]], reduced: Sequence[float]) -> None:
        """Keep a step that was computed without a graph."""
        offset_s = self._offset()
        self._eager.append([_stamps(own, reduced, offset_s, eager=True) for own in replicas])

    def take(self) -> list[list[Stamps]]:
        """Return the steps done since the last call, by replica; forget them."""
        steps, self._eager = self._eager, []
        lists = [one.take() for one in self._lists]
        # A step that failed may have left a row on some devices only.
        count = min(len(rows) for rows in lists)
        if not count:
            return steps
        offset_s, replicas = self._offset(), sum(len(one.replicas) for one in self._lists)
        for number in range(-count, 0):
            row = [rows[number] for rows in lists]
            reduced = row[0].reduced
            step: list[Any] = [None] * replicas
            for one, own in zip(self._lists, row, strict=True):
                for index, numbers in zip(one.replicas, own.replicas, strict=True):
                    step[index] = _stamps(numbers, reduced, offset_s)
            steps.append(step)
        return steps

    def clear(self) -> None:
        """Forget everything: what was computed while nobody measured."""
        self._eager = []
        for one in self._lists:
            one.clear()

    def _offset(self) -> float:
        """Return what is to be added to TensorFlow's time to get that of `perf_counter`."""
        for _ in range(3):
            before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
            if after - before < _CLOSE_S or self._offset_s != self._offset_s:
                self._offset_s = (before + after) / 2 - wall
            if after - before < _CLOSE_S:
                break
        return self._offset_s


@dataclass
class _Row:
    """One step on one device."""

    replicas: list[list[float]]
    reduced: list[float]


class _List:
    """The numbers of one device; `replicas` are those it holds."""

    def __init__(self, host: str, replicas: list[int]) -> None:
        self.replicas = replicas
        self._host, self._read = host, 0
        # Made directly: a strategy would make a copy on each device.
        with tf.init_scope(), tf.device(host):
            self._empty = tf.identity(tf.zeros(0, tf.float64))
            self._variable = resource_variable_ops.ResourceVariable(
                self._empty, shape=tf.TensorShape([None]), trainable=False
            )

    def append(self, parts: list[Any], reduced: Sequence[Any]) -> None:
        handle = self._variable.handle
        count = tf.constant(len(reduced), tf.float64)
        with tf.device(self._host):
            end = tf.stack([*reduced, count] if 0 in self.replicas else [count])
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
            joined = tf.concat([before, *parts, end], 0)[-MOST:]
            tf.raw_ops.AssignVariableOp(resource=handle, value=joined)

    def take(self) -> list[_Row]:
        tensor = read_variable_op(self._variable.handle, tf.float64)
        numbers: list[float] = memoryview(tensor)[self._read :].tolist()  # type: ignore[assignment]
        held, first = len(self.replicas), 0 in self.replicas
        rows: list[_Row] = []
        end = len(numbers)
        while end:
            count = int(numbers[end - 1])
            width = FIRST_READY + count
            begin = end - 1 - held * width - (count if first else 0)
            if begin < 0:
                break
            ends = range(begin + width, end, width)
            own = [numbers[stop - width : stop] for stop in ends[:held]]
            rows.append(_Row(own, numbers[begin + held * width : end - 1]))
            end = begin
        self._read += len(numbers)
        if self._read > _CLEARED:
            self.clear()
        rows.reverse()
        return rows

    def clear(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._variable.handle, value=self._empty)
        self._read = 0


def _stamps(
    own: Sequence[float], reduced_s: Sequence[float], offset_s: float, *, eager: bool = False
) -> Stamps:
    """Read a replica's numbers of one step."""
    began_s, samples, data_s, delay_s, loss, seen = own[:FIRST_READY]
    exposed_s = blocked_s = 0.0
    ready_s = NAN
    for ready_s, after_s in zip(own[FIRST_READY:], reduced_s, strict=True):
        exposed_s += blocked_s
        blocked_s = max(0.0, after_s - ready_s)
    # A delay of the data is spent later, with the others.
    began_s += data_s + offset_s
    ready_s += offset_s - exposed_s
    return Stamps(
        began_s, ready_s, exposed_s + blocked_s, loss, int(samples), delay_s, bool(seen), eager
    )
