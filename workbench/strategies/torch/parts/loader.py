"""The loader that a user's own loop receives: the user's batches, divided over the workers.

Workbench adds methods to a user's object, and the user keeps the same object. `model = DDP(model)`
changes the object behind the user's name: state_dict keys get a prefix, the user's attributes
cannot be reached, and calling the inner module bypasses the all-reduce without an error. Here the
object keeps its identity; only its class is replaced by a subclass, and later restored. Copies and
pickles (an averaged copy, a checkpoint) have the original class.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader

from ....engine.torch.data import map_batch
from ....shared import events

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.training.shares import Source


class Loop(Protocol):
    """The loop that gets batches and epochs from a loader; `loop.OwnLoop` is such a loop."""

    context: RunContext
    device: torch.device
    standing: Standing

    def epoch_begins(self) -> None:
        """Another pass over the data begins."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, and measure how long fetching takes."""

    def epoch_ends(self) -> None:
        """The last batch of a pass was trained on."""

    def epoch_end(self) -> None:
        """A pass over the data has ended."""

    def pass_begins(self) -> None:
        """Note that the loop requests batches: a pass begins, unless the loop resumes later."""

    def next_batch(self) -> None:
        """Note that the loop requests a batch."""

    def is_elsewhere(self) -> None:
        """Note that the loop resumes after this pass."""

    def restore(self) -> None:
        """Set the state to the state at the place where the loop resumes."""


@dataclass
class Standing:
    """The position of a loop in its loader.

    Attributes:
        begun: Passes that have begun.
        served: Batches that the latest pass has returned.
        resumes_at: The epoch and the batch at which the loop resumes; None if nothing is skipped.
        dealt: How often the shares were divided again because workers changed.
        reads: How often each earlier pass asked for a batch. Passes before a resume count too.
        ended: Whether the latest pass has reached the end of its data.
    """

    begun: int = 0
    served: int = 0
    resumes_at: tuple[int, int] | None = None
    dealt: int = 0
    reads: list[int] = field(default_factory=list)
    ended: bool = False

    def reads_before(self, epoch: int) -> list[int]:
        """Return how often each pass before an epoch asked for a batch; the end counts too."""
        latest = [self.served + self.ended] if len(self.reads) < self.begun else []
        return [*self.reads, *latest][:epoch]


class SharedLoader(DataLoader[Any]):
    """Replaces the user's loader: its batches, divided over the workers.

    Everything else belongs to the user's loader: `dataset`, `num_workers`, `collate_fn`, attributes
    of a user's class. `batch_size` and `len` count global batches. Epochs are counted here, so
    `sampler.set_epoch` is not needed; if it is called, it names the next epoch.

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
        self._at, self._ahead = loop.standing, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "undivided" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(vars(self)["undivided"], name)

    def _name_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; later epochs count from there."""
        self._ahead = max(0, int(epoch)) - self._at.begun

    def __len__(self) -> int:
        if self._source.steps_per_epoch is None:
            raise TypeError("this loader has no length, because its data is a stream")
        return self._source.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loop, at = self._loop, self._at
        if not self._source.seekable:
            at.reads = at.reads_before(max(at.begun, len(at.reads)))
        epoch, at.begun, at.served, at.ended = at.begun, at.begun + 1, 0, False
        loop.pass_begins()
        named = max(0, epoch + self._ahead)  # a user's own count can begin with any number
        shares = self._reached(epoch, named)
        if shares is None:
            loop.is_elsewhere()
            return
        loop.epoch_begins()
        dealt, total = at.dealt, self._source.steps_per_epoch
        while total is None or at.served < total:
            loop.next_batch()
            if at.dealt != dealt:
                shares, dealt = self._shares(named, at.served), at.dealt
            try:
                share = loop.fetch(shares)
            except StopIteration:  # a stream that does not say how long it is
                break
            at.served += 1
            yield self._moved(share.data)
        if not self._source.seekable:
            next(shares, None)  # a stream may have lines after its last sample
            at.ended = True
        loop.epoch_ends()
        loop.epoch_end()
        context = loop.context
        context.emit(
            events.EpochBegan(rank=context.spec.rank, epoch=epoch, step=context.trained - 1)
        )

    def _shares(self, named: int, first: int) -> Iterator[Any]:
        spec = self._loop.context.spec
        return self._source.epoch(named, spec.rank, spec.world_size, first)

    def _reached(self, epoch: int, named: int) -> Iterator[Any] | None:
        """Return an epoch's shares; None if the loop resumes after this epoch.

        The state is set again here. The saved state already contains the loop's actions between the
        skipped epochs (a step of a scheduler, an evaluation). A stream is read before the state is
        set, because reading may change random states.
        """
        at, streams = self._at, not self._source.seekable
        if at.resumes_at is None:
            return self._shares(named, 0)
        first, batch = at.resumes_at
        if epoch < first:
            if streams:
                # A checkpoint of an older version does not have `reads`.
                reads = at.reads[epoch] if epoch < len(at.reads) else None
                at.served = sum(1 for _ in islice(self._shares(named, 0), reads))
                at.ended = True
            return None
        at.resumes_at, at.served = None, batch
        shares = self._shares(named, 0 if streams else batch)
        if streams:
            for _ in islice(shares, batch):
                pass
        self._loop.restore()
        return shares

    def position(self, unfinished: int = 0) -> dict[str, Any]:
        """Return the current epoch, and the number of its batches whose steps are complete.

        Args:
            unfinished: Batches of a step that failed: they are given out again.
        """
        at = self._at
        served = max(0, at.served - unfinished)
        if served and served == self._source.steps_per_epoch:
            epoch, served = at.begun, 0
        else:
            epoch = max(0, at.begun - 1)
        reads = [] if self._source.seekable else at.reads_before(epoch)
        return {"epoch": epoch, "batch": served, "reads": reads}

    def go_on(self, epoch: int, batch: int, reads: Sequence[int] = ()) -> None:
        """Begin with this batch of this epoch; earlier epochs are empty.

        Args:
            reads: How often each earlier pass over a stream asked for a batch.
        """
        self._at.resumes_at, self._at.reads = (epoch, batch), list(reads)

    def _moved(self, data: Any) -> Any:
        device = self._loop.device
        if device.type == "cpu":
            return data
        return map_batch(lambda t: t.to(device, non_blocking=True), data)


def _with_set_epoch(sampler: Any, tell: Any) -> Any:
    """Return the sampler with a `set_epoch` that reports the epoch; its state is the same."""

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

    A compiled or patched module, which has its own `forward`, is not changed.
    """
    cls = type(model)
    scripted = isinstance(model, torch.jit.ScriptModule)
    if scripted or hasattr(model, "no_sync") or "forward" in model.__dict__:
        return lambda: None
    model.__class__ = subclass(cls, no_sync=lambda self: no_sync())
    return lambda: setattr(model, "__class__", cls)


def subclass(cls: type, **methods: Any) -> type:
    """Return a subclass that looks like `cls`; its copies and pickles have the class `cls`."""

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
    """Replace an object's class, even if that has its own `__class__` (accelerate)."""
    vars(object)["__class__"].__set__(thing, cls)
