"""The content of an answer as plain data: numbers, strings, lists, dictionaries, arrays of bytes.

A check sees nothing else of an answer, both in the notebook and in `workbench grade`. The grader
cannot trust the answer's process, so it never runs or unpickles anything that this process sends.
"""

from __future__ import annotations

import base64
import collections
import itertools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_PLAIN_KINDS = "biufc"
_DEPTH, _ITEMS, _BYTES, _BITS, _CHARACTERS = 24, 100_000, 4_000_000, 20_000, 1_000_000
_WORDS = 400
_READ_ITEMS, _READ_KEYS, _READ_BYTES = 4 * _ITEMS, 5000, 16_000_000
"""The limits of one description: keys that share one hash take quadratic time."""


class Other:
    """A value that is not plain data, as far as a check can ask for it.

    Args:
        kind: Its class, by name.
        words: Its `repr`, cut.
        number: The result of `float`; None if `float` fails.
    """

    def __init__(self, kind: str, words: str, number: float | None, is_callable: bool) -> None:
        self.kind, self.words, self.is_callable = kind, words, is_callable
        self._number = number

    def __float__(self) -> float:
        if self._number is None:
            raise TypeError(f"{self.kind} is not a number")
        return self._number

    def __repr__(self) -> str:
        return self.words


class Items(Other):
    """Such a value that can be iterated: a generator, an object with `__iter__`."""

    def __init__(self, kind: str, words: str, number: float | None, items: list[Any]) -> None:
        super().__init__(kind, words, number, False)
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


EXPOSED_S = (0.5, 0.375, 0.125, 0.25)
"""Exposed times of the steps of a run that a check made up: the first two take longest."""


@dataclass(frozen=True)
class NamedRun:
    """A run that a check passes to a function of the answer.

    Attributes:
        workers: The run as it would be with this many of them; 0 for the run as it is.
        sent_bytes: The bytes that each of these sends in a step.
    """

    name: str
    workers: int = 0
    sent_bytes: float = 0.0

    def __repr__(self) -> str:
        return f"a run of {self.workers} workers" if self.workers else f"wb.runs[{self.name!r}]"


def shown(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, numbers.Number):
        return f"{value}"
    words = repr(value)
    return words if len(words) <= 40 else f"{type(value).__name__} {words[:36]}..."


# -- from a value to JSON --------------------------------------------------------------------------


def pack(value: Any) -> Any:
    """Return a value for JSON; a value that is not plain data becomes a description."""
    return _Packer().pack(value, 0)


class _Packer:
    def __init__(self) -> None:
        self._left = _ITEMS

    def pack(self, value: Any, depth: int) -> Any:
        self._left -= 1
        try:
            if depth < _DEPTH and self._left > 0:
                found = self._known(value, depth)
                if found is not None:
                    return found[0]
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception:  # looking at an object of a student may raise anything
            return _other(value)
        return _other(value)

    def _known(self, value: Any, depth: int) -> list[Any] | None:
        """Return a list with only the JSON form of the value, or None if it has no such form."""
        if value is None or isinstance(value, bool):
            return [value]
        kind = type(value)
        if value is Ellipsis or value is NotImplemented:
            return [{"k": "none", "v": str(value)}]
        if kind is int:
            return [value] if value.bit_length() <= 1000 else [_big(value)]
        if kind is float:
            return [value if math.isfinite(value) else {"k": "float", "v": repr(value)}]
        if kind is str:
            cut = value[:_CHARACTERS]
            return [cut.encode("utf-8", "replace").decode("utf-8")]
        if isinstance(value, NamedRun):
            return [{"k": "run", "v": [value.name, value.workers, value.sent_bytes]}]
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, depth)
        if hasattr(value, "detach") and not isinstance(value, type):
            tensor = value.detach().cpu()
            if str(tensor.dtype) == "torch.bfloat16":
                tensor = tensor.float()
            return self._array(tensor.numpy(), depth)
        if isinstance(value, (bool, int, float, str)):  # of a student's own class
            return [self.pack({bool: bool, int: int, float: float}.get(kind, _base(value))(value),
                              depth + 1)]  # fmt: skip
        if isinstance(value, Mapping):
            pairs = [[self.pack(k, depth + 1), self.pack(v, depth + 1)] for k, v in value.items()]
            return [{"k": "dict", "v": pairs}]
        if isinstance(value, (list, range, collections.deque)):
            return [self._all(value, depth)]
        if isinstance(value, (tuple, set, frozenset)):
            name = "tuple" if isinstance(value, tuple) else "set"
            return [{"k": name, "v": self._all(value, depth)}]
        if isinstance(value, (type, bytes, bytearray)) or callable(value):
            return None
        if hasattr(value, "__array__"):
            return self._array(np.asarray(value), depth)
        if isinstance(value, Sequence):
            return [self._all(value, depth)]
        if hasattr(value, "__iter__"):
            return [{**_other(value), "items": self._all(value, depth)}]
        return None

    def _all(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.pack(one, depth + 1) for one in itertools.islice(values, self._left)]

    def _array(self, value: Any, depth: int) -> list[Any] | None:
        if value.dtype.kind not in _PLAIN_KINDS:
            return [self.pack(value.tolist(), depth + 1)] if value.dtype.kind in "OUS" else None
        if value.nbytes > _BYTES:
            return None
        wire = {
            "k": "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": value.dtype.newbyteorder("<").str, "shape": list(value.shape),
            "data": base64.b64encode(
                np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes()
            ).decode("ascii"),
        }  # fmt: skip
        return [wire]


