"""Where parameters and gradients are on the CPU, on their way from and to servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .shards import as_bytes

Bytes = NDArray[np.uint8]


class Staging:
    """The bytes of each parameter: its own memory, or pinned memory on the host for a GPU's."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._device = next((p.device for p in parameters if p.device.type != "cpu"), None)
        self._own: list[torch.Tensor | None] = []
        for parameter in parameters:
            direct = parameter.device.type == "cpu" and parameter.is_contiguous()
            self._own.append(None if direct else _host_copy(parameter))
        self._zeros: dict[int, Bytes] = {}

    def landing(self) -> list[Bytes]:
        """Return where each parameter arrives: its own memory, or a copy on the host."""
        self._wait()  # the last copies to the device must have left the host's memory
        return [
            as_bytes(parameter.detach() if own is None else own)
            for parameter, own in zip(self._parameters, self._own, strict=True)
        ]

    def scatter(self, parameters: Sequence[torch.Tensor]) -> None:
        """Bring what arrived in host copies to where the parameters are."""
        with torch.no_grad():
            for parameter, own in zip(parameters, self._own, strict=True):
                if own is not None:
                    parameter.copy_(own, non_blocking=True)

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> list[Bytes]:
        """Return the bytes of tensors that lie like the parameters; zeros for those missing."""
        self._wait()
        for tensor, own in zip(tensors, self._own, strict=True):
            if own is not None and tensor is not None:
                own.copy_(tensor, non_blocking=True)
        self._wait()
        return [self._bytes_of(i, tensor) for i, tensor in enumerate(tensors)]

    def _bytes_of(self, index: int, tensor: torch.Tensor | None) -> Bytes:
        own, parameter = self._own[index], self._parameters[index]
        if tensor is None:
            if index not in self._zeros:
                size = parameter.numel() * parameter.element_size()
                self._zeros[index] = np.zeros(size, np.uint8)
            return self._zeros[index]
        return as_bytes(own if own is not None else tensor.contiguous())

    def _wait(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    pinned = parameter.device.type == "cuda"
    return torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=pinned)
