"""As `test_leftovers.py`, with TensorFlow's engines, which swallow SIGTERM."""

import pytest
from leftovers import Stage

from workbench.cluster.processes import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.tensorflow,
    pytest.mark.skipif(not can_fork("tensorflow")[0], reason=can_fork("tensorflow")[1]),
]
RUN = """
KERAS = '''
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=10**6, batch_size=64, verbose=0)
'''
cluster = wb.Cluster(2, framework="tensorflow")
run = cluster.run(KERAS, strategy=STRATEGY)
while run.history.totals.steps < 3:
    time.sleep(0.05)
    assert not run.is_over, run.error
say("ready")
"""


@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "parameter_server"])
def test_a_killed_kernel_leaves_nothing(strategy):
    stage = Stage()
    try:
        kernel = stage.kernel(RUN.replace("STRATEGY", repr(strategy)))
        assert "ready" in map(str.strip, kernel.stdout), "the kernel's stand-in did not come up"
        assert len(stage.look()) > 3
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()
        seconds, left = stage.wait_empty()
        assert not left, f"after {seconds:.1f} s: {left}"
    finally:
        stage.close()
