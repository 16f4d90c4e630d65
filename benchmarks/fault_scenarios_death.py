"""Deaths of engines: how soon they are named, and how soon training continues without them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from typing import Any

from fault_scenarios import WAIT_S, Stage, scenario, soon

from workbench.errors import RunError

FIT = """
import torch, time
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=64,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7,
       callbacks=[lambda step, logs: time.sleep(0.005)])
"""
RANK = 1


def going(stage: Stage, strategy: str = "mirrored", **more: Any) -> Any:
    """Start a run and wait until it trains and has written its first checkpoint, if any."""
    run = stage.cluster().run(FIT, strategy=strategy, **more)
    soon(lambda: run.is_over or run.history.totals.steps >= 40)
    if folder := more.get("checkpoint"):
        soon(lambda: run.is_over or any(name.startswith("step-") and not name.endswith(".tmp")
                                        for name in os.listdir(folder)))  # fmt: skip
    assert not run.is_over, run.error
    return run


def kill(cluster: Any, engine: int) -> float:
    """SIGKILL an engine; return when."""
    pid = next(one.pid for one in cluster.engines if one.id == engine)
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return began


def named(stage: Stage, strategy: str, engine_of: Any) -> float:
    """Seconds from a kill until the run names the dead engine."""
    cluster, run = stage.cluster(), going(stage, strategy)
    engine = engine_of(run)
    began = kill(cluster, engine)
    soon(lambda: any("is gone" in note for note in run.history.story.notes))
    took_s = time.perf_counter() - began
    with contextlib.suppress(RunError):
        run.wait(WAIT_S)
    assert "SIGKILL" in str(run.error), str(run.error)
    cluster.restart([engine])
    return took_s


def again(stage: Stage, strategy: str, engine_of: Any, **more: Any) -> float:
    """Seconds from a kill until the first step after it."""
    cluster = stage.cluster()
    with tempfile.TemporaryDirectory() as folder:
        run = going(stage, strategy, checkpoint=folder, checkpoint_every=20, **more)
        engine = engine_of(run)
        began = kill(cluster, engine)
        soon(lambda: run.is_over or (run.recoveries and run.state == "running"))
        reached = run.recoveries[0].step if run.recoveries else 0
        soon(lambda: run.is_over or run.history.snapshot().step >= reached)
        took_s = time.perf_counter() - began
        assert not run.is_over, run.error
        run.stop()
        run.wait(WAIT_S)
    if dead := [one.id for one in cluster.engines if one.state == "dead"]:
        cluster.restart(dead)
    return took_s


def worker(run: Any) -> int:
    return int(run.members[RANK])


def server(run: Any) -> int:
    return int(max(run._everyone))


@scenario("a worker is SIGKILLed: named", 2.0, command="--on-failure stop")
def death_named(stage: Stage) -> float:
    return named(stage, "mirrored", worker)


@scenario("a server is SIGKILLed: named", 2.0, command="central_storage")
def server_death_named(stage: Stage) -> float:
    return named(stage, "central_storage", server)


@scenario("a worker is SIGKILLed: replaced, first step after it", 10.0, command="--checkpoint DIR")
def death_replaced(stage: Stage) -> float:
    return again(stage, "mirrored", worker)


@scenario(
    "a worker is SIGKILLed: the others go on, first step after it", 10.0,
    command="--on-failure continue",
)  # fmt: skip
def death_continued(stage: Stage) -> float:
    return again(stage, "mirrored", worker, on_failure="continue")


@scenario("a server is SIGKILLed: replaced, first step after it", 10.0, command="--checkpoint DIR")
def server_death_replaced(stage: Stage) -> float:
    return again(stage, "parameter_server", server)
