"""Horovod's own way to train MNIST, in cells, under `workbench run` and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

MNIST = """
import torch
import torch.nn.functional as F
from torch import nn, optim

import horovod.torch as hvd
import workbench as wb


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def shares(split, batch_size):
    data = wb.data.digits(split, as_mnist=True)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    return sampler, torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)


def main(epochs=1):
    hvd.init()
    torch.manual_seed(42)
    sampler, loader = shares("train", 32)
    _, tests = shares("test", 90)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.03 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    for epoch in range(1, epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        right = torch.tensor(0.0)
        with torch.no_grad():
            for data, target in tests:
                right += (model(data).argmax(1) == target).float().sum()
        accuracy = hvd.allreduce(right / len(tests.sampler), name="avg_accuracy").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    return accuracy


accuracy = main()
"""


def test_it_runs_in_a_cell_with_a_process_group(book):
    cell = book.ok("%%distributed\n" + MNIST)
    assert "[rank 0] epoch 1: accuracy" in cell.stdout
    assert "docs/training.md" in cell.text
    same = "%%distributed\nlen(set(hvd.allgather_object(accuracy))), hvd.size()"
    assert book.ok(same).lines() == ["[ranks 0-1] (1, 2)"]  # what a cell began goes on in the next


def test_it_is_recorded_under_a_strategy(book):
    book.ok("%%distributed horovod --plot off --name horovod-mnist\n" + MNIST)
    run = book["wb"].runs["horovod-mnist"]
    assert (run.plan.strategy, run.state) == ("mirrored", "finished")
    assert run.summarise().steps == 23
    assert (
        "[ranks 0-1] 2.0"
        in book.ok(
            "%%distributed\nimport torch; x = torch.ones(1); dist.all_reduce(x); x.item()"
        ).lines()
    )


def test_the_kernel_finds_no_horovod(book):
    assert isinstance(book.run("import horovod.torch").error, ModuleNotFoundError)


FOUND = "from workbench.engine.torch.horovod import finder\nfinder.install()\n"


@pytest.mark.parametrize("way", ["torchrun", "workbench run", "alone"])
def test_it_runs_as_a_script(tmp_path: Path, way: str):
    script = tmp_path / "train.py"
    script.write_text(MNIST if way == "workbench run" else FOUND + MNIST)
    command = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "workbench run": ["-m", "workbench", "run", "-n", "2"],
        "alone": [],
    }[way]
    ended = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    assert "epoch 1: accuracy" in ended.stdout
    assert ended.stderr.count("docs/training.md") == 1
