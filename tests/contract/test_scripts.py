"""Scripts that know nothing of Workbench are recorded as they are, and train the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from needs import need
from torchrun_scripts import GPT, MULTIGPU
from worker_reports import Report, clean, failures
from workers import Workers

pytestmark = pytest.mark.torch

BEGINS = """
import contextlib, copy, io, os, pickle, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD = int(os.environ["WORLD_SIZE"])
torch.manual_seed(3)
X, Y = torch.randn(64, 8), torch.randn(64, 1)
DATA = TensorDataset(X, Y)

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)

def step(model, opt, x, y):
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()

def loader(size=4):
    return DataLoader(DATA, batch_size=size, sampler=DistributedSampler(DATA))
"""


def recorded(source: str, watched: bool = True, arguments: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run a script as `workbench run` does; return what it leaves behind in the process."""
    import contextlib
    import io
    import os
    import sys
    from unittest import mock

    import torch
    from torch.utils.data import dataloader

    from workbench.engine import context as current
    from workbench.strategies.torch.parts.scripts import watch_scripts

    run = current.current()
    kinds = dataloader._BaseDataLoaderIter, torch.amp.GradScaler
    before = [dict(vars(kind)) for kind in kinds]
    undo = watch_scripts(run) if watched else lambda: None
    space: dict[str, Any] = {"__name__": "__main__", "run": run}
    said, given = io.StringIO(), sys.argv
    sys.argv = ["train.py", *arguments]
    try:
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            mock.patch.dict(os.environ),  # libraries set variables of their own
        ):
            exec(compile(source, "train.py", "exec"), space)
    finally:
        sys.argv = given
        undo()
        undo()
    model = space.get("model")
    result = space.get("result")
    if result is None and model is not None:
        result = getattr(model, "module", model).state_dict()
    return {
        "weights": {name: value.detach().numpy().copy() for name, value in (result or {}).items()},
        "hooks": len(getattr(model, "_forward_pre_hooks", ())),
        "patched": [dict(vars(kind)) for kind in kinds] != before and not run.closers,
        "facts": space.get("facts"),
    }


def notes(report: Report) -> str:
    return " ".join(fields["text"] for fields in report.emitted("note"))


def trains_the_same(workers: Workers, source: str, count: int, *arguments: str) -> list[Report]:
    """Run a script with and without being recorded; return the reports of the recorded run."""
    kind = "mirrored" if count > 1 else "one_device"
    others, reports = (
        workers.run(kind, recorded, source, watched, arguments, workers=count)
        for watched in (False, True)
    )
    for other in others:  # PyTorch keeps the first mesh that a process makes for FSDP
        other.left = [one for one in other.left if "fully_shard" not in source]
    clean(others)
    clean(reports)
    for report, other in zip(reports, others, strict=True):
        ours, plain = report.value["weights"], other.value["weights"]
        assert ours
        assert ours.keys() == plain.keys()
        assert all(np.array_equal(ours[name], plain[name]) for name in ours)
        assert not report.value["patched"]
        assert other.trained == 0
    return reports


