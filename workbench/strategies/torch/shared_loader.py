"""The loader that a user's own loop is given: the user's batches, divided over the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...engine.source import Source
from ...engine.torch_batches import map_batch

if TYPE_CHECKING:
    from .loop import OwnLoop


class SharedLoader:
    """Takes the place of the user's loader: its batches, divided over the workers.

    `len` is the number of global batches; epochs are counted by themselves, so no `set_epoch`.
    """

    def __init__(self, loop: OwnLoop, source: Source) -> None:
        self._loop, self._source = loop, source
        self._epoch = self._served = 0
        self._resumes_at: tuple[int, int] | None = None
        self.batch_size = source.batch_size

    def __len__(self) -> int:
        if self._source.steps_per_epoch is None:
            raise TypeError("the stream behind this loader has no length")
        return self._source.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        loop, spec = self._loop, self._loop.context.spec
        epoch, self._epoch, self._served = self._epoch, self._epoch + 1, 0
        first = self._passed_over(epoch)
        if first is None:
            return
        loop.epoch_begins()
        shares = self._source.epoch(epoch, spec.rank, spec.world_size, first)
        for _ in range(first, self._source.steps_per_epoch or 1 << 62):
            try:
                share = loop.fetch(shares)
            except StopIteration:  # a stream that does not say how long it is
                break
            self._served += 1
            yield self._moved(share.data)
        loop.epoch_end()
        loop.context.emit("epoch", rank=spec.rank, epoch=epoch, step=loop.context.trained - 1)

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

    @property
    def dataset(self) -> Any:
        """The data set behind the loader."""
        source: Any = self._source
        return source.loader.dataset if hasattr(source, "loader") else source
