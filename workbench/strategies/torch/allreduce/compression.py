"""Gradient compression: fewer bytes per step, with the error fed back.

Source: error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Stich,
Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018, algorithm 1. PowerSGD: Vogels,
Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2.

    worker r:  p = g_r + e_r ──▶ c = compress(p) ──▶ mean over workers ──▶ optimizer
                     ▲                │
                     └── e_r = p - decompress(c)      what is not sent now is sent later

- `fp16`, `bf16`: the gradient is sent as numbers of this type, with half the bits of float32. The
  all-reduce also adds numbers of this type. `bf16` has the range of float32 and 8 bits of
  precision. `fp16` has 11 bits of precision, and its largest number is 65504.
- `topk:F`: each worker sends only the numbers of its gradient that have the largest magnitude, as
  values and indices. F is the fraction of the gradient's numbers that a worker sends. The workers
  choose numbers at different places, so an all-reduce cannot add them up. Instead, an all-gather
  gives every worker the chosen numbers of all workers. The all-gather runs around a ring. Each
  worker sends n-1 messages: first its own numbers, then the numbers that it received from the
  previous worker.
- `powersgd:R`: for each gradient matrix M, shape (m, k), two smaller matrices are sent: P, shape
  (m, R), and Q, shape (k, R). The product P Q^T approximates M. Worker r has the matrix M_r, and M
  is the mean of these matrices. Let Q_0 be the Q of the previous training step. P is mean(M_r Q_0),
  made orthonormal. Q is mean(M_r^T P). (This is one step of the power iteration, a method that
  multiplies with M again and again.) M_r Q_0 and M_r^T P are linear in M_r, so an all-reduce can
  average them. Vectors are sent without compression. A matrix is also sent without compression if R
  (m + k) is at least m k.

The time for the compression is a part of the communication time (sync wait and transfer), not of
the compute time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from . import AllReduce

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Compression(ABC):
    """Averages a flat gradient over the workers, compressed.

    Attributes:
        error: What this worker has not sent yet, shape (numbers,).
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        self.all_reduce = all_reduce
        self.error: torch.Tensor | None = None
        self._loaded: dict[str, Any] | None = None

    def __call__(self, flat: torch.Tensor) -> None:
        """Replace `flat`, shape (numbers,), by the mean of the parts that the workers sent."""
        if self.all_reduce.links.size == 1:
            return
        if self._loaded is not None:
            self.place(self._loaded, flat)
            self._loaded = None
        if self.error is None:
            self.error = torch.zeros_like(flat)
        flat += self.error
        self.error.copy_(flat)
        self.mean(flat, self.error)
        # An infinite gradient must not stay in the error; loss scaling checks for such gradients.
        torch.nan_to_num_(self.error, nan=0.0, posinf=0.0, neginf=0.0)

    def state(self) -> dict[str, Any]:
        """Return copies of the state kept from step to step, on the CPU."""
        return {"error": None if self.error is None else self.error.to("cpu", copy=True)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._loaded = state

    def place(self, state: dict[str, Any], flat: torch.Tensor) -> None:
        """Move a loaded state to the device of the first gradients."""
        self.error = None if state["error"] is None else state["error"].to(flat)

    @abstractmethod
    def mean(self, flat: torch.Tensor, error: torch.Tensor) -> None:
        """Replace `flat` by the mean of what was sent; subtract from `error` what this worker sent.

        Args:
            error: Equal to `flat` at first.
        """


class HalfPrecision(Compression):
    """Sends 16 bits of each number."""

    def __init__(self, all_reduce: AllReduce, dtype: torch.dtype) -> None:
        super().__init__(all_reduce)
        self._dtype = dtype

    def mean(self, flat: torch.Tensor, error: torch.Tensor) -> None:
        """Divide, round, add up: the sum of the n parts overflows only if the mean does."""
        n = self.all_reduce.links.size
        half = (flat / n).to(self._dtype)
        error.sub_(half.to(flat.dtype), alpha=n)
        self.all_reduce(half)
        flat.copy_(half)


class TopK(Compression):
    """Sends the numbers of largest magnitude."""

    def __init__(self, all_reduce: AllReduce, fraction: float) -> None:
        super().__init__(all_reduce)
        self._fraction = fraction

    def mean(self, flat: torch.Tensor, error: torch.Tensor) -> None:
        """Gather every worker's choice as (values, indices) and add them up."""
        links = self.all_reduce.links
        count = math.ceil(self._fraction * flat.numel())
        chosen = flat.abs().topk(count, sorted=False).indices
        values = flat[chosen]
        error[chosen] = 0.0
        wide = torch.int32 if flat.numel() < 1 << 31 else torch.int64
        packed = [values.view(torch.uint8), chosen.to(wide).view(torch.uint8)]
        flat.zero_()
        for part in links.gather(links.staged(torch.cat(packed))):
            part = part.to(flat.device)
            theirs = part[: packed[0].numel()].view(flat.dtype)
            where = part[packed[0].numel() :].view(wide).long()
            flat.index_add_(0, where, theirs, alpha=1 / links.size)


class PowerSGD(Compression):
    """Sends two thin factors of each matrix.

    Args:
        shapes: Shapes of the gradients in the flat tensor, in order.
    """

    def __init__(self, all_reduce: AllReduce, rank: int, shapes: list[torch.Size]) -> None:
        super().__init__(all_reduce)
        self._cuts: list[tuple[int, int, int]] = []  # offset, m, k of each matrix that is factored
        self._whole: list[slice] = []
        offset = 0
        for shape in shapes:
            size = shape.numel()
            m = shape[0] if shape else 1
            k = size // max(m, 1)
            if rank * (m + k) < size:
                self._cuts.append((offset, m, k))
            else:
                self._whole.append(slice(offset, offset + size))
            offset += size
        self._rank = rank
        self._q: list[torch.Tensor] = []

    def mean(self, flat: torch.Tensor, error: torch.Tensor) -> None:
        """Take one step of power iteration: reduce P and whole tensors, then reduce Q."""
        if not self._q:
            self._q = self._first_factors(flat)
        matrices = [flat[at : at + m * k].view(m, k) for at, m, k in self._cuts]
        whole = [flat[part] for part in self._whole]
        p = [matrix @ q for matrix, q in zip(matrices, self._q, strict=True)]
        *p, rest = self._reduced([*p, torch.cat(whole) if whole else flat[:0]])
        p = [torch.linalg.qr(factor).Q for factor in p]
        own_q = [matrix.T @ factor for matrix, factor in zip(matrices, p, strict=True)]
        self._q = self._reduced(own_q)
        for (at, m, k), factor, own, mean in zip(self._cuts, p, own_q, self._q, strict=True):
            error[at : at + m * k] -= (factor @ own.T).view(-1)
            flat[at : at + m * k] = (factor @ mean.T).view(-1)
            # An overflow must not stay in the factors either, because the next step begins with
            # them.
            torch.nan_to_num_(mean, nan=0.0, posinf=0.0, neginf=0.0)
        for part, values in zip(
            self._whole, torch.split(rest, [part.numel() for part in whole]), strict=True
        ):
            error[part] = 0.0
            flat[part] = values

    def state(self) -> dict[str, Any]:
        """Return the error, and the factors with which the next step begins."""
        return {**super().state(), "q": [factor.to("cpu", copy=True) for factor in self._q]}

    def place(self, state: dict[str, Any], flat: torch.Tensor) -> None:
        """Move a loaded state to the gradients' device."""
        super().place(state, flat)
        self._q = [factor.to(flat) for factor in state["q"]]

    def _first_factors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the first Q of each matrix, shape (k, rank): random, the same on every worker."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(k, self._rank, generator=generator).to(flat) for _, _, k in self._cuts]

    def _reduced(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of some tensors, which are sent as one message."""
        if not parts:
            return []
        message = torch.cat([part.reshape(-1) for part in parts])
        self.all_reduce.mean(message)
        pieces = torch.split(message, [part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def message_like(
    text: str, shapes: list[torch.Size], dtype: torch.dtype
) -> tuple[int, torch.dtype]:
    """Return the number and type of the numbers in a message of gradients."""
    kind, _, amount = text.partition(":")
    numbers = sum(shape.numel() for shape in shapes)
    if kind == "powersgd":
        rank = int(amount)
        numbers = 0
        for shape in shapes:
            m = shape[0] if shape else 1
            k = shape.numel() // max(m, 1)
            numbers += min(rank * m, shape.numel()) if rank * (m + k) < m * k else shape.numel()
    return numbers, _HALF.get(kind, dtype)


def make_compression(
    text: str, all_reduce: AllReduce, shapes: list[torch.Size]
) -> Compression | None:
    """Return the compression that the option `compress` names; None for `none`.

    Args:
        text: `none`, `fp16`, `bf16`, `powersgd:RANK` or `topk:FRACTION`; the catalog checked it.
    """
    kind, _, amount = text.partition(":")
    if kind in _HALF:
        return HalfPrecision(all_reduce, _HALF[kind])
    if kind == "topk":
        return TopK(all_reduce, float(amount))
    if kind == "powersgd":
        return PowerSGD(all_reduce, int(amount), shapes)
    return None
