"""Keeps data sets alive for as long as an iterator over several devices reads them.

`MultiDeviceIterator` reads ahead on a thread of its own. When it is deleted it lets go of its data
set first, and only then waits for that thread:

    deletion:   data set freed --- waits for the thread . . . .
    thread:     - reads the next batch ----> asks the data set for its types: memory that is gone

That ends the process by a segmentation fault, now and then, wherever an iterator is dropped while
it reads ahead. Keras does so after each evaluation in `fit`: it makes the next one's iterator at
once, and replaces it unread. Here each iterator also holds its data set from Python, until the one
in C++ is gone.

Source: `~MultiDeviceIterator` in `tensorflow/core/kernels/data/multi_device_iterator_ops.cc`
(`dataset_` is declared last, so destroyed first),
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/kernels/data/multi_device_iterator_ops.cc.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.ops import gen_dataset_ops

_here = threading.local()  # .opened: the data sets of the iterator that is being made


@contextlib.contextmanager
def datasets_kept() -> Iterator[None]:
    """Have iterators that are made meanwhile hold their data sets, as long as they live."""
    kind = multi_device_iterator_ops.OwnedMultiDeviceIterator
    make, init = kind.__init__, gen_dataset_ops.multi_device_iterator_init

    @functools.wraps(init)
    def opened(dataset: Any, *args: Any, **keywords: Any) -> Any:
        getattr(_here, "opened", []).append(dataset)
        return init(dataset, *args, **keywords)

    @functools.wraps(make)
    def made(iterator: Any, *args: Any, **keywords: Any) -> None:
        _here.opened = []
        try:
            make(iterator, *args, **keywords)
            # The last attribute is the last to be dropped.
            iterator._workbench_datasets = _here.opened
        finally:
            _here.opened = []

    kind.__init__, gen_dataset_ops.multi_device_iterator_init = made, opened
    try:
        yield
    finally:
        kind.__init__, gen_dataset_ops.multi_device_iterator_init = make, init
