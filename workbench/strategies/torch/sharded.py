"""Fully sharded data parallelism: each worker keeps 1/n of parameters, gradients and optimizer.

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
SC 2020, section 5; Zhao et al., PyTorch FSDP, VLDB 2023. The strategy `sharded` uses PyTorch's
implementation `fully_shard` (FSDP2).

    worker r keeps shard w_r of every layer's parameters w = [w_0 | w_1 | .. | w_n-1]

    forward   layer by layer:    w_r -- all-gather --> w -> activations -> w is freed
    backward  layer by layer:    w_r -- all-gather --> w -> g = full gradient of the own share
                                 g -- reduce-scatter --> g_r = mean over workers of shard r
    update                       optimizer: w_r, g_r -> w_r     (its state is sharded as well)

Every worker takes a share of the batch, and the mathematics is the same as under `mirrored`. As
under `mirrored`, the loss of worker r is multiplied by `n * samples_r / samples`. Here n is the
number of workers, `samples_r` is the size of the worker's share, and `samples` is the size of the
batch. So the mean of the workers' gradients is the gradient of the mean loss over the whole batch.

With Adam, a float32 parameter needs 16 bytes: the parameter, its gradient and two moments. With n
workers, each worker needs 16/n bytes per parameter. It also needs memory for the parameters that
are gathered at the moment: usually one or two units, and the parameters that are not in any unit. A
unit is usually a layer (see below). For the parameters in units, every worker sends 3 (n-1)/n times
their size in a step. Under `mirrored` it sends 2 (n-1)/n times their size. With `reshard=false`,
gathered units stay in memory from the forward pass to the backward pass. In this case every worker
sends only 2 (n-1)/n times the parameters' size, but needs more memory.

You can give `wb.fit` a function that builds the model. In this case, every worker begins with a
model without values: it calls the function on device `meta`. Only rank 0 then calls the function a
second time, to make the values of the parameters. Rank 0 sends the values to all workers. Each
message contains rows of one tensor, and each worker keeps only its own part of the tensor
(`Filling` in the source). So at the start of the run, only rank 0 needs memory for the whole model.
This is memory of rank 0's host, not of a GPU. If the function cannot run on device `meta` (because
it computes with the values), every worker builds the whole model.

All parameters of a unit are gathered together. A unit has at least `unit_mb` MB of parameters. Two
kinds of modules can be units: an element of a Sequential or ModuleList, and a direct child of the
model that contains no other module. The parameters that are not in any unit are called the rest,
and are also gathered together. The rest always stays in memory from the forward pass to the
backward pass. So for the parameters of the rest, every worker sends only 2 (n-1)/n times their
size. A model that is smaller than `unit_mb` has no units. With `unit_mb=0`, small models have units
too.

Sent bytes are counted for each collective operation. In an all-gather every worker receives the
parts of all workers. In a reduce-scatter every worker receives one part of the sum of all workers'
gradients. In each of these operations, every worker sends S (n-1)/n bytes for a unit of S bytes, if
the workers form a ring. Workers wait for each other several times in a step, also in the forward
pass. So for each worker, Workbench computes the ready time: the time at which its gradients would
be ready if communication never blocked this worker (`parts/timing.py`). The worker with the latest
ready time has no sync wait; the other workers wait for this worker. On GPUs the sync wait is not
measured.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import vector_to_parameters

from ...engine.contract import NAN, Job, Share
from ...engine.torch import accelerator
from ...engine.torch.support import forms
from ...engine.training import initial
from ...errors import FitError
from ...shared import events
from ...shared.checkpoints import fit_weights
from .parts.guard import broadcast, check_alike
from .parts.layout import Layout, Partitioned, clip_grad_norm, local, make_mesh
from .parts.replica import Trainer

if TYPE_CHECKING:
    from ...engine.context import RunContext
    from ...engine.telemetry.recorder import StepResult
    from ...engine.telemetry.step_gate import FaultInjector

MESSAGE_BYTES = 16 << 20


def is_form_somewhere(model: torch.nn.Module, device: torch.device) -> bool:
    """Whether any worker's model, or a part of it, has no memory. Collective."""
    lacking = torch.tensor([float(bool(forms(model)))], device=device)
    dist.all_reduce(lacking, dist.ReduceOp.MAX)
    return bool(lacking > 0)


