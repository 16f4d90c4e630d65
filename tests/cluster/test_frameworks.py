"""Other libraries' loops run in a cell as they are: the environment is torchrun's."""

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")


ACCELERATE = """%%distributed
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = 0
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    batches += 1
weight = accelerator.unwrap_model(model).weight.detach()
print(accelerator.num_processes, batches, type(model).__name__)
"""


def test_an_accelerate_loop_runs_unchanged(book):
    need("accelerate")
    assert book.ok(ACCELERATE).lines() == ["[ranks 0-1] 2 4 DistributedDataParallel"]
    same = "%%distributed\nboth = [torch.empty_like(weight) for _ in range(world_size)]\n"
    same += "dist.all_gather(both, weight)\ntorch.equal(*both)"
    assert book.ok(same).lines() == ["[ranks 0-1] True"]
    forget = (
        "%%distributed\nfrom accelerate.state import AcceleratorState\n"
        "AcceleratorState._reset_state(True)\ndel model, optimizer, loader, accelerator"
    )
    book.ok(forget)
    works(book)


def works(book):
    again = "%%distributed\nimport torch; x = torch.ones(1); dist.all_reduce(x); x.item()"
    assert book.ok(again).lines() == ["[ranks 0-1] 2.0"]


LIGHTNING = """%%distributed
import logging, warnings
import lightning as L
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
trainer = L.Trainer(
    strategy="ddp", accelerator="cpu", devices=world_size, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=8))
print(trainer.world_size, trainer.global_step, trainer.global_rank == rank)
"""


def test_a_lightning_trainer_runs_unchanged(book):
    need("lightning")
    cell = book.ok(LIGHTNING)
    assert "[ranks 0-1] 2 4 True" in cell.lines()
    works(book)


OWN_DDP = """%%distributed mirrored --plot off
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
x = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
wb.watch(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    wb.log(lr=optimizer.param_groups[0]["lr"])
"""


def test_a_loop_with_its_own_ddp_is_watched(book):
    book.ok(OWN_DDP)
    run = book["_run"]
    assert run.state == "finished"
    assert run.history.totals.steps == 4
    assert set(run.history["lr"]) == {0.05}
    works(book)
