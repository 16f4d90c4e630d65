"""Turns the user's data into shares of global batches, for PyTorch strategies.

There are three kinds of source:

- tensors: one indexing of each tensor gives a batch; samples are not collated one by one;
- map-style datasets and loaders over them: samples are fetched by index, in the loader's own
  worker processes if it has some; each worker of the run fetches only its share;
- streams (IterableDataset): a stream has no index. So every worker reads the whole stream and keeps
  its slice of each global batch. The stream must give every worker the same samples; some batches
  are compared (`same_batch.py`).

This module also counts, cuts and maps collated batches of any nesting. A source may be divided by
class (`engine/training/shares.py`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data._utils.pin_memory import pin_memory

from ...data import OwnData
from ...errors import FitError
from ...shared import events
from ..context import current
from ..contract import Share
from ..training.shares import (
    Order,
    Source,
    Workers,
    dirichlet_shards,
    make_order,
    own_order,
    share_bounds,
    skewed_order,
)
from . import accelerator
from .same_batch import SameBatch, sampled

PART_OF_DEVICE = 0.1
"""The part of a device's free memory that a data set may use to stay on the device."""

KINDS = "a torch Dataset, (x, y) arrays or tensors, or a DataLoader"


class TensorSource(Source):
    """Tensors of equal length; one indexing gives a batch.

    Args:
        tensors: Tensors of shape (samples, ...).
        collated: Whether a batch is a list, as a DataLoader's batch is, even if it has one tensor.
    """

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], order: Order, *, collated: bool = False
    ) -> None:
        self.tensors, self.order, self._collated = tensors, order, collated
        self.samples, self.batch_size = order.samples, order.batch_size
        self.steps_per_epoch = order.steps_per_epoch
        self._device = tensors[0].device

    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        size, indices = self.order.batch_size, self.order.epoch(epoch)
        places = torch.from_numpy(indices).to(self._device)
        for step in range(first, self.order.steps_per_epoch):
            begin = step * size
            total = min(size, len(indices) - begin)
            start, stop = share_bounds(total, rank, workers)
            samples = stop - start
            # A worker without a sample gets one sample, which does not count.
            chosen = places[begin + start : begin + stop] if samples else places[begin : begin + 1]
            yield Share(self._take(chosen), samples, total, step, epoch)

    def stay_on(self, device: str) -> None:
        """Keep the samples on the device if they are small: then steps copy nothing.

        The samples are indexed on the device, so batches are not copied either.
        """
        own = accelerator.of(device)
        room = own.memory()
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        if own.is_cpu or self._device.type != "cpu" or room is None:
            return
        if size_bytes <= PART_OF_DEVICE * room.free_bytes:
            self.tensors = tuple(tensor.to(own.device) for tensor in self.tensors)
            self._device = own.device

    def _take(self, places: torch.Tensor) -> Any:
        taken = tuple(tensor.index_select(0, places) for tensor in self.tensors)
        if self._collated:
            return list(taken)
        return taken if len(taken) > 1 else taken[0]

    def peek(self) -> Any:
        return self._take(torch.zeros(1, dtype=torch.int64, device=self._device))