ALONE = {
    "a loader": (
        """
model = net(); opt = sgd(model); batches = DataLoader(DATA, batch_size=8, shuffle=True)
for epoch in range(2):
    next(iter(batches))
    for x, y in batches:
        step(model, opt, x, y)
""",
        [8] * 16,
    ),
    "a short last batch, fetched by processes": (
        """
model = net(); opt = sgd(model)
for x, y in DataLoader(DATA, batch_size=30, num_workers=1):
    step(model, opt, x, y)
""",
        [30, 30, 4],
    ),
    "no loader": (
        """
model = net(); opt = sgd(model)
for _ in range(4):
    for part in (X[:6], X[6:12]):
        model(part).mean().backward()
    opt.step()
""",
        [12] * 4,
    ),
    "no loader, another model is made and used before": (
        """
other = net(); aside = sgd(other); model = net(); opt = sgd(model)
with torch.no_grad(): model(X)
other(X)
for _ in range(3):
    opt.zero_grad(); model(X[:7]).mean().backward(); opt.step()
""",
        [7] * 3,
    ),
    "fetched ahead": (
        """
def ahead(batches):
    held = None
    for batch in batches:
        if held is not None: yield held
        held = batch
    yield held
model = net(); opt = sgd(model)
for _ in range(2):
    for x, y in ahead(DataLoader(DATA, batch_size=15)):
        step(model, opt, x, y)
    with torch.no_grad():
        for x, y in DataLoader(DATA, batch_size=64): model(x)
""",
        [15, 15, 15, 15, 4] * 2,
    ),
    "two loaders": (
        """
model = net(); opt = sgd(model)
for one, other in zip(DataLoader(DATA, batch_size=16), DataLoader(DATA, batch_size=8)):
    opt.zero_grad()
    (F.mse_loss(model(one[0]), one[1]) + model(other[0]).square().mean()).backward()
    opt.step()
""",
        [24] * 4,
    ),
    "several steps for a batch": (
        """
model = net(); opt = sgd(model)
for x, y in DataLoader(DATA, batch_size=16):
    for _ in range(3): step(model, opt, x, y)
""",
        [16] * 12,
    ),
    "two models": (
        """
made = torch.nn.Linear(8, 1); model = torch.nn.Linear(1, 1)
first, second = sgd(model), sgd(made)
for x, y in DataLoader(DATA, batch_size=8):
    first.zero_grad()
    model(y).mean().backward(); (-model(made(x).detach()).mean()).backward()
    first.step()
    second.zero_grad(); model(made(x)).mean().backward(); second.step()
""",
        [8] * 8,
    ),
    "a teacher": (
        """
teacher, model = net(), net(); opt = sgd(model)
for x, y in DataLoader(DATA, batch_size=8):
    opt.zero_grad(); F.mse_loss(model(x), teacher(x).detach()).backward(); opt.step()
""",
        [8] * 8,
    ),
    "a closure": (
        """
model = net(); opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
for x, y in DataLoader(DATA, batch_size=16):
    def closure():
        opt.zero_grad(); loss = F.mse_loss(model(x), y); loss.backward(); return loss
    opt.step(closure)
""",
        [16] * 4,
    ),
    "a copy of the model": (
        """
model = net(); opt = sgd(model)
for x, y in DataLoader(DATA, batch_size=16):
    step(model, opt, x, y)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(x).sum().backward()
""",
        [16] * 4,
    ),
    "batches that cannot be counted": (
        """
model = net(); opt = sgd(model)
for rows in DataLoader([str(i) for i in range(64)], batch_size=16, collate_fn=list):
    rows = [int(one) for one in rows]
    step(model, opt, X[rows], Y[rows])
""",
        None,
    ),
}


@pytest.mark.parametrize("way", ALONE)
def test_a_script_in_one_process_is_recorded(workers: Workers, way: str) -> None:
    source, samples = ALONE[way]
    (report,) = trains_the_same(workers, BEGINS + source, 1)
    assert report.value["hooks"] == 0
    assert (report.rows["step"] == np.arange(report.trained)).all()
    if samples is None:
        assert report.trained == 4
        assert (report.rows["samples"][1:] == 16).all()
        return
    assert list(report.rows["samples"]) == samples
    assert np.isnan(report.rows["data_wait_s"]).all() == way.startswith("no loader")
    assert np.isfinite(report.rows["local_loss"]).all()
    assert report.saved.keys() == report.value["weights"].keys()


