"""Loops as public code has them: losses that never call `model(x)`, several models, freezing."""

from __future__ import annotations

rank = 0  # these two are the running worker's
world_size = 1
context = None


def trained(kind, own_loop=True, epochs=2, clipped=True):
    """Train in one of many ways; every one must end as on one device.

    46 samples in 12s leave an uneven batch of 10; on three workers shares differ too.
    """
    import torch
    from torch.nn import functional

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    global keep

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.Linear(6, 8)
            self.decoder = torch.nn.GRU(8, 8, batch_first=True) if kind == "seq2seq" else None
            self.mean, self.deviation = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 6 if kind in ("vae", "tied") else 3)
            if kind == "tied":
                self.head = torch.nn.Linear(8, 6, bias=False)
                self.mean.weight = self.deviation.weight

        def encode(self, x):
            return torch.tanh(self.encoder(x))

        def forward(self, x):
            hidden = self.encode(x)
            return self.head(torch.tanh(self.mean(hidden) + self.deviation(hidden)))

        def training_step(self, batch):
            hidden = self.encode(batch[0])  # never by way of forward
            hidden = torch.tanh(self.mean(hidden) + self.deviation(hidden))
            return functional.cross_entropy(self.head(hidden), batch[1])

        def elbo(self, x):
            hidden = self.encode(x)
            mean, log = self.mean(hidden), self.deviation(hidden)
            drawn = mean + (0.5 * log).exp() * 0.3
            divergence = -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()
            return functional.mse_loss(self.head(torch.tanh(drawn)), x) + 0.1 * divergence

        def translate(self, x, y):
            state = torch.tanh(self.mean(self.encode(x)) + self.deviation(self.encode(x)))
            words = state.new_ones(len(x), 3, 8) * 0.5
            out, _ = self.decoder(words, state[None])
            return functional.cross_entropy(self.head(out).transpose(1, 2), y[:, None].repeat(1, 3))

    def loss_of(model, batch):
        x, y = batch
        if kind == "vae":
            return model.elbo(x)
        if kind == "seq2seq":
            return model.translate(x, y)
        if kind == "parts":
            hidden = model.encode(x)
            hidden = torch.tanh(model.mean(hidden) + model.deviation(hidden))
            return functional.cross_entropy(model.head(hidden), y)
        if kind == "both":  # forward, and a part of the model besides
            return functional.cross_entropy(model(x), y) + 0.1 * model.encode(x).square().mean()
        if kind == "tied":
            return functional.mse_loss(model(x), x)
        if hasattr(model, "extra"):
            return functional.cross_entropy(model(x) + model.extra(x), y)
        if kind == "penalty":  # WGAN-GP
            x = x.detach().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return functional.cross_entropy(out, y) + ((slope.norm(dim=1) - 1) ** 2).mean()
        return model.training_step(batch)

    torch.manual_seed(3)
    x, y = torch.randn(46, 6, dtype=torch.float64), torch.randint(0, 3, (46,))
    model = Model().double()
    keep = {"model": model}
    if kind in ("unfreeze", "unfreeze all"):
        model.encoder.requires_grad_(False)

    def build():
        return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)

    optimizer = build()
    data = torch.utils.data.TensorDataset(x, y)
    if not own_loop:
        fit(model, data, step_fn=loss_of, optimizer=optimizer, batch_size=12, epochs=epochs,
            shuffle=False)  # fmt: skip
        return None
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            if (epoch, number) == (1, 1):
                if kind == "unfreeze":
                    model.encoder.requires_grad_(True)
                if kind == "freeze":
                    model.encoder.requires_grad_(False)
                if kind == "new optimizer":
                    optimizer = build()
                if kind == "grow":
                    torch.manual_seed(5)
                    model.extra = torch.nn.Linear(6, 3).double()
                    optimizer.add_param_group({"params": model.extra.parameters()})
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            if kind == "autograd.backward":
                torch.autograd.backward([loss * 0.25, loss * 0.75], retain_graph=True)
            elif kind == "autograd.grad":
                parameters = [p for p in model.parameters() if p.requires_grad]
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    parameter.grad = gradient
            elif kind == "alone":
                with model.no_sync():
                    loss.backward()
            elif kind == "no_sync":
                with model.no_sync():
                    (loss * 0.5).backward(retain_graph=True)
                (loss * 0.5).backward()
            else:
                loss.backward()
            if kind == "freeze" and not model.encoder.weight.requires_grad:
                assert model.encoder.weight.grad is None
            if clipped and kind not in (
                "autograd.grad",
                "alone",
            ):  # there the gradients are averaged by the step
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return len(loader)


