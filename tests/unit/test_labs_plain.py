"""What a check sees of an answer: plain data, whatever the answer is, and whatever is sent."""

from __future__ import annotations

import collections
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from workbench.labs.plain import Items, NamedRun, Other, Senseless, pack, unpack


def through(value):
    return unpack(json.loads(json.dumps(pack(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value",
    [None, ..., True, 3, -(10**400), 2.5, math.inf, "é", [1, [2.0]], (1, "a"), {1, 2},
     {"a": [1], 2: None}, np.float32(2), np.int64(3), NamedRun("central-3")],
)  # fmt: skip
def test_plain_values_come_back_equal_and_of_their_kind(value):
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_arrays_come_back_typed_and_tensors_as_arrays():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    found = through({"w": array})["w"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)
    assert through(collections.deque([1, 2])) == [1, 2]
    assert through(range(3)) == [0, 1, 2]


def test_what_is_no_plain_data_is_described():
    third = through(Fraction(1, 3))
    assert float(third) == pytest.approx(1 / 3)
    function = through(lambda: 1)
    assert isinstance(function, Other)
    assert function.is_callable
    generator = through(x * x for x in range(3))
    assert isinstance(generator, Items)
    assert list(generator) == [0, 1, 4]
    with pytest.raises(TypeError):
        float(function)


def test_values_that_do_not_end_or_raise_are_described_too():
    class Odd:
        def __getattr__(self, name):
            raise OSError

        def __repr__(self):
            raise OSError

    def without_end():
        while True:
            yield 1

    loop = []
    loop.append(loop)
    assert isinstance(through(Odd()), Other)
    assert isinstance(through(without_end()), Items)
    through(loop)
    assert isinstance(through(1 << 10**6), Other)


@pytest.mark.parametrize(
    "wire",
    [{}, {"k": "x", "v": []}, {"k": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
     {"k": "array", "dtype": "<f8", "shape": [2], "data": ""}, {"k": "int", "v": 3},
     {"k": "array", "dtype": "<f8", "shape": [-1], "data": "AAAAAAAAAAA="},
     {"k": "dict", "v": [1]},
     {"k": "array", "dtype": "<f4", "shape": [10**10, 0], "data": ""},
     {"k": "set", "v": [i * (2**61 - 1) for i in range(50_000)]},
     {"k": "dict", "v": [[i * (2**61 - 1), 0] for i in range(50_000)]}, [0] * 500_000],
)  # fmt: skip
def test_what_pack_never_makes_is_refused(wire):
    with pytest.raises(Senseless):
        unpack(wire)
