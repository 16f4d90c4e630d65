"""Small data sets for lessons and tests; nothing is downloaded.

Importing this module loads no framework. Each function returns a PyTorch data set, or with
`arrays=True` (and always in a TensorFlow run) a tuple `(x, y)` of NumPy arrays.

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
        "The digits data set needs scikit-learn, which is not installed.",
        next_step="pip install scikit-learn",
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
    """Mark data as this worker's own: the other workers have other samples.

    `wb.fit` then trains each worker on its own samples only, and no sample is sent. Each worker
    takes the same number of samples per step. In an epoch the workers together take as many
    samples as all of them have. A worker with few samples uses them several times, and a worker
    with many samples does not use all of them. So each worker has the same weight in the result.

    Args:
        data: A PyTorch data set, a pair of arrays, or a DataLoader, which `wb.fit` accepts. Read
            it by the worker's number, for example from `f"client_{rank}.npy"`.

    Returns:
        The data, to be passed to `wb.fit` as `data`.
        Source: McMahan et al., Communication-Efficient Learning of Deep Networks from
        Decentralized Data, AISTATS 2017 (federated learning).
    """
    return OwnData(data)


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


def tissue(
    split: str = "train", *, samples: int = 1500, seed: int = 0, arrays: bool = False
) -> Any:
    """Return simulated microscopy images of tissue, generated when they are asked for.

    No image is from a patient, and a model of them says nothing about patients. An image has the
    size of those of PatchCamelyon (Veeling et al., Rotation Equivariant CNNs for Digital Pathology,
    MICCAI 2018). It shows up to 16 nuclei in coloured tissue. The label is 1 where at least about
    half of the nuclei are abnormal: larger, and with an irregular edge. Images with the label 0
    have more nuclei, at most 15 % of them abnormal. So the mean colour tells little.

    Args:
        split: `train` or `test`: other images, by the same rules.
        samples: Images to train with. The test has a fifth as many, at least 1.
        seed: Another seed gives other images.
        arrays: Return `(x, y)` as NumPy arrays, all in memory: 111 kB per image.

    Returns:
        Pairs of x, float32 in 0..1 of shape (3, 96, 96): red, green, blue; and y, int64: 0 or 1.

    Raises:
        DataError: There is no such split, or `samples` is not a whole number of at least 1.
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
    """Return simulated card payments, generated when they are asked for. About 2 % are fraud.

    The branches of the bank differ. Their sizes are in proportion to 1, 1/2, 1/3, and so on. The
    last branch has 12 times the fraud of the first: with five branches 0.6 % to 7.7 % of the
    payments. Whether a payment is fraud is drawn with a chance that depends on x alone;
    `fraud_chance` returns this chance. So no model can have a lower expected loss than
    `fraud_chance`.

    Args:
        split: `train` or `test`: other payments, by the same rules.
        samples: Payments to train with. The test has a fifth as many, at least 1.
        branches: Branches of the bank.
        seed: Another seed gives other payments.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, float32 of shape (6 + branches,), and y, int64: 1 where the payment is fraud.
        x has the amount, the distance from home and the pace of recent payments (each on a log
        scale, with mean 0 and variance 1), 1 for a shop where the card is new, the sine and the
        cosine of the hour, and the branch: 1 in its place, 0 in the places of the others.

    Raises:
        DataError: There is no such split, or a size is not a whole number of at least 1.
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
    """Return the true chance that each of these payments is fraud: no model can be better.

    Args:
        x: Payments of `payments`, shape (n, 6 + branches): an array, or a tensor on the CPU.

    Returns:
        Chances in 0..1, shape (n,).

    Raises:
        DataError: x does not have the shape of payments.
    """
    table = np.asarray(x)
    if table.ndim != 2 or table.shape[1] <= FEATURES:
        raise DataError(
            "fraud_chance needs a table of payments.",
            seen=f"shape {table.shape}",
            allowed=f"shape (payments, {FEATURES} + branches), as wb.data.payments returns x",
            next_step='x, y = wb.data.payments("test", arrays=True); wb.data.fraud_chance(x)',
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