@pytest.mark.parametrize("how", ["wrapped", "in place", "the loss"])
def test_a_compiled_model_stays_one_graph(workers: Workers, how: str) -> None:
    way = {
        "wrapped": "compiled = torch.compile(model, backend='eager', fullgraph=True)",
        "in place": "model.compile(backend='eager', fullgraph=True); compiled = model",
        "the loss": "compiled = torch.compile(lambda x: model(x), backend='eager', fullgraph=True)",
    }[how]
    source = f"""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 1))
    def forward(self, x):
        return x @ self.weight
model = Net(); opt = sgd(model)
{way}
for number in range(8):  # another shape makes it compile again, while it is recorded
    size = (12, 12, 13, 14)[number % 4]
    step(compiled, opt, X[:size], Y[:size])
"""
    (report,) = trains_the_same(workers, BEGINS + source, 1)
    assert report.trained == 8


GROUP = "dist.init_process_group({how})\n"
DDP = "model = torch.nn.parallel.DistributedDataParallel(net())\n"
PLAIN_LOOP = """
opt = sgd(model); batches = loader()
for epoch in range(2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches: step(model, opt, x, y)
"""
SHARDS = """
result = {name: value.full_tensor() for name, value in model.named_parameters()}
"""
FLAT = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
model = FSDP(net(), device_id=torch.device("cpu"), use_orig_params=ORIGINAL)
""" + PLAIN_LOOP + """
with FSDP.summon_full_params(model):
    result = {name: value.detach().clone() for name, value in model.named_parameters()}
"""  # fmt: skip
TOGETHER = {
    "ddp": DDP + PLAIN_LOOP,
    "ddp, built after its optimizer": """
inner = net(); opt = sgd(inner); model = torch.nn.parallel.DistributedDataParallel(inner)
batches = loader()
for epoch in range(2):
    for x, y in batches: step(model, opt, x, y)
""",
    "fsdp2, one piece": """
from torch.distributed.fsdp import fully_shard
model = net(); fully_shard(model)
""" + PLAIN_LOOP + SHARDS,
    "fsdp2, by layer": """
from torch.distributed.fsdp import fully_shard
model = net(); fully_shard(model[0]); fully_shard(model[2]); fully_shard(model)
""" + PLAIN_LOOP + SHARDS,
    "fsdp": FLAT.replace("ORIGINAL", "False"),
    "fsdp, original parameters": FLAT.replace("ORIGINAL", "True"),
}  # fmt: skip
GROUPS = [
    "'gloo'", "", "backend=None", "device_id=torch.device('cpu')", "'cpu:gloo'",
    "rank=int(os.environ['RANK']), world_size=WORLD",
]  # fmt: skip


@pytest.mark.parametrize("way", TOGETHER)
def test_a_script_of_several_processes_is_recorded(workers: Workers, way: str) -> None:
    how = GROUPS[list(TOGETHER).index(way)]
    source = BEGINS + GROUP.format(how=how) + TOGETHER[way] + "dist.destroy_process_group()\n"
    reports = trains_the_same(workers, source, 2)
    for report in reports:
        assert list(report.rows["samples"]) == [4] * 16
        assert np.isfinite(report.rows["exposed_s"]).all()
        assert np.isfinite(report.rows["data_wait_s"]).all()
    assert reports[0].emitted("run_started")[0]["batch_size"] == 8
    assert bool(reports[0].saved) == ("fsdp" not in way)  # no rank holds it all


def test_accumulated_and_scaled_gradients_are_one_step(workers: Workers) -> None:
    source = BEGINS + GROUP.format(how="'gloo'") + DDP + """
opt = sgd(model); scaler = torch.amp.GradScaler("cpu")
losses = []
for number, (x, y) in enumerate(loader()):
    last = number % 2
    with contextlib.nullcontext() if last else model.no_sync():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y) / 2
        losses.append(loss.item())
        scaler.scale(loss).backward()
    if last:
        scaler.step(opt); scaler.update(); opt.zero_grad()