class Filling:
    """Gives a divided model that has no memory the values of rank 0. Collective.

    Args:
        model: The same on all workers except for its memory; its memory is freed here.
        build: Builds the real model on rank 0; None if there is only `model`.

    Raises:
        FitError: Some values cannot be made; raised on every worker.
    """

    def __init__(
        self, context: RunContext, model: torch.nn.Module, build: Callable[[], Any] | None
    ) -> None:
        self._model, self._rank = model, context.spec.rank
        self._device = torch.device(context.spec.device)
        self._values: dict[str, torch.Tensor] = {}
        failed: Exception | None = None
        if self._rank == 0:
            try:
                self._values = _values_of(context, model, build)
            # includes the user's function: the other workers must not wait for this rank
            except Exception as error:
                failed = error
        _agree(failed)
        _let_go(model)

    def fill(self) -> None:
        """Give the parts memory and rank 0's values. Collective; after the layout."""
        self._model.to_empty(device=self._device)
        with torch.no_grad():
            for name, tensor in _tensors(self._model):
                value = self._values.pop(name, None)
                self._spread(tensor.detach(), None if value is None else value.detach())
                if value is not None:  # also if other code holds the module with which it was built
                    value.data = value.data.new_empty(0)
            for module, name, tensor in _attributes(self._model):
                path = _path(self._model, module, name)
                held = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                self._spread(held, self._values.pop(path, None))
                setattr(module, name, held.cpu())  # where `__init__` had made it
        self._values.clear()

    def _spread(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Send every worker its part of a tensor, some rows in each message."""
        own, first = _own_rows(tensor)
        if not tensor.dim() or not tensor.numel():
            self._send(own, value)
            return
        row_bytes = tensor.numel() // len(tensor) * tensor.element_size()
        step = max(1, MESSAGE_BYTES // row_bytes)
        for begin in range(0, len(tensor), step):
            end = min(begin + step, len(tensor))
            rows = own.new_empty((end - begin, *tensor.shape[1:]))
            self._send(rows, None if value is None else value[begin:end])
            low, high = max(begin, first), min(end, first + len(own))
            if low < high:
                own[low - first : high - first].copy_(rows[low - begin : high - begin])

    def _send(self, into: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None:
            into.copy_(value)
        # As a flat view of bytes, because some backends do not know every type.
        if into.numel():
            dist.broadcast(into.reshape(-1).view(torch.uint8), 0)


def _own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this worker's part and the row with which it begins."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    (placement,) = tensor.placements
    own = local(tensor)
    if not placement.is_shard():
        return own, 0
    assert placement.is_shard(0), "fully_shard divides rows"
    each = -(-len(tensor) // tensor.device_mesh.size())
    return own, min(each * tensor.device_mesh.get_local_rank(), len(tensor))


def _agree(failed: Exception | None) -> None:
    """Raise on every worker if rank 0 could not make the values. Collective."""
    told = [None if failed is None else f"{type(failed).__name__}: {failed}"]
    dist.broadcast_object_list(told, 0)
    if failed is not None:
        raise failed
    if told[0] is not None:
        raise FitError(
            "Rank 0 could not give the model its initial weights.",
            seen=told[0].splitlines()[0],
            next_step="see the error of rank 0, and correct its cause",
            code="WB-FIT-161",
        )


def _values_of(
    context: RunContext, model: torch.nn.Module, build: Callable[[], Any] | None
) -> dict[str, torch.Tensor]:
    """Return all values by name, on the CPU."""
    source = model
    if build is not None:
        source = build()
        if _names(source) != _names(model):
            raise FitError(
                "The function that builds the model must return the same model each time it is "
                "called.",
                seen=f"first call: {len(_names(model))} tensors; "
                f"second call: {len(_names(source))} tensors"
                + ", with other names or shapes"
                * (len(_names(source)) == len(_names(model))),
                next_step="build the whole model inside the function, from values that do not "
                "change",
                code="WB-FIT-159",
            )
    if forms(source):
        _draw(context, source)
    for module, name, _ in _attributes(source):
        raise _undrawn(_path(source, module, name))
    found = dict(_tensors(source))
    for module, name, tensor in _attributes(source, memory=True):
        found[_path(source, module, name)] = tensor.detach()
    return found


def _draw(context: RunContext, model: torch.nn.Module) -> None:
    """Give a model without memory its initial weights, or those that its layers draw."""
    _give_memory(model)
    with torch.no_grad():
        if context.spec.init_from and not context.initial_read:
            arrays, framework = initial.read(Path(context.spec.init_from))
            shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
            fitted = fit_weights(arrays, framework, shapes, context.spec.framework)
            unsaved = dict(_tensors(model)).keys() - shapes.keys()
            if unsaved:  # buffers that are not saved with a model are not in a run's weights either
                _draw_layers(model, "")
            model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in fitted.items()})
            context.initial_read = True
        else:
            _draw_layers(model, "")
    for name, tensor in _tensors(model):
        if _is_marked(tensor):
            raise _undrawn(name)


def _draw_layers(module: torch.nn.Module, path: str) -> None:
    whole = getattr(module, "initialize_weights", None)
    # Hugging Face's function initialises all modules inside too
    if callable(whole) and hasattr(module, "_init_weights"):
        whole()
        return
    for name, child in module.named_children():
        _draw_layers(child, f"{path}.{name}" if path else name)
    own = (*module._parameters.values(), *module._buffers.values())
    if not any(tensor is not None and _is_marked(tensor) for tensor in own):
        return
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            getattr(module, name)()
            return
    raise _undrawn(f"{path or 'the model'} ({type(module).__name__})")


def _undrawn(what: str) -> FitError:
    return FitError(
        "The model is on device `meta`, where tensors have no memory. Workbench must create the "
        "initial weights, but cannot do this for one part of the model.",
        seen=f"{what}: reset_parameters() is missing, or does not set all parameters of this part",
        allowed="layers of torch.nn and of Hugging Face, and layers with reset_parameters()",
        next_step="pass a function that builds the model without device `meta`: "
        "wb.fit(lambda: make_model(), ...)",
        code="WB-FIT-160",
    )


def _give_memory(model: torch.nn.Module) -> None:
    """Allocate missing memory and fill it with a marker value; shared tensors stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    real = _marked(tensor)
                    if isinstance(tensor, torch.nn.Parameter):
                        real = torch.nn.Parameter(real, tensor.requires_grad)
                    made[id(tensor)] = real
                slots[name] = made[id(tensor)]


def _marked(form: torch.Tensor) -> torch.Tensor:
    real = torch.empty(form.shape, dtype=form.dtype, device="cpu")
    if form.is_floating_point() or form.is_complex():
        return real.fill_(float("nan"))
    return real.zero_() if form.dtype == torch.bool else real.fill_(torch.iinfo(form.dtype).min)


def _is_marked(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    least = False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min
    return tensor.dtype != torch.bool and bool((tensor == least).any())


def _let_go(model: torch.nn.Module) -> None:
    """Free the model's memory; shared tensors stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    form = tensor.detach().to("meta")
                    if isinstance(tensor, torch.nn.Parameter):
                        form = torch.nn.Parameter(form, tensor.requires_grad)
                    made[id(tensor)] = form
                slots[name] = made[id(tensor)]
    for module, name, tensor in _attributes(model, memory=True):
        setattr(module, name, tensor.detach().to("meta"))
    gc.collect()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _names(model: torch.nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in _tensors(model)]


def _attributes(
    model: torch.nn.Module, *, memory: bool = False
) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield plain tensors among the modules' attributes: either without memory, or with memory."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta is not memory:
                yield module, name, value


def _path(model: torch.nn.Module, module: torch.nn.Module, name: str) -> str:
    path = next(path for path, other in model.named_modules() if other is module)
    return f"{path}:{name}"


_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)

# Newer versions of PyTorch warn of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def naive_step(model: Any, shard: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one step on this worker's share of the batch: x (B/n, ...). Return the share's loss.

    All P parameters are one unit here; P is a multiple of n. `Sharded` gathers layer by layer, so
    that only one whole layer is in memory at a time.

    Args:
        shard: This worker's parameters, shape (P/n,); nothing else is kept from step to step.
        optimizer: The optimizer of `shard` only.
    """
    n = dist.get_world_size()
    whole = shard.new_empty(n * len(shard))
    _all_gather(whole, shard.data)  # (P/n,) of each -> (P,)
    vector_to_parameters(whole, model.parameters())
    model.zero_grad()
    loss = loss_fn(model(x), y)  # mean over the share
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # (P,)
    shard.grad = torch.empty_like(shard)
    _reduce_scatter(shard.grad, gradient)  # (P,) of each -> (P/n,): shard r of the sum
    shard.grad /= n
    optimizer.step()
    return float(loss)


class Sharded(Partitioned):
    """Data parallelism with sharded parameters, gradients and optimizer state."""

    traffic: Traffic | None = None
    _hook: Any = None
    _entered = False  # whether this step has called the model

    def prepare(self, job: Job) -> None:
        """Keep this worker's shard of every unit; the optimizer holds only shards."""
        self.trainer = Trainer(
            self.context, job, lay_out=lambda model: self._lay_out(model, job), even=True
        )
        self.trainer.wrap(self.trainer.model)
        self.trainer.clip = clip_grad_norm
        self._hook = self.trainer.model.register_forward_pre_hook(self._enter)
        self.traffic = Traffic(self.trainer, self.root, self.context.faults)
        if self.traffic.unmeasured:
            self.context.emit(events.Unmeasured(columns=self.traffic.unmeasured))

    def _lay_out(self, model: torch.nn.Module, job: Job) -> None:
        found = units(model, self.options["unit_mb"] * 1e6)
        check_types(model, found)
        check_alike(model, self.device)
        fills = is_form_somewhere(model, self.device)
        if not fills:
            broadcast([*model.parameters(), *model.buffers()], self.device)
        self.mesh = mesh = make_mesh(self.device, (self.world_size,), ("shard",))

        def shard(model: torch.nn.Module) -> None:
            filling = Filling(self.context, model, job.build) if fills else None
            for unit in found:
                fully_shard(unit, mesh=mesh, reshard_after_forward=self.options["reshard"])
            fully_shard(model, mesh=mesh)
            if filling is not None:
                filling.fill()

        if self.device.type == "cpu":
            accelerator.CPU.free_at_once(True)
        self.layout = Layout(model, job.optimizer, shard)

    def finish(self) -> None:
        """Gather the trained model after the layers gathered for a forward pass are freed."""
        if self.layout is not None and self.layout.laid_out:
            for module in self._trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        super().finish()

    def step(self, share: Share) -> StepResult:
        """Gather, compute, scatter layer by layer; update this worker's shard."""
        trainer, traffic = self._trainer, self.traffic
        assert traffic is not None
        traffic.sent_bytes = 0.0
        weight = share.samples * self.world_size / share.global_samples
        self._entered = False
        try:
            trainer.gradients(share, weight=weight, alone=self._alone)
        except RuntimeError as error:
            if trainer.job.step_fn is None or self._entered:
                raise
            raise _passed_by(type(trainer.model)) from error
        traffic.gradients_ready()
        trainer.update()
        return trainer.measured(share, traffic.sent_bytes if traffic.counted else NAN)

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._entered = True

    def close(self) -> None:
        """Restore the user's module."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        accelerator.CPU.free_at_once(False)
        super().close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a microbatch's gradients until those of the last microbatch are ready."""
        self.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.root.set_requires_gradient_sync(True)

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share with the gathered model."""
        self.equal_buffers()
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    @property
    def root(self) -> FSDPModule:
        """The whole model as `fully_shard` made it."""
        model = self._trainer.model
        assert isinstance(model, FSDPModule)
        return model


def _passed_by(kind: type) -> FitError:
    return FitError(
        "With the strategy `sharded`, a layer's parameters are gathered only when the model "
        "itself is called. But step_fn called a part of the model, and this part has "
        "only shards of its parameters.",
        seen=f"step_fn called a method or a part of {kind.__name__}",
        allowed="a step_fn that calls the whole model: step_fn=lambda model, batch: ... "
        "model(...) ...",
        next_step="return the loss from the model's forward and call model(batch) in step_fn, or "
        "use the strategy `mirrored`",
        code="WB-FIT-130",
    )


def units(model: torch.nn.Module, least_bytes: float) -> list[torch.nn.Module]:
    """Return the parts that are gathered separately, inner ones first.

    A parameter that two modules share must be gathered with both, so it stays with the whole model.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = []
    for module in model.modules():
        inside = isinstance(module, _CONTAINERS)
        for child in module.children():
            plain = module is model and not list(child.children())
            if not (inside or plain) or isinstance(child, _CONTAINERS) or child is model:
                continue
            parameters = list(child.parameters())
            size = sum(p.numel() * p.element_size() for p in parameters)
            shared = any(holders[id(p)] > 1 for p in parameters)
            if parameters and size >= least_bytes and not shared:
                found.append(child)
    return list(dict.fromkeys(reversed(found)))


def check_types(model: torch.nn.Module, found: list[torch.nn.Module]) -> None:
    """Raise FitError if parameters that are gathered together have different types.

    Args:
        found: The parts that are gathered separately, inner ones first.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for unit in (*found, model):
        own = {p: names.pop(p) for p in unit.parameters() if p in names and p.requires_grad}
        kinds = {str(p.dtype).removeprefix("torch."): name for p, name in own.items()}
        if len(kinds) > 1:
            raise FitError(
                "Parameters that are gathered together must have the same data type.",
                seen=", ".join(f"{kind} ({name})" for kind, name in kinds.items()),
                allowed="one data type in each part that is gathered",
                next_step="store a complex parameter as real numbers, and use "
                "torch.view_as_complex in forward"
                if any("complex" in kind for kind in kinds)
                else (
                    "give all parameters the same type (model.float()), or use the strategy "
                    "`mirrored`"
                ),
                code="WB-FIT-131",
            )


class Traffic:
    """Counts the bytes of FSDP's collectives and times how long this worker waited in them.

    It replaces FSDP's own all-gather and reduce-scatter through the hooks that PyTorch offers for
    that. On an accelerator the collectives run on their own streams, in parallel with the
    computation, so their duration does not show the wait. The waits for them are between the
    computation's kernels. In backward FSDP has no hook for them, and measuring only some waits
    would blame the wrong worker. So waits are not measured on accelerators. If PyTorch does not
    have the hooks, nothing is measured.

    Attributes:
        counted: Whether bytes are counted.
        timed: Whether waits are measured.
    """

    def __init__(self, trainer: Trainer, root: FSDPModule, faults: FaultInjector) -> None:
        self.sent_bytes = 0.0
        self._faults = faults
        self.timer = trainer.timer
        hooks = hasattr(root, "set_custom_all_gather")
        self.counted, self.timed = hooks, hooks and trainer.device.type == "cpu"
        self.unmeasured = {}
        if not self.timed:
            why = (
                f"on {trainer.device.type}, FSDP's collectives run at the same time as the "
                "computation, so their time does not show how long a worker waits"
            )
            columns: tuple[str, ...] = ("sync_wait_s", "transfer_s")
            if not hooks:
                why = "with this version of PyTorch, Workbench cannot measure FSDP's collectives"
                columns = (*columns, "sent_bytes")
            self.unmeasured = dict.fromkeys(columns, why)
            self.timer.blind()
        if not hooks:
            return
        every: Any = root
        for module in (m for m in every.modules() if isinstance(m, FSDPModule)):
            module.set_custom_all_gather(_AllGather(self))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def gradients_ready(self) -> None:
        """Note when this worker's part of the gradients is complete."""
        if self.timed:
            self.timer.ready()

    @contextlib.contextmanager
    def count(self, whole: torch.Tensor, group: dist.ProcessGroup) -> Iterator[None]:
        """Count a collective over the tensor `whole`, and time it if possible."""
        workers = group.size()
        size_bytes = whole.numel() * whole.element_size() * (workers - 1) / workers
        self.sent_bytes += size_bytes
        with self.timer.blocked() if self.timed else contextlib.nullcontext():
            if self._faults.on_links:
                self._faults.travel(round(size_bytes))
            yield


class _Collective:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        beside = async_op and not self._traffic.timed
        with self._traffic.count(output_tensor, group):
            return _all_gather(output_tensor, input_tensor, group=group, async_op=beside)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        beside = async_op and not self._traffic.timed
        with self._traffic.count(input_tensor, group):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=beside)
