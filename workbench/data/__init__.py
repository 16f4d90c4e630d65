"""Small data sets for lessons and tests; nothing is downloaded.

Importing this module loads no framework. Each function returns a PyTorch data set, or with
`arrays=True` (and always in a TensorFlow run) a tuple `(x, y)` of NumPy arrays.

    arrays      how do the data sets look as NumPy arrays
    torch_sets  how do they look as PyTorch data sets
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..errors import DataError, nearest
from .arrays import VOCABULARY, Synthetic, corpus_arrays, digits_arrays

__all__ = ["VOCABULARY", "corpus", "digits", "synthetic"]

SPLITS = ("train", "test")


def digits(split: str = "train", *, arrays: bool = False, as_mnist: bool = False) -> Any:
    """Return handwritten digits: 1,437 to train with, 360 to test.

    Args:
        split: `train` or `test`; the split is fixed.
        arrays: Return `(x, y)` as NumPy arrays instead of a PyTorch data set.
        as_mnist: Enlarge the 8 x 8 images to MNIST's 28 x 28. They are real digits, but not
            MNIST's: fewer, and as blurred as 64 pixels are.

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
        Pairs of x and y, int64 of shape (block,): y is x moved on by one character. A number is
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
    """Return made-up samples of any size, generated when they are asked for.

    Args:
        samples: How many.
        shape: Shape of one x.
        classes: How many classes; each has a pattern, and x is the pattern under noise.
        seed: Another seed gives other samples.
        arrays: Return `(x, y)` as NumPy arrays, all in memory.

    Returns:
        Pairs of x, float32 of shape `shape`, and y, int64 in 0..classes-1.

    Raises:
        DataError: A size is no whole number of at least 1.
    """
    sizes = tuple(_count("shape", size) for size in shape)
    made = Synthetic(_count("samples", samples), sizes, _count("classes", classes), seed)
    if arrays or _takes_arrays():
        return made.everything()
    return _torch_sets().SyntheticSet(made)


def _takes_arrays() -> bool:
    """Return whether a TensorFlow run is under way in this engine: PyTorch's sets are no use."""
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
        "There is no split of that name.",
        seen=name,
        allowed=" or ".join(map(repr, SPLITS)),
        next_step=f"did you mean {guess!r}?" if guess else None,
        code="WB-DATA-002",
    )


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise DataError(
            f"{what} must count something.",
            seen=value,
            allowed="a whole number, at least 1",
            code="WB-DATA-003",
        )
    return int(value)
