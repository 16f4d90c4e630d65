"""The loader that a user's own loop is given: the user's batches, divided over the workers.

An object of the user's gets further methods while the user goes on holding it as it is. `model =
DDP(model)` changes what the user's name stands for: state_dict keys get a prefix, own attributes
are out of reach, and calling the inner module bypasses the all-reduce without a word. Here the
object keeps its identity; only its class is exchanged for a subclass. Undoing that is exchanging
the class back. Copies and pickles (an averaged copy, a checkpoint) are of the original class.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader

from ....engine.torch.data import map_batch
from ....shared import events

if TYPE_CHECKING:
    from ....engine.checkpoints.checkpoints import Checkpoints
    from ....engine.context import RunContext
    from ....engine.training.shares import Source


class Loop(Protocol):
    """The loop that a loader hands batches to, and tells of epochs; `loop.OwnLoop` is one."""

    context: RunContext
    device: torch.device
    checkpoints: Checkpoints | None

    def epoch_begins(self) -> None:
        """Another pass over the data begins."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, its fetching measured."""

    def epoch_ends(self) -> None:
        """The last batch of a pass was trained on."""

    def epoch_end(self) -> None:
        """A pass over the data has ended."""


class SharedLoader(DataLoader[Any]):
    """Takes the place of the user's loader: its batches, divided over the workers.

    All but its batches is the user's loader's: `dataset`, `num_workers`, `collate_fn`, what a
    class of the user's adds. `batch_size` and `len` count global batches. Epochs are counted here,
    so `sampler.set_epoch` is not needed; where it is called, it names the epoch that comes next.

    Attributes:
        undivided: The user's loader.
    """

    undivided: DataLoader[Any]

    def __init__(self, loop: Loop, source: Source) -> None:
        # DataLoader's own `__init__` is left out: it would make another sampler and check again.
        given = source.given
        vars(self).update({k: v for k, v in vars(given).items() if k != "_iterator"})
        vars(self)["undivided"] = given
        vars(self)["sampler"] = _with_set_epoch(given.sampler, self._name_epoch)
        self._loop, self._source = loop, source
        self._epoch = self._served = self._ahead = 0
        self._resumes_at: tuple[int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "undivided" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(vars(self)["undivided"], name)

    def _name_epoch(self, epoch: int) -> None:
        """Let the next epoch, and those after it, be this one and those after it."""
        self._ahead = max(0, int(epoch)) - self._epoch

    def __len__(self) -> int:
        if self._source.steps_per_epoch is None:
            raise TypeError("the stream behind this loader has no length")
        return self._source.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loop, spec = self._loop, self._loop.context.spec
        epoch, self._epoch, self._served = self._epoch, self._epoch + 1, 0
        first = self._passed_over(epoch)
        if first is None:
            return
        loop.epoch_begins()
        named = max(0, epoch + self._ahead)  # a user's own count may begin anywhere
        shares = self._source.epoch(named, spec.rank, spec.world_size, first)
        for _ in range(first, self._source.steps_per_epoch or 1 << 62):
            try:
                share = loop.fetch(shares)
            except StopIteration:  # a stream that does not say how long it is
                break
            self._served += 1
            yield self._moved(share.data)
        loop.epoch_ends()
        loop.epoch_end()
        loop.context.emit(
            events.EpochBegan(rank=spec.rank, epoch=epoch, step=loop.context.trained - 1)
        )

    def _passed_over(self, epoch: int) -> int | None:
        """Return the batch with which an epoch begins; None: all of it lies before the checkpoint.

        The state is set again here: what the loop did between the epochs passed over (a step of a
        scheduler, an evaluation) is part of what was saved.
        """
        if self._resumes_at is None:
            return 0
        at, batch = self._resumes_at
        if epoch < at:
            return None
        self._resumes_at, self._served = None, batch
        assert self._loop.checkpoints is not None
        self._loop.checkpoints.restore()
        return batch

    def position(self) -> dict[str, Any]:
        """Return the epoch under way and its batches that were given out."""
        if self._served and self._served == self._source.steps_per_epoch:
            return {"epoch": self._epoch, "batch": 0}
        return {"epoch": max(0, self._epoch - 1), "batch": self._served}

    def go_on(self, epoch: int, batch: int) -> None:
        """Begin with this batch of this epoch; earlier epochs are empty."""
        self._resumes_at = (epoch, batch)

    def _moved(self, data: Any) -> Any:
        device = self._loop.device
        if device.type == "cpu":
            return data
        return map_batch(lambda t: t.to(device, non_blocking=True), data)


def _with_set_epoch(sampler: Any, tell: Any) -> Any:
    """Return the sampler with a `set_epoch` that tells of the epoch; its state is the same."""

    def set_epoch(self: Any, epoch: int) -> None:
        own = getattr(super(made, self), "set_epoch", None)
        if own is not None:
            own(epoch)
        tell(epoch)

    with contextlib.suppress(TypeError, AttributeError):  # slots, or no class that can be extended
        made = subclass(type(sampler), set_epoch=set_epoch)
        twin: Any = object.__new__(made)
        twin.__dict__ = sampler.__dict__
        return twin
    return sampler


def give_no_sync(model: torch.nn.Module, no_sync: Callable[[], Any]) -> Callable[[], None]:
    """Give a model DistributedDataParallel's `no_sync`, unless it has one; return what undoes it.

    A compiled or patched module, which has a `forward` of its own, is left as it is.
    """
    cls = type(model)
    scripted = isinstance(model, torch.jit.ScriptModule)
    if scripted or hasattr(model, "no_sync") or "forward" in model.__dict__:
        return lambda: None
    model.__class__ = subclass(cls, no_sync=lambda self: no_sync())
    return lambda: setattr(model, "__class__", cls)


def subclass(cls: type, **methods: Any) -> type:
    """Return a subclass that looks like `cls` and whose copies and pickles are of `cls`."""

    def reduce(self: Any, protocol: Any) -> Any:
        parts = list(super(made, self).__reduce_ex__(protocol))
        if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            # __newobj__ insists on the object's present class; the older function does not.
            parts[:2] = copyreg._reconstructor, (cls, object, None)  # type: ignore[attr-defined]
        return tuple(parts)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(cls)(cls.__name__, (cls,), {**names, **methods, "__reduce_ex__": reduce})
    return made  # type: ignore[no-any-return]


def become(thing: Any, cls: type) -> None:
    """Exchange an object's class, also where that has a `__class__` of its own (accelerate)."""
    vars(object)["__class__"].__set__(thing, cls)