class IndexedSource(Source):
    """A map-style dataset; its collate function and worker processes come from `loader`."""

    def __init__(self, dataset: Any, order: Order, loader: DataLoader[Any] | None = None) -> None:
        self.dataset, self.order, self.loader = dataset, order, loader
        self.samples, self.batch_size = order.samples, order.batch_size
        self.steps_per_epoch = order.steps_per_epoch
        collate = default_collate if loader is None else loader.collate_fn
        self._fetch = _fetcher(dataset, collate)
        self._chosen: list[list[int]] = []  # indices that the worker processes must fetch
        self._fetching: Any = None

    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        batches = self.order.batches(epoch)[first:]
        if not batches:
            return
        if self.loader is None or not self.loader.num_workers:
            pins = self.loader is not None and self.loader.pin_memory and _can_pin()
            for step, batch in enumerate(batches, first):
                chosen, samples = _share_of(batch, rank, workers)
                data = self._fetch(chosen)
                if pins:  # the user's loader would pin it
                    data = pin_memory(data)  # type: ignore[no-untyped-call]
                yield Share(data, samples, len(batch), step, epoch)
            return
        chosen_of, samples_of = zip(*(_share_of(b, rank, workers) for b in batches), strict=True)
        fetched = self._processes(self.loader, list(chosen_of))
        for place, data in enumerate(fetched):
            yield Share(data, samples_of[place], len(batches[place]), first + place, epoch)

    def _processes(self, loader: DataLoader[Any], chosen: list[list[int]]) -> Any:
        """Return the batches of one epoch, from worker processes like the user's loader's."""
        self._chosen[:] = chosen
        if self._fetching is None:
            self._fetching = DataLoader(
                self.dataset,
                batch_sampler=self._chosen,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
                prefetch_factor=loader.prefetch_factor,
                persistent_workers=loader.persistent_workers,
            )
        return self._fetching

    def close(self) -> None:
        self._fetching = None

    def peek(self) -> Any:
        state = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):  # else torch asks every GPU for its state
                return self._fetch([0])
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


class StreamSource(Source):
    """An IterableDataset, read through a loader of global batches."""

    seekable = False

    def __init__(self, loader: DataLoader[Any], batch_size: int) -> None:
        self.loader, self.batch_size = loader, batch_size
        self._context = context = current()
        self._same = SameBatch(context) if context else None
        self._number, self._warned = 0, False
        if context is not None:  # every worker makes its streams in the same order
            self._number = context.streams = context.streams + 1
        try:
            self.steps_per_epoch: int | None = len(loader)
        except TypeError:
            self.steps_per_epoch = None
        self.samples = None

    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        self._warn_of_processes()
        empty = True
        for step, data in enumerate(self.loader):
            empty = False
            if step < first:
                continue
            self._compare(data, epoch, step)
            total = batch_length(data)
            start, stop = share_bounds(total, rank, workers)
            kept = (start, stop) if stop > start else (0, 1)
            yield Share(slice_batch(data, *kept, total), stop - start, total, step, epoch)
        if empty:
            raise FitError(
                "The data set returned no sample.",
                seen=f"{type(self.loader.dataset).__name__}, epoch {epoch}",
                next_step="make __iter__ return a new iterator in each epoch"
                if epoch
                else "make the data set return at least one batch on each worker",
                code="WB-FIT-048",
            )

    def _warn_of_processes(self) -> None:
        """Warn if each process of the loader reads the whole stream (PyTorch's documentation of
        `IterableDataset`); data sets of libraries divide themselves.
        """
        count, kind = self.loader.num_workers, type(self.loader.dataset)
        if self._context is None or count < 2 or kind.__module__ != "__main__":
            return
        codes = [getattr(method, "__code__", None) for method in vars(kind).values()]
        if not any(code and "get_worker_info" in code.co_names for code in codes):
            self._context.emit(  # the same text on every worker, so it is shown once
                events.Warned(
                    rank=self._context.spec.rank,
                    text=f"The loader has {count} processes, and each process reads the whole "
                    f"stream. So each sample is used {count} times in an epoch. If `steps` ends "
                    "the training before the end of an epoch, the last samples of the stream may "
                    "never be used. Make the data set's __iter__ read a different part in each "
                    "process (torch.utils.data.get_worker_info()), or use num_workers=1.",
                )
            )

    def _compare(self, data: Any, epoch: int, step: int) -> None:
        """Check that the workers read the same stream.

        Raises:
            FitError: Other workers read other targets. If batches are not pairs, this is a warning:
                the samples can be the same, with other random changes.
        """
        if self._same is None or self._context is None:
            return
        paired = isinstance(data, (tuple, list)) and len(data) == 2
        about = f"stream {self._number} epoch {epoch}"
        other = self._same.other(step, tensors_of(data[1] if paired else data), about=about)
        if other is None:
            return
        rank = self._context.spec.rank
        if paired:
            raise FitError(
                "Each worker reads the whole stream and keeps only its share, but the workers' "
                "streams differ. So some samples would be used several times and others never.",
                seen=f"batch {step}: the targets of rank {rank} and of rank {other} differ",
                allowed="the same samples in the same order on every worker",
                next_step="use the same fixed seed for the stream's random numbers on every rank, "
                "for example torch.Generator().manual_seed(0). If each worker must read its own "
                "files, write the training loop yourself (docs/data.md)",
                code="WB-FIT-188",
            )
        if not self._warned:
            self._warned = True
            self._context.emit(  # the same text on every worker, so it is shown once
                events.Warned(
                    rank=rank,
                    text="Every worker must read the same samples from the stream, but the "
                    "workers' batches differ. If the workers read the same samples and only change "
                    "them at random (augmentation), ignore this warning. If the samples differ, "
                    "some samples are used several times and others never: give the stream a fixed "
                    "seed.",
                )
            )


