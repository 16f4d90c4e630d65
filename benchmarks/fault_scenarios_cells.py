"""Errors and interrupts of cells and runs; each scenario ends with a check of the engines."""

from __future__ import annotations

import contextlib
import time

from fault_scenarios import WAIT_S, Stage, scenario, soon

from workbench.errors import RunError

TOGETHER = "import torch\nx = torch.ones(1)\ndist.all_reduce(x)\ntotal = x.item()\n"
FIT = """
import torch, time
from torch import nn
{before}
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
wb.fit(model, {data}, batch_size=32, loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**7, callbacks={callbacks})
"""
DATA = "wb.data.synthetic(256, shape=(64,), classes=10)"


def fit(before: str = "", data: str = DATA, callbacks: str = "()") -> str:
    return FIT.format(before=before, data=data, callbacks=callbacks)


def prove(stage: Stage, engines: int = 4) -> None:
    """Check that the next cell does an all-reduce on the same engines."""
    cluster = stage.cluster(engines)
    task = cluster.execute(TOGETHER)
    assert task.over.wait(WAIT_S), "the next cell hangs"
    assert task.failure() is None, str(task.failure())
    assert {found["total"] for found in cluster.pull(["total"]).values()} == {float(engines)}


def cell(stage: Stage, source: str, words: str) -> float:
    """Run a cell that must fail; return seconds from the stamp to its end."""
    stamp, cluster = stage.stamp(), stage.cluster()
    before = [engine.pid for engine in cluster.engines]
    task = cluster.execute(TOGETHER + source.replace("STAMP", stamp.code))
    assert task.over.wait(WAIT_S), "the cell hangs"
    ended = time.perf_counter()
    assert words in str(task.failure()), str(task.failure())
    assert [engine.pid for engine in cluster.engines] == before
    prove(stage)
    return ended - stamp.at_s


@scenario("one rank raises, the others wait in all_reduce", 2.0, command="%%distributed")
def cell_raises(stage: Stage) -> float:
    return cell(
        stage, "if rank == 1:\n    STAMP\n    raise ValueError('mine')\ndist.all_reduce(x)", "mine"
    )


@scenario("one rank raises, the others sleep", 2.0, command="%%distributed")
def cell_raises_others_sleep(stage: Stage) -> float:
    return cell(
        stage,
        "import time\nif rank == 1:\n    STAMP\n    raise ValueError('mine')\ntime.sleep(1000)",
        "mine",
    )


@scenario("one rank raises in its data, mirrored", 2.0, command="%%distributed mirrored")
def run_raises(stage: Stage) -> float:
    stamp, cluster = stage.stamp(), stage.cluster()
    hook = (
        "class Fail:\n    def on_step_end(self, step, logs):\n"
        f"        if rank == 1 and step == 20:\n            {stamp.code}\n"
        "            raise ValueError('mine')\n"
    )
    run = cluster.run(fit(hook, callbacks="[Fail()]"), strategy="mirrored", name="fails")
    with contextlib.suppress(RunError):
        run.wait(WAIT_S)
    ended = time.perf_counter()
    assert "mine" in str(run.error), run.error
    prove(stage)
    return ended - stamp.at_s


@scenario("Stop at a step boundary, mirrored", 1.0, command="run.stop()")
def stop_between_steps(stage: Stage) -> float:
    run = stage.cluster().run(fit(), strategy="mirrored", name="stopped")
    soon(lambda: run.history.totals.steps > 20)
    began = time.perf_counter()
    run.stop()
    run.wait(WAIT_S)
    ended = time.perf_counter()
    assert run.state == "stopped"
    prove(stage)
    return ended - began


def stop_while(stage: Stage, before: str, **parts: str) -> float:
    """Stop a run whose rank 1 does something; return how long it took."""
    stamp = stage.stamp()
    run = stage.cluster().run(
        fit(before.replace("STAMP", stamp.code), **parts), strategy="mirrored", name="stopped"
    )
    soon(lambda: stamp.written or run.is_over)
    began = time.perf_counter()
    run.stop()
    run.wait(WAIT_S)
    ended = time.perf_counter()
    assert run.state == "stopped"
    assert run.history.totals.steps > 0, "the partial history is gone"
    prove(stage)
    return ended - began


SLOW_DATA = """
class Slow(torch.utils.data.Dataset):
    asked = 0
    def __len__(self): return 256
    def __getitem__(self, i):
        Slow.asked += 1
        if rank == 1 and Slow.asked > 100:
            STAMP
            time.sleep(1000)
        return torch.zeros(64), 0
"""


@scenario("Stop while a rank's data hangs and the others wait in all_reduce", 3.0)
def stop_in_collective(stage: Stage) -> float:
    return stop_while(stage, SLOW_DATA, data="Slow()")


LOOP = """
class Loop:
    def on_step_end(self, step, logs):
        if rank == 1 and step == 20:
            STAMP
            while True: pass
"""


@scenario("Stop while a rank is in an endless loop and the others wait", 3.0)
def stop_endless_loop(stage: Stage) -> float:
    return stop_while(stage, LOOP, callbacks="[Loop()]")


def interrupt(stage: Stage, source: str) -> float:
    """Interrupt a cell; return how long it took."""
    stamp, cluster = stage.stamp(), stage.cluster()
    before = [engine.pid for engine in cluster.engines]
    task = cluster.execute(TOGETHER + source.replace("STAMP", stamp.code))
    soon(lambda: stamp.written)
    began = time.perf_counter()
    task.interrupt()
    assert task.over.wait(WAIT_S), "the cell hangs"
    ended = time.perf_counter()
    assert "Interrupted" in str(task.failure())
    assert [engine.pid for engine in cluster.engines] == before
    prove(stage)
    return ended - began


@scenario("interrupt of a cell whose ranks wait in all_reduce for one that sleeps", 3.0)
def interrupt_in_collective(stage: Stage) -> float:
    return interrupt(
        stage, "if rank == 1:\n    import time\n    STAMP\n    time.sleep(1000)\ndist.all_reduce(x)"
    )


@scenario("interrupt of an endless loop in a cell", 1.0)
def interrupt_endless_loop(stage: Stage) -> float:
    return interrupt(stage, "if rank == 0:\n    STAMP\nwhile True: pass")


@scenario("interrupt of time.sleep(1000) in a cell", 1.0)
def interrupt_sleep(stage: Stage) -> float:
    return interrupt(stage, "import time\nif rank == 0:\n    STAMP\ntime.sleep(1000)")


KERAS = """
import keras, time
class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 20:
            STAMP
            raise ValueError("mine")
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=100, batch_size=64, verbose=0,
          callbacks=[Fail()])
"""


@scenario("one rank raises under TensorFlow's multi-worker mirrored", 2.0, most=10)
def tensorflow_raises(stage: Stage) -> float:
    stamp, cluster = stage.stamp(), stage.cluster(2, "tensorflow")
    source = KERAS.replace("STAMP", stamp.code)
    run = cluster.run(source, strategy="multi_worker_mirrored", framework="tensorflow")
    with contextlib.suppress(RunError):
        run.wait(WAIT_S)
    ended = time.perf_counter()
    assert "mine" in str(run.error), run.error
    return ended - stamp.at_s
