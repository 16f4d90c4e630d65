"""Small data sets for lessons and tests; nothing is downloaded.

Importing this module loads no framework. Each function returns a PyTorch data set, or with
`arrays=True` (and always in a TensorFlow run) a tuple `(x, y)` of NumPy arrays.

    torch_sets  the same data as PyTorch data sets
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import string
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, nearest

Pair = tuple[NDArray[np.generic], NDArray[np.generic]]

VOCABULARY = "\n " + string.ascii_letters + string.digits + string.punctuation
"""Characters of the corpus; any other character counts as a space."""

CORPUS_CHARACTERS = 1 << 20
TASTES = 4
"""How many hidden taste values each user and each item has; their products make a rating."""

TEST_DIGITS = 360


def digits_arrays(split: str, as_mnist: bool) -> Pair:
    """Return x (n, 1, 8, 8) or (n, 1, 28, 28) float32 in 0..1 and y (n,) int64, as copies."""
    images, labels = _digits()
    order = np.random.default_rng(0).permutation(len(images))
    chosen = order[:-TEST_DIGITS] if split == "train" else order[-TEST_DIGITS:]
    x = images[chosen]
    if as_mnist:
        enlarge = _interpolation(8, 28)
        x = (enlarge @ x @ enlarge.T).astype(np.float32)
    return np.ascontiguousarray(x[:, None]), labels[chosen]


@functools.cache
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return all images (1797, 8, 8) in 0..1 and labels (1797,)."""
    table = _digits_table()
    images = (table[:, :64] / 16.0).astype(np.float32).reshape(-1, 8, 8)
    return images, table[:, 64].astype(np.int64)


def _digits_table() -> NDArray[np.float64]:
    # The file is read directly, because importing scikit-learn can take longer than a first run.
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    raise DataError(
        "The digits data set needs scikit-learn, which is not installed.",
        next_step="pip install scikit-learn",
        code="WB-DATA-004",
    )


def _interpolation(small: int, large: int) -> NDArray[np.float64]:
    """Return the (large, small) matrix of linear interpolation."""
    places = np.linspace(0, small - 1, large)
    columns = [np.interp(places, np.arange(small), unit) for unit in np.eye(small)]
    return np.stack(columns, axis=1)


def corpus_arrays(split: str, block: int) -> Pair:
    """Return x, y (n, block) int64: blocks of text, and the same shifted by one character."""
    text = _corpus()
    cut = len(text) * 9 // 10
    part = text[:cut] if split == "train" else text[cut:]
    count = (len(part) - 1) // block
    if count < 1:
        raise DataError(
            "The text is shorter than one block.",
            seen=block,
            allowed=f"1 to {len(part) - 1}",
            code="WB-DATA-005",
        )
    end = count * block
    return part[:end].reshape(count, block).copy(), part[1 : end + 1].reshape(count, block).copy()


@functools.cache
def _corpus() -> NDArray[np.int64]:
    """Return about a million characters of Python's standard library as numbers."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise DataError(
            "The corpus needs Python's own source files, which this Python lacks.",
            seen=sysconfig.get_path("stdlib"),
            code="WB-DATA-006",
        )
    texts, size = [], 0
    for index in np.random.default_rng(0).permutation(len(paths)):
        texts.append(paths[index].read_text("utf-8", "replace"))
        size += len(texts[-1])
        if size >= CORPUS_CHARACTERS:
            break
    return encode("".join(texts)[:CORPUS_CHARACTERS])


def encode(text: str) -> NDArray[np.int64]:
    """Return the places of a text's characters in `VOCABULARY`, shape (len(text),).

    Args:
        text: Any text; a character that is not in the vocabulary counts as a space.
    """
    table = np.full(0x110000, VOCABULARY.index(" "), np.int64)
    table[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    return table[np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)]


@dataclass(frozen=True)
class Synthetic:
    """Samples that are computed from their index, so no sample is stored."""

    samples: int
    shape: tuple[int, ...]
    classes: int
    seed: int

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, *shape) float32 and y (n,) int64 of the samples at `places` (n,)."""
        size = int(np.prod(self.shape))
        rows: Any = places.astype(np.uint64)
        labels = (_mix(rows, self.seed) % np.uint64(self.classes)).astype(np.int64)
        cells: NDArray[np.uint64] = rows[:, None] * np.uint64(size) + np.arange(
            size, dtype=np.uint64
        )
        noise = _unit(_mix(cells, self.seed + 1))
        patterns = _unit(
            _mix(np.arange(self.classes * size, dtype=np.uint64), self.seed + 2)
        ).reshape(self.classes, size)
        x = 2.0 * noise - 1.0 + patterns[labels] - 0.5
        return x.astype(np.float32).reshape(len(places), *self.shape), labels

    def everything(self) -> Pair:
        """Return all samples."""
        return self.take(np.arange(self.samples))


