"""Checkpoints of TensorFlow runs: the files that `tf.train.Checkpoint` writes.

A state's arrays are written by the operation behind `tf.train.Checkpoint`, so
`tf.train.load_checkpoint(DIR/step-N/state/arrays)` can read them; their description is next to
them, as JSON. A `tf.train.Checkpoint` itself would write from the variables, which keep training.

Source: https://www.tensorflow.org/guide/checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ..checkpoints import files
from ..checkpoints.files import decode, encode, sync_tree, write_text

SKELETON, ARRAYS = "state.json", "arrays"


def write_state(folder: Path, state: Any) -> int:
    """Write a state into a new folder, down to the disk; return its bytes."""
    skeleton, leaves = encode(copied(state), lambda value: False)
    folder.mkdir(parents=True)
    if leaves:
        with tf.device("/CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(folder / ARRAYS),
                tensor_names=list(leaves),
                shape_and_slices=[""] * len(leaves),
                tensors=[tf.constant(array) for array in leaves.values()],
            )
    write_text(folder / SKELETON, json.dumps(skeleton))
    sync_tree(folder)
    return sum(array.nbytes for array in leaves.values())


def read_state(folder: Path) -> Any:
    """Return the state that `write_state` wrote."""
    skeleton = json.loads((folder / SKELETON).read_text())
    leaves: dict[str, Any] = {}
    if (folder / f"{ARRAYS}.index").exists():
        reader = tf.train.load_checkpoint(str(folder / ARRAYS))
        leaves = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    # A number comes back without dimensions as one of NumPy's: an array of it is meant.
    return decode(skeleton, {name: np.asarray(value) for name, value in leaves.items()})


def copied(state: Any) -> Any:
    """Return a copy of a state as NumPy, which later steps do not change."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copied(value) for value in state)
    if isinstance(state, (tf.Tensor, tf.Variable, np.ndarray)):
        return np.array(state)
    return state


def random_state(device: str) -> dict[str, Any]:
    """Return the states of Python's and NumPy's generators; Keras' are variables of the model."""
    return files.random_state()


def set_random_state(state: dict[str, Any], device: str) -> None:
    """Set the generators to the states that `random_state` returned."""
    files.set_random_state(state)
