"""The device on which an engine computes: only this module uses torch.cuda and similar modules.

All questions about a device go to an `Accelerator`, which `of(device)` returns. A CPU is an
`Accelerator` that has always finished. Torch has one module for each kind of device (`torch.cuda`,
`torch.xpu`, `torch.mps`, or the module of a package with its own kind). All use the same names, but
some modules lack a few. A missing name gives `None` or does nothing, so a new kind of device needs
no code here.
Source: https://docs.pytorch.org/docs/stable/accelerator.html

Two rules hold for the whole module. First, the current device belongs to a thread. A thread other
than the cell's must name the device in its calls. Otherwise CUDA makes a context of 0.5 GB on the
first GPU. Second, a device that has failed fails in every later call (CUDA keeps its error until
the process ends). So code that must not raise asks `is_lost` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import pickle
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import cloudpickle
import torch

POLL_S = 2e-4
"""How often to ask a device whether it has finished, in a wait that has a time limit."""

PROBE_S = 2.0
"""How long a healthy device may take to answer while nothing runs on it."""


class Memory(NamedTuple):
    """The free and the total memory of a device, in bytes."""

    free_bytes: int
    total_bytes: int


class Accelerator:
    """One device of this process.

    Attributes:
        device: The device with its number: `cuda:0`.
        kind: Torch's name of such devices: `cpu`, `cuda`, `xpu`, `mps`.
    """

    is_cpu = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type
        self._room: Any = torch.get_device_module(device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.device)!r})"

    # -- the device and stream of a thread's calls -------------------------------------------------

    def make_current(self) -> None:
        """Make this the device on which the thread computes if a cell only says `cuda`."""
        if hasattr(self._room, "set_device"):
            self._room.set_device(self.device)

    def current(self) -> AbstractContextManager[Any]:
        """Compute on the device inside this context, in any thread."""
        if not hasattr(self._room, "device"):
            return contextlib.nullcontext()
        context: AbstractContextManager[Any] = self._room.device(self.device)
        return context

    def side_stream(self) -> Any:
        """Return a new stream, separate from the one on which the cell computes."""
        with self.current():
            return torch.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run computations on this stream inside the context."""
        context: AbstractContextManager[Any] = stream
        return context

    def current_stream(self) -> Any:
        """Return the stream on which this thread computes on the device."""
        return torch.accelerator.current_stream(self.device)

    # -- waiting -----------------------------------------------------------------------------------

    def event(self, *, timed: bool = True) -> Event:
        """Return an event at the present end of this thread's stream on the device."""
        return Event(self, timed)

    def raw_event(self, *, timed: bool) -> Any:
        """Return an event of torch that is not recorded yet; `Event` guards its calls."""
        return torch.Event(self.device, enable_timing=timed)

    def synchronize(self) -> None:
        """Wait until the device has finished all its computations, on every stream."""
        with self.current():
            self._room.synchronize()

    def synchronize_stream(self) -> None:
        """Wait until the device has finished the computations of this thread's stream."""
        self.current_stream().synchronize()

    def is_lost(self, within_s: float = PROBE_S) -> bool:
        """Whether the device has failed, or does not answer in time.

        CUDA's errors stay: after a device-side assert or an illegal address, every call raises
        until the process ends. The device may hang, so a separate thread asks it. If there is no
        answer in time, this thread is abandoned.
        """
        answered: list[bool] = []
        probe = threading.Thread(target=self._probe, args=(answered,), daemon=True)
        probe.name = "workbench-probe"
        probe.start()
        probe.join(within_s)
        return not (answered and answered[0])

    def _probe(self, answered: list[bool]) -> None:
        try:
            self.synchronize()
            answered.append(True)
        except Exception:
            answered.append(False)

    # -- memory ------------------------------------------------------------------------------------

    def memory(self) -> Memory | None:
        """Return the free memory of the device, for all its users; None: unknown."""
        ask = getattr(self._room, "mem_get_info", None)
        if ask is None:
            return None
        with self.current():
            free, total = ask()
        return Memory(int(free), int(total))

    def peak_bytes(self) -> int | None:
        """Return the peak memory of this process's tensors, in bytes; None: not counted."""
        ask = getattr(self._room, "max_memory_allocated", None)
        return None if ask is None else int(ask(self.device))

    def reset_peak(self) -> None:
        """Count the peak again from now on."""
        if hasattr(self._room, "reset_peak_memory_stats"):
            self._room.reset_peak_memory_stats(self.device)

    def give_back(self) -> None:
        """Return memory that torch keeps for later use, so that other processes can use it."""
        with self.current():
            for name in ("empty_cache", "ipc_collect"):
                if hasattr(self._room, name):
                    getattr(self._room, name)()

    def limit_memory(self, fraction: float) -> None:
        """Limit this process to a part of the device's memory."""
        if hasattr(self._room, "set_per_process_memory_fraction"):
            with self.current():
                self._room.set_per_process_memory_fraction(fraction)

    @property
    def pins(self) -> bool:
        """Whether copies from pinned memory run in parallel with the host's computation."""
        return self.kind in ("cuda", "xpu")

    # -- name and random state ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The manufacturer's name of the device, or its kind if there is no name."""
        ask = getattr(self._room, "get_device_name", None)
        return self.kind if ask is None else str(ask(self.device))

    @property
    def label(self) -> str:
        """`cuda:0 NVIDIA H200`."""
        return f"{self.device} {self.name}"

    def is_in_use(self) -> bool:
        """Whether this process already uses this kind of device."""
        ask = getattr(self._room, "is_initialized", None)
        return True if ask is None else bool(ask())

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the generator of this device only; None: there is no generator.

        `get_rng_state_all` would make a context on each GPU.
        """
        ask = getattr(self._room, "get_rng_state", None)
        if ask is None or not self.is_in_use():
            return None
        state: torch.Tensor = ask() if self.kind == "mps" else ask(self.device)
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the device's generator to a state."""
        if hasattr(self._room, "set_rng_state"):
            arguments = () if self.kind == "mps" else (self.device,)
            self._room.set_rng_state(state.cpu(), *arguments)

    @property
    def forked(self) -> list[torch.device]:
        """The devices whose generators `torch.random.fork_rng(devices=...)` must keep."""
        return [self.device]