@dataclass(frozen=True)
class Ratings:
    """Ratings that are computed from their index, by the known rules that `ratings` describes.

    Attributes:
        first: Index of the first rating; test ratings have the indices after the training ratings.
    """

    samples: int
    rows: int
    noise: float
    seed: int
    first: int = 0

    def take(self, places: NDArray[np.int64]) -> Pair:
        """Return x (n, 2) int64, user and item, and y (n,) float32 of the ratings at `places`."""
        which: Any = places.astype(np.uint64) + np.uint64(self.first)
        users = (_mix(which, self.seed) % np.uint64(self.rows)).astype(np.int64)
        popular = _unit(_mix(which, self.seed + 1)) ** 2
        items = (popular * self.rows).astype(np.int64)
        user, item = self._traits(users, 2), self._traits(items, 3)
        agreement = (user[:, 1:] * item[:, 1:]).sum(axis=1) / math.sqrt(TASTES)
        y = 0.5 * user[:, 0] + 0.5 * item[:, 0] + 0.7 * agreement
        y += self.noise * _normal(_mix(which, self.seed + 4), _mix(which, self.seed + 5))
        return np.stack([users, items], axis=1), y.astype(np.float32)

    def everything(self) -> Pair:
        """Return all ratings."""
        return self.take(np.arange(self.samples))

    def _traits(self, rows: NDArray[np.int64], stream: int) -> NDArray[np.float64]:
        """Return a bias and tastes, (n, 1 + TASTES), of mean 0 and variance 1 over the rows."""
        width = np.uint64(1 + TASTES)
        cells: Any = rows.astype(np.uint64)[:, None] * width + np.arange(width, dtype=np.uint64)
        return math.sqrt(3) * (2.0 * _unit(_mix(cells, self.seed + stream)) - 1.0)


