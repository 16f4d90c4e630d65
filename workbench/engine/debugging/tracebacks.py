"""How a cell's errors are shown, if this differs from IPython's way.

Frames of libraries are left out, and their number is shown: a beginner looks for their own line,
and `--traceback full` shows the others. Code that TensorFlow generated from a user's function is
shown as the line that the user wrote.

Cells have the notebook's names, so that equal errors of several ranks are equal.

IPython reads and colours the source of every frame, which takes a third of a second each time. When
a cell is interrupted, all its workers do so at once while the user waits. So an interrupt is shown
in Python's own form: the place where it arrived, in the cell's lines.

If the error of a framework does not say what to do, advice is added.

TensorFlow's AutoGraph writes each function that it traces into a file, and keeps a map of its lines
to the user's lines. `engine/tensorflow/support.py` passes these maps on as they are made.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import linecache
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from ...errors import WorkbenchError
from . import marks

# IPython 8 imports this at the first error; here it is done once, in the parent of all engines.
with contextlib.suppress(ImportError):
    importlib.import_module("stack_data")

_own_format = warnings.formatwarning
_GROUPS: tuple[type[BaseException], ...] = (
    (builtins.BaseExceptionGroup,) if sys.version_info >= (3, 11) else ()
)

FULL = "full"
KINDS = ("short", FULL)
"""Ways to show a traceback: the user's own lines, or every frame."""
_MODULE = "<module>"
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


def short(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    *,
    chain: bool = False,
) -> list[str]:
    """Return a traceback that begins in the cell, in Python's own form.

    Args:
        chain: Whether to show the errors from which it was raised, too.
    """
    while trace is not None and not marks.is_cell(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace, chain=chain)
    return [marks.name_cells(line).rstrip("\n") for line in lines]


@dataclass(frozen=True)
class Written:
    """A frame of code that was generated from the user's: shown as the line they wrote.

    It has the attributes that IPython reads of its own records.
    """

    filename: str
    lineno: int
    function: str
    source: str
    frame: FrameType
    _sd: None = None

    def text(self) -> str:
        """Return the place, and the line."""
        head = marks.name_cells(f'File "{self.filename}", line {self.lineno}')
        return f"{head}, in {self.function}\n----> {self.lineno} {self.source}\n"


Shown = TracebackType | Written


def fold(trace: TracebackType | None) -> tuple[list[Shown], list[FrameType]]:
    """Divide a traceback into what the user wrote and the frames of libraries.

    Frames above the cell belong to neither. Frames of comprehensions, which Python 3.12 no longer
    has, are merged with the frame of their function.

    Returns:
        Runs of the user's frames, each as a separate traceback, and the frames that are left out.
    """
    shown: list[tuple[FrameType, int, int] | Written] = []
    left_out: list[FrameType] = []
    begun = False
    while trace is not None:
        frame, line, at = trace.tb_frame, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next
        name = frame.f_code.co_filename
        begun = begun or marks.is_cell(name)
        if not begun:
            continue
        written = written_line(frame, line)
        last = shown[-1] if shown else None
        if written is not None:
            shown.append(Written(*written, frame))
        elif is_generated(name) or not marks.is_yours(name):
            left_out.append(frame)
        elif (
            frame.f_code.co_name in _COMPREHENSIONS
            and isinstance(last, tuple)
            and last[0].f_code.co_filename == name
        ):
            shown[-1] = (last[0], last[1], line)
        else:
            shown.append((frame, at, line))
    found: list[Shown] = []
    for one in reversed(shown):
        if isinstance(one, Written):
            found.insert(0, one)
        elif found and isinstance(found[0], TracebackType):
            found[0] = TracebackType(found[0], *one)
        else:
            found.insert(0, TracebackType(None, *one))
    return found, left_out