facts = losses
dist.destroy_process_group()
"""  # fmt: skip
    for report in trains_the_same(workers, source, 2):
        assert list(report.rows["samples"]) == [8] * 4
        wanted = np.reshape(report.value["facts"], (4, 2)).sum(axis=1)
        np.testing.assert_allclose(report.rows["local_loss"], wanted, rtol=1e-5)


def test_the_public_examples_are_recorded(workers: Workers, tmp_path: Any) -> None:
    snapshot = ["3", "1", f"--snapshot_path={tmp_path / 'multi.pt'}"]
    multi = clean(workers.run("mirrored", recorded, MULTIGPU, True, snapshot, workers=2))
    assert [list(report.rows["samples"]) for report in multi] == [[8] * 12] * 2
    assert (tmp_path / "multi.pt").exists()
    said = ["--backend=gloo", "--device=cpu", f"--out={tmp_path / 'gpt.pt'}"]
    gpt = trains_the_same(workers, GPT, 2, *said)
    assert [list(report.rows["samples"])[1:] for report in gpt] == [[8] * 6] * 2


SLOW = BEGINS + """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        time.sleep(0.02)
        return X[index], Y[index]

def evaluate():
    began = time.perf_counter()
    for x, y in held_out:
        time.sleep(0.05)
        with torch.no_grad(): model(x)
    return time.perf_counter() - began

held_out = DataLoader(DATA, batch_size=32)
model = net(); opt = sgd(model); batches = DataLoader(Slow(), batch_size=2)
began = time.perf_counter()
aside = [evaluate()]
between = 0.0
for epoch in range(2):
    for number, (x, y) in enumerate(batches):
        step(model, opt, x, y)
        if number == 1:
            between += evaluate()
    between += evaluate() if epoch == 0 else 0.0
facts = [between, time.perf_counter() - began]
"""  # fmt: skip


def test_waits_for_data_are_training_and_evaluation_is_not(workers: Workers) -> None:
    (report,) = clean(workers.run("one_device", recorded, SLOW))
    between_s, whole_s = report.value["facts"]
    rows = report.rows
    assert report.trained == 6
    assert (rows["data_wait_s"] >= 0.04).all()
    assert (rows["end_s"] - rows["start_s"] >= rows["data_wait_s"]).all()
    assert report.eval_s >= between_s
    assert report.train_s + between_s <= whole_s


def test_an_evaluation_before_training_is_no_part_of_the_first_step(workers: Workers) -> None:
    source = BEGINS + """
model = net(); opt = sgd(model); held_out = DataLoader(DATA, batch_size=32)
for x, y in held_out:
    model(x)
for x, y in DataLoader(DATA, batch_size=8): step(model, opt, x, y)
"""  # fmt: skip
    (report,) = clean(workers.run("one_device", recorded, source))
    assert list(report.rows["samples"]) == [8] * 8
    assert report.emitted("run_started")[0]["batch_size"] == 8


def test_a_script_that_asks_for_wb_watch_is_left_to_it(workers: Workers) -> None:
    source = BEGINS + """
from workbench.engine.training.user_loops import watch
model = net(); opt = sgd(model); batches = DataLoader(DATA, batch_size=8)
watch(model, opt, batches)
for x, y in batches: step(model, opt, x, y)
"""  # fmt: skip
    (report,) = trains_the_same_rows(workers, source)
    assert list(report.rows["samples"]) == [8] * 8
    assert len(report.emitted("run_started")) == 1


def trains_the_same_rows(workers: Workers, source: str) -> list[Report]:
    """Run a script that is recorded by itself, twice: what the first one left, the second meets."""
    first = clean(workers.run("one_device", recorded, source))
    second = clean(workers.run("one_device", recorded, source))
    assert [report.trained for report in first] == [report.trained for report in second]
    assert not any(report.value["patched"] for report in second)
    return second


NOTHING = {
    "no training": "model = net(); model(X)",
    "tensors without a module": """
weight = torch.zeros(8, 1, requires_grad=True); opt = torch.optim.SGD([weight], 0.1)
for x, y in DataLoader(DATA, batch_size=16):
    opt.zero_grad(); F.mse_loss(x @ weight, y).backward(); opt.step()
""",
    "another process": """