def _base(value: Any) -> type:
    return next(one for one in (bool, int, float, str) if isinstance(value, one))


def _big(value: int) -> dict[str, Any]:
    if value.bit_length() > _BITS:
        return {"k": "other", "kind": "int", "words": "a number without end", "number": None,
                "callable": False}  # fmt: skip
    return {"k": "int", "v": hex(value)}


def _other(value: Any) -> dict[str, Any]:
    number = None
    kind = type(value).__name__[:_WORDS]
    try:
        if not isinstance(value, (str, bytes, bytearray, type)):
            number = float(value)
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception:
        number = None
    try:
        words = repr(value)[:_WORDS]
    except (KeyboardInterrupt, MemoryError):
        raise
    except Exception:
        words = f"<{kind}>"
    return {
        "k": "other", "kind": kind, "words": words.encode("utf-8", "replace").decode("utf-8"),
        "number": None if number is None else repr(float(number)), "callable": callable(value),
    }  # fmt: skip


# -- and back -------------------------------------------------------------------------------------


class Senseless(ValueError):
    """The data is not from `pack`."""


def unpack(wire: Any) -> Any:
    """Return the value that `pack` described; the description is not trusted.

    Raises:
        Senseless: It is not a description, or a larger one than `pack` makes.
    """
    try:
        return _Unpacker().unpack(wire, 0)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Senseless(str(error)) from None


class _Unpacker:
    def __init__(self) -> None:
        self._items, self._keys = _READ_ITEMS, _READ_KEYS

    def unpack(self, wire: Any, depth: int) -> Any:
        self._items -= 1
        if depth > 2 * _DEPTH or self._items < 0:
            raise Senseless("the value is nested too deeply, or has too many parts")
        if wire is None or isinstance(wire, (bool, float, str)):
            return wire
        if isinstance(wire, int):
            large = wire.bit_length() > _BITS
            return Other("int", "a large number", None, False) if large else wire
        if isinstance(wire, list):
            return [self.unpack(one, depth + 1) for one in wire]
        if not isinstance(wire, dict):
            raise Senseless("no description")
        return self._of_kind(wire, depth)

    def _of_kind(self, wire: dict[str, Any], depth: int) -> Any:
        kind = wire["k"]
        if kind == "none":
            return Ellipsis if wire["v"] == "Ellipsis" else NotImplemented
        if kind == "int":
            return self.unpack(int(_text(wire["v"]), 16), depth)
        if kind == "float":
            return float(_text(wire["v"]))
        if kind == "run":
            name, workers, sent_bytes = _list(wire["v"])
            return NamedRun(_text(name), int(workers), float(sent_bytes))
        if kind in ("array", "scalar"):
            return _array(wire, kind)
        if kind == "other":
            return self._described(wire, depth)
        items = _list(wire["v"])
        if kind in ("dict", "set"):
            self._keys -= len(items)
            if self._keys < 0:
                raise Senseless("too many keys")
        if kind == "dict":
            pairs = [[self.unpack(one, depth + 1) for one in _list(pair)] for pair in items]
            return {_hashable(key): value for key, value in pairs}
        values = [self.unpack(one, depth + 1) for one in items]
        if kind == "tuple":
            return tuple(values)
        if kind == "set":
            return {_hashable(one) for one in values}
        raise Senseless("an unknown kind")

    def _described(self, wire: dict[str, Any], depth: int) -> Other:
        number = None if wire["number"] is None else float(_text(wire["number"]))
        kind, words = (_text(wire[name])[:_WORDS] for name in ("kind", "words"))
        if "items" in wire:
            items = [self.unpack(one, depth + 1) for one in _list(wire["items"])]
            return Items(kind, words, number, items)
        return Other(kind, words, number, wire["callable"] is True)


def _array(wire: dict[str, Any], kind: str) -> Any:
    dtype = np.dtype(_text(wire["dtype"]))
    if dtype.kind not in _PLAIN_KINDS or dtype.names is not None or dtype.subdtype is not None:
        raise Senseless("no array of numbers")
    shape = tuple(_list(wire["shape"]))
    if not all(type(one) is int and one >= 0 for one in shape):
        raise Senseless("no shape")
    if math.prod(max(one, 1) for one in shape) * dtype.itemsize > _READ_BYTES:
        raise Senseless("too large")  # also where another axis is empty: a sum along it would be
    data = base64.b64decode(_text(wire["data"]), validate=True)
    found = np.frombuffer(data, dtype).reshape(shape).copy()
    return found if kind == "array" else found.reshape(())[()]


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Senseless("no text")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Senseless("no list")
    return value
