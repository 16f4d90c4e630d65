"""The next step for errors of frameworks that name none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench.engine.debugging.tracebacks import advice


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (
            "ValueError: Expected more than 1 value per channel when training, got input size "
            "torch.Size([1, 4])",
            "drop_last=True",
        ),
        ("AttributeError: 'Sequential' object has no attribute 'module'", "`model.module`"),
        ("AttributeError: 'Net' object has no attribute 'modules_'", None),
        (
            "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer "
            "[127.0.0.1]:1234",
            "fewer steps",
        ),
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: No space "
            "left on device (28)",
            "num_workers=0",
        ),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Unexpected bus error "
            "encountered in worker. This might be caused by insufficient shared memory (shm).",
            "num_workers=0",
        ),
        (
            "ResourceExhaustedError: Graph execution error: OOM when allocating tensor with shape"
            "[8192,8192] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by "
            "allocator GPU_0_bfc",
            "%cluster restart",
        ),
        (
            "ResourceExhaustedError: {{function_node __wrapped__MatMul}} failed to allocate memory "
            "[Op:MatMul]",
            "model_split",
        ),
        (
            "AlreadyExistsError: TensorFlow device (GPU:0) is being mapped to multiple devices (1 "
            "now, and 0 previously), which is not supported.",
            "%cluster restart",
        ),
        (
            "InternalError: cudaGetDevice() failed. Status: no CUDA-capable device is detected",
            "nvidia-smi",
        ),
        (
            "ImportError: Could not load dynamic library 'libcudart.so.11.0'; dlerror: no file",
            "tensorflow[and-cuda]",
        ),
        (
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file",
            "tensorflow[and-cuda]",
        ),
        ("ImportError: libfoo.so.9: cannot open shared object file: No such file", None),
        (
            "FailedPreconditionError: DNN library initialization failed. Look at the errors above "
            "for more details. [Op:Conv2D]",
            "without another cuDNN",
        ),
        (
            "InternalError: 'cuModuleLoadData' failed with 'CUDA_ERROR_UNSUPPORTED_PTX_VERSION'",
            "a newer driver",
        ),
        (
            "ValueError: Unknown attribute 'cuda' is encountered while parsing the device spec: "
            "'cuda:0'.",
            "tf.device(device)",
        ),
        ("RuntimeError: can't start new thread", "--pids-limit"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "ulimit -u"),
        (
            "TypeError: cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not "
            "NoneType",
            "`return`",
        ),
        ("TypeError: copy_(): argument 'other' (position 1) must be Tensor, not NoneType", None),
        ("ValueError: something else", None),
    ],
)
def test_what_to_do_is_said_for_known_errors_alone(error: str, step: str | None) -> None:
    found = advice(error)
    assert (found is None) if step is None else (step in str(found))


def test_no_room_is_said_of_the_place_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "OSError: [Errno 28] No space left on device"
    rooms = {"/dev/shm": 0}
    monkeypatch.setattr(
        "workbench.engine.debugging.tracebacks.shutil.disk_usage",
        lambda place: SimpleNamespace(free=rooms.get(str(place), 10**9)),
    )
    said = str(advice(error))
    assert said.startswith("/dev/shm")
    assert "num_workers=0" in said
    assert "--shm-size" in said
    assert "folder" not in said
    assert "another folder" in advice(f"{error}: '/data/x'")
    rooms["/dev/shm"] = 10**9
    assert "another folder" in advice(error)


def test_shared_memory_that_nobody_may_write_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "OSError: [Errno 30] Read-only file system"
    assert advice(error) is None
    monkeypatch.setattr("workbench.engine.debugging.tracebacks.os.access", lambda *_: False)
    assert "num_workers=0" in str(advice(error))
    assert advice(f"{error}: '/data/x'") is None


RANKS = "Argument `output` must have rank (ndim) `target.ndim - 1`. Received: "


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("ValueError: Arguments `target` and `output` must have the same rank (ndim). Received: "
         "target.shape=(16,), output.shape=(16, 3)", "to_categorical(y, 3)"),
        (f"ValueError: {RANKS}target.shape=(16, 3), output.shape=(16, 3)", "y.argmax(-1)"),
        (f"ValueError: {RANKS}target.shape=(16,), output.shape=(16, 8, 3)",
         "output (16, 8, 3)"),
        ("ValueError: Dimensions must be equal, but are 16 and 3 for '{{node compile_loss/mse/sub}}"
         " = Sub[T=DT_FLOAT](Placeholder_1, Placeholder_2)' with input shapes: [16], [16,3].",
         "[16] and [16,3]"),
        ("ValueError: Dimensions must be equal, but are 16 and 8 for '{{node Equal_1}} = "
         "Equal[T=DT_FLOAT, incompatible_shape_error=true](Cast, Cast_1)' with input shapes: "
         "[16], [16,8].", "keras.layers.Flatten()"),
        ("ValueError: Dimensions must be equal, but are 2 and 3 for '{{node my/add}} = "
         "Add[T=DT_FLOAT](a, b)' with input shapes: [2], [3].", None),
        ("ValueError: Data cardinality is ambiguous. Make sure all arrays contain the same number "
         "of samples.'x' sizes: 64\n'y' sizes: 60\n", "64 samples and 60 labels"),
        ("ValueError: Could not interpret metric identifier: acuracy", "metrics=['accuracy']"),
        ("ValueError: Could not interpret loss identifier: msee", "'mse'"),
        ("ValueError: Could not interpret optimizer identifier: adamm", "'adam'"),
        ("ValueError: Invalid dtype: str32", "astype('float32')"),
        ("ValueError: Invalid dtype: object", "astype('float32')"),
        ("ValueError: Input 0 with name 'None' of layer 'conv2d' is incompatible with the layer: "
         "expected min_ndim=4, found ndim=3. Full shape received: (16, 8, 8)", "x[..., None]"),
        ("ValueError: Computed output size would be zero or negative. Received `inputs "
         "shape=(16, 8, 8, 1)`, `kernel shape=(9, 9, 1, 4)`, `dilation_rate=[1 1]`",
         "the image (16, 8, 8, 1) is smaller"),
        ("ValueError: Argument `validation_split` is only supported for tensors or NumPy "
         "arrays.Found incompatible type in the input: [...]", "validation_data="),
    ],
)  # fmt: skip
def test_what_keras_says_to_beginners_gets_a_next_step(error: str, step: str | None) -> None:
    found = advice(error)
    assert (found is None) if step is None else (step in str(found))