def make_source(data: Any, batch_size: int | None, *, seed: int, shuffle: bool) -> Source:
    """Turn the user's data into a source.

    Args:
        data: A torch Dataset, a tuple of arrays or tensors of equal length, or a DataLoader; or one
            of these as the worker's own data, in a collective call.
        batch_size: Global batch size; None: use the loader's.
        shuffle: Ignored for a DataLoader, because its own sampler decides.

    Raises:
        FitError: The data is of another kind, is empty, or has no batch size.
    """
    if isinstance(data, OwnData):
        return _own(make_source(data.data, batch_size, seed=seed, shuffle=shuffle))
    if isinstance(data, DataLoader):
        return _from_loader(undivided(data), batch_size, seed)
    if batch_size is None:
        raise FitError(
            "batch_size is missing.",
            allowed="a whole number: how many samples all workers together use in one step",
            next_step="pass batch_size=64",
            code="WB-FIT-049",
        )
    if isinstance(data, IterableDataset):
        return StreamSource(DataLoader(data, batch_size=batch_size), batch_size)
    if isinstance(data, (tuple, list)) and data and all(_is_array(part) for part in data):
        tensors = tuple(torch.as_tensor(part) for part in data)
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise FitError("The arrays have unequal lengths.", seen=lengths, code="WB-FIT-050")
        _not_empty(lengths[0], data)
        return TensorSource(tensors, make_order(lengths[0], batch_size, seed=seed, shuffle=shuffle))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        if isinstance(data, (str, bytes, Mapping)) or _is_array(data):
            raise _unknown(data)
        _not_empty(len(data), data)
        order = make_order(len(data), batch_size, seed=seed, shuffle=shuffle)
        return _indexed(data, order, None)
    raise _unknown(data)


def _own(source: Source) -> Source:
    """Return the source of a worker that has only its own samples; a collective call.

    Raises:
        FitError: The data is a stream, whose samples have no index.
    """
    if not isinstance(source, (TensorSource, IndexedSource)):
        raise FitError(
            "wb.data.own needs a data set that supports len(data) and data[i].",
            seen="a stream (IterableDataset)",
            next_step="pass a Dataset with __len__ and __getitem__, or a pair of tensors",
            code="WB-FIT-186",
        )
    together = dist.is_initialized() and dist.get_world_size() > 1
    counts = [source.order.samples]
    if together:
        counts = counts * dist.get_world_size()
        dist.all_gather_object(counts, source.order.samples)
    mine = copy.copy(source)
    mine.order = own_order(source.order, counts, dist.get_rank() if together else 0)
    mine.samples, mine.steps_per_epoch = mine.order.samples, mine.order.steps_per_epoch
    mine.own = True
    return mine