class Cpu(Accelerator):
    """The CPU, which has always finished."""

    is_cpu = True

    def make_current(self) -> None:
        """Do nothing."""

    def current(self) -> AbstractContextManager[Any]:
        """Do nothing."""
        return contextlib.nullcontext()

    def side_stream(self) -> Any:
        """Return None: there are no streams."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Do nothing."""
        return contextlib.nullcontext()

    def current_stream(self) -> Any:
        """Return None: there are no streams."""
        return None

    def synchronize(self) -> None:
        """Do nothing."""

    def synchronize_stream(self) -> None:
        """Do nothing."""

    def is_lost(self, within_s: float = PROBE_S) -> bool:
        """Return False."""
        return False

    def memory(self) -> Memory | None:
        """Return None."""
        return None

    def peak_bytes(self) -> int | None:
        """Return None."""
        return None

    def reset_peak(self) -> None:
        """Do nothing."""

    def give_back(self) -> None:
        """Return freed pages to the system, if malloc can (glibc)."""
        trim = getattr(_libc(), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def free_at_once(self, on: bool) -> None:
        """Let large tensors use separate memory, which returns to the system when they are freed.

        Otherwise malloc raises its threshold, keeps the memory of large tensors and gives it to
        small ones. Then layers that are gathered and freed in turn would use the memory of the
        whole model.
        """
        option = getattr(_libc(), "mallopt", None)
        if option is not None:
            option(_MMAP_THRESHOLD, OWN_BYTES if on else _MOST_LEARNT_BYTES)

    def limit_memory(self, fraction: float) -> None:
        """Do nothing."""

    @property
    def name(self) -> str:
        """Return `cpu`."""
        return "cpu"

    @property
    def label(self) -> str:
        """Return `cpu`."""
        return "cpu"

    def random_state(self) -> torch.Tensor | None:
        """Return None: the CPU's generator is torch's own."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Do nothing."""

    @property
    def forked(self) -> list[torch.device]:
        """Return nothing: the CPU's generator is always kept."""
        return []


CHUNK_BYTES = 64 << 20
ALIGNED_BYTES = 512
OWN_BYTES = 1 << 20
_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_MOST_LEARNT_BYTES = 32 << 20  # malloc itself raises the threshold up to this value


@functools.cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # not a Unix system
        return None


class Event:
    """Mark a point in a stream's work, without a wait; any thread may call this."""

    def __init__(self, accelerator: Accelerator, timed: bool) -> None:
        self._accelerator = accelerator
        # On the stream of this device, even inside `torch.cuda.device(other)`.
        with accelerator.current():
            self._event = accelerator.raw_event(timed=timed)
            self._event.record(accelerator.current_stream())

    def query(self) -> bool:
        """Whether the device has passed this event; raises the device's error."""
        with self._accelerator.current():
            return bool(self._event.query())

    def wait(self, within_s: float | None = None) -> bool:
        """Wait until the device passes this event; return whether it did so in time."""
        if within_s is None:
            with self._accelerator.current():
                self._event.synchronize()
            return True
        until_s = time.monotonic() + within_s
        while not self.query():
            if time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
        return True

    def seconds_to(self, later: Event) -> float:
        """Return the device's time from this event to a later event; both must have passed."""
        with self._accelerator.current():
            return float(self._event.elapsed_time(later._event)) * 1e-3


class Staged:
    """Copies between a device and the host's ordinary memory, through two pinned chunks.

    A chunk is copied on its own stream while the host copies the other chunk. Pinned memory is
    reserved in powers of two and never returned. For a whole model it would be up to twice the
    model.

        device --- chunk 1 ---> host memory
               --- chunk 2 ---> host memory
    """

    def __init__(self, accelerator: Accelerator, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._accelerator, self._bytes = accelerator, chunk_bytes
        self._stream = accelerator.side_stream()
        self._chunks = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=accelerator.pins)
            for _ in range(2)
        ]
        self._busy: list[Event | None] = [None, None]  # until the copy of a chunk is complete
        self._turn = 0

    def to_host(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors of the device to tensors of the host; complete when this returns."""
        self._follow()
        waiting: list[tuple[torch.Tensor, int, list[_Piece]]] = []
        for pieces in self._cut(pairs):
            place, chunk = self._next()
            with self._accelerator.on(self._stream):
                for source, _, at in pieces:
                    chunk[at : at + len(source)].copy_(source, non_blocking=True)
                self._busy[place] = self._accelerator.event(timed=False)
            if waiting:
                self._unload(*waiting.pop())
            waiting.append((chunk, place, pieces))
        if waiting:
            self._unload(*waiting.pop())

    def to_device(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy tensors of the host to the device; the device's later work can use them."""
        self._follow()
        last: Event | None = None
        for pieces in self._cut(pairs):
            place, chunk = self._next()
            for source, _, at in pieces:
                chunk[at : at + len(source)].copy_(source)
            with self._accelerator.on(self._stream):
                for source, target, at in pieces:
                    target.copy_(chunk[at : at + len(source)], non_blocking=True)
                last = self._busy[place] = self._accelerator.event(timed=False)
        if last is not None and self._stream is not None:
            self._accelerator.current_stream().wait_event(last._event)

    def _follow(self) -> None:
        """Let the copies begin after the computations that the device already has."""
        if self._stream is not None:
            now = self._accelerator.event(timed=False)
            self._stream.wait_event(now._event)

    def _next(self) -> tuple[int, torch.Tensor]:
        self._turn = 1 - self._turn
        busy, self._busy[self._turn] = self._busy[self._turn], None
        if busy is not None:
            busy.wait()
        return self._turn, self._chunks[self._turn]

    def _unload(self, chunk: torch.Tensor, place: int, pieces: list[_Piece]) -> None:
        busy, self._busy[place] = self._busy[place], None
        if busy is not None:
            busy.wait()
        for source, target, at in pieces:
            target.copy_(chunk[at : at + len(source)])

    def _cut(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[list[_Piece]]:
        """Yield pieces that fit one chunk: parts of large tensors, several small tensors."""
        pieces: list[_Piece] = []
        at = 0
        for source, target in pairs:
            if not source.numel():
                continue
            sent, taken = (_as_bytes(tensor) for tensor in (source, target))
            begin = 0
            while begin < len(sent):
                size = min(len(sent) - begin, self._bytes - at)
                pieces.append((sent[begin : begin + size], taken[begin : begin + size], at))
                begin, at = begin + size, at + -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
                if at >= self._bytes:
                    yield pieces
                    pieces, at = [], 0
        if pieces:
            yield pieces


_Piece = tuple[torch.Tensor, torch.Tensor, int]
"""Bytes of the source, bytes of the target, and their place in the chunk during the copy."""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def of(device: str | torch.device) -> Accelerator:
    """Return the accelerator of a device.

    Raises:
        RuntimeError: Torch does not know this kind of device, or has no module for it.
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return CPU
    return _of(wanted if wanted.index is not None else torch.device(wanted.type, 0))


@functools.lru_cache(maxsize=64)
def _of(device: torch.device) -> Accelerator:
    return Accelerator(device)


CPU = Cpu(torch.device("cpu"))


_own: Accelerator = CPU


def take(device: str | torch.device) -> Accelerator:
    """Make a device the device of this engine, and the current device of this thread."""
    global _own
    _own = of(device)
    _own.make_current()
    return _own


def own() -> Accelerator:
    """Return the latest device of this engine, or the CPU if the engine has had no device yet.

    Other threads begin on the first GPU. Code that asks there for "the current stream" would make a
    context on the first GPU. So use `with own().current()` around code that is not ours.
    """
    return _own


def in_use() -> Accelerator | None:
    """Return this thread's current device, if this process has begun to use such devices."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    kind = of(found)
    if not kind.is_in_use():
        return None
    # Device 0 may be another worker's. To make it current, even briefly, makes a context on it.
    ask = getattr(kind._room, "current_device", None)
    return kind if ask is None else of(torch.device(found.type, int(ask())))


def give_back() -> None:
    """Return the memory that torch keeps for later, so that others can use it; never raises.

    A device that has failed raises in every call. Then there is nothing to return.
    """
    with contextlib.suppress(Exception):
        CPU.give_back()
        if (own := in_use()) is not None:
            own.give_back()


# -- values that leave the process -----------------------------------------------------------------


class _Leaving(pickle.Pickler):
    """Packs a value; each tensor on a device becomes a tensor on the CPU.

    Attributes:
        met: Whether the value has a tensor on a device.
    """

    met = False

    def reducer_override(self, value: Any) -> Any:
        """Say how a tensor on a device is packed; all other values are packed as usual."""
        if not _is_away(value):
            return NotImplemented
        self.met = True
        copy: Any = _on_cpu(value)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _Lent(cloudpickle.Pickler):  # type: ignore[misc]
    """Packs a value for another engine, which puts the tensors on its own device."""

    def reducer_override(self, value: Any) -> Any:
        """Say how a tensor on a device is packed; all other values are packed as usual."""
        if not _is_away(value):
            return super().reducer_override(value)
        return _arrived, (_on_cpu(value),)


def on_cpu(value: Any) -> Any:
    """Return a value for a process without this device: a copy with its tensors on the CPU.

    A value without a tensor on a device is returned unchanged, and so is a value that cannot be
    packed.
    """
    if in_use() is None:
        return value
    packed = io.BytesIO()
    leaving = _Leaving(packed, pickle.HIGHEST_PROTOCOL)
    try:
        leaving.dump(value)
    except Exception:  # objects raise any error; the process that sends the value reports it
        return value
    return pickle.loads(packed.getvalue()) if leaving.met else value


def pack(value: Any) -> bytes:
    """Pack a value for another engine (`settle`)."""
    packed = io.BytesIO()
    _Lent(packed).dump(value)
    return packed.getvalue()


_arrivals: list[torch.Tensor] = []


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    _arrivals.append(tensor)
    return tensor


def settle(device: str | torch.device) -> None:
    """Move tensors from the lender's device to this worker's; they remain the same objects.

    Borrowed values arrive before the engine knows its device.
    """
    if _arrivals and torch.device(device).type != "cpu":
        for tensor in _arrivals:
            _bring(tensor, device)
    _arrivals.clear()


def _bring(tensor: torch.Tensor, device: str | torch.device) -> None:
    tensor.data = tensor.data.to(device)


def _is_away(value: Any) -> bool:
    # Without `__reduce_ex__` of its own: DTensors and similar classes pack themselves.
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and value.device.type not in ("cpu", "meta")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().to("cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def own_random(device: str | torch.device) -> Iterator[None]:
    """Keep the generators of the CPU and of one device, without a call to any other device."""
    with torch.random.fork_rng(devices=of(device).forked, device_type=_forked_kind(device)):
        yield


def _forked_kind(device: str | torch.device) -> str:
    kind = torch.device(device).type
    return "cuda" if kind == "cpu" else kind
