"""What to do about errors of frameworks that name the trouble but no way out."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile

SHARED = "/dev/shm"
_NO_ROOM_BYTES = 64 << 10
"""With less room than this a place counts as full."""

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        "the batch has {0} features, the Linear takes {1}: make it nn.Linear({0}, ...), or flatten "
        "with nn.Flatten() before it",
    ),
    (
        r"expected axis (-?\d+) of input shape to have value (\d+), but received input with shape "
        r"(\([\d, ]+\))",
        "the data is {2}, the layer was built for {1} on axis {0}: build the model for this data, "
        "or reshape the data",
    ),
    (
        r"expected (?:min_)?ndim=(\d+), found ndim=(\d+)\. Full shape received: (\([\d, ]+\))",
        "the layer takes data of {0} axes, the batch is the first, and got {1}: {2}; x[..., None] "
        "adds the channels of grey images, keras.layers.Flatten() takes axes away",
    ),
    (
        r"must have the same rank \(ndim\)\. Received: target\.shape=\((\d+|None),\), "
        r"output\.shape=\((?:\d+|None), (\d+)\)",
        "the labels are class numbers and the output has {1} values: take "
        "loss='sparse_categorical_crossentropy', or labels keras.utils.to_categorical(y, {1})",
    ),
    (
        r"`output` must have rank \(ndim\) `target\.ndim - 1`\. Received: "
        r"target\.shape=\((?:\d+|None), (\d+)\)",
        "the labels have {0} values each, as one-hot ones have, and the loss takes class numbers: "
        "loss='categorical_crossentropy', or labels y.argmax(-1)",
    ),
    (
        r"`output` must have rank \(ndim\) `target\.ndim - 1`\. Received: "
        r"target\.shape=\(\w+,\), output\.shape=(\(\w+, \w+, [\w, ]+\))",
        "the model's output {0} has axes too many for class numbers: begin with "
        "keras.layers.Flatten()",
    ),
    (
        r"Dimensions must be equal[^\n]*\{\{node (?:compile_loss/|Equal)[^\n]*with input shapes: "
        r"(\[[\d,?]*\]), (\[[\d,?]*\])",
        "labels and output differ in shape, {0} and {1}: give the last layer as many outputs as a "
        "label has values, and begin with keras.layers.Flatten() where the data are images",
    ),
    (
        r"Data cardinality is ambiguous[\s\S]*'x' sizes: ([\d, ]+)\s+'y' sizes: ([\d, ]+)",
        "there are {0} samples and {1} labels: cut both at the same place",
    ),
    (
        r"Could not interpret metric identifier",
        "look at its spelling: metrics=['accuracy'], or an object of keras.metrics",
    ),
    (
        r"Could not interpret loss identifier",
        "look at its spelling: 'mse', 'binary_crossentropy', 'categorical_crossentropy', "
        "'sparse_categorical_crossentropy', or an object of keras.losses",
    ),
    (
        r"Could not interpret optimizer identifier",
        "look at its spelling: 'sgd', 'adam', 'adamw', 'rmsprop', or an object of keras.optimizers",
    ),
    (
        r"Invalid dtype: (str|object|bytes)",
        "the data holds text or objects, and models take numbers: x.astype('float32'); classes "
        "named by text: numpy.unique(y, return_inverse=True)[1]",
    ),
    (
        r"Computed output size would be zero or negative[^\n]*`inputs shape=(\([\d, None]+\))`",
        "the image {0} is smaller than the layer's window: a smaller kernel, padding='same', or "
        "fewer layers that pool",
    ),
    (
        r"`validation_split` is only supported for tensors or NumPy arrays",
        "divide the data set yourself: fit(data.skip(10), validation_data=data.take(10))",
    ),
    (
        r"Target (-?\d+) is out of bounds",
        "class {0} needs an output of its own: the last layer has too few outputs, or the labels "
        "do not begin at 0",
    ),
    (
        r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)",
        "class {0} needs an output of its own: the last layer has {1} outputs, for the classes 0 "
        "to {1} - 1; give it more, or count the labels from 0",
    ),
    (
        r"(?:\}\} |: )(\w+: [^\n]{0,200})\nTraceback \(most recent call last\):[\s\S]*PyFunc",
        "your own function raised it while TensorFlow called it: {0}; call the function by itself "
        "on one element to see where",
    ),
    (
        r"Mixing different tf\.distribute\.Strategy objects",
        "a strategy is there already: leave the line out that makes one; `strategy` is the run's",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long",
        "classes are int64 for this loss: y = y.long()",
    ),
    (
        r"Found dtype Double but expected Float|expected .*Float but (?:found|got) Double"
        r"|must have the same dtype, but got Double and Float",
        "NumPy's float64 meets a float32 model: x = x.float()",
    ),
    (
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|invalid device ordinal",
        "use the name device, which is this worker's: x.to(device)",
    ),
    (
        r"CUDA out of memory|CUDNN_STATUS_ALLOC_FAILED|OOM when allocating",
        "use a smaller batch, or a strategy that spreads the model: sharded, model_split",
    ),
    (
        r"can't allocate memory|Cannot allocate memory|^MemoryError",
        "use a smaller batch, or fewer engines; %cluster free drops the cells' variables",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "the loss must be one number: loss.mean(), or reduction='mean'",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "start processes before the first use of the GPU, or with the method spawn: "
        "DataLoader(..., multiprocessing_context='spawn')",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "BatchNorm needs two samples or more on every worker, in each batch: "
        "DataLoader(..., drop_last=True), a larger batch, or GroupNorm in place of BatchNorm",
    ),
    (
        r"AttributeError: '\w+' object has no attribute 'module'",
        "wb.prepare leaves the model as it is: write model in place of model.module",
    ),
    (
        r"Connection closed by peer|Connection reset by peer",
        "the other rank's error says why; if it shows none, its loop was shorter: let all ranks "
        "take the same number of steps",
    ),
    (
        r"^ModuleNotFoundError: No module named '([\w]+)",
        "install it beside the notebook, whose Python the engines use: %pip install {0} (some "
        "packages have another name), then run the cell again",
    ),
    (
        r"Trying to backward through the graph a second time",
        "compute the loss anew before each backward(), or add the losses up and call it once",
    ),
    (
        r"stack expects each tensor to be equal size, but got (\[[\d, ]*\]) at entry \d+ and "
        r"(\[[\d, ]*\])",
        "the samples of a batch differ in shape, {0} and {1}: make them equal in the data set, or "
        "pad them in DataLoader(..., collate_fn=...)",
    ),
    (
        r"must be Tensor, not NoneType",
        "the model returned nothing: end its forward() with return",
    ),
    (
        r"before Module\.__init__\(\) call",
        "begin the model's __init__ with super().__init__()",
    ),
    (
        r"^SystemExit",
        "end a cell early with raise, or put the rest under if",
    ),
    (
        r"shared memory\(shm\)|insufficient shared memory|Unexpected bus error",
        f"{SHARED}, which worker processes of a DataLoader hand batches over in, has too little "
        "room: DataLoader(..., num_workers=0) needs none of it, or enlarge it (docker run "
        "--shm-size=2g)",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "make room there, or write to another folder",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "use another port, or 0 for any that is free",
    ),
)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Return a message without the colours of a terminal (Keras puts them in)."""
    return _COLOURS.sub("", text)


def advice(words: str) -> str | None:
    """Return the next step for an error, given as `Name: message`, or None where there is none."""
    step = _known(words)
    if step is not None and "No space left" in words and (places := _full_places()):
        return f"{' and '.join(places)}: {step}"
    return step


def _full_places() -> list[str]:
    """Return where no room is left, of the places that are written to without naming them."""
    found = []
    for place, what in (
        (SHARED, "the shared memory that processes of a DataLoader use"),
        (tempfile.gettempdir(), "the folder for temporary files"),
        (os.getcwd(), "the present folder"),
    ):
        with contextlib.suppress(OSError):
            if shutil.disk_usage(place).free < _NO_ROOM_BYTES:
                found.append(f"{place} ({what}) is full")
    return found


def _known(words: str) -> str | None:
    for pattern, text in _KNOWN:
        if found := re.search(pattern, words):
            return text.format(*found.groups())
    return None
