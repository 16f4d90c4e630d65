"""What the instrumentation costs under TensorFlow: steps/s with it and without it.

The same script runs on one engine, alternately as a cell without a strategy (plain TensorFlow, its
own MirroredStrategy) and as a training run. Steps are real computation. The script prints the
median ratio of steps/s over pairs of consecutive runs, and the ratio of CPU time per step, which
other work disturbs less.

    python benchmarks/bench_tensorflow_overhead.py [--replicas 2] [--pairs 5] [--width 700]
"""

from __future__ import annotations

import argparse
import json
import statistics

import workbench as wb

BEGIN = """
import time, keras, numpy as np, tensorflow as tf
if {plain}:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:%d" % i for i in range({replicas})],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
x = np.random.default_rng(0).normal(size=(256 * {steps}, 64)).astype("float32")
y = x.sum(1, keepdims=True)
with strategy.scope():
    hidden = [keras.layers.Dense({width}, "tanh") for _ in range(2)]
    model = keras.Sequential([*hidden, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
"""

FIT = """
class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        stamps.append((time.perf_counter(), time.process_time()))

stamps = []
with strategy.scope():
    model.compile(optimizer=optimizer, loss="mse")
model.fit(x, y, batch_size=256, callbacks=[Clock()], verbose=0)
"""

LOOP = """
stamps = []

def step(inputs, targets):
    with tf.GradientTape() as tape:
        each = tf.reduce_sum((model(inputs) - targets) ** 2, 1)
        loss = tf.nn.compute_average_loss(each, global_batch_size=256)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

@tf.function
def train_step(batch):
    return strategy.run(step, args=batch)

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)
for batch in strategy.experimental_distribute_dataset(data):
    train_step(batch)
    stamps.append((time.perf_counter(), time.process_time()))
"""

END = """
steps = len(stamps) - 11
step_ms, cpu_ms = (1e3 * (b - a) / steps for a, b in zip(stamps[10], stamps[-1]))
"""


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=700)
    given = parser.parse_args()
    results = []
    with wb.Cluster(1, framework="tensorflow") as cluster:
        for way, source in (("model.fit", FIT), ("own loop", LOOP)):
            pairs = []
            for pair in range(given.pairs + 1):  # the first warms up
                times = {}
                for plain in (True, False) if pair % 2 else (False, True):
                    cell = BEGIN.format(plain=plain, **vars(given)) + source + END
                    if plain:
                        cluster.execute(cell).over.wait()
                    else:
                        cluster.run(cell, strategy="mirrored", workers=given.replicas).wait()
                    times[plain] = cluster.pull(["step_ms", "cpu_ms"])[0]
                pairs.append((times[True], times[False]))
            result: dict[str, object] = {"what": f"TensorFlow, {way}, recorded / plain"}
            print(f"{way}: {statistics.median(a['step_ms'] for a, _ in pairs[1:]):.1f} ms", end="")
            for name, words in (("step_ms", "steps/s"), ("cpu_ms", "steps per s of CPU time")):
                ratios = [bare[name] / ours[name] for bare, ours in pairs[1:]]
                result[f"{name.removesuffix('_ms')}_ratio"] = statistics.median(ratios)
                shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
                print(f"; {words} {statistics.median(ratios):.3f}x ({shown})", end="")
            print()
            result["plain_step_ms"] = statistics.median(a["step_ms"] for a, _ in pairs[1:])
            rounds = [{"plain": bare, "recorded": ours} for bare, ours in pairs[1:]]
            results.append({**result, "pairs": given.pairs, "rounds": rounds})
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