def left_out_words(frames: Sequence[FrameType]) -> str:
    """Return the words that report frames that are not shown; empty if there are none."""
    if not frames:
        return ""
    names = list(dict.fromkeys(marks.package(f.f_code.co_filename) for f in frames))
    one = len(frames) == 1
    last = frames[-1].f_code.co_name
    return (
        f"    [{len(frames)} frame{'' if one else 's'} of {', '.join(names)} "
        f"{'is' if one else 'are'} hidden. {'It' if one else 'The last one'} is in {last}(). "
        f"--traceback full shows {'it' if one else 'them'}]\n"
    )


class Folding:
    """Makes an IPython shell show the user's own lines, and the number of the others."""

    def __init__(self, shell: Any) -> None:
        self.kind = KINDS[0]
        own = shell.InteractiveTB
        self._records, self._record, self._last = (
            own.get_records, own.format_record, own.format_exception
        )  # fmt: skip
        self._left_out = ""
        own.get_records, own.format_record = self.get_records, self.format_record
        own.format_exception = self.format_exception

    def get_records(self, trace: TracebackType, context: int, offset: int) -> Any:
        """Return IPython's records of the user's frames."""
        self._left_out = ""
        if self.kind == FULL:
            return self._records(trace, context, offset)
        shown, left_out = fold(trace)
        self._left_out = left_out_words(left_out)
        records: list[Any] = []
        for one in shown:
            if isinstance(one, Written):
                records.append(one)
            else:
                records += _at_their_lines(self._records(one, context, 0), one)
        return records

    def format_record(self, record: Any) -> str:
        """Return a record as text, without the comment that replaces the magic's line."""
        if isinstance(record, Written):
            return record.text()
        text: str = self._record(record)
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if _PLACE_OF_MAGIC.match(plain(line)) is None)

    def format_exception(self, kind: Any, error: Any) -> list[str]:
        """Return the note on left-out frames, and the error itself."""
        named = marks.name_cells if self.kind == FULL else marks.fold_text
        lines = [named(line) for line in self._last(kind, error)]
        left_out, self._left_out = self._left_out, ""
        return [left_out, *lines] if left_out else lines


def _at_their_lines(records: list[Any], trace: TracebackType | None) -> list[Any]:
    """Return IPython's records with the lines at which their frames were left.

    Where IPython reads a frame's source by itself, it takes the line that the frame has reached
    since: that of an `except` block, mostly.
    """
    lines = {}
    while trace is not None:
        lines[id(trace.tb_frame)] = trace.tb_lineno
        trace = trace.tb_next
    for record in records:
        if getattr(record, "_sd", None) is None:
            record.lineno = lines.get(id(record.frame), record.lineno)
    return records


