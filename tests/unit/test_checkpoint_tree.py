"""States become JSON and tensors, and come back as what they were."""

import json
from collections import Counter

import numpy as np
import pytest

from workbench.engine.checkpoints.files import arrays_in, decode, encode
from workbench.errors import FitError


def test_what_goes_in_comes_out():
    state = {
        "lr": 0.1, "betas": (0.9, 0.99), 3: {"nested": [1, None, True, "text"]},
        "milestones": Counter({5: 2}), "inf": float("inf"), "raw": b"\x00\xff", "set": {1, 2},
        "array": np.arange(3.0), "number": np.float64(0.25), ("a", 1): "tuples are keys",
    }  # fmt: skip
    skeleton, leaves = encode(state, lambda value: False)
    assert arrays_in(skeleton) == set(leaves) == {"0"}
    again = decode(json.loads(json.dumps(skeleton)), leaves)
    np.testing.assert_array_equal(again.pop("array"), state.pop("array"))
    assert again == state
    assert type(again["betas"]) is tuple
    assert type(again["milestones"]) is Counter


def test_what_cannot_be_kept_is_named():
    with pytest.raises(FitError, match=r"state\['groups'\]\[0\]\['fn'\]: function.*WB-FIT-001"):
        encode({"groups": [{"fn": test_what_goes_in_comes_out}]}, lambda value: False)
