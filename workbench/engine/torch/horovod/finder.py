"""How `import horovod.torch` finds the replacement: the last finder, so a real Horovod wins."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from ....errors import FitError

VERSION = "0.28.1+workbench"
"""The version whose interface this is, and whose it is."""

PUBLIC = (
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max",
    "Min", "Product", "Sum",
    "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_built", "gloo_enabled", "grouped_allreduce",
    "grouped_allreduce_", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll",
    "rank", "rocm_built", "shutdown", "size", "synchronize",
)  # fmt: skip
"""What `horovod.torch` has of these names."""


class LacksError(FitError, ImportError):
    """A part of Horovod that is not here."""


class Refused:
    """Replaces a name of Horovod that is not supported: reports this when it is used."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Raise FitError."""
        raise FitError(
            f"hvd.{self._name} is not supported.", next_step=self._instead, code="WB-FIT-183"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self()


_OTHER_GROUPS = "for a group with only some ranks, use torch.distributed.new_group(ranks)"
_REFUSED = {
    "alltoall": "use torch.distributed.all_to_all_single",
    "alltoall_async": "use torch.distributed.all_to_all_single",
    "reducescatter": "use torch.distributed.reduce_scatter_tensor",
    "reducescatter_async": "use torch.distributed.reduce_scatter_tensor",
    "sparse_allreduce_async": "use hvd.allreduce(tensor.to_dense())",
    "SyncBatchNorm": "on GPUs, use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "elastic": "use wb.fit with --checkpoint DIR: the run continues after a worker's death",
    "ProcessSet": _OTHER_GROUPS,
    "add_process_set": _OTHER_GROUPS,
    "remove_process_set": _OTHER_GROUPS,
    "start_timeline": "use the run's dashboard, or profile steps 10 to 14 with --profile 10:15",
    "stop_timeline": "use the run's dashboard, or profile steps 10 to 14 with --profile 10:15",
}
_LAUNCH = (
    "begin the cell with %%distributed -n 4, or run torchrun --nproc-per-node 4 train.py in a "
    "terminal"
)
_PARTS = {
    "tensorflow": "use %%distributed mirrored --framework tensorflow and model.fit without Horovod",
    "keras": "use %%distributed mirrored --framework tensorflow and model.fit without Horovod",
    "mxnet": "train with PyTorch: use horovod.torch, or %%distributed parameter_server",
    "spark": "put the code into a cell under %%distributed",
    "ray": "put the code into a cell under %%distributed",
    "runner": _LAUNCH,
}
_ROOMS = ("compression", "functions", "mpi_ops", "optimizer")
"""Modules of horovod.torch from which code imports the same names."""


_OURS = ("ranks", "messages", "optimizer")
"""Where the names are; loaded by those who use them alone."""


class Loader(importlib.abc.Loader):
    """Makes the modules `horovod`, `horovod.torch` and those below it."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill a module."""
        name = module.__name__.removeprefix("horovod").removeprefix(".")
        if name in _PARTS:
            raise LacksError(
                "Horovod is not installed, and Workbench has no replacement for "
                f"{module.__name__}.",
                allowed="horovod.torch",
                next_step=_PARTS[name],
                code="WB-FIT-184",
            )
        if not name:
            module.__dict__.update(__version__=VERSION, run=Refused("run", _LAUNCH))
            importlib.import_module("horovod.torch")
            return
        rooms = [importlib.import_module(f".{one}", __package__) for one in _OURS]
        there = {name: value for room in rooms for name, value in vars(room).items()}
        module.__dict__.update({k: there[k] for k in PUBLIC})
        module.__dict__.update({k: Refused(k, v) for k, v in _REFUSED.items()})


class Finder(importlib.abc.MetaPathFinder):
    """Answers for `horovod` after all other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the loader of a module of Horovod; None for others, and for a real Horovod."""
        top, _, rest = fullname.partition(".")
        if top != "horovod":
            return None
        if rest:
            spec = getattr(sys.modules.get(top), "__spec__", None)
            if not isinstance(getattr(spec, "loader", None), Loader):
                return None
        if rest in ("", "torch") or rest in _PARTS:
            return importlib.machinery.ModuleSpec(fullname, Loader(), is_package=True)
        below = rest.removeprefix("torch.")
        return importlib.machinery.ModuleSpec(fullname, Loader()) if below in _ROOMS else None


def install() -> None:
    """Let `import horovod.torch` find this, unless a real Horovod is installed."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def uninstall() -> None:
    """Stop finding it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        spec = getattr(sys.modules[name], "__spec__", None)
        if isinstance(getattr(spec, "loader", None), Loader):
            del sys.modules[name]
