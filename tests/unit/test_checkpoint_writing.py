"""A checkpoint is whole or not there: full disks, damaged and hostile files."""

import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import metadata  # noqa: E402

from workbench.cookbook.recipe import Recipe  # noqa: E402
from workbench.engine.checkpoints.checkpoints import Checkpoints  # noqa: E402  # noqa: E402
from workbench.engine.telemetry.membership import Membership  # noqa: E402
from workbench.engine.torch import checkpoints as torch_checkpoints  # noqa: E402  # noqa: E402
from workbench.errors import RunError  # noqa: E402
from workbench.execution.launch import Recoverer  # noqa: E402  # noqa: E402
from workbench.session.checkpoints import claim, describe, described, verify  # noqa: E402
from workbench.shared import checkpoints  # noqa: E402  # noqa: E402
from workbench.shared.plan import make_plan  # noqa: E402  # noqa: E402
from workbench.shared.protocol import RunSpec  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.torch


PLAN = make_plan(Recipe("wb.fit()"), "mirrored", workers=2)


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
        checkpoint_every=5, prefix=prefix, resume=resume, run_id="run",
    )  # fmt: skip
    told = []
    context = SimpleNamespace(
        spec=spec,
        membership=Membership(rank),
        sync=True,
        trained=0,
        emit=lambda event: told.append((event.name, event.to_wire())),
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
    assert re.search("step 10 .*step 5", fields["text"])
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
    assert told[-1][0] == "warning"
    assert "worker" in told[-1][1]["text"]
    assert not list(tmp_path.iterdir())


def test_an_index_that_would_run_code_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch_checkpoints.write_state(tmp_path / "state", {"value": torch.ones(3)})
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(RunError, match=r"WB-RUN-030[\s\S]*posix\.system"):
        torch_checkpoints.read_state(tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_an_index_of_python_3_11_2_is_read(tmp_path):
    # Its enumerations are written as `getattr(class, name)`, as Debian 12's Python does.
    torch_checkpoints.write_state(tmp_path / "state", {"value": torch.ones(3)})
    index = tmp_path / "state" / ".metadata"
    found = pickle.loads(index.read_bytes())
    kind = metadata._MEM_FORMAT_ENCODING
    packed = []

    class AsIn3112(pickle._Pickler):
        def reducer_override(self, thing):
            if type(thing) is kind:
                packed.append(thing)
                return getattr, (type(thing), thing.name)
            return NotImplemented

    with index.open("wb") as file:
        AsIn3112(file).dump(found)
    assert packed
    assert torch_checkpoints.read_state(tmp_path / "state")["value"].tolist() == [1, 1, 1]


def test_an_index_gets_at_nothing_but_members_of_enumerations(tmp_path):
    class Hostile:
        def __reduce__(self):
            return getattr, (torch_checkpoints.Metadata, "__init__")

    torch_checkpoints.write_state(tmp_path / "state", {"value": torch.ones(3)})
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(RunError, match="WB-RUN-031"):
        torch_checkpoints.read_state(tmp_path / "state")


def flip(path, at=0.5):
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def two_written(folder):
    """Write steps 5 and 10 by two workers."""
    first, strategy, context, _ = begun(folder, workers=2)
    other, _, beside, _ = begun(folder, rank=1, workers=2)
    for step in (5, 10):
        context.trained = beside.trained = step
        strategy.value.fill_(step)
        first.save()
        other.save()
        first._writer.wait()
        other._writer.wait()
    assert [one.step for one in checkpoints.found(folder)] == [5, 10]


def test_every_file_has_its_checksum_and_nothing_else_is_left(tmp_path):
    two_written(tmp_path)
    whole = tmp_path / "step-10"
    files = {p.relative_to(whole).as_posix() for p in whole.rglob("*") if p.is_file()}
    assert files == {*checkpoints.at(whole).about["files"], checkpoints.MANIFEST}
    assert {name.partition("/")[0] for name in files} == {
        "state", "rank-0", "rank-1", checkpoints.MANIFEST,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["state/__0_0.distcp", "state/.metadata", "state/state.json", "rank-1/__0_0.distcp"]
)
def test_a_flipped_bit_is_named_and_the_last_whole_one_offered(tmp_path, name):
    two_written(tmp_path)
    verify(str(tmp_path / "step-10"), PLAN)
    flip(tmp_path / "step-10" / name)
    with pytest.raises(RunError, match=r"10.*WB-RUN-003") as refused:
        verify(str(tmp_path), PLAN)
    assert name in str(refused.value)
    assert f"wb.resume('{tmp_path}/step-5')" in str(refused.value)
    claim(replace(PLAN, checkpoint=str(tmp_path)), str(tmp_path / "step-5"))


def test_what_a_rank_alone_had_is_missed_only_where_it_is_needed(tmp_path):
    two_written(tmp_path)
    shutil.rmtree(tmp_path / "step-10" / "rank-1")
    shutil.rmtree(tmp_path / "step-5")
    with pytest.raises(RunError, match=r"(?s)WB-RUN-003.*rank-1/\S+.*workers=1\)"):
        verify(str(tmp_path), PLAN)
    verify(str(tmp_path), replace(PLAN, workers=1))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"version": null}', None])
def test_a_damaged_manifest_is_not_called_another_version(tmp_path, content):
    two_written(tmp_path)
    manifest = tmp_path / "step-10" / checkpoints.MANIFEST
    if content is None:
        flip(manifest, 0.02)  # still JSON
    else:
        manifest.write_bytes(content)
    with pytest.raises(RunError, match=r"(?s)10.*WB-RUN-003.*checkpoint\.json") as refused:
        checkpoints.at(tmp_path)
    assert "version" not in str(refused.value).replace("lacks: version", "")
    assert f"wb.resume('{tmp_path}/step-5')" in str(refused.value)
    manifest.unlink()
    with pytest.raises(RunError, match=r"WB-RUN-003[\s\S]*checkpoint\.json[\s\S]*missing"):
        checkpoints.at(tmp_path / "step-10")


def without_checksums(whole):
    """Make a checkpoint what earlier versions wrote."""
    about = json.loads((whole / checkpoints.MANIFEST).read_text())
    del about["files"], about["checksum"]
    (whole / checkpoints.MANIFEST).write_text(json.dumps(about))


def test_checkpoints_without_checksums_load_as_ever(tmp_path):
    two_written(tmp_path)
    without_checksums(tmp_path / "step-10")
    verify(str(tmp_path), PLAN)
    again, strategy, _, told = begun(tmp_path, rank=1, workers=2, resume=str(tmp_path / "step-10"))
    again.restore()
    assert (strategy.value == 10).all()
    assert told == []
    shutil.rmtree(tmp_path / "step-10" / "rank-1")
    again.restore()
    assert "rank-1" in told[-1][1]["text"]


def test_a_damaged_one_is_written_anew_when_the_run_comes_by(tmp_path):
    saving, strategy, context, _ = begun(tmp_path)
    at_step(saving, strategy, context, 5)
    at_step(saving, strategy, context, 10)
    flip(tmp_path / "step-10" / "state" / "__0_0.distcp")
    assert not checkpoints.is_whole(tmp_path / "step-10")
    again, strategy, context, _ = begun(tmp_path, resume=str(tmp_path / "step-5"))
    at_step(again, strategy, context, 10)
    assert checkpoints.is_whole(tmp_path / "step-10")
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-5"]


def recovering(folder, origin=""):
    """Return what decides where `run` goes on after a death, and what it has told."""
    told = []
    run = SimpleNamespace(
        resume_from=origin, folder=folder / "run", note=told.append, task=None, members=(),
        engines=(),
    )  # fmt: skip
    plan = replace(PLAN, checkpoint=str(folder), on_failure="replace")
    launch = SimpleNamespace(run=run, plan=plan, pool=SimpleNamespace(engines=None))
    return Recoverer(launch), told


def test_a_run_that_recovers_passes_over_what_is_damaged(tmp_path):
    two_written(tmp_path)
    recoverer, told = recovering(tmp_path)
    assert (recoverer._start().step, told) == (10, [])
    flip(tmp_path / "step-10" / "rank-1" / "__0_0.distcp")
    assert recoverer._start().step == 5
    (note,) = told
    assert "step 10 is damaged" in note
    assert "rank-1/__0_0.distcp" in note
    (tmp_path / "step-5" / checkpoints.MANIFEST).write_text("")
    assert recoverer._start() is None  # from its beginning
    origin = tmp_path / "elsewhere"
    two_written(origin)
    recoverer, _ = recovering(tmp_path, str(origin / "step-5"))
    assert recoverer._start().path == str(origin / "step-5")
    flip(origin / "step-5" / "state" / "__0_0.distcp")
    with pytest.raises(RunError, match=r"5.*WB-RUN-003"):
        recoverer._start()


def test_a_disk_that_stays_full_is_told_once_and_summed_up(tmp_path, monkeypatch):
    saving, strategy, context, told = begun(tmp_path)
    at_step(saving, strategy, context, 5)
    whole = torch_checkpoints.write_state

    def full(folder, state):
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(torch_checkpoints, "write_state", full)
    for step in range(10, 205, 5):
        at_step(saving, strategy, context, step)
    said = [fields["text"] for name, fields in told if name == "warning"]
    assert len(said) == 1
    assert all(step in said[0] for step in ("step 10", "step 5"))
    saving.conclude(failed=False)
    assert [name for name, _ in told[1:]] == ["warning", "warning"]
    last = told[-1][1]["text"]
    assert all(number in last for number in ("39", "10 to 200", "step 5"))
    saving, strategy, context, told = begun(tmp_path)
    for step in (205, 210, 215):
        monkeypatch.setattr(torch_checkpoints, "write_state", whole if step == 215 else full)
        at_step(saving, strategy, context, step)
    saving.conclude(failed=False)
    assert [name for name, _ in told] == ["warning", "warning", "checkpoint"]
    assert "step 215" in told[1][1]["text"]


def test_the_recipe_that_is_run_again_is_the_one_that_was_kept(tmp_path):
    run = SimpleNamespace(
        plan=replace(PLAN, checkpoint=str(tmp_path)), name="base", folder=tmp_path / "x"
    )
    describe(run)
    assert described(tmp_path)["name"] == "base"
    text = (tmp_path / checkpoints.RUN).read_text()
    (tmp_path / checkpoints.RUN).write_text(text.replace("wb.fit()", "wb.fat()"))
    with pytest.raises(RunError, match="WB-RUN-061"):
        described(tmp_path)
    lines = (tmp_path / checkpoints.RUN).read_text().splitlines()  # as its next step says
    (tmp_path / checkpoints.RUN).write_text("\n".join([*lines[:-3], lines[-3].rstrip(","), "}"]))
    assert described(tmp_path)["plan"]["recipe"]["source"] == "wb.fat()"


def test_what_is_damaged_is_said(tmp_path):
    saving, strategy, context, _ = begun(tmp_path)
    at_step(saving, strategy, context, 5)
    (tmp_path / "step-5" / "state" / "__0_0.distcp").write_bytes(b"half")
    again, _, _, _ = begun(tmp_path, prefix="run-2", resume=str(tmp_path / "step-5"))
    with pytest.raises(RunError, match=r"WB-RUN-003[\s\S]*cannot be read"):
        again.restore()
