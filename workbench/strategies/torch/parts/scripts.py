"""Records scripts that do not use Workbench: finds what trains in them while it trains.

`workbench run train.py` shows any job without a change to its code. A script shows what it does by
its calls, so three places in PyTorch are watched:

    DataLoader's next      which batches are fetched, and how long that takes
    Optimizer's init       how many samples its model gets until the first backward
    autograd.backward      at the first one: which optimizer, and which module has its parameters?

Then all modules and optimizers of the process are searched, once, for any wrappers of the model
(DDP, FSDP, compile, Lightning, Accelerate) in any order. After that the loop is recorded as by
`wb.watch`; its first step begins when its first batch was fetched.

    fetch | fetch | forward | backward | optimizer.step | fetch | ...
      noted                 ^ found: the first step began with that fetch

Libraries fetch batches ahead of training. So a step does not train on the batch that was fetched in
it: batches wait in a queue, and each backward takes one.

The script's numbers are not changed: nothing is wrapped, no random number is used, and nothing is
sent. Copies of DDP are not compared, unlike with `wb.watch`, which a script calls itself.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import dataloader

from ....engine.contract import NAN
from ....engine.torch import accelerator
from ....engine.torch.data import batch_length
from ....engine.torch.horovod.gradients import averaging
from ....engine.training.user_loops import announce
from ....errors import FitError, RunError
from ....shared import events
from .averaging import ring_bytes
from .user_loop import OwnLoop

if TYPE_CHECKING:
    from ....engine.context import RunContext

clock = time.perf_counter

SHARDED = FSDPModule, FullyShardedDataParallel
MOST_NOTED = 256
"""How many fetches are remembered, because they may belong to training."""
MOST_NODES = 50_000
"""How far the graph of a loss is followed back to find its optimizer among several."""

_watching: _Scripts | None = None


def watch_scripts(context: RunContext, *made: Optimizer) -> Callable[[], None]:
    """Record the training of the script that this process will run, if it trains.

    If the script calls `wb.watch`, `wb.prepare` or `wb.fit` itself, that is recorded instead. If
    several models train (a GAN), the first pair of model and optimizer that trains is recorded: its
    optimizer ends the steps.

    Args:
        context: The run, which has begun; `context.trained` is the number of recorded steps.
        made: Optimizers that exist already.

    Returns:
        A function that removes everything again; call it when the script has ended, once or more.

    Raises:
        RunError: The process is watched already.
    """
    global _watching
    if _watching is not None:
        raise RunError(
            "A script is already being recorded in this process.",
            next_step="end that recording first: call the function that watch_scripts returned",
            code="WB-RUN-126",
        )
    _watching = scripts = _Scripts(context)
    for optimizer in made:
        scripts.expect(optimizer)
    return scripts.close


@dataclass
class _Fetch:
    """One batch that a loader handed out.

    Attributes:
        batches: Identifies the pass over the loader while the pass exists.
        source: Identifies the loader, also between passes.
        samples: None if the batch cannot be counted.
        passed: The operations that the device had received by then.
    """

    batches: weakref.ref[Any]
    source: Any
    began_s: float
    ended_s: float
    samples: int | None
    passed: accelerator.Event | None = None


class _Scripts:
    """Watches the script from its beginning to its end."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.loop: ScriptLoop | None = None
        self._home = os.getpid(), threading.get_ident()
        self.fetches: deque[_Fetch] = deque(maxlen=MOST_NOTED)
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._backwards = 0
        self._stands_down = False
        self._early: list[tuple[Module, int]] = []  # inputs that models got before one was found
        self._leave_backward = _patched(torch.autograd, "backward", self._backward)
        fetched = _patched(dataloader._BaseDataLoaderIter, "__next__", self._next)
        self._undo = [self._leave_backward, fetched, _patched(Optimizer, "__init__", self._made)]
        for kind in _with_subclasses(torch.amp.GradScaler):
            if "scale" in vars(kind):
                self._undo.append(_patched(kind, "scale", self._scale))

    # -- what is listened to -----------------------------------------------------------------------

    def _backward(self, original: Any, tensors: Any, *args: Any, **keywords: Any) -> None:
        """At the first backward, find out what it trains."""
        if self.loop is None and self._is_ours() and self._found(tensors):
            original = torch.autograd.backward  # the loop's
        original(tensors, *args, **keywords)

    def _made(self, original: Any, optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
        """Make an optimizer."""
        original(optimizer, *args, **keywords)
        if self.loop is None and not self._stands_down and self._is_ours():
            self.expect(optimizer)

    def expect(self, optimizer: Optimizer) -> None:
        """Count the samples that an optimizer's model gets before the first backward."""
        model = _Tree(_alive(Module)).holder(_trained_by(optimizer))
        if model is None or isinstance(model, torch.jit.ScriptModule):
            return

        def enters(samples: int | None) -> None:
            if samples and self.loop is None and self._is_ours():
                self._early.append((model, samples))

        hook: Any = _Hook(enters)
        self._undo.append(model.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Keep a loss as it was before it was multiplied."""
        scaled = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and self._is_ours():
            (self.loop or self)._scaled = scaled, outputs.detach()
        return scaled

    def _next(self, original: Any, batches: Any) -> Any:
        """Return a loader's next batch."""
        if self._stands_down or not self._is_ours():
            return original(batches)
        learns, source = torch.is_grad_enabled(), batches._index_sampler
        loop = self.loop
        if loop is not None and learns and loop.trains_on(source):
            return loop.take(batches, source, original)
        if loop is not None:
            loop.was_aside = True
        began_s = clock()
        try:
            batch = original(batches)
        except StopIteration:
            left = [one for one in self.fetches if one.batches() is not batches]
            self.fetches = deque(left, MOST_NOTED)
            raise
        if learns:
            noted = _Fetch(weakref.ref(batches), source, began_s, clock(), _count(batch))
            if loop is None and self.context.spec.device != "cpu":
                noted.passed = accelerator.of(self.context.spec.device).event()
            self.fetches.append(noted)
        return batch

    def _is_ours(self) -> bool:
        """Whether the script itself calls, not a thread or a process that it started."""
        return self._home == (os.getpid(), threading.get_ident())

    # -- what is found -----------------------------------------------------------------------------

    def _found(self, losses: Any) -> bool:
        """Search for the model that trains; return whether it is recorded from here on."""
        context = self.context
        if self._stands_down or context.taken_over or context.strategy or context.weights:
            self._stands_down = True  # the script has called wb.watch or wb.fit
            self.fetches.clear()
            return False
        self._backwards += 1
        # searched at the 1st, 2nd, 4th, 8th, ... backward
        if self._backwards & (self._backwards - 1):
            return False
        began_s = clock()
        found, early, self._early = find(losses), self._early, []
        if found is None:
            return False
        device, told = found.device, torch.device(context.spec.device)
        if (device.type, device.index or 0) != (told.type, told.index or 0):
            context.spec = replace(context.spec, device=str(device))  # the script's own choice
        fetches = self.claim()
        self._leave_backward()
        self.loop = loop = ScriptLoop(self, found)
        loop._scaled, self._scaled = self._scaled, None
        inside = set(found.model.modules())
        loop._entered += [n for one, n in early if one in inside or found.model in one.modules()]
        spent_s = clock() - began_s  # is no part of the step
        for one in self.fetches:
            one.began_s, one.ended_s = one.began_s + spent_s, one.ended_s + spent_s
        context.taken_over = "wb.watch"
        context.closers.append(loop.close)
        whole = context.spec.rank == 0 and loop.is_whole
        context.weights = loop.weights if whole else dict
        announce(context, found.model, _global_batch(fetches, context.spec.world_size))
        if not fetches:
            why = "the script does not get its batches from a DataLoader"
            context.emit(events.Unmeasured(columns={"data_wait_s": why}))
        return True

    def claim(self) -> list[_Fetch]:
        """Return the fetches since the last step that belong to the current step.

        These are fetches from the loader used last, and from loaders used equally often, because a
        loop can use several loaders at once. A pass that has ended or was abandoned (to look at one
        batch) does not count.
        """
        alive = [one for one in self.fetches if one.batches() is not None]
        asked = Counter(id(one.source) for one in alive)
        last = asked[id(alive[-1].source)] if alive else 0
        return [one for one in alive if asked[id(one.source)] == last]

    def close(self) -> None:
        """Remove all hooks."""
        global _watching
        if _watching is not self:
            return
        _watching = None
        context = self.context
        if self.loop is not None:
            self.loop.close()
        elif context.updates and not (context.taken_over or context.strategy):
            why = "the optimizers' parameters are not in a torch.nn.Module, or backward() was not"
            text = f"Nothing was recorded. Either {why} called."
            context.emit(events.Noted(rank=context.spec.rank, text=text))
        self._stands_down = True
        self.fetches.clear()
        self._scaled = None
        if self.loop is None and context.closers:  # the script's own loop is the caller
            context.closers.insert(0, self._take_out)  # they are called last first
        else:
            self._take_out()

    def _take_out(self) -> None:
        while self._undo:
            self._undo.pop()()


class ScriptLoop(OwnLoop):
    """The loop of a script: recorded as by `wb.watch`, with the batches that its loaders fetch.

    Args:
        scripts: Knows the fetches of loaders that may not be for training.
        found: The model and optimizer that train.

    Attributes:
        was_aside: Whether a batch was fetched that is not for training, such as in an evaluation.
    """

    def __init__(self, scripts: _Scripts, found: Found) -> None:
        context, model = scripts.context, found.model
        several = context.spec.world_size > 1
        wrapped = isinstance(model, DistributedDataParallel)
        self.is_whole = not any(isinstance(one, SHARDED) for one in model.modules())
        inside = wrapped or not self.is_whole
        self._scripts = scripts
        self._sources: list[Any] = []
        self._line: list[tuple[Any, int | None]] = []  # batches that were fetched but not yet used
        self._ahead = 0
        self._hoards = False
        sent_bytes = ring_bytes(model, context.spec.world_size) if wrapped else NAN
        super().__init__(
            context, model, found.optimizer, None,
            watched=self, sent_bytes=sent_bytes, communicates=several and inside,
        )  # fmt: skip
        self._counts = False
        if (by_optimizer := averaging(model)) is not None:
            self.hear_of_waits(by_optimizer)
        elif several and not inside:
            self.timer.blind()
            why = (
                "the script exchanges gradients outside backward(), but Workbench measures the "
                "exchange only inside backward()"
            )
            context.emit(events.Unmeasured(columns={"sync_wait_s": why, "transfer_s": why}))
        if not isinstance(found.entrance, torch.jit.ScriptModule):
            hook: Any = _Hook(self._enters)
            entered = found.entrance.register_forward_pre_hook
            self._undo.append(entered(hook, prepend=True, with_kwargs=True).remove)

    def _time_loader(self, loader: Any) -> None:
        """Do nothing: `take` handles the loaders of a script."""

    def _clear(self) -> None:
        super()._clear()
        self._backwards = 0
        self._entered: list[int] = []
        self._is_tentative = self.was_aside = False

    # -- where a step begins -----------------------------------------------------------------------

    def trains_on(self, source: Any) -> bool:
        """Whether the batches of a loader are known to be used for training."""
        return any(one is source for one in self._sources)

    def take(self, batches: Any, source: Any, fetch: Callable[[Any], Any]) -> Any:
        """Return the next batch, timed.

        Raises:
            RunStopped: Stop was pressed.
        """
        if not batches._num_yielded:
            self._line = [one for one in self._line if one[0] is not source]
        if not self._backwards and self._is_anew(batches):
            trained = self._is_tentative and not self.was_aside
            self._clear()
            if not trained:
                self.epoch_begins()
        self._begin()
        before_s = clock()
        try:
            batch = fetch(batches)
        except StopIteration:
            if not self._fed:
                self._under_way = False
                self.epoch_ends()
            raise
        self.timer.spend("data")
        waited_s = clock() - before_s
        if self._fed:
            self._late_wait_s += waited_s
        else:
            self._first_wait_s += waited_s
            self._feed()
        self._line.append((source, _count(batch)))
        return batch

    def _is_anew(self, batches: Any) -> bool:
        """Whether the assumed beginning of a step was wrong, so that the step begins again."""
        if not self._line and (self._is_tentative or not batches._num_yielded):
            return True  # only a look at a batch, or a batch for another model
        return self.was_aside and not self._fed

    def _enters(self, samples: int | None) -> None:
        """Begin a step whose batch was fetched earlier, or without a loader."""
        if not self._fed:
            self._begin_here()
        self._entered += [samples] if samples else []

    def _begin_here(self) -> None:
        self._begin()
        self._feed()
        self._is_tentative = True

    def _take_up(self, fetches: list[_Fetch]) -> None:
        """Move the beginning of the step back to fetches that turned out to be for training.

        An evaluation that ran at that time is not counted.
        """
        self._clear()
        self._begin()
        first, last = fetches[0], fetches[-1]
        if self._start == self._start and first.began_s > self._start:
            self.context.eval_s += first.began_s - self._start
        self._start = first.began_s
        self._first_wait_s = sum(one.ended_s - one.began_s for one in fetches)
        self._feed()
        timer: Any = self.timer
        if not hasattr(timer, "steps"):
            timer.begin_at(last.ended_s)
        elif last.passed is not None:
            timer.steps.marks.began, timer.steps.marks.cpu_s = last.passed, last.ended_s
        for one in fetches:
            self._line.append((one.source, one.samples))
            if not self.trains_on(one.source):
                self._sources.append(one.source)
        self._counts = True

    def _before_backward(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        if not self._backwards and not self._line and (fetches := self._scripts.claim()):
            self._take_up(fetches)
        elif not self._fed:
            self._begin_here()
        self._backwards += 1
        return super()._before_backward(tensors)

    # -- where it ends -----------------------------------------------------------------------------

    def _record(self, loss: torch.Tensor, *, seen: bool) -> None:
        self._samples = self._trained_on() or self._given() or max(1, self._backwards)
        super()._record(loss, seen=seen)
        self._scripts.fetches.clear()

    def _given(self) -> int:
        """Return the number of samples in the model's input; 0 if it was not seen."""
        seen = self._entered
        return sum(seen) * max(len(seen), self._backwards) // len(seen) if seen else 0

    def _trained_on(self) -> int:
        """Take the step's batches out of the queue; return their samples, 0 if unknown.

        Every backward takes one batch from each loader; other batches were fetched ahead. If a loop
        fetches several batches in every step, it trains on them together.
        """
        taken: list[int | None] = []
        left: list[tuple[Any, int | None]] = []
        for source in self._sources:
            sizes = [size for one, size in self._line if one is source]
            count = len(sizes) if self._hoards else max(1, self._backwards)
            taken += sizes[:count]
            left += [(source, size) for size in sizes[count:]]
        if self._ahead and len(left) > self._ahead:
            self._hoards = True
            taken, left = taken + [size for _, size in left], []
        self._ahead = max(self._ahead, len(left))
        self._line = left
        return 0 if None in taken else sum(size or 0 for size in taken)


class _Hook:
    """Reports each training forward; in copies and pickles of the model it does nothing."""

    def __init__(self, tell: Callable[[int | None], object] = lambda samples: None) -> None:
        self._tell = tell

    def __call__(self, module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # A compiled graph must not contain this call, and must not break at it.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._tell(_count((args, keywords)))

    def __reduce__(self) -> Any:
        return _Hook, ()


def _count(batch: Any) -> int | None:
    """Return how many samples a batch holds; None if it has no tensor."""
    try:
        return batch_length(batch)
    except FitError:
        return None


def _global_batch(fetches: list[_Fetch], workers: int) -> int | None:
    """Return the global batch size, from the loader or its first batch."""
    sizes = {id(one.source): getattr(one.source, "batch_size", one.samples) for one in fetches}
    known = [size for size in sizes.values() if isinstance(size, int)]
    return workers * sum(known) if known else None


def _patched(kind: Any, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Have `instead` called, with the original as first argument; return the undo."""
    original = vars(kind)[name]

    @functools.wraps(original)
    def function(*args: Any, **keywords: Any) -> Any:
        return instead(original, *args, **keywords)

    def undo() -> None:
        if vars(kind)[name] is function:
            setattr(kind, name, original)

    setattr(kind, name, function)
    return undo


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from _with_subclasses(sub)


# -- which model, which optimizer ------------------------------------------------------------------


class _Tree:
    """The modules of this process: which module contains which, and the owner of each parameter."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._parents: dict[int, list[Module]] = {}
        self._owners: dict[int, list[Module]] = {}
        for module in modules:
            for child in (vars(module).get("_modules") or {}).values():
                if child is not None:
                    self._parents.setdefault(id(child), []).append(module)
            for parameter in _own_parameters(module):
                self._owners.setdefault(id(parameter), []).append(module)

    def above(self, module: Module) -> list[Module]:
        """Return a module and all modules that contain it, the nearest first."""
        found, seen = [module], {id(module)}
        for one in found:  # grows meanwhile
            for parent in self._parents.get(id(one), ()):
                if id(parent) not in seen:
                    seen.add(id(parent))
                    found.append(parent)
        return found

    def holder(self, parameters: list[torch.Tensor]) -> Module | None:
        """Return the smallest module with most of these parameters, or its DDP-like wrapper."""
        counts: dict[int, int] = {}
        modules: dict[int, Module] = {}
        for parameter in parameters:
            holders: dict[int, Module] = {}
            for owner in self._owners.get(id(parameter), ()):
                if id(owner) not in holders:
                    holders |= {id(one): one for one in self.above(owner)}
            for key in holders:
                counts[key] = counts.get(key, 0) + 1
            modules |= holders
        if not modules:
            return None
        most = max(counts.values())
        full = [module for key, module in modules.items() if counts[key] == most]
        smallest: Module = min(full, key=lambda one: sum(1 for _ in one.modules()))
        above = self.above(smallest)
        copied = [one for one in above if isinstance(one, DistributedDataParallel)]
        sharded = [one for one in above if isinstance(one, SHARDED)]
        return (copied or sharded or [smallest])[-1]


def _own_parameters(module: Module) -> list[Any]:
    """Return a module's own parameters; for FSDP all, because it registers only some at a time."""
    found: list[Any] = list((vars(module).get("_parameters") or {}).values())
    held: Any = module
    try:
        if isinstance(module, FSDPModule):
            for group in held._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    found += [one.sharded_param, getattr(one, "_unsharded_param", None)]
        elif isinstance(module, FullyShardedDataParallel) and held._handle is not None:
            flat = held._handle.flat_param
            found += [flat, *(flat._params or ())]
    except AttributeError:  # unknown internals of another version: use the registered parameters
        pass
    return [one for one in found if one is not None]


@dataclass
class Found:
    """The model and the optimizer that train in a script.

    Attributes:
        entrance: The outermost callable of the model, with compilation and wrappers. A hook inside
            would be compiled into the graph.
    """

    model: Module
    optimizer: Optimizer
    entrance: Module
    device: torch.device


def find(losses: Any) -> Found | None:
    """Return the model and optimizer that these losses train; None if there is no such pair."""
    tree, pairs = _Tree(_alive(Module)), []
    for optimizer in _alive(Optimizer):
        held = _trained_by(optimizer)
        model = tree.holder(held)
        if model is not None:
            pairs.append((model, optimizer, held))
    if (shown := _reached(losses)) is not None:

        def share(pair: tuple[Module, Optimizer, list[Any]]) -> tuple[int, int]:
            whole = (id(p) for module in pair[0].modules() for p in _own_parameters(module))
            return len(shown & {id(p) for p in pair[2]}), len(shown.intersection(whole))

        pairs = sorted((one for one in pairs if any(share(one))), key=share, reverse=True)
    if not pairs:
        return None
    model, optimizer, held = pairs[0]
    around = [one for one in tree.above(model) if isinstance(one, OptimizedModule)]
    return Found(model, optimizer, around[-1] if around else model, held[0].device)


def _alive(kind: type[Any]) -> list[Any]:
    # `isinstance` would take longer, and would trust objects that claim another class.
    kinds = set(_with_subclasses(kind))
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def _trained_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters that an optimizer trains; a wrapper of an optimizer has none."""
    groups = vars(optimizer).get("param_groups") or ()
    return [p for group in groups for p in group["params"] if p.requires_grad]


def _reached(losses: Any) -> set[int] | None:
    """Return the ids of the parameters from which losses were computed; None if not visible.

    If activations are computed again in backward (checkpointing), the graph has no parameters.
    """
    listed = losses if isinstance(losses, (list, tuple)) else [losses]
    nodes = [t.grad_fn for t in listed if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen, found = set(nodes), set()
    for node in nodes:  # grows meanwhile
        found.add(id(getattr(node, "variable", None)))
        if len(nodes) > MOST_NODES or type(node).__name__ == "CheckpointFunctionBackward":
            return None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
