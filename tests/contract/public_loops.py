"""Training loops as they are written in public code; only the data and the model are small.

`train` and `test` of pytorch/examples' mnist, and the loops of PyTorch's quickstart, stand here
word for word.
"""

# ruff: noqa: E501, UP032

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def mnist(epochs=2):
    """pytorch/examples, mnist/main.py."""
    import argparse

    import torch
    import torch.nn.functional as F
    from torch import nn, optim
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.user_loops import prepare

    global keep

    # fmt: off
    def train(args, model, device, train_loader, optimizer, epoch):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                print('Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}'.format(
                    epoch, batch_idx * len(data), len(train_loader.dataset),
                    100. * batch_idx / len(train_loader), loss.item()))
                if args.dry_run:
                    break

    def test(model, device, test_loader):
        model.eval()
        test_loss = 0
        correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                data, target = data.to(device), target.to(device)
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction='sum').item()  # sum up batch loss
                pred = output.argmax(dim=1, keepdim=True)  # get the index of the max log-probability
                correct += pred.eq(target.view_as(pred)).sum().item()

        test_loss /= len(test_loader.dataset)

        print('\nTest set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)\n'.format(
            test_loss, correct, len(test_loader.dataset),
            100. * correct / len(test_loader.dataset)))
    # fmt: on

    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3), nn.LogSoftmax(1)).double()
    keep = {"model": model}
    optimizer = optim.SGD(model.parameters(), 0.2, momentum=0.9)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=23, shuffle=True)
    test_loader = DataLoader(TensorDataset(x, y), batch_size=50)
    model, optimizer, train_loader = prepare(model, optimizer, train_loader)
    args = argparse.Namespace(log_interval=2, dry_run=False)
    for epoch in range(1, epochs + 1):
        train(args, model, "cpu", train_loader, optimizer, epoch)
        test(model, "cpu", test_loader)


def quickstart(epochs=2):
    """pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.user_loops import prepare

    global keep
    device = "cpu"

    # fmt: off
    def train(dataloader, model, loss_fn, optimizer):
        size = len(dataloader.dataset)
        model.train()
        for batch, (X, y) in enumerate(dataloader):
            X, y = X.to(device), y.to(device)

            # Compute prediction error
            pred = model(X)
            loss = loss_fn(pred, y)

            # Backpropagation
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            if batch % 100 == 0:
                loss, current = loss.item(), (batch + 1) * len(X)
                print(f"loss: {loss:>7f}  [{current:>5d}/{size:>5d}]")

    def test(dataloader, model, loss_fn):
        size = len(dataloader.dataset)
        num_batches = len(dataloader)
        model.eval()
        test_loss, correct = 0, 0
        with torch.no_grad():
            for X, y in dataloader:
                X, y = X.to(device), y.to(device)
                pred = model(X)
                test_loss += loss_fn(pred, y).item()
                correct += (pred.argmax(1) == y).type(torch.float).sum().item()
        test_loss /= num_batches
        correct /= size
        print(f"Test Error: \n Accuracy: {(100*correct):>0.1f}%, Avg loss: {test_loss:>8f} \n")
    # fmt: on

    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    keep = {"model": model}
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_dataloader = DataLoader(TensorDataset(x, y), batch_size=23)
    test_dataloader = DataLoader(TensorDataset(x, y), batch_size=50)
    model, optimizer, train_dataloader = prepare(model, optimizer, train_dataloader)
    for _ in range(epochs):
        train(train_dataloader, model, loss_fn, optimizer)
        test(test_dataloader, model, loss_fn)


def distributed_sampler(spread=True, begins=0, epochs=3):
    """A loop written for DDP: a DistributedSampler, whose epoch is set."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from workbench.engine.training.user_loops import prepare

    global keep
    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randn(100, 1, dtype=torch.float64)
    model = torch.nn.Linear(8, 1).double()
    keep = {"model": model}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=20, shuffle=not spread or None)
    if spread:
        loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data))
    model, optimizer, loader = prepare(model, optimizer, loader)
    seen = []
    for epoch in range(begins, begins + epochs):
        if spread or begins:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            seen += inputs[:, 0].tolist()
    return len(set(seen)), seen[: len(seen) // epochs]


def again():
    """A cell that is run twice: its loader was handed back by the first."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.user_loops import prepare
    from workbench.strategies.torch.parts.loader import SharedLoader

    class Named(DataLoader):
        def mark(self):
            return f"mine, {self.batch_size}"

    def collate(rows):
        return torch.utils.data.default_collate(rows)

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(50, 8), torch.randn(50, 1))
    own = Named(data, 8, shuffle=True, drop_last=True, collate_fn=collate)
    first = SharedLoader.__new__(SharedLoader)
    vars(first)["undivided"] = own
    _, _, loader = prepare(model, optimizer, first)
    samples = 0
    for inputs, _ in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        samples += len(inputs)
    return {
        "dataset": loader.dataset is data,
        "is a DataLoader": isinstance(loader, DataLoader),
        "is a RandomSampler": isinstance(loader.sampler, torch.utils.data.RandomSampler),
        "sampler": len(loader.sampler) == 50 and loader.sampler.set_epoch(1) is None,
        "own": loader.undivided is own and not hasattr(own.sampler, "set_epoch"),
        "collate": loader.collate_fn is collate,
        "rest": (loader.num_workers, loader.drop_last, loader.batch_size, len(loader)),
        "of a class": loader.mark(),
        "missing": hasattr(loader, "nothing"),
        "samples": samples,
    }