def _from_loader(loader: DataLoader[Any], batch_size: int | None, seed: int) -> Source:
    size = batch_size or loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise FitError(
            "The DataLoader must have a batch_size.",
            seen="batch_size=None"
            if loader.batch_sampler is None
            else f"a batch_sampler of type {type(loader.batch_sampler).__name__}",
            next_step="use DataLoader(..., batch_size=64) without batch_sampler",
            code="WB-FIT-051",
        )
    if isinstance(loader.dataset, IterableDataset):
        if size != loader.batch_size:
            loader = _resized(loader, size)
        return StreamSource(loader, size)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise FitError(
            "A DataLoader with its own batch_sampler cannot be divided over workers.",
            seen=type(loader.batch_sampler).__name__,
            next_step="use DataLoader(..., batch_size=64, sampler=...) without batch_sampler",
            code="WB-FIT-052",
        )
    dataset: Any = loader.dataset
    # A loader that was given a batch sampler has another `sampler`, which it does not use.
    given = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler: Any = given.sampler
    drop_last = bool(given.drop_last)
    _not_empty(len(dataset), dataset)
    plain = type(sampler) is SequentialSampler
    usual = type(sampler) is RandomSampler and not sampler.replacement
    if type(sampler) is DistributedSampler:  # gives a share; shares are made here
        order = make_order(
            len(dataset), size, seed=seed, shuffle=sampler.shuffle, drop_last=drop_last
        )
    elif plain or (usual and sampler.num_samples == len(dataset)):
        order = make_order(len(dataset), size, seed=seed, shuffle=not plain, drop_last=drop_last)
    else:
        order = Order(len(sampler), size, sampled(sampler, seed), drop_last)
    if not order.steps_per_epoch:
        raise FitError(
            "The loader drops its only batch, which is smaller than the batch size.",
            seen=f"samples: {order.samples}, batch size: {size}, drop_last=True",
            next_step="use a smaller batch size, or drop_last=False",
            code="WB-FIT-053",
        )
    return _indexed(dataset, order, loader)


def _indexed(dataset: Any, order: Order, loader: DataLoader[Any] | None) -> Source:
    plain = loader is None or (loader.collate_fn is default_collate and not loader.num_workers)
    if plain and isinstance(dataset, TensorDataset):
        untouched = type(dataset).__getitem__ is TensorDataset.__getitem__
        if untouched and len({t.device for t in dataset.tensors}) == 1:
            return TensorSource(dataset.tensors, order, collated=True)
    return IndexedSource(dataset, order, loader)


def _can_pin() -> bool:
    """Whether a device in use copies from pinned memory in parallel with the host."""
    own = accelerator.in_use()
    return own is not None and own.pins


