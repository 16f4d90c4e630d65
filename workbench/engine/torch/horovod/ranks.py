"""Which processes there are, and what PyTorch is built with."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from ....errors import FitError
from ....shared import events
from ...context import current

NOTE = (
    "Horovod is not installed, so Workbench replaces horovod.torch with its own module. "
    "docs/training.md (Code written for Horovod) lists what works."
)


class _State:
    """What `init` has found."""

    initialized = False
    made = False  # whether the group is this module's
    told = False
    places: tuple[tuple[int, int], ...] = ()  # of each rank: its host's number, its local rank


_LAUNCHERS = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Use the present process group; otherwise join the one that the environment describes.

    Raises:
        FitError: Only some ranks are asked for, or the processes were not started by torchrun.
    """
    if comm is not None or process_sets:
        raise FitError(
            "In Workbench, hvd.init always uses all ranks.",
            seen="comm=" if comm is not None else "process_sets=",
            next_step="call hvd.init() without arguments; for a group with only some ranks, use "
            "torch.distributed.new_group(ranks)",
            code="WB-FIT-163",
        )
    if not dist.is_initialized():
        _join()
        _State.made = True
    _State.initialized = True
    mine = int(os.environ.get("GROUP_RANK", 0)), local_rank()
    found: list[Any] = [mine] * size()
    dist.all_gather_object(found, mine)
    _State.places = tuple(found)
    if not _State.told and rank() == 0:
        context = current()
        if context is not None:
            context.emit(events.Noted(rank=context.spec.rank, text=NOTE))
        else:
            sys.stderr.write(f"note: {NOTE}\n")
    _State.told = True


def _join() -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group()
        return
    launched = [name for name in _LAUNCHERS if os.environ.get(name, "1") != "1"]
    if launched:
        raise FitError(
            "These processes were not started by torchrun, so they cannot find each other.",
            seen=f"{launched[0]}={os.environ[launched[0]]}",
            next_step="use torchrun --nproc-per-node 4 train.py instead of horovodrun or mpirun",
            code="WB-FIT-164",
        )
    stores: Any = dist  # the stores are there, but not declared as exported
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)


def shutdown() -> None:
    """Leave the group if `init` has made it; an earlier one stays."""
    if _State.made and dist.is_initialized():
        dist.destroy_process_group()
    _State.initialized = _State.made = False


def is_initialized() -> bool:
    """Return whether `init` was called."""
    return _State.initialized and dist.is_initialized()


def require_init() -> None:
    if not is_initialized():
        raise FitError(
            "Horovod has not been initialized.", next_step="call hvd.init()", code="WB-FIT-165"
        )


def rank() -> int:
    """Return this process's number among all."""
    require_init()
    return dist.get_rank()


def size() -> int:
    """Return how many processes there are."""
    require_init()
    return dist.get_world_size()


def local_rank() -> int:
    """Return this process's number on its host."""
    require_init()
    return int(os.environ.get("LOCAL_RANK", 0))


def local_size() -> int:
    """Return how many processes this host has."""
    require_init()
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _across() -> list[int]:
    """Return the ranks that have this local rank, one on each host."""
    require_init()
    mine = local_rank()
    return [at for at, (_, local) in enumerate(_State.places) if local == mine]


def cross_rank() -> int:
    """Return this host's number among those that have this local rank."""
    return _across().index(rank())


def cross_size() -> int:
    """Return how many hosts have this local rank."""
    return len(_across())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    hosts = [host for host, _ in _State.places]
    return len({hosts.count(host) for host in hosts}) <= 1


def _no() -> bool:
    """Return False: MPI, DDL and oneCCL are not here."""
    return False


mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = _no


def gloo_built() -> bool:
    """Return whether PyTorch has gloo."""
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return 1 if PyTorch has NCCL, else 0."""
    return int(dist.is_nccl_available())


def cuda_built() -> bool:
    """Return whether PyTorch is built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch is built for ROCm."""
    return torch.version.hip is not None
