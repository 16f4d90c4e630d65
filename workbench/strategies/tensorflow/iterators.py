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

Such an iterator consists of one that reads the data set and one for each device, and each of them
has a thread that tunes it (`Model::OptimizeLoop` in `tensorflow/core/framework/model.cc`), which
its deletion waits for: tens of milliseconds, on a busy machine a second, once more than two
minutes. They are not tuned here, but where the user's data set asks for it. `AUTOTUNE` in the
data set then means TensorFlow's default, as many calls at a time as there are threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.ops import gen_dataset_ops

_here = threading.local()  # .opened: the data sets of the iterator that is being made


def untuned(dataset: Any) -> Any:
    """Return a data set that is not tuned while it is read; as it is where it says that itself."""
    if dataset is None or dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


@contextlib.contextmanager
def datasets_kept() -> Iterator[None]:
    """Have iterators that are made meanwhile hold their data sets, and end as soon as dropped."""
    module = multi_device_iterator_ops
    kind = module.OwnedMultiDeviceIterator
    make, init = kind.__init__, gen_dataset_ops.multi_device_iterator_init
    on_device = module._create_device_dataset

    @functools.wraps(init)
    def opened(dataset: Any, *args: Any, **keywords: Any) -> Any:
        getattr(_here, "opened", []).append(dataset)
        return init(dataset, *args, **keywords)

    @functools.wraps(make)
    def made(iterator: Any, dataset: Any = None, *args: Any, **keywords: Any) -> None:
        _here.opened = []
        try:
            make(iterator, untuned(dataset), *args, **keywords)
            # The last attribute is the last to be dropped.
            iterator._workbench_datasets = _here.opened
        finally:
            _here.opened = []

    @functools.wraps(on_device)
    def made_on_device(*args: Any, **keywords: Any) -> Any:
        return untuned(on_device(*args, **keywords))

    kind.__init__, gen_dataset_ops.multi_device_iterator_init = made, opened
    module._create_device_dataset = made_on_device
    try:
        yield
    finally:
        kind.__init__, gen_dataset_ops.multi_device_iterator_init = make, init
        module._create_device_dataset = on_device
