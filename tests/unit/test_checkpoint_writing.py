"""A checkpoint is whole or not there: full disks, damaged and hostile files."""

import os
import pickle
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from workbench import checkpoints  # noqa: E402
from workbench.engine import torch_checkpoints  # noqa: E402
from workbench.engine.checkpoints import Checkpoints  # noqa: E402
from workbench.errors import RunError  # noqa: E402
from workbench.protocol import RunSpec  # noqa: E402

pytestmark = pytest.mark.torch


class Trained:
    """A strategy that has a state of so many numbers."""

    def __init__(self, numbers):
        self.value = torch.zeros(numbers)

    def snapshot(self):
        return {"value": self.value.clone()}

    def own_state(self):
        return {}

    def load_state(self, state):
        self.value.copy_(state["value"])


def begun(folder, numbers=1000, rank=0, workers=1, prefix="run-1", resume=""):
    spec = RunSpec(
        "run", rank, workers, tuple(range(workers)), strategy="mirrored", checkpoint=str(folder),
        checkpoint_every=5, prefix=prefix, resume=resume,
    )  # fmt: skip
    told = []
    context = SimpleNamespace(
        spec=spec, sync=True, trained=0, emit=lambda name, **fields: told.append((name, fields))
    )
    saving, strategy = Checkpoints(context), Trained(numbers)
    saving.enter(strategy, lambda: {"base": 0})
    return saving, strategy, context, told


def at_step(saving, strategy, context, step):
    context.trained = step
    strategy.value.fill_(step)
    assert saving.step_done() == (step % 5 == 0)
    saving._writer.wait()


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    saving, strategy, context, told = begun(tmp_path, numbers=100_000)
    at_step(saving, strategy, context, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a quarter of the tensor
    try:
        at_step(saving, strategy, context, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    name, fields = told[-1]
    assert name == "warning"
    assert "step 10 could not be written; step 5 is the last good one" in fields["text"]
    assert sorted(os.listdir(tmp_path)) == ["step-5"]
    at_step(saving, strategy, context, 15)
    assert [one.step for one in checkpoints.found(tmp_path)] == [5, 15]
    again, other, _, _ = begun(tmp_path, numbers=100_000, resume=str(tmp_path / "step-15"))
    again.restore()
    assert torch.equal(other.value, strategy.value)


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
import test_checkpoint_writing as tests

def killed_at(at):
    saving, strategy, context, told = tests.begun({folder!r} + f"/{{at}}", numbers=100_000)
    tests.at_step(saving, strategy, context, 5)
    written = [0]
    save = os.fsync
    def fsync(handle):
        written[0] += 1
        if written[0] == at:
            os.kill(os.getpid(), 9)
        save(handle)
    os.fsync = fsync
    tests.at_step(saving, strategy, context, 10)

for at in {moments}:
    pid = os.fork()  # importing torch for each takes seconds
    if pid == 0:
        try:
            killed_at(at)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, at
"""
MOMENTS = [1, 3, 4, 6]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where processes were killed while they wrote, by the moment."""
    folder = tmp_path_factory.mktemp("killed")
    for at in MOMENTS:
        (folder / str(at)).mkdir()
    code = KILLED.format(tests=os.path.dirname(__file__), folder=str(folder), moments=MOMENTS)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("at", MOMENTS)
def test_killed_at_any_moment_of_a_write_the_last_good_one_stands(killed, at):
    folder = killed / str(at)
    last = checkpoints.latest(folder)
    assert last.step in (5, 10)
    saving, strategy, *_ = begun(folder, numbers=100_000, prefix="run-2", resume=last.path)
    saving.restore()
    assert (strategy.value == last.step).all()
    assert not list(folder.glob("*.tmp"))  # the next run sweeps up


def test_two_are_kept(tmp_path):
    saving, strategy, context, _ = begun(tmp_path)
    for step in range(1, 23):
        at_step(saving, strategy, context, step)
    assert [one.step for one in checkpoints.found(tmp_path)] == [15, 20]


def test_a_part_that_does_not_come_costs_the_checkpoint(tmp_path):
    first, _, context, _ = begun(tmp_path, workers=2)
    context.trained = 5
    first.save()
    first.conclude(failed=True)  # the other worker has died
    assert checkpoints.latest(tmp_path) is None
    assert not list(tmp_path.glob("step-*"))


def test_a_worker_that_fails_while_another_writes_costs_the_checkpoint_at_once(
    tmp_path, monkeypatch
):
    """The failing worker must not pull the folder from under rank 0, nor be overheard by it."""
    first, _, context, told = begun(tmp_path, workers=2)
    other, _, beside, _ = begun(tmp_path, rank=1, workers=2)
    writes, whole = [], torch_checkpoints.write_state

    def full(folder, state):
        whole(folder, state)
        writes.append(folder.name)
        if folder.name == ".rank-1":
            raise OSError(28, "No space left on device")
        if folder.name == ".rank-0":
            beside.trained = 5
            other.save()
            other._writer.wait()
        return 0

    monkeypatch.setattr(torch_checkpoints, "write_state", full)
    context.trained = 5
    first.save()
    first._writer._thread.join(10)
    assert not first._writer._thread.is_alive()
    assert writes == [".rank-0", ".rank-1", "state"]
    assert "another worker could not write its part" in told[-1][1]["text"]
    assert not list(tmp_path.iterdir())


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch_checkpoints.write_state(tmp_path / "state", {"value": torch.ones(3)})
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(RunError, match=r"posix\.system"):
        torch_checkpoints.read_state(tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_what_is_damaged_is_said(tmp_path):
    saving, strategy, context, _ = begun(tmp_path)
    at_step(saving, strategy, context, 5)
    (tmp_path / "step-5" / "state" / "__0_0.distcp").write_bytes(b"half")
    again, _, _, _ = begun(tmp_path, prefix="run-2", resume=str(tmp_path / "step-5"))
    with pytest.raises(RunError, match="cannot be read"):
        again.restore()
