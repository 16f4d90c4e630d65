"""TensorFlow's model_split: stages one after the other, where they lie, and its mistakes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from needs import need
from tf_harness import clean
from tf_split import WIDE, furthest, train

need("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("functional", [False, True])
def test_weights_and_their_slots_are_on_the_devices_of_their_stages(functional):
    truth = clean(train("one_device", WIDE, FUNCTIONAL=functional))
    report = clean(train("model_split", WIDE, 3, FUNCTIONAL=functional))
    assert furthest(report, truth) < 1e-5
    assert report.names["score"] == pytest.approx(truth.names["score"], abs=1e-4)
    assert report.names["predicted"].shape == (256, 4)
    devices = report.names["devices"]
    assert set(devices) == {"CPU:0", "CPU:1", "CPU:2"}
    assert report.names["slots"] == devices
    rows = report.emitted("split")[0]["stages"]
    assert sum(row["parameters"] for row in rows) >= report.names["model"].count_params()
    assert "not time" in report.emitted("note")[0]["text"]


@pytest.mark.timing
def test_stages_take_turns_and_the_parts_fill_the_step():
    rows = clean(train("model_split", WIDE, 3)).rows
    spent_s = (rows["end_s"] - rows["start_s"])[:, 0]
    assert spent_s[0] < 10 * np.median(spent_s)  # tracing belongs to no step, so to no bubble
    assert (rows[0]["bubble_s"] <= spent_s[0]).all()
    rows = rows[4:]
    step_s = rows["end_s"] - rows["start_s"]
    parts_s = rows["data_wait_s"] + rows["compute_s"] + rows["bubble_s"]
    assert (parts_s < step_s + 1e-5)[np.isfinite(parts_s)].all()
    # The update and what Keras does between two batches is done for all stages together.
    assert np.nanmedian(parts_s / step_s) > 0.4
    chain_s = rows["compute_s"] + rows["bubble_s"]
    assert np.allclose(chain_s, chain_s[:, :1], rtol=1e-3)
    # One after the other: together they are no busier than the chain is long.
    assert (rows["compute_s"].sum(axis=1) < chain_s[:, 0] * 1.001).all()


@pytest.mark.timing
def test_stages_that_sleep_read_back_their_shares_and_never_less_than_the_ideal():
    from workbench.catalog.schedules import ideal_bubble

    for cell in (WIDE, WIDE.replace("SGD(0.05, momentum=0.9)", "Adam(0.001)")):
        rows = clean(train("model_split", cell, 2)).rows
        chain_s = (rows["compute_s"] + rows["bubble_s"]).sum()
        assert rows["bubble_s"].sum() / chain_s >= ideal_bubble("naive", 2, 1, 1) - 1e-3
    asleep = ("slow=0:60ms", "slow=1:20ms")
    rows = clean(train("model_split", WIDE, 2, faults=asleep)).rows[4:]
    share = rows["bubble_s"].sum(axis=0) / (rows["bubble_s"] + rows["compute_s"]).sum(axis=0)
    assert share == pytest.approx([0.25, 0.75], abs=0.06)
    assert 0.499 <= share.mean() < 0.55


def test_time_in_which_several_stages_work_is_divided_among_them():
    from workbench.strategies.tensorflow.parts.stages import chain_of

    assert chain_of([[(1, 2), (4, 6)], [(2, 5)]]) == (1, 5, [2.5, 2.5])
    assert chain_of([[(1, 2), (5, 6)], [(2, 4)]]) == (1, 5, [2, 2])  # nobody works from 4 to 5
    assert chain_of([[(1, float("nan"))], [(2, 4)]]) == (2, 2, [0, 2])
    assert chain_of([[], []]) is None


@pytest.mark.timing
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_slow_stage_is_busy_for_longer_and_the_others_stand_idle(stage):
    normal = clean(train("model_split", WIDE, 3)).rows[4:]
    slow = clean(train("model_split", WIDE, 3, faults=(f"slow={stage}:50ms",))).rows[4:]
    more_busy = np.median(slow["compute_s"], axis=0) - np.median(normal["compute_s"], axis=0)
    more_idle = np.median(slow["bubble_s"], axis=0) - np.median(normal["bubble_s"], axis=0)
    others = [other for other in range(3) if other != stage]
    assert abs(more_busy[stage] - 0.05) < 0.01
    assert abs(more_idle[others] - 0.05).max() < 0.01
    assert abs(more_busy[others]).max() < 0.01


def test_a_stage_begins_where_the_line_says():
    report = clean(train("model_split", WIDE, 3, options={"split_at": "fc2,head"}))
    layers = [row["layers"] for row in report.emitted("split")[0]["stages"]]
    assert layers == ["fc0 to fc1", "fc2 to dropout", "head"]
    report = clean(train("model_split", WIDE, 2, options={"split_at": "1"}))
    assert report.emitted("split")[0]["stages"][0]["layers"] == "fc0"


SUBCLASS = """
import keras
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
    def call(self, x):
        return self.dense(x)
import numpy as np
model = Net()
model.compile(loss="mse")
model.fit(np.ones((8, 2), "float32"), np.ones((8, 3), "float32"))
"""


@pytest.mark.parametrize(
    ("cell", "stages", "settings", "words"),
    [
        (WIDE, 8, {}, ["WB-FIT-076", "8 stages", "7 layers", "-n 7"]),
        (WIDE, 2, {"options": {"split_at": "fc9"}}, ["WB-FIT-077", "fc9", "6 or head"]),
        (WIDE, 2, {"options": {"split_at": "0"}}, ["WB-FIT-077"]),
        (WIDE, 3, {"options": {"split_at": "3,1"}}, ["model's order", "split_at=1,3"]),
        (WIDE, 2, {"options": {"split_at": "1,3"}}, ["3 stages for 2 devices", "-n 3"]),
        (WIDE, 2, {"EXTRA": {"jit_compile": True}}, ["XLA", "jit_compile=False"]),
        (SUBCLASS, 2, {}, ["WB-FIT-075", "Net", "keras.Sequential"]),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_next_step(cell, stages, settings, words):
    report = train("model_split", cell, stages, **settings)
    assert report.error is not None
    assert "FitError" in report.error
    assert all(word in report.error for word in words), report.error
    assert report.trained == 0
    assert report.left == []


def test_parameters_are_balanced_over_the_stages():
    from workbench.strategies.tensorflow.model_split import balance

    rng = np.random.default_rng(0)
    for count, stages in itertools.product(range(1, 8), range(1, 5)):
        if stages > count:
            continue
        costs = rng.integers(0, 20, count).tolist()
        bounds = balance(costs, stages)
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert all(a < b for a, b in itertools.pairwise(bounds))
        cuts = itertools.combinations(range(1, count), stages - 1)
        best = min(largest(costs, [0, *cut, count]) for cut in cuts)
        assert largest(costs, bounds) == best


def largest(costs: list[int], bounds: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))
