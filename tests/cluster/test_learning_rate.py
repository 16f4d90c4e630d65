"""A rate that a scheduler changes is a column of the history, without a line of the cell."""

from __future__ import annotations

import pytest
from needs import need

pytestmark = pytest.mark.cluster

FIT = """%%distributed {line} --name {name} --plot off
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 10))
wb.fit(model, wb.data.synthetic(96, shape=(64,), classes=10), batch_size=16,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.4),
       scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
"""
LOOP = """%%distributed mirrored --name loop --plot off
import torch
from torch import nn
model = nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), 0.4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
loader = torch.utils.data.DataLoader(
    wb.data.synthetic(96, shape=(64,), classes=10), batch_size=16)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()
"""
KERAS = """%%distributed mirrored --framework tensorflow --name keras --plot off
import keras
model = keras.Sequential([keras.layers.Dense(10)])
wb.fit(model, wb.data.synthetic(96, shape=(64,), classes=10, arrays=True), batch_size=16,
       loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
       optimizer=keras.optimizers.SGD(0.4), scheduler=lambda step: 0.4 * 0.5 ** (step // 2))
"""
RATES = [0.4, 0.4, 0.2, 0.2, 0.1, 0.1]


@pytest.mark.torch
@pytest.mark.parametrize(
    "line", ["mirrored", "sharded", "central_storage", "model_split", "local_sgd -o every=2"]
)
def test_the_rate_of_each_step_of_fit_is_in_the_history(book, line):
    need("torch")
    name = line.split()[0]
    book.ok(FIT.format(line=line, name=name))
    history = book["_run"].history
    first = history["rank"] == 0
    assert history["lr"][first].tolist() == pytest.approx(RATES)


@pytest.mark.torch
def test_the_rate_of_each_step_of_an_own_loop_is_in_the_history(book):
    need("torch")
    book.ok(LOOP)
    history = book["_run"].history
    assert history["lr"][history["rank"] == 0].tolist() == pytest.approx(RATES)


@pytest.mark.torch
def test_a_constant_rate_adds_no_column(book):
    need("torch")
    book.ok(LOOP.replace("scheduler = torch", "# ").replace("    scheduler.step()\n", ""))
    assert "lr" not in book["_run"].history.columns


@pytest.mark.tensorflow
def test_the_rate_of_each_step_of_a_keras_model_is_in_the_history(book):
    need("tensorflow")
    book.ok(KERAS)
    history = book["_run"].history
    assert history["lr"][history["rank"] == 0].tolist() == pytest.approx(RATES)
