"""What torch loads for `fakegpu`: the device's module, and the backend of its collectives."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import fakegpu_native as native
import torch


def _index(device: Any = None) -> int:
    if device is None:
        return int(native.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(native.current_device()) if index is None else index


class device:  # noqa: N801 - as torch.cuda.device
    """Computes on a device within."""

    def __init__(self, wanted: Any) -> None:
        self._wanted = _index(wanted)

    def __enter__(self) -> None:
        self._before = native.exchange_device(self._wanted)

    def __exit__(self, *_: object) -> None:
        native.exchange_device(self._before)


def _set_device(wanted: Any) -> None:
    new = not native.is_initialized()
    native.set_device(_index(wanted))
    if new and _asked:
        _seed_all(_asked[0])


def _stream(wanted: Any = None, priority: int = 0, **_: Any) -> Any:
    return torch.Stream(device=f"fakegpu:{_index(wanted)}", priority=priority)


def _event(enable_timing: bool = False, **_: Any) -> Any:
    return torch.Event(device=f"fakegpu:{_index()}", enable_timing=enable_timing)


def _module() -> types.ModuleType:
    module: Any = types.ModuleType("torch.fakegpu")
    module.device = device
    module.is_available = lambda: native.device_count() > 0
    module.is_initialized = native.is_initialized
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = _set_device
    module.synchronize = lambda wanted=None: native.synchronize(_index(wanted))
    module.get_device_name = lambda wanted=None: f"Fake {native.identity(_index(wanted))}"
    module.mem_get_info = lambda wanted=None: native.memory(_index(wanted))
    module.max_memory_allocated = lambda wanted=None: native.peak(_index(wanted))
    module.reset_peak_memory_stats = lambda wanted=None: native.reset_peak(_index(wanted))
    module.Stream, module.Event = _stream, _event
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.current_stream = lambda wanted=None: torch.accelerator.current_stream(
        f"fakegpu:{_index(wanted)}"
    )
    module.empty_cache = lambda: None
    module.has_context, module.identity = native.has_context, native.identity
    module.fail = native.fail
    module.hang = native.hang
    module._is_in_bad_fork = lambda: False
    module.get_rng_state = _rng_state
    module.set_rng_state = _set_rng_state
    module.manual_seed = lambda seed: native.seed(native.current_device(), seed)
    module.manual_seed_all = _seed_all
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def _rng_state(wanted: Any = None) -> torch.Tensor:
    return native.rng_state(_index(wanted))


def _set_rng_state(state: torch.Tensor, wanted: Any = None) -> None:
    native.set_rng_state(state, _index(wanted))


_asked: list[int] = []


def _seed_all(seed: int) -> None:
    """Seed every device; one that is not initialised yet is seeded when it is."""
    _asked[:] = [seed]
    if not native.is_initialized():
        return
    for index in range(native.device_count()):
        native.seed(index, seed)


_data: Any = torch.Tensor.data
_set = _data.__set__


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor's data move between the CPU and the device, as CUDA's may."""
    if tensor.device.type == value.device.type:
        _set(tensor, value)
        return
    moved = value.detach().requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, moved)


_module_apply = torch.nn.Module._apply


def _apply(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Keep parameters the same objects when a module moves, as on CUDA."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _module_apply(module, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _make_nccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    import torch.distributed as dist

    inner = dist.PrefixStore("inner/", store)
    return native.make_nccl(store, rank, size, dist.ProcessGroupGloo(inner, rank, size, timeout))


def start() -> None:
    """Bring the device to torch; torch calls it when it is imported."""
    torch.utils.rename_privateuse1_backend("fakegpu")
    torch._register_device_module("fakegpu", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.Tensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign,assignment]
    import torch.distributed as dist

    dist.Backend.register_backend("fakenccl", _make_nccl, devices=["fakegpu"])