def _normal(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return normally distributed numbers made from mixed bits: Box and Muller, Ann.

    Math. Stat. 1958.
    """
    radius: NDArray[np.float64] = np.sqrt(-2.0 * np.log1p(-_unit(some)))
    return radius * np.cos(2.0 * np.pi * _unit(others))


def _mix(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return well-mixed bits of each number: SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in 0..1 that are made of the upper 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


__all__ = ["VOCABULARY", "corpus", "digits", "ratings", "synthetic"]

SPLITS = ("train", "test")


def digits(split: str = "train", *, arrays: bool = False, as_mnist: bool = False) -> Any:
    """Return handwritten digits: 1,437 for training, 360 for testing.

    Args:
        split: `train` or `test`; the split is fixed.
        arrays: Return `(x, y)` as NumPy arrays instead of a PyTorch data set.
        as_mnist: Enlarge the 8 x 8 images to MNIST's 28 x 28. They are real digits, but not the
            digits of MNIST: there are fewer, and they are blurred.

    Returns:
        Pairs of x, float32 in 0..1 of shape (1, 8, 8) or (1, 28, 28), and y, int64 in 0..9.
        As arrays, `as_mnist` gives x without the channel, (n, 28, 28), as
        `keras.datasets.mnist.load_data()` does (there they are 0..255).
        Source: scikit-learn's `load_digits` (UCI Optical Recognition of Handwritten Digits).

    Raises:
        DataError: There is no such split.
    """
    pair = digits_arrays(_split(split), as_mnist)
    if arrays or _takes_arrays():
        return (pair[0][:, 0], pair[1]) if as_mnist else pair
    return _torch_sets().ArraySet(pair)


def corpus(split: str = "train", *, block: int = 64, arrays: bool = False) -> Any:
    """Return text for a character model, from the source code of Python's standard library.

    Args:
        split: `train` (the first nine tenths) or `test`.
        block: Characters in a sample.
        arrays: Return `(x, y)` as NumPy arrays instead of a PyTorch data set.

    Returns:
        Pairs of x and y, int64 of shape (block,): y is x shifted by one character. A number is
        the character's place in `wb.data.VOCABULARY`; the data set has `.vocabulary`,
        `.encode(text)` and `.decode(numbers)`. The text depends on the version of Python.

    Raises:
        DataError: There is no such split, or no block of that length.
    """
    pair = corpus_arrays(_split(split), _count("block", block))
    return pair if arrays or _takes_arrays() else _torch_sets().TextSet(pair, VOCABULARY)


def synthetic(
    samples: int,
    *,
    shape: tuple[int, ...] = (32,),
    classes: int = 10,
    seed: int = 0,
    arrays: bool = False,
) -> Any:
    """Return artificial samples of any size, generated when they are requested.

    Args:
        samples: How many.
        shape: Shape of one x.
        classes: How many classes. Each class has a pattern, and x is the pattern plus noise.
        seed: Another seed gives other samples.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, float32 of shape `shape`, and y, int64 in 0..classes-1.

    Raises:
        DataError: A size is not a whole number of at least 1.
    """
    sizes = tuple(_count("shape", size) for size in shape)
    made = Synthetic(_count("samples", samples), sizes, _count("classes", classes), seed)
    if arrays or _takes_arrays():
        return made.everything()
    return _torch_sets().SyntheticSet(made)


def ratings(
    split: str = "train",
    *,
    rows: int = 1000,
    samples: int = 200_000,
    noise: float = 0.5,
    seed: int = 0,
    arrays: bool = False,
) -> Any:
    """Return artificial ratings of items by users, generated when they are requested.

    All users rate equally often, but a few items get most of the ratings. A rating is a sum: half
    the user's bias, half the item's bias, 0.7 times how well their four tastes agree, and noise. So
    its variance is 0.99 + noise**2. A model's mean squared error can only be below noise**2 by
    chance. Biases and tastes are fixed numbers of each user and item, with mean 0 and variance 1.

    Args:
        split: `train` or `test`. Both have the same users and items, but different ratings.
        rows: How many users there are, and how many items.
        samples: Number of training ratings. The test has a tenth of this number, at least 1.
        noise: Standard deviation of the random part.
        seed: Another seed gives other users and items.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, int64 of shape (2,): the user's row and the item's, each in 0..rows-1; and y,
        float32.

    Raises:
        DataError: There is no such split, a size is below 1, or the noise is below 0.
    """
    count, least = _count("samples", samples), isinstance(noise, (int, float)) and noise >= 0
    if not least or not math.isfinite(noise):
        raise DataError(
            "noise must be a standard deviation of at least 0.",
            seen=noise,
            allowed="0 or more, and finite",
            code="WB-DATA-007",
        )
    test = _split(split) == "test"
    made = Ratings(
        max(1, count // 10) if test else count,
        _count("rows", rows),
        float(noise),
        seed,
        first=count if test else 0,
    )
    if arrays or _takes_arrays():
        return made.everything()
    return _torch_sets().SyntheticSet(made)


def _takes_arrays() -> bool:
    """Return whether a TensorFlow run is active here.

    It cannot use PyTorch's data sets.
    """
    engine = sys.modules.get("workbench.engine.context")
    run = None if engine is None else engine.current()
    return run is not None and run.spec.framework != "torch"


def _torch_sets() -> Any:
    try:
        return importlib.import_module("workbench.data.torch_sets")
    except ModuleNotFoundError as error:
        raise DataError(
            "A PyTorch data set needs PyTorch, which is not installed.",
            seen=str(error),
            next_step="pass arrays=True for NumPy arrays",
            code="WB-DATA-001",
        ) from error


def _split(name: object) -> str:
    if name in SPLITS:
        return str(name)
    guess = nearest(str(name), SPLITS)
    raise DataError(
        "This split does not exist.",
        seen=name,
        allowed=" or ".join(map(repr, SPLITS)),
        next_step=f"did you mean {guess!r}?" if guess else None,
        code="WB-DATA-002",
    )


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise DataError(
            f"{what} must be a whole number of at least 1.",
            seen=value,
            allowed="a whole number, at least 1",
            code="WB-DATA-003",
        )
    return int(value)
