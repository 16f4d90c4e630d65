"""`--profile` under TensorFlow: plain Keras, replicas in one engine."""

import json

import pytest
from needs import need
from notebook_shell import notebook

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

KERAS = """import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=1, batch_size=64)
"""


def test_keras_fit_is_profiled(monkeypatch):
    monkeypatch.setenv("WORKBENCH_PREWARM", "off")
    with notebook() as book:
        book.ok("%cluster start 1 --framework tensorflow")
        line = "%%distributed mirrored -n 2 --framework tensorflow --profile 10:15 --plot off"
        book.ok(f"{line}\n{KERAS}")
        (trace,) = book["_run"].profiles
        assert trace.name == "ranks0-1.json"
        events = json.loads(trace.read_text())["traceEvents"]
        steps = [e for e in events if e.get("ph") == "X" and e["name"].startswith("step ")]
        assert sorted(e["name"] for e in steps) == [f"step {k}" for k in range(10, 15)]
        products = [e for e in events if e.get("ph") == "X" and "MatMul" in e["name"]]
        begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
        within = [e for e in products if begin <= e["ts"] <= end]
        assert len(within) >= 5 * 2, "each replica multiplies in each step"
        assert trace.with_suffix(".xplane.pb").stat().st_size > 1000
        assert any("steps 10-14" in note for note in book["_run"].history.story.notes)