import multiprocessing
def train():
    model = net(); opt = sgd(model)
    for x, y in DataLoader(DATA, batch_size=16): step(model, opt, x, y)
child = multiprocessing.get_context("fork").Process(target=train)
child.start(); child.join()
assert child.exitcode == 0
""",
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_script_that_trains_nothing_here_has_no_records(workers: Workers, what: str) -> None:
    (report,) = clean(workers.run("one_device", recorded, BEGINS + NOTHING[what]))
    assert report.trained == len(report.rows) == 0
    assert not report.emitted("run_started")
    assert ("torch.nn.Module" in notes(report)) == (what == "tensors without a module")


def test_a_script_that_averages_by_hand_has_unknown_waits(workers: Workers) -> None:
    source = BEGINS + GROUP.format(how="'gloo'") + """
model = net(); opt = sgd(model)
for x, y in loader():
    opt.zero_grad(); F.mse_loss(model(x), y).backward()
    for parameter in model.parameters(): dist.all_reduce(parameter.grad)
    opt.step()
dist.destroy_process_group()
"""  # fmt: skip
    reports = trains_the_same(workers, source, 2)
    assert all(np.isnan(report.rows["exposed_s"]).all() for report in reports)
    (columns,) = (fields["columns"] for fields in reports[0].emitted("unmeasured"))
    assert set(columns) == {"sync_wait_s", "transfer_s"}


def test_stop_ends_a_script_at_the_agreed_step(workers: Workers) -> None:
    source = BEGINS + """
model = net(); opt = sgd(model)
for number, (x, y) in enumerate(DataLoader(DATA, batch_size=8)):
    if number == 2:
        run.gate.halt_at("stop", 4)
    step(model, opt, x, y)
"""  # fmt: skip
    (report,) = workers.run("one_device", recorded, source)
    assert "RunStopped" in (report.error or "")
    assert report.trained == 5
    assert report.left == []


def test_a_process_records_one_script_at_a_time(workers: Workers) -> None:
    source = """
from workbench.strategies.torch.parts.scripts import watch_scripts
watch_scripts(run)
"""
    reports = workers.run("one_device", recorded, source)
    (error,) = failures(reports)
    assert "WB-RUN-126" in error
    assert reports[0].left == []


WORDS = """
import tempfile
import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
words = torch.randint(0, 50, (48, 9), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": one, "labels": one} for one in words]
shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
with tempfile.TemporaryDirectory() as folder:
    told = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, eval_strategy="epoch", logging_strategy="no",
        gradient_accumulation_steps=2, seed=1)
    Trainer(model, told, train_dataset=data, eval_dataset=data).train()
"""
PREPARED = BEGINS + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
batches = DataLoader(DATA, batch_size=4, shuffle=True)
held_out = DataLoader(DATA, batch_size=16)
model = net(); opt = sgd(model)
model, opt, batches, held_out = accelerator.prepare(model, opt, batches, held_out)
for _ in range(2):
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y)); opt.step(); opt.zero_grad()
    for x, y in held_out:
        with torch.no_grad(): model(x)
"""  # fmt: skip
LIGHTNING = BEGINS + """
import logging, warnings
import lightning
warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, number):
        return F.mse_loss(self.net(batch[0]), batch[1])
    def validation_step(self, batch, number):
        return F.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return sgd(self)
model = Model()
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
batches = DataLoader(DATA, batch_size=4, shuffle=True)
trainer.fit(model, batches, DataLoader(DATA, batch_size=16))
"""  # fmt: skip
LIBRARIES = {
    "transformers": (WORDS, [8] * 6),
    "accelerate": (PREPARED, [8] * 8),
    "lightning": (LIGHTNING, [4] * 16),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_loops_of_libraries_are_recorded(workers: Workers, library: str) -> None:
    need(library)
    source, samples = LIBRARIES[library]
    for report in trains_the_same(workers, source, 2):
        assert list(report.rows["samples"]) == samples
        assert np.isfinite(report.rows["data_wait_s"]).all()
