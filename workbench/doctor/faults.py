"""The stage of `--gpu-test` that causes faults on purpose, in a separate process.

Each fault occurs in a cell on two engines, where one engine waits for the other in a collective.
The promises are: the prompt returns soon, engines keep their process and variables if possible, and
the next cell is correct.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .children import Child, main
from .stages import STEP_S, Place, cell, cluster_of, end, places, slug

PROMPT_S = 15.0
"""Longest time until the prompt returns."""

START = "import torch, torch.distributed as dist, time, os\nkept = 41 + rank\n"
WAIT = "x = torch.ones(4, device=device)\ndist.all_reduce(x)\n"
AFTER = (
    "import torch, torch.distributed as dist\n"
    "x = torch.full((4,), float(rank + 1), device=device)\ndist.all_reduce(x)\n"
    "found = x.tolist() == [3.0] * 4\n"
)


@dataclass(frozen=True)
class Fault:
    """A fault on rank 1.

    Attributes:
        source: The code of rank 1 while rank 0 waits for it.
        keeps: Whether engine 1 promises to keep its process; engine 0 always does.
        press: Whether the user interrupts the cell.
        words: Text that the error must contain.
        kinds: Kinds of devices with this fault; empty: all.
    """

    name: str
    title: str
    source: str
    keeps: bool = True
    press: bool = False
    words: str = ""
    kinds: tuple[str, ...] = ()


OOM = (
    "if torch.device(device).type == 'cpu':\n"
    "    raise torch.OutOfMemoryError('simulated: no memory is left')\n"
    "torch.empty(1 << 46, device=device)"
)
ASSERT = (
    "torch.zeros(4, device=device)[torch.tensor([9], device=device)]\n"
    "torch.cuda.synchronize()"
)  # fmt: skip
FAULTS = (
    Fault("interrupt", "interrupt while rank 1 sleeps", "time.sleep(120)", press=True),
    Fault("error", "ValueError on rank 1", "time.sleep(1)\nraise ValueError('on purpose')",
          words="on purpose"),
    Fault("memory", "out of memory on rank 1", OOM, words="memory"),
    Fault("killed", "SIGKILL of rank 1", "time.sleep(1)\nos.kill(os.getpid(), 9)", keeps=False,
          words="SIGKILL"),
    Fault("assert", "device-side assert on rank 1", ASSERT, keeps=False, kinds=("cuda",)),
)  # fmt: skip
QUICK = ("interrupt", "error")


def faults(child: Child) -> None:
    """Cause each fault, at every place with two workers."""
    for place in places(child):
        if place.workers != 2:
            continue
        with child.trying(f"faults.{slug(place)}", f"faults on {place.title}"):
            _on(child, place)


def _on(child: Child, place: Place) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(cluster_of(child, place))
        for fault in FAULTS:
            if child.asked["quick"] and fault.name not in QUICK:
                continue
            id = f"faults.{slug(place)}.{fault.name}"
            what = f"{place.title}, fault test: {fault.title}"
            if fault.kinds and place.devices not in fault.kinds:
                child.say("unknown", id, what, f"needs {', '.join(fault.kinds)}")
                continue
            try:
                found, wrong, figures = provoke(cluster, fault)
            except Exception as error:  # the next fault gets a complete cluster
                child.say("fail", id, what, f"{type(error).__name__}: {str(error)[:300]}")
                end(cluster)
                cluster = stack.enter_context(cluster_of(child, place))
                continue
            child.say("fail" if wrong else "ok", id, what, wrong or found, **figures)


def provoke(cluster: Any, fault: Fault) -> tuple[str, str, dict[str, Any]]:
    """Cause the fault; return observations, deviations from the promise, and figures."""
    cell(cluster, START + AFTER)
    before = pids(cluster)
    body = "\n".join(f"    {line}" for line in fault.source.splitlines())
    task = cluster.execute(
        f"if rank == 1:\n{body}\nelse:\n    {WAIT.replace(chr(10), chr(10) + '    ')}"
    )
    began = time.perf_counter()
    if fault.press:
        time.sleep(2)
        began = time.perf_counter()
        task.interrupt()
    if not task.over.wait(2 * PROMPT_S):
        print(cluster.stacks(), flush=True)
        raise TimeoutError(f"the cell has not ended within {2 * PROMPT_S:g} s")
    prompt_s = time.perf_counter() - began
    error = task.failure()
    wrong = (
        []
        if prompt_s < PROMPT_S
        else [f"the cell needed {prompt_s:.1f} s to end, but the limit is {PROMPT_S:g} s"]
    )
    if fault.words and fault.words.lower() not in str(error).lower():
        said = f"the error does not contain {fault.words!r}: {str(error)[:200]}"
        wrong.append("the cell ended without an error" if error is None else said)
    wrong += _after(cluster, fault, before)
    figures = {"prompt_s": round(prompt_s, 2)}
    found = f"the cell needed {prompt_s:.1f} s to end"
    if not wrong:
        found += ", and the results of the next cell were correct"
    return found, "; ".join(wrong), figures


def _after(cluster: Any, fault: Fault, before: Mapping[int, int]) -> list[str]:
    """Return the deviations from the promises after the cell has ended."""
    dead = [engine.id for engine in cluster.engines if engine.state == "dead"]
    if dead:
        cluster.restart(dead)
    cluster.claim()  # engines that were being replaced are ready now
    wrong: list[str] = []
    soon(lambda: len(cluster.worker_ids) == 2)
    found = cell(cluster, AFTER, 2 * STEP_S)
    if not all(found.values()):
        wrong.append(f"the next cell has wrong results: {found}")
    now, keepers = pids(cluster), [0, 1] if fault.keeps else [0]
    wrong += [f"a new process replaced engine {e}" for e in keepers if now.get(e) != before[e]]
    if not wrong:
        kept = cluster.pull(["kept"], keepers)
        wrong += [f"engine {e} lost its variables" for e in keepers if kept[e]["kept"] != 41 + e]
    return wrong


def pids(cluster: Any) -> dict[int, int]:
    """Return the process of each engine."""
    return {engine.id: engine.pid for engine in cluster.engines}


def soon(condition: Callable[[], bool], limit_s: float = STEP_S) -> None:
    """Wait until a condition holds or the time is over; the next check shows which."""
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


if __name__ == "__main__":
    main({"faults": faults})