def _fetcher(dataset: Any, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if hasattr(dataset, "take") and collate is default_collate:
        take = dataset.take
        return lambda places: take(np.asarray(places, np.int64))
    if hasattr(dataset, "__getitems__"):
        many = dataset.__getitems__
        return lambda places: collate(many([int(i) for i in places]))
    return lambda places: collate([dataset[int(i)] for i in places])


def _share_of(batch: Any, rank: int, workers: Workers) -> tuple[list[int], int]:
    start, stop = share_bounds(len(batch), rank, workers)
    return (batch[start:stop] if stop > start else batch[:1]).tolist(), stop - start


def _resized(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_size=size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )


def _is_array(part: Any) -> bool:
    return isinstance(part, (np.ndarray, torch.Tensor))


def _not_empty(length: int, data: Any) -> None:
    if length == 0:
        raise FitError("The data set is empty.", seen=type(data).__name__, code="WB-FIT-054")


def _unknown(data: Any) -> FitError:
    return FitError(
        "wb.fit cannot read `data` of this type.",
        seen=type(data).__name__,
        allowed=KINDS,
        next_step="use wb.fit(model, (x, y), ...) or wb.fit(model, wb.data.digits('train'), ...)",
        code="WB-FIT-055",
    )


def divisible(loader: Any, *, seed: int) -> Source:
    """Return the source behind a user's loader.

    Raises:
        FitError: The loader is not a DataLoader, or cannot be divided.
    """
    if not isinstance(loader, DataLoader):
        raise FitError(
            "The loader is not a DataLoader.",
            seen=type(loader).__name__,
            allowed="a torch.utils.data.DataLoader with a batch_size",
            code="WB-FIT-056",
        )
    source = make_source(loader, None, seed=seed, shuffle=False)
    source.given = undivided(loader)
    return source


def undivided(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the user's own loader, also if an earlier cell got a loader from `wb.prepare`."""
    own: DataLoader[Any] = vars(loader).get("undivided", loader)
    return own


def global_batch(loader: Any, workers: int) -> int | None:
    """Return the samples per step on all workers, for a loop that divides its own data."""
    size = getattr(loader, "batch_size", None)
    return size * workers if isinstance(size, int) else None


def batch_length(data: Any) -> int:
    """Return how many samples a collated batch has: the first tensor's first dimension.

    Raises:
        FitError: The batch contains no tensor.
    """
    for tensor in tensors_of(data):
        if tensor.dim():
            return len(tensor)
    raise FitError(
        "A batch must contain a tensor with one row for each sample.",
        seen=type(data).__name__,
        next_step="make the data set or the loader's collate_fn return such tensors",
        code="WB-FIT-045",
    )


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_of(value)


def map_batch(
    function: Callable[[torch.Tensor], Any],
    data: Any,
    other: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Apply `function` to every tensor of nested tuples, lists, mappings; `other` to the rest."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_batch(function, value, other) for key, value in data.items()}
        try:
            return type(data)(mapped)  # type: ignore[call-arg]
        except TypeError:
            return mapped
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_batch(function, value, other) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_batch(function, value, other) for value in data)
    return other(data)


def slice_batch(data: Any, start: int, stop: int, total: int) -> Any:
    """Return samples start..stop of a collated batch of `total` samples."""
    if isinstance(data, (list, tuple)) and len(data) == total and not list(tensors_of(data)):
        return data[start:stop]
    return map_batch(lambda t: t[start:stop] if t.dim() and len(t) == total else t, data)


CHUNK = 1024


def skewed(source: Source, workers: int, alpha: float, seed: int) -> Source:
    """Return the source with a separate shard for each worker; equal seeds give equal shards.

    Raises:
        FitError: The samples have no class, or no index (a stream).
    """
    shards = dirichlet_shards(labels(source), workers, alpha, seed)
    dealt: Any = copy.copy(source)
    dealt.order = skewed_order(dealt.order, shards, seed)
    return dealt  # type: ignore[no-any-return]


def labels(source: Source) -> NDArray[np.int64]:
    """Return the class of each sample, shape (samples,).

    Raises:
        FitError: The samples have no class, or no index.
    """
    if isinstance(source, TensorSource):
        target = source.tensors[-1] if len(source.tensors) == 2 else None
    elif isinstance(source, IndexedSource):
        target = _fetched(source)
    else:
        raise FitError(
            "The option `skew` cannot be used with a stream, because its samples have no index.",
            seen=type(source).__name__,
            next_step="remove -o skew, or use a data set that supports data[i]",
            code="WB-FIT-057",
        )
    if target is None or target.dim() != 1 or target.is_floating_point():
        raise FitError(
            "The option `skew` divides samples by class, but these samples have no class (label).",
            seen="samples that are not pairs (x, y)"
            if target is None
            else f"y: {target.dtype}, number of dimensions: {target.dim()}",
            allowed="pairs (x, y), where y is one whole number per sample",
            next_step="remove -o skew",
            code="WB-FIT-058",
        )
    return target.cpu().numpy().astype(np.int64)


def _fetched(source: IndexedSource) -> torch.Tensor | None:
    """Read the targets of all samples, only once."""
    found = []
    count = len(source.dataset)
    for first in range(0, count, CHUNK):
        batch = source._fetch(list(range(first, min(first + CHUNK, count))))
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            return None
        if not isinstance(batch[1], torch.Tensor):
            return None
        found.append(batch[1])
    return torch.cat(found)
