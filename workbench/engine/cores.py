"""Keeps a worker to its share of the host's cores where its thread pools cannot be resized.

TensorFlow fixes the size of its thread pool for the life of the process at its first operation. A
pool that were sized for one run would fake the speed-up of another, so it is sized for the whole
host, and a worker that shares the host with others is kept to some of its cores meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def limited(of: int, workers: int, position: int) -> Iterator[None]:
    """Let all threads of this process run on this worker's share of the host's cores only.

    Does nothing where the system cannot (not Linux); where there are fewer cores than workers,
    which the system shares out more evenly; and where a container's quota gives fewer cores than
    it sees, as the first ones would then be every container's.

    Args:
        of: Cores of the host that the run has in all.
        workers: How many of them share these cores.
        position: Which one this is, from 0.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 < workers <= of or of != len(allowed):
        yield
        return
    count = of // workers
    _keep_to(allowed[position * count : (position + 1) * count])
    try:
        yield
    finally:
        _keep_to(allowed)


def _keep_to(cores: Collection[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)
