"""Checkpoints of PyTorch runs: `torch.distributed.checkpoint`, read without unpickling.

One process (`no_dist`) writes the tensors of a state with DCP's own file writer. Before that,
tensors that are spread over workers have been gathered. DCP keeps an index in `.metadata`, which is
a pickle. DCP's reader loads this pickle without restriction. Here only the classes of such an index
are allowed, so a folder from another place cannot run code. Tensors are read with `weights_only`,
as in DCP itself.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import contextlib
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from enum import EnumMeta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...errors import RunError
from ..checkpoints import files
from ..checkpoints.files import arrays_in, decode, encode, write_text
from . import accelerator
from .data import map_batch

SKELETON = "state.json"
# One process is intended: no warning. Set here, because writing threads cannot change filters.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values()
                        if isinstance(d, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path", "WindowsPath"},
    "pathlib._local": {"PosixPath", "Path", "WindowsPath"},
}  # fmt: skip
"""All names in DCP's index of plain tensors, by module."""


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's index, and no other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the index.

        Raises:
            RunError: The index names another class, so DCP did not write it.
        """
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 write enums so
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise RunError(
                "Workbench does not read this checkpoint: its index contains an object that could "
                "run code.",
                seen=f"{module}.{name}",
                next_step="use a checkpoint that Workbench wrote, from a source that you trust",
                code="WB-RUN-030",
            )
        return super().find_class(module, name)


def _member(of: Any, name: str) -> Any:
    """Return a member of one of the index's enumerations; no other attribute is allowed."""
    if isinstance(of, EnumMeta) and name in of.__members__:
        return of.__members__[name]
    raise RunError("The checkpoint's index is damaged.", seen=f"{of!r}.{name}", code="WB-RUN-031")


class _Reader(FileSystemReader):
    """DCP's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise RunError(
                "The checkpoint's index is damaged.", seen=type(found).__name__, code="WB-RUN-032"
            )
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


def write_state(folder: Path, state: Any) -> int:
    """Write a state into a new folder, and sync it to the disk; return its bytes."""
    skeleton, leaves = encode(state, lambda value: isinstance(value, torch.Tensor))
    tensors = {
        name: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        for name, leaf in leaves.items()
    }
    folder.mkdir(parents=True)
    if tensors:
        writer = FileSystemWriter(folder, sync_files=True)
        with _plain_errors(), accelerator.own().current():  # a thread of its own writes
            save(tensors, storage_writer=writer, no_dist=True)
    write_text(folder / SKELETON, json.dumps(skeleton))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def read_state(folder: Path) -> Any:
    """Return the state that `write_state` wrote, on the CPU."""
    skeleton = json.loads((folder / SKELETON).read_text())
    leaves: dict[str, Any] = {}
    if (folder / ".metadata").exists():
        reader = _Reader(folder)
        for name, about in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            leaves[name] = torch.empty(about.size, dtype=about.properties.dtype)
        with _plain_errors():
            load(leaves, storage_reader=reader, no_dist=True)
    for name in arrays_in(skeleton):
        leaves[name] = leaves[name].numpy()
    return decode(skeleton, leaves)


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def packed(state: Any) -> tuple[dict[str, Any], list[Bytes]]:
    """Return a state as JSON-ready data and the bytes of its tensors, in order.

    Raises:
        FitError: A value is neither a number, a text, a tensor nor a container of these.
    """
    skeleton, leaves = encode(state, lambda value: isinstance(value, torch.Tensor))
    tensors = {
        name: (torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf).detach().cpu()
        for name, leaf in leaves.items()
    }
    kinds = {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in tensors.items()}
    return {"skeleton": skeleton, "tensors": kinds}, [_bytes(t) for t in tensors.values()]


def room_for(about: Mapping[str, Any]) -> tuple[list[Bytes], Callable[[], Any]]:
    """Return buffers for the bytes of a packed state, and a function that builds the state."""
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, *shape) in about["tensors"].items()
    }

    def unpacked() -> Any:
        arrays = {name: tensors[name].numpy() for name in arrays_in(about["skeleton"])}
        return decode(about["skeleton"], {**tensors, **arrays})

    return [_bytes(tensor) for tensor in tensors.values()], unpacked


def _bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor on the CPU; without a copy if the tensor is contiguous."""
    found: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return found


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the original error: `except Exception` does not catch DCP's own exception."""
    try:
        yield
    except CheckpointException as collected:
        cause = next(iter(collected.failures.values()))[0]
        raise (cause if isinstance(cause, Exception) else OSError(str(cause))) from None


def copied(state: Any) -> Any:
    """Return a copy of a state on the CPU; later steps do not change the copy."""
    return map_batch(lambda tensor: tensor.detach().to("cpu", copy=True), state)


def random_state(device: str) -> dict[str, Any]:
    """Return the states of all generators that a step of this worker may draw from.

    Among the devices' generators, only that of this worker's device is kept. It is kept without the
    device's number, so the rank can continue on another device. The other generators belong to
    other workers.
    """
    state = {**files.random_state(), "torch": torch.get_rng_state()}
    own = accelerator.of(device).random_state()
    return state if own is None else {**state, "device": own}


def set_random_state(state: dict[str, Any], device: str) -> None:
    """Set every generator to the state that `random_state` returned."""
    files.set_random_state(state)
    torch.set_rng_state(state["torch"])
    if state.get("device") is not None:
        accelerator.of(device).set_random_state(state["device"])
