"""The same runs twice over, with kills and interrupts: nothing has grown the second time."""

import gc
import importlib.util
import random
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from lending import lent
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.execution import registry

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"
ROUNDS = [
    ("mirrored", 2, "none"),
    ("parameter_server", 2, "kill"),
    ("model_split", 3, "interrupt"),
    ("one_device", 1, "raise"),
    ("central_storage", 3, "none"),
    ("gossip", 2, "interrupt"),
    ("mirrored", 3, "kill"),
]
LEFT = """
import gc, sys
gc.collect()
ours = {}
for thing in gc.get_objects():
    kind = type(thing)
    if str(kind.__module__).startswith("workbench."):
        ours[kind.__qualname__] = ours.get(kind.__qualname__, 0) + 1
    elif kind is type(lambda: 0) and thing.__name__ == "_distributed_excepthook":
        ours["torch's hooks"] = ours.get("torch's hooks", 0) + 1
del thing
hook = sys.excepthook.__name__
"""
SLACK = {"files": 2, "threads": 1, "engine_files": 8, "kernel_mb": 8}


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["soak"]


def test_nothing_grows_over_mixed_runs_with_faults(soak):
    dice = random.Random(1)
    counts = []
    with lent(2) as cluster:
        for _ in range(3):
            ends = [soak.one(cluster, soak.Round(*what), dice) for what in ROUNDS]
            assert not any("HUNG" in end for end in ends)
            assert [end for end in ends if end.startswith("none")] == ["none: finished"] * 2
            counts.append(soak.count(len(counts)))
    _, before, after = counts  # the first time is for pools, caches and servers
    for name in ("files", "threads", "processes", "engine_files", "shared_memory", "kernel_mb"):
        grown = getattr(after, name) - getattr(before, name)
        assert grown <= SLACK.get(name, 0), f"{name}: {before} then {after}"


def left_on_engines(cluster):
    """Return how many objects of ours each engine holds, by kind, and its hook for exceptions."""
    task = cluster.execute(LEFT)
    task.over.wait()
    assert task.failure() is None
    held = cluster.pull(["ours", "hook"], cluster.worker_ids)
    return {engine: (values["ours"], values["hook"]) for engine, values in held.items()}


def test_engines_hold_nothing_more_after_many_runs_than_after_a_few(soak):
    dice = random.Random(1)
    with lent(2) as cluster:
        before = None
        for times in (2, 3):
            for _ in range(times):
                for strategy in ("mirrored", "parameter_server"):
                    assert "finished" in soak.one(cluster, soak.Round(strategy, 2, "none"), dice)
            after = left_on_engines(cluster)
            before = before or after
        assert len(after) == 2
        for engine, (objects, hook) in after.items():
            assert hook != "_distributed_excepthook"
            more = {kind: (before[engine][0].get(kind, 0), n) for kind, n in objects.items()}
            assert {kind: n for kind, n in more.items() if n[1] > n[0]} == {}
            assert objects.get("RunContext", 0) == objects.get("Recorder", 0) == 0


def test_the_kernel_lets_go_of_old_runs_and_they_can_still_be_read(soak, monkeypatch):
    monkeypatch.setattr(registry, "AWAKE", 2)
    dice = random.Random(1)
    with lent(2) as cluster:
        ends = [soak.one(cluster, soak.Round("mirrored", 2, "none"), dice)]
        run = wb.runs["mirrored"]
        seen = {name: run.history[name] for name in run.history.columns}
        summary = run.summarise()
        gone = [weakref.ref(run.task), weakref.ref(run.history._table)]
        for fault in ("kill", "none", "interrupt", "none"):
            ends.append(soak.one(cluster, soak.Round("mirrored", 2, fault), dice))
            gone.append(weakref.ref(wb.runs["mirrored"].task))
        assert not any("HUNG" in end for end in ends)
        # Those of the killed engine's run too, once the threads that would have ended it are over.
        assert soon(lambda: gc.collect() >= 0 and not any(ref() for ref in gone[:4]))
        assert len(cluster.hearing._runs) <= 2
        assert len(cluster.hearing.folders) == len(ends)
        assert run.history.rests
        assert run.history.nbytes == 0
        for name, column in seen.items():
            np.testing.assert_array_equal(run.history[name], column)
        for name in ("steps", "final_loss", "parts_s", "share", "sent_bytes"):
            np.testing.assert_allclose(getattr(run.summarise(), name), getattr(summary, name))
        assert run.name in repr(run.summary())
