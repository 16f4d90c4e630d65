"""Checkpoints in the notebook: written by real engines, gone on from, and never half of one."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.errors import PlanError, RunError
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import torch
from torch import nn
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 10)).double()
x, y = torch.randn(96, 64, dtype=torch.float64), torch.randint(0, 10, (96,))
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=32,
       optimizer=lambda p: torch.optim.Adam(p, 0.01), steps=12)
"""


def same(one, other):
    return all(np.array_equal(one[key], other[key]) for key in other) and one.keys() == other.keys()


def test_a_cell_is_gone_on_with_by_one_line(book, cluster, tmp_path):
    kept = tmp_path / "kept"
    whole = book.ok(f"%%distributed mirrored --steps 20 --name whole\n{FIT}")
    line = f"%%distributed mirrored --name first --checkpoint {kept} --checkpoint-every 5"
    book.ok(f"{line} --steps 12\n{FIT}")
    assert whole is not None
    assert checkpoints.latest(kept).step == 12
    shown = book.refused(
        f"{line} --steps 20\n{FIT}", "first at step 12", "wb.resume(", "WB-PLAN-097"
    )
    assert isinstance(shown.error, PlanError)
    run = wb.resume(kept / "step-10", steps=20, checkpoint=tmp_path / "other").wait(60)
    assert run.name == "first"
    assert same(run.weights(), wb.runs["whole"].weights())
    assert run.history["step"].min() == 10
    assert run.history["step"].max() == 19
    assert any("step 10" in note for note in run.history.story.notes)
    assert checkpoints.latest(tmp_path / "other").step == 20
    over = wb.resume(tmp_path / "other").wait(60)
    assert over.history.totals.steps == 0
    assert any("step 20" in one and "epochs" in one for one in over.history.story.notes)


def test_another_number_of_workers_and_another_strategy(book, cluster, tmp_path):
    plain = FIT.replace("nn.Dropout(0.2), ", "")
    whole = cluster.run(plain, strategy="one_device", steps=16).wait(60)
    cluster.run(
        plain, strategy="mirrored", steps=9, checkpoint=str(tmp_path), checkpoint_every=4
    ).wait(60)
    one = wb.resume(tmp_path / "step-8", workers=1, steps=16, checkpoint=tmp_path / "a").wait(60)
    other = wb.resume(
        tmp_path / "step-8", strategy="sharded", steps=16, checkpoint=tmp_path / "b"
    ).wait(60)
    for run in (one, other):
        for key, value in whole.weights().items():
            assert np.abs(run.weights()[key] - value).max() <= 1e-10


def test_a_worker_that_dies_while_writing_leaves_the_last_good_one(book, cluster, tmp_path):
    run = cluster.run(
        SLOWLY + FIT, strategy="mirrored", steps=200, checkpoint=str(tmp_path), checkpoint_every=5,
        on_failure="stop",
    )  # fmt: skip
    # The second write has begun, and will not end by itself.
    assert soon(lambda: (tmp_path / "half").exists())
    assert any(tmp_path.glob("step-10.*.tmp"))
    pid = int((tmp_path / "half").read_text())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunError):
        run.wait(60)
    assert [one.step for one in checkpoints.found(tmp_path)] == [5]
    cluster.restart()
    again = _resumed(tmp_path, FIT, 12)
    whole = cluster.run(FIT, strategy="mirrored", steps=12).wait(60)
    assert same(again.weights(), whole.weights())
    assert not list(tmp_path.glob("*.tmp"))


SLOWLY = """
import importlib, os, threading
from pathlib import Path
import workbench.engine.torch.checkpoints as writing
importlib.reload(writing)  # whatever an earlier cell has left there
whole = writing.write_state
def half(folder, state):
    if rank == 0 and "step-10." in str(folder) and folder.name == "state":
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
        (folder.parent.parent / "half").write_text(str(os.getpid()))
        threading.Event().wait()
    return whole(folder, state)
writing.write_state = half
"""


def _resumed(folder: Path, cell: str, steps: int):
    """Resume with the cell as it should be: the one that was saved never ends a write."""
    about = json.loads((folder / checkpoints.RUN).read_text())
    about["plan"]["recipe"]["source"] = cell
    del about["checksum"]  # changed by hand
    (folder / checkpoints.RUN).write_text(json.dumps(about))
    return wb.resume(folder, steps=steps).wait(60)


FULL = """
import errno, importlib
import workbench.engine.torch.checkpoints as writing
importlib.reload(writing)  # whatever an earlier cell has left there
whole = writing.write_state
def full(folder, state):
    size = whole(folder, state)
    if rank == WHO and "step-10." in str(folder):
        raise OSError(errno.ENOSPC, "No space left on device")
    return size
writing.write_state = full
"""


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_costs_a_checkpoint_not_the_run(book, cluster, tmp_path, who):
    cell = FULL.replace("WHO", str(who)) + FIT + "\nwriting.write_state = whole\n"
    run = cluster.run(
        cell, strategy="mirrored", steps=17, checkpoint=str(tmp_path), checkpoint_every=5
    ).wait(60)
    assert run.state == "finished"
    assert [one.step for one in checkpoints.found(tmp_path)] == [15, 17]
    warnings = " ".join(run.history.story.notes)
    assert "step 10" in warnings
    assert "step 5" in warnings
    assert not list(tmp_path.glob("*.tmp"))


LATE = """
import errno, importlib, threading
from pathlib import Path
import workbench.engine.checkpoints.checkpoints as parts
import workbench.engine.torch.checkpoints as writing
importlib.reload(writing)  # whatever an earlier cell has left there
whole, give_up = writing.write_state, parts.Writer._give_up
given_up = Path(FLAG)
def late(folder, state):
    if f"step-{AT}." in str(folder):
        if rank == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        while not given_up.exists():
            threading.Event().wait(0.01)
    return whole(folder, state)
def tell(*args):
    give_up(*args)
    if rank == 0:
        given_up.touch()
writing.write_state, parts.Writer._give_up = late, tell
"""


@pytest.mark.parametrize("at", [10, 17])  # a later one follows; none does
def test_a_part_that_comes_after_the_checkpoint_was_given_up_is_not_left(
    book, cluster, tmp_path, at
):
    own = LATE.replace("FLAG", repr(str(tmp_path / "given-up"))).replace("AT", str(at))
    back = "writing.write_state, parts.Writer._give_up = whole, give_up"
    try:
        run = cluster.run(
            own + FIT, strategy="mirrored", steps=17, checkpoint=str(tmp_path / "c"),
            checkpoint_every=5,
        ).wait(60)  # fmt: skip
    finally:
        book.ok(f"%%distributed\n{back}")
    assert run.state == "finished"
    assert [one.step for one in checkpoints.found(tmp_path / "c")] == (
        [15, 17] if at == 10 else [10, 15]
    )
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_a_run_that_is_stopped_is_saved_where_it_stopped(book, cluster, tmp_path):
    run = cluster.run(
        FIT, strategy="mirrored", steps=1_000_000, checkpoint=str(tmp_path), checkpoint_every=99_999
    )  # fmt: skip
    assert soon(lambda: run.history.totals.steps >= 5)
    run.stop()
    run.wait(30)
    assert run.state == "stopped"
    assert checkpoints.latest(tmp_path).step == run.history["step"].max() + 1