def gan(pairs="both", steps=6):
    """DCGAN's loop over two models; noise is drawn alike for the whole batch."""
    import torch
    from torch.nn import functional

    from workbench.engine.training.user_loops import prepare

    global keep
    torch.manual_seed(3)
    critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    maker = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    critic, maker = critic.double(), maker.double()
    keep = {"critic": critic, "maker": maker}
    of_critic = torch.optim.SGD(critic.parameters(), 0.1)
    of_maker = torch.optim.SGD(maker.parameters(), 0.1)
    real, noise = torch.randn(12 * steps - 2, 4), torch.randn(12 * steps - 2, 2)
    data = torch.utils.data.TensorDataset(real.double(), noise.double())
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    critic, of_critic, loader = prepare(critic, of_critic, loader)
    if pairs == "both":
        maker, of_maker = prepare(maker, of_maker)
    for real, noise in loader:
        of_critic.zero_grad()
        functional.softplus(-critic(real)).mean().backward()
        made = maker(noise)
        functional.softplus(critic(made.detach())).mean().backward()
        of_critic.step()
        of_maker.zero_grad()
        functional.softplus(-critic(made)).mean().backward()
        of_maker.step()
    return [p.detach().sum().item() for p in maker.parameters()]


def led_astray(own_loop, at=2, by="a bit", steps=24):
    """Rank 1's copy is changed right before a comparison, where strategies would repair it else."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare
    from workbench.strategies.torch.parts.guard import Guard

    torch.manual_seed(3)
    x, y = torch.randn(48, 4), torch.randn(48, 1)
    layers = [torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 6)]
    model = torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    right = Guard.check

    def check(self):
        if self.checks + 1 == at and rank == 1:
            _, values = next((n, t) for n, t in self._parameters() if n.endswith("1.bias"))
            with torch.no_grad():
                if by == "a bit":
                    values[0] = torch.nextafter(values[0], torch.tensor(9.0))
                else:
                    values += 0.1 * torch.randn_like(values)
        right(self)

    Guard.check = check
    try:
        if not own_loop:
            fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=optimizer, batch_size=12,
                steps=steps)  # fmt: skip
            return
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=12)
        model, optimizer, loader = prepare(model, optimizer, loader)
        for _ in range(steps // 4):
            for inputs, targets in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
    finally:
        Guard.check = right


def diverging(kind, own_loop, at=1, steps=12):
    """Rank 1 changes its copy alone, in the loop or after it, or takes no step of the optimizer."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(48, 4), torch.randn(48, 1)
    layers = [torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def disturb(step, logs=None):
        if step == at and rank == 1:
            with torch.no_grad():
                parameter = model[1].bias
                parameter[0] = torch.nextafter(parameter[0], torch.tensor(9.0))

    if not own_loop:
        fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=optimizer, batch_size=12,
            steps=steps, callbacks=[disturb])  # fmt: skip
        return
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for epoch in range(steps // 4):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if kind != "steps" or rank == 0:
                optimizer.step()
            if kind == "bit":
                disturb(4 * epoch + number)
    if kind == "after":
        disturb(at)


def watched(kind, steps=12):
    """A loop with its own DistributedDataParallel, which one rank leads astray."""
    import torch

    from workbench.engine.training.user_loops import watch

    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(48, 4), torch.randn(48, 1)
    data = torch.utils.data.TensorDataset(x + rank, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    watch(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        inner = model.module if kind == "passed by" else model
        torch.nn.functional.mse_loss(inner(inputs), targets).backward()
        optimizer.step()


def guarded(steps=250, width=256):
    """Train in steps of 10 ms or so; return the guard's share of the time, and its checks."""
    import time

    import torch

    from workbench.engine import context as current
    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(2048, width), torch.randn(2048, 1)
    layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)]
    guards = []

    def look(step, logs):
        if not guards:
            guards.append(current.current().strategy.reductions.guard)
        time.sleep(0.008)

    began = time.perf_counter()
    fit(torch.nn.Sequential(*layers), (x, y), loss=torch.nn.MSELoss(), batch_size=512, steps=steps,
        optimizer=lambda p: torch.optim.SGD(p, 0.01), callbacks=[look])  # fmt: skip
    return guards[0].cost_s / (time.perf_counter() - began), guards[0].checks


def sequences(steps=5):
    """A loop without a loader over (time, batch) data, as word_language_model has it."""
    import torch

    from workbench.engine.training.user_loops import prepare

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names, self.rnn = torch.nn.Embedding(9, 4), torch.nn.LSTM(4, 9)

        def forward(self, x, state):
            return self.rnn(self.names(x), state)

    torch.manual_seed(3)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = prepare(model, optimizer)
    words = torch.randint(0, 9, (7 * steps - 3, 20 // world_size))
    for step in range(steps):
        x = words[7 * step : 7 * step + 7]
        optimizer.zero_grad()
        out, _ = model(x, None)
        torch.nn.functional.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
        optimizer.step()


def without_step():
    """word_language_model's way to step: by hand."""
    import torch

    from workbench.engine.training.user_loops import prepare

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = prepare(model, optimizer)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
    return [context.taken_over, context.backwards, context.updates, context.trained]


def one_freezes(alone=False):
    """Ranks that freeze different parameters, or rank 0 alone, while the others go on."""
    import torch

    from workbench.engine.training.user_loops import prepare

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = prepare(model, optimizer)
    for step in range(3):
        if step == 1 and not (alone and rank):
            model[rank].requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def half_used(steps=3):
    """A parameter that takes no part in the loss."""
    import torch

    from workbench.engine.training.user_loops import prepare

    model = torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepare(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model[0](torch.ones(2, 4)).sum().backward()
        optimizer.step()


def leaves_early(steps=6):
    """Rank 1's loop is shorter than the others'."""
    import torch

    from workbench.engine.training.user_loops import prepare

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = prepare(model, optimizer)
    for step in range(steps):
        if rank == 1 and step == 3:
            break
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def own_backward(steps=3):
    """A `step_fn` that calls backward itself and keeps the graph for the one of `wb.fit`."""
    import torch
    from torch.nn import functional

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)

    def step_fn(model, batch):
        loss = functional.mse_loss(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).double()
    fit(model, (x, y), step_fn=step_fn, optimizer=lambda p: torch.optim.SGD(p, 0.1),
        batch_size=8, steps=steps)  # fmt: skip


def norms_clipped(kind):
    """Return the norms that clipping sees under plain DistributedDataParallel, and under ours."""
    import copy

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    ours = torch.nn.Linear(4, 1)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    x = torch.randn(2, 3, 4)[rank]

    def norms(model):
        parameters, seen = list(model.parameters()), []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            if kind == "autograd.grad":
                loss = model(x).square().mean()
                for parameter, grad in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    parameter.grad = grad
            if kind in ("no_sync", "then synced"):
                with model.no_sync():  # DistributedDataParallel wants the forward in it, too
                    model(x).square().mean().backward()
            if kind in ("backward", "then synced"):
                model(x).square().mean().backward()
            seen.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)))
        return seen

    # autograd.grad is no way DistributedDataParallel knows; it must not be asked for a reduction.
    plain = norms(theirs.module if kind == "autograd.grad" else theirs)
    del theirs
    model, _ = prepare(ours, torch.optim.SGD(ours.parameters(), 0.1))
    return plain, norms(model)


def prepared_as_elsewhere():
    """Pass the scheduler as other libraries want it."""
    import torch

    from workbench.engine.training.user_loops import prepare

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    prepare(model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1))
