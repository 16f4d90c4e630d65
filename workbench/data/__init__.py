"""Small data sets for lessons and tests; nothing is downloaded.

Importing this module loads no framework. The functions that are named after a data
set return it as a PyTorch data set, or with `arrays=True` (and always in a TensorFlow run) as a
tuple `(x, y)` of NumPy arrays.

    generated   how are the samples computed that no file holds
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
from .generated import (
    FEATURES,
    Pair,
    Payments,
    Ratings,
    Synthetic,
    Tissue,
    chance_of_fraud,
    interpolation,
)

VOCABULARY = "\n " + string.ascii_letters + string.digits + string.punctuation
"""Characters of the corpus; any other character counts as a space."""

CORPUS_CHARACTERS = 1 << 20
TEST_DIGITS = 360


def digits_arrays(split: str, as_mnist: bool) -> Pair:
    """Return x (n, 1, 8, 8) or (n, 1, 28, 28) float32 in 0..1 and y (n,) int64, as copies."""
    images, labels = _digits()
    order = np.random.default_rng(0).permutation(len(images))
    chosen = order[:-TEST_DIGITS] if split == "train" else order[-TEST_DIGITS:]
    x = images[chosen]
    if as_mnist:
        enlarge = interpolation(8, 28)
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
        "The digits data set needs scikit-learn, but scikit-learn is not installed.",
        next_step="run pip install scikit-learn",
        code="WB-DATA-004",
    )


def corpus_arrays(split: str, block: int) -> Pair:
    """Return x, y (n, block) int64: blocks of text, and the same shifted by one character."""
    text = _corpus()
    cut = len(text) * 9 // 10
    part = text[:cut] if split == "train" else text[cut:]
    count = (len(part) - 1) // block
    if count < 1:
        raise DataError(
            "`block` must be shorter than the text of the data set.",
            seen=block,
            allowed=f"1 to {len(part) - 1} characters",
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
            "The data set `corpus` needs the source files of Python's standard library. This "
            "Python does not have these files.",
            seen=sysconfig.get_path("stdlib"),
            next_step="use another data set, or install a Python that includes the *.py files of "
            "its standard library",
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
    """Return the positions of a text's characters in `VOCABULARY`, of shape (len(text),).

    Args:
        text: Any text. A character that is not in the vocabulary is treated as a space.
    """
    table = np.full(0x110000, VOCABULARY.index(" "), np.int64)
    table[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    return table[np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)]


__all__ = [
    "VOCABULARY", "OwnData", "corpus", "digits", "fraud_chance", "own", "payments", "ratings",
    "synthetic", "tissue",
]  # fmt: skip

SPLITS = ("train", "test")


@dataclass(frozen=True)
class OwnData:
    """Data that only this worker has; `own` makes it."""

    data: Any


def own(data: Any) -> OwnData:
    """Mark data that only this worker has; the other workers have other samples.

    `wb.fit` then trains each worker only on the worker's own samples, and no sample is sent. Each
    worker takes the same number of samples in a step. In an epoch the workers together take as many
    samples as they have in total. So a worker with few samples uses its samples several times, and
    a worker with many samples does not use all of its samples. Each worker has the same weight in
    the result.

    Args:
        data: A PyTorch data set, a pair of arrays, or a `DataLoader`. Each worker must read its own
            data, for example from the file `f"client_{rank}.npy"`.

    Returns:
        The marked data; pass it to `wb.fit` as `data`.
        Source: McMahan et al., Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017 (federated learning).
    """
    return OwnData(data)


def digits(split: str = "train", *, arrays: bool = False, as_mnist: bool = False) -> Any:
    """Return images of handwritten digits: 1,437 for training, 360 for testing.

    Args:
        split: `train` or `test`; the split is fixed.
        arrays: Return `(x, y)` as NumPy arrays instead of a PyTorch data set.
        as_mnist: Enlarge the images from 8 x 8 to 28 x 28 pixels, the size of MNIST's images. They
            are not the images of MNIST: there are fewer of them, and they are blurred.

    Returns:
        Pairs of x, float32 in 0..1 of shape (1, 8, 8) or (1, 28, 28), and y, int64 in 0..9. With
        `as_mnist` and `arrays`, x has no channel: its shape is (n, 28, 28), like that of
        `keras.datasets.mnist.load_data()`, whose values are in 0..255.
        Source: scikit-learn's `load_digits` (UCI Optical Recognition of Handwritten Digits).

    Raises:
        DataError: The split does not exist.
    """
    pair = digits_arrays(_split(split), as_mnist)
    if arrays or _takes_arrays():
        return (pair[0][:, 0], pair[1]) if as_mnist else pair
    return _torch_sets().ArraySet(pair)


def corpus(split: str = "train", *, block: int = 64, arrays: bool = False) -> Any:
    """Return text for a character model, from the source code of Python's standard library.

    Args:
        split: `train` (the first nine tenths) or `test`.
        block: Number of characters in a sample.
        arrays: Return `(x, y)` as NumPy arrays instead of a PyTorch data set.

    Returns:
        Pairs of x and y, int64 of shape (block,): y is x shifted by one character. Each number is
        the position of a character in `wb.data.VOCABULARY`. The data set has `.vocabulary`,
        `.encode(text)` and `.decode(numbers)`. The text depends on the version of Python.

    Raises:
        DataError: The split does not exist, or the text has no block of this length.
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
        samples: Number of samples.
        shape: Shape of the x of one sample.
        classes: Number of classes. Each class has a pattern, and x is the pattern plus noise.
        seed: Seed of the random samples.
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

    All users rate equally often, but a few items get most of the ratings. Each user and each item
    has a bias and four tastes. These are fixed random numbers with mean 0 and variance 1. A rating
    is a sum: half the user's bias, half the item's bias, 0.7 times the agreement of their tastes,
    and noise. So the variance of a rating is 0.99 + noise**2. A model's mean squared error can only
    be below noise**2 by chance.

    Args:
        split: `train` or `test`. Both have the same users and items, but different ratings.
        rows: Number of users, which is also the number of items.
        samples: Number of training ratings. The test split has a tenth of this number, at least 1.
        noise: Standard deviation of the noise.
        seed: Seed of the random users and items.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, int64 of shape (2,): the user's number and the item's number, each in 0..rows-1;
        and y, the rating, float32.

    Raises:
        DataError: The split does not exist, a size is below 1, or the noise is below 0.
    """
    count, least = _count("samples", samples), isinstance(noise, (int, float)) and noise >= 0
    if not least or not math.isfinite(noise):
        raise DataError(
            "`noise` is a standard deviation, so it must be at least 0.",
            seen=noise,
            allowed="a finite number, 0 or more",
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


def tissue(
    split: str = "train", *, samples: int = 1500, seed: int = 0, arrays: bool = False
) -> Any:
    """Return simulated microscopy images of tissue, generated when they are requested.

    The images are not from patients, so a model that was trained on these images says nothing about
    patients. An image has the same size as the images of PatchCamelyon (Veeling et al., Rotation
    Equivariant CNNs for Digital Pathology, MICCAI 2018). It shows up to 16 nuclei in coloured
    tissue. The label is 1 if at least about half of the nuclei are abnormal: larger, and with an
    irregular edge. Images with the label 0 have more nuclei, and at most 15 % of their nuclei are
    abnormal. So the mean colour of an image says little about its label.

    Args:
        split: `train` or `test`. The two splits have different images, made by the same rules.
        samples: Number of training images. The test split has a fifth of this number, at least 1.
        seed: Seed of the random images.
        arrays: Return `(x, y)` as NumPy arrays, all in memory: 111 kB per image.

    Returns:
        Pairs of x, float32 in 0..1 of shape (3, 96, 96): red, green, blue; and y, int64: 0 or 1.

    Raises:
        DataError: The split does not exist, or `samples` is not a whole number of at least 1.
    """
    count = _count("samples", samples)
    test = _split(split) == "test"
    made = Tissue(max(1, count // 5) if test else count, seed, first=count if test else 0)
    if arrays or _takes_arrays():
        return made.everything()
    return _torch_sets().SyntheticSet(made)


def payments(
    split: str = "train",
    *,
    samples: int = 100_000,
    branches: int = 5,
    seed: int = 0,
    arrays: bool = False,
) -> Any:
    """Return simulated card payments, generated when they are requested. About 2 % are fraud.

    The branches of the bank differ. Their sizes are in proportion to 1, 1/2, 1/3, and so on. The
    share of fraud is 12 times as large in the last branch as in the first: with five branches it is
    0.6 % to 7.5 % of the payments. Whether a payment is fraud is random, with a probability that
    depends only on x; `fraud_chance` returns this probability. So no model can have a lower
    expected loss than `fraud_chance`.

    Args:
        split: `train` or `test`. The two splits have different payments, made by the same rules.
        samples: Number of training payments. The test split has a fifth of this number, at least 1.
        branches: Number of branches of the bank.
        seed: Seed of the random payments.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, float32 of shape (6 + branches,), and y, int64: 1 if the payment is fraud. x
        contains the amount, the distance from home and the frequency of recent payments (each on a
        log scale, with mean 0 and variance 1). The fourth value is 1 if the card was never used in
        this shop before, otherwise 0. Then follow the sine and the cosine of the hour, and the
        branch in one-hot encoding.

    Raises:
        DataError: The split does not exist, or a size is not a whole number of at least 1.
    """
    count, test = _count("samples", samples), _split(split) == "test"
    made = Payments(
        max(1, count // 5) if test else count,
        _count("branches", branches),
        seed,
        first=count if test else 0,
    )
    if arrays or _takes_arrays():
        return made.everything()
    return _torch_sets().SyntheticSet(made)


def fraud_chance(x: Any) -> NDArray[np.float64]:
    """Return the true probability that each of these payments is fraud; no model can be better.

    Args:
        x: Payments from `payments`, of shape (n, 6 + branches): an array, or a tensor on the CPU.

    Returns:
        Probabilities in 0..1, of shape (n,).

    Raises:
        DataError: The shape of x is not (n, 6 + branches).
    """
    table = np.asarray(x)
    if table.ndim != 2 or table.shape[1] <= FEATURES:
        raise DataError(
            "wb.data.fraud_chance needs the inputs x of wb.data.payments.",
            seen=f"shape {table.shape}",
            allowed=f"one row for each payment, and {FEATURES} + B columns; B is the value of "
            "`branches` in wb.data.payments",
            next_step='for example: x, y = wb.data.payments("test", arrays=True); '
            "wb.data.fraud_chance(x)",
            code="WB-DATA-008",
        )
    return chance_of_fraud(table)


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
            "A PyTorch data set needs PyTorch, but PyTorch is not installed.",
            seen=str(error),
            next_step="pass arrays=True to get NumPy arrays",
            code="WB-DATA-001",
        ) from error


def _split(name: object) -> str:
    if name in SPLITS:
        return str(name)
    guess = nearest(str(name), SPLITS)
    raise DataError(
        "The data set has no split with this name.",
        seen=name,
        allowed=" or ".join(map(repr, SPLITS)),
        next_step=f"did you mean {guess!r}?" if guess else None,
        code="WB-DATA-002",
    )


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise DataError(
            f"`{what}` must be a whole number of at least 1.",
            seen=value,
            allowed="a whole number, at least 1",
            code="WB-DATA-003",
        )
    return int(value)