def told(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return the text of a Workbench error: the user's lines that led to it, then its message.

    The message says what to do, so the lines around are not needed.
    """
    shown, _ = fold(trace)
    lines: list[str] = []
    for one in shown:
        if isinstance(one, Written):
            lines += one.text().splitlines()
        else:
            lines += [line for frame in traceback.extract_tb(one) for line in _place(frame)]
    return [*lines, *([""] if lines else []), f"{type(error).__name__}: {error}"]


def _place(frame: traceback.FrameSummary) -> list[str]:
    where = marks.name_cells(f'File "{frame.filename}", line {frame.lineno}')
    inside = "" if frame.name == _MODULE else f", in {frame.name}"
    return [f"{where}{inside}", f"----> {frame.lineno} {frame.line}"]


_PLACE_OF_MAGIC = re.compile(r"\s+1 #\s*$")


def install(shell: Any) -> None:
    """Show the errors of this IPython shell's cells in this way; may be called again."""

    def numbers() -> Mapping[str, int]:
        found: Mapping[str, int] = getattr(shell.compile, "_filename_map", {})
        return found

    def show(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        interrupt = issubclass(kind, KeyboardInterrupt)
        ours = isinstance(error, WorkbenchError) and all(one.kind != FULL for one in _folding)
        lines = told(error, trace) if ours else short(kind, error, trace, chain=not interrupt)
        shell._showtraceback(kind, str(error), lines)
        return lines

    marks.number_cells(numbers)
    own = (KeyboardInterrupt, WorkbenchError, *_GROUPS)
    folds = importlib.import_module("IPython").version_info[0] >= 8
    # IPython 7, which Colab uses, has other records of frames: its errors are shown as `short`.
    shell.set_custom_exc(own if folds else (*own, Exception), show)
    if folds and not _folding:
        _folding.append(Folding(shell))
    _name_cells_in_warnings(numbers)


_folding: list[Folding] = []


def show_as(kind: str) -> None:
    """Show the errors of the next cell in one of `KINDS`."""
    for folding in _folding:
        folding.kind = kind


def _name_cells_in_warnings(numbers: Callable[[], Mapping[str, int]]) -> None:
    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        number = numbers().get(filename)
        if number is None:
            return _own_format(message, category, filename, lineno, line)
        text = _own_format(
            message, category, "", lineno, line or linecache.getline(filename, lineno)
        )
        return f"Cell In[{number}]{text}"

    warnings.formatwarning = formatwarning


SHARED = "/dev/shm"
_ON_CPU = "run %cluster stop, then %cluster start --devices cpu"
_NO_ROOM_BYTES = 64 << 10
"""With less free space than this, a place counts as full."""

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
        "the first matrix has {0} columns, but the second matrix has {1} rows. If a `Linear` layer "
        "failed, its input has {0} features: use nn.Linear({0}, ...) or put nn.Flatten() before it",
    ),
    (
        r"expected axis (-?\d+) of input shape to have value (\d+), but received input with shape "
        r"(\([\d, ]+\))",
        "the data has shape {2}, but the layer needs size {1} on axis {0}: build the model for "
        "this data, or reshape the data",
    ),
    (
        r"expected (?:min_)?ndim=(\d+), found ndim=(\d+)\. Full shape received: (\([\d, ]+\))",
        "the layer needs {0} axes (with the batch axis), but the data has {1} axes: shape {2}. "
        "x[..., None] adds a channel axis to grey images; keras.layers.Flatten() removes axes",
    ),
    (
        r"must have the same rank \(ndim\)\. Received: target\.shape=\((\d+|None),\), "
        r"output\.shape=\((?:\d+|None), (\d+)\)",
        "the labels are class numbers, but the output has {1} values: use "
        "loss='sparse_categorical_crossentropy', or labels from keras.utils.to_categorical(y, {1})",
    ),
    (
        r"`output` must have rank \(ndim\) `target\.ndim - 1`\. Received: "
        r"target\.shape=\((?:\d+|None), (\d+)\)",
        "the labels have {0} values each (one-hot), but the loss takes class numbers: "
        "use loss='categorical_crossentropy', or convert the labels: y.argmax(-1)",
    ),
    (
        r"`output` must have rank \(ndim\) `target\.ndim - 1`\. Received: "
        r"target\.shape=\(\w+,\), output\.shape=(\(\w+, \w+, [\w, ]+\))",
        "the labels are class numbers, but the model's output {0} has too many axes: begin the "
        "model with keras.layers.Flatten()",
    ),
    (
        r"Dimensions must be equal[^\n]*\{\{node (?:compile_loss/|Equal)[^\n]*with input shapes: "
        r"(\[[\d,?]*\]), (\[[\d,?]*\])",
        "labels and output differ in shape, {0} and {1}: if a label has 10 numbers, the last layer "
        "needs 10 outputs. For images, put keras.layers.Flatten() before the last Dense layer",
    ),
    (
        r"Data cardinality is ambiguous[\s\S]*'x' sizes: ([\d, ]+)\s+'y' sizes: ([\d, ]+)",
        "there are {0} samples and {1} labels: pass one label for each sample",
    ),
    (
        r"Could not interpret metric identifier",
        "check the spelling, as in metrics=['accuracy'], or pass an object of keras.metrics",
    ),
    (
        r"Could not interpret loss identifier",
        "check the spelling: 'mse', 'binary_crossentropy', 'categorical_crossentropy', "
        "'sparse_categorical_crossentropy', or an object of keras.losses",
    ),
    (
        r"Could not interpret optimizer identifier",
        "check the spelling: 'sgd', 'adam', 'adamw', 'rmsprop', or an object of keras.optimizers",
    ),
    (
        r"Invalid dtype: (str|object|bytes)",
        "the data contains text or objects, but models need numbers: use x.astype('float32'). For "
        "class names, use numpy.unique(y, return_inverse=True)[1]",
    ),
    (
        r"Computed output size would be zero or negative[^\n]*`inputs shape=(\([\d, None]+\))`",
        "the image {0} is smaller than the layer's window: use a smaller window (kernel_size, "
        "pool_size), padding='same', or fewer pooling layers",
    ),
    (
        r"`validation_split` is only supported for tensors or NumPy arrays",
        "divide the data set yourself: model.fit(data.skip(10), validation_data=data.take(10))",
    ),
    (
        r"Target (-?\d+) is out of bounds",
        "the last layer has no output for label {0}: add outputs, or number the labels from 0",
    ),
    (
        r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)",
        "the last layer has no output for label {0}: it has {1} outputs, numbered from 0. Add "
        "outputs, or number the labels from 0",
    ),
    (
        r"(?:\}\} |: )(\w+: [^\n]{0,200})\nTraceback \(most recent call last\):[\s\S]*PyFunc",
        "your own function failed while TensorFlow called it: {0}; to see the line that "
        "failed, call the function yourself on one element of the data",
    ),
    (
        r"Mixing different tf\.distribute\.Strategy objects",
        "the run already has a strategy: use the variable `strategy`, and remove the line that "
        "makes another strategy",
    ),
    (
        r"expected target dtype to be Long|expected scalar type Long",
        "this loss needs class numbers of type int64: y = y.long()",
    ),
    (
        r"Found dtype Double but expected Float|expected .*Float but (?:found|got) Double"
        r"|must have the same dtype, but got Double and Float",
        "x or y is float64 (NumPy's default), but the model is float32: use x.float() or y.float()",
    ),
    (
        r"Torch not compiled with CUDA enabled|No CUDA GPUs are available|invalid device ordinal",
        "use the variable `device`, which every worker has: x.to(device). An engine sees only the "
        "GPUs that are assigned to it, and numbers these GPUs from 0",
    ),
    (
        r"^ResourceExhaustedError[\s\S]*(?:GPU|failed to allocate memory)",
        "use a smaller batch, or a strategy that needs less GPU memory: model_split, "
        "central_storage. TensorFlow keeps its GPU memory for later cells, even after "
        "%cluster free. To release this memory for other programs, run %cluster restart",
    ),
    (
        r"Unknown attribute '(?:cuda|xpu|mps)' is encountered while parsing the device spec",
        "TensorFlow does not know this device name. In TensorFlow, the name of the first GPU is "
        "`GPU:0`. Use the variable `device`, which every worker has: tf.device(device)",
    ),
    (
        r"being mapped to multiple devices|Visible devices cannot be modified after",
        "After its first operation, TensorFlow cannot change which GPUs it sees. A worker sees "
        "only its own GPUs, so remove set_visible_devices, then run %cluster restart",
    ),
    (
        r"no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE",
        "CUDA sees no GPU: run nvidia-smi where the engine runs, check CUDA_VISIBLE_DEVICES, then "
        f"run %cluster restart. To train without a GPU, {_ON_CPU}",
    ),
    (
        r"Could not load dynamic library|Cannot dlopen some GPU libraries"
        r"|lib(?:cu|nv|nccl)[\w.+-]*: cannot open shared object file",
        "TensorFlow's GPU libraries are missing in the engines' Python: run "
        "%pip install 'tensorflow[and-cuda]', then run %cluster restart",
    ),
    (
        r"Loaded runtime CuDNN library|DNN library (?:is not found|initialization failed)"
        r"|No DNN in stream executor",
        "TensorFlow did not find the right cuDNN, or the GPU has no memory for cuDNN. Run %pip "
        "install 'tensorflow[and-cuda]' in an environment without another cuDNN (so without "
        "PyTorch). Run nvidia-smi to see the programs on the GPU. Then run %cluster restart",
    ),
    (
        r"CUDA_ERROR_(?:UNSUPPORTED_PTX_VERSION|INVALID_PTX|NO_BINARY_FOR_GPU)"
        r"|PTX was compiled with an unsupported toolchain|ptxas returned an error"
        r"|libdevice not found|Couldn't (?:find|get) ptxas",
        "TensorFlow's CUDA does not fit the driver or the GPU. Use a newer driver, or a TensorFlow "
        "whose CUDA the driver supports. nvidia-smi shows the newest CUDA that the driver supports",
    ),
    (
        r"device-side assert",
        "a GPU operation received a value out of range: most often a class label or the index of "
        "an embedding. Print y.min(), y.max() and the number of classes. After this error the "
        "engine cannot use its GPU any more. To see the line that failed, run the cell on the CPU "
        f"({_ON_CPU}), or set CUDA_LAUNCH_BLOCKING=1 before you start the cluster",
    ),
    (
        r"Duplicate GPU detected",
        "two workers share one GPU, which NCCL does not allow: use as many workers as there are "
        f"GPUs (-n), or train on the CPU: {_ON_CPU}",
    ),
    (
        r"no kernel image is available",
        "the installed torch does not support this GPU: install another build of torch "
        f"(https://pytorch.org/get-started/locally), or train on the CPU: {_ON_CPU}",
    ),
    (
        r"driver version is insufficient|NVIDIA driver on your system is too old",
        "the driver is too old for the framework's CUDA version: update the driver, install a "
        f"build of the framework for an older CUDA version, or train on the CPU: {_ON_CPU}",
    ),
    (
        r"CUDA_ERROR_ALREADY_MAPPED|resource already mapped",
        "another process still uses the memory of a tensor (CUDA IPC): run "
        "%cluster restart, then send tensors between processes as CPU tensors",
    ),
    (
        r"ncclUnhandledCudaError|unhandled cuda error",
        "NCCL reported a CUDA error: most often, the GPU's memory or the shared memory is full. In "
        "a container, docker run --shm-size=2g gives more shared memory. If NCCL_DEBUG=WARN is set "
        "when the cluster starts, the engine's log names the cause",
    ),
    (
        r"(?:CUDA|HIP|XPU|MPS)(?: backend)? out of memory|\bOutOfMemoryError"
        r"|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED|OOM when allocating",
        "use a smaller batch, or a strategy that divides the model: sharded, model_split. "
        "Workbench keeps the failed cell's variables and activations for %cluster debug until the "
        "next cell begins. %cluster free deletes them, and also all variables of earlier cells",
    ),
    (
        r"can't allocate memory|Cannot allocate memory|^MemoryError",
        "use a smaller batch, or fewer engines; %cluster free deletes the variables of cells",
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        "the loss must be one number: loss.mean(), or reduction='mean'",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "start processes before the first use of the GPU, or with the method `spawn`: "
        "DataLoader(..., multiprocessing_context='spawn')",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "BatchNorm needs at least two samples on every worker, in each batch: use "
        "DataLoader(..., drop_last=True), a larger batch, or GroupNorm instead of BatchNorm",
    ),
    (
        r"AttributeError: '\w+' object has no attribute 'module'",
        "wb.prepare does not wrap the model: write `model` instead of `model.module`",
    ),
    (
        r"Connection closed by peer|Connection reset by peer",
        "another rank closed the connection: read the errors of the other ranks. If they have no "
        "errors, a rank probably took fewer steps: all ranks must take the same number of steps",
    ),
    (
        r"^ModuleNotFoundError: No module named '([\w]+)",
        "run %pip install {0} (a package can have another name than its module), then run the cell "
        "again. If engines run on other machines, install the package there too",
    ),
    (
        r"Trying to backward through the graph a second time",
        "compute the loss again before each backward(); for two losses, use (a + b).backward()",
    ),
    (
        r"stack expects each tensor to be equal size, but got (\[[\d, ]*\]) at entry \d+ and "
        r"(\[[\d, ]*\])",
        "samples of a batch have different shapes, {0} and {1}: give all samples one shape in the "
        "data set, or pad them in DataLoader(..., collate_fn=...)",
    ),
    (
        r"(?:loss|linear|conv\w*)\(\): argument 'input' .+ must be Tensor, not NoneType",
        "the model, or a layer in it, returned nothing: its forward() must `return` the result",
    ),
    (
        r"before Module\.__init__\(\) call",
        "begin the model's __init__ with super().__init__()",
    ),
    (r"^SystemExit", "to end a cell early, use `raise`, or put the rest of the cell under an `if`"),
    (
        r"shared memory\(shm\)|insufficient shared memory|[Bb]us error"
        r"|Error while creating shared memory segment",
        f"{SHARED} cannot hold the batches that a DataLoader's processes have read. "
        "Use DataLoader(..., num_workers=0), which needs no shared memory, or enlarge "
        f"{SHARED} (docker run --shm-size=2g)",
    ),
    (
        r"can't start new thread|\[Errno 11\] Resource temporarily unavailable",
        "there are too many processes and threads: use fewer engines or num_workers=0, or raise "
        "the limit (docker run --pids-limit=-1, ulimit -u NUMBER)",
    ),
    (r"No space left on device|Disk quota exceeded", "delete some files, or use another folder"),
    (r"Address already in use|EADDRINUSE", "use another port; port 0 chooses an unused port"),
)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Return a message without the colours of a terminal (Keras puts them in)."""
    return _COLOURS.sub("", text)


def advice(words: str) -> str | None:
    """Return the next step for an error, given as `Name: message`, or None if none is known."""
    # If no file is named, a DataLoader found no space for its semaphores.
    unnamed = re.search(r"(No space left on device|Read-only file system)\s*$", words)
    closed = _is_full(SHARED) or (os.path.isdir(SHARED) and not os.access(SHARED, os.W_OK))
    if unnamed and closed:
        return _known("shared memory(shm)")
    step = _known(words)
    if step is not None and "No space left" in words and (places := _full_places()):
        return f"{' and '.join(places)}: {step}"
    return step


def _full_places() -> list[str]:
    """Return the full places among those that libraries use without naming them."""
    places = {tempfile.gettempdir(): "the folder for temporary files", ".": "the current folder"}
    return [f"{place} ({what}) is full" for place, what in places.items() if _is_full(place)]


def _is_full(place: str) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(place).free < _NO_ROOM_BYTES
    return False


def _known(words: str) -> str | None:
    for pattern, text in _KNOWN:
        if found := re.search(pattern, words):
            return text.format(*found.groups())
    return None


MARK = "__autograph_generated_file"


class Line(NamedTuple):
    """A line that the user wrote."""

    filename: str
    number: int
    function: str
    source: str


_lines: dict[str, dict[int, Line]] = {}


def is_generated(filename: str) -> bool:
    """Whether a framework wrote the file."""
    return MARK in filename


def note(filename: str, origins: Mapping[Any, Any]) -> None:
    """Accept AutoGraph's map of a file: `LineLocation` to `OriginInfo`."""
    found = _lines.setdefault(filename, {})
    for place, origin in origins.items():
        found[place.lineno] = Line(
            origin.loc.filename,
            origin.loc.lineno,
            origin.function_name or "",
            (origin.source_code_line or "").strip(),
        )


def written_line(frame: FrameType, line: int) -> Line | None:
    """Return the user's line from which a line was generated; None if there is none."""
    return _lines.get(frame.f_code.co_filename, {}).get(line)
